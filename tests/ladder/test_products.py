"""Which products with coded matrices go to the operator that never decodes them whole; here its reference, on a CPU."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional

import torchmadam
from torchmadam.kernels import linear_op
from torchmadam.ladder import products


@pytest.fixture
def calls(monkeypatch):
    """The shapes of x that reached the operator, on a CPU too."""
    monkeypatch.setattr(products, "DEVICES", {"cpu"})
    seen = []

    def noted(x, *rest):
        seen.append(tuple(x.shape))
        return linear(x, *rest)

    linear = linear_op.linear
    monkeypatch.setattr(linear_op, "linear", noted)
    return seen


def layer(ladder="paper8", bias=True, dtype=torch.bfloat16, **how):
    torch.manual_seed(0)
    return torchmadam.to_ladder_(nn.Linear(48, 20, bias=bias), ladder, dtype=dtype, **how)


@pytest.mark.filterwarnings("ignore:.*zero")
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("ladder", ["paper8", "paper12", "signed8"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("shape", "rows"), [((48,), 1), ((1, 48), 1), ((2, 3, 48), 6), ((64, 48), 64)])
def test_a_linear_layer_without_gradients_goes_to_the_operator(mode, ladder, bias, shape, rows, calls):
    net, x = layer(ladder, bias), torch.randn(shape).bfloat16()
    dense = torchmadam.to_dense_(copy.deepcopy(net))
    with mode():
        found, expected = net(x), dense(x)
    assert calls == [(rows, 48)]
    assert found.shape == expected.shape
    torch.testing.assert_close(found, expected, rtol=2**-7, atol=2**-8)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_bias_that_is_floats_is_added(dtype, calls):
    net = layer("signed8", filter=lambda name, p: p.dim() > 1, dtype=dtype).to(dtype)
    with torch.no_grad():
        net.bias.fill_(3.0)
        found = net(torch.zeros(2, 48, dtype=dtype))
    assert calls == [(2, 48)]
    assert torch.equal(found, torch.full((2, 20), 3.0, dtype=dtype))


@pytest.mark.filterwarnings("ignore:.*zero")
@pytest.mark.parametrize(
    "why",
    [
        "many rows",
        "no rows",
        "float32",
        "gradients",
        "a gradient of x",
        "signs from a seed",
        "a part of the rows",
        "not transposed",
    ],
)
def test_everything_else_is_decoded_as_before(why, calls):
    net = layer(bias=False, sign_seed=1) if why == "signs from a seed" else layer(bias=False)
    if why == "float32":
        net = layer(bias=False, dtype=torch.float32)
    weight = net.weight[:7] if why == "a part of the rows" else net.weight
    rows = {"many rows": 65, "no rows": 0}.get(why, 2)
    x = torch.randn(rows, 20 if why == "not transposed" else 48).to(net.weight.dtype)
    if why == "a gradient of x":
        weight = weight.detach()
        x.requires_grad_()
    with torch.set_grad_enabled(why in ("gradients", "a gradient of x")):
        found = x @ weight if why == "not transposed" else functional.linear(x, weight)
    dense = weight.detach().decode()
    expected = x.detach() @ (dense if why == "not transposed" else dense.T)
    assert calls == []
    torch.testing.assert_close(found.detach(), expected)
    assert found.requires_grad == (why in ("gradients", "a gradient of x"))


def test_on_a_cpu_products_are_decoded(calls, monkeypatch):
    monkeypatch.undo()
    with torch.no_grad():
        assert torch.equal(layer(bias=False)(torch.eye(48).bfloat16()), layer(bias=False).weight.detach().decode().T)
    assert calls == []


def test_a_product_of_the_wrong_size_says_so(calls):
    with torch.no_grad(), pytest.raises(RuntimeError, match="cannot be multiplied"):
        layer(bias=False)(torch.zeros(2, 40).bfloat16())
    assert calls == []


def test_the_operator_is_what_its_schema_says():
    net = layer("paper12", bias=False)
    weight, x = net.weight.detach(), torch.randn(3, 48).bfloat16()
    ladder = weight.coding.format
    arguments = (
        x,
        list(weight.planes),
        weight.limit,
        ladder.levels,
        ladder.spacing,
        ladder.crossing,
        (20, 48),
        "plane",
    )
    torch.library.opcheck(torch.ops.torchmadam.linear.default, (*arguments, None))
    torch.library.opcheck(torch.ops.torchmadam.linear.default, (*arguments, torch.ones(20).bfloat16()))


@pytest.mark.parametrize("kind", ["CPU", "float32", "gradients"])
def test_where_the_operator_cannot_be_a_graph_is_for_any_number_of_rows(kind, monkeypatch):
    monkeypatch.setattr(products, "DEVICES", {"cuda"} if kind == "CPU" else {"cpu"})
    net = layer(dtype=torch.float32 if kind == "float32" else torch.bfloat16).requires_grad_(kind == "gradients")
    x = torch.randn(8, 48, dtype=net.weight.dtype)
    shapes = ({0: torch.export.Dim("rows")},)
    exported = torch.export.export(net, (x,), dynamic_shapes=shapes).module()
    more = torch.randn(100, 48, dtype=net.weight.dtype)
    torch.testing.assert_close(exported(more), net(more))


def test_a_compiled_model_has_the_operator_in_its_graph(calls):
    graphs = []

    def keep(graph, inputs):
        graphs.append([node.target for node in graph.graph.nodes])
        return graph.forward

    from torch._dynamo.backends.common import aot_autograd

    net, x = layer(bias=False), torch.randn(2, 48).bfloat16()
    torch._dynamo.reset()
    with torch.no_grad():
        found = torch.compile(net, backend=aot_autograd(fw_compiler=keep), fullgraph=True)(x)
        expected = net(x)
    torch.testing.assert_close(found, expected)
    assert torch.ops.torchmadam.linear.default in graphs[0]
    assert torch.ops.torchmadam.decode.default not in graphs[0]
