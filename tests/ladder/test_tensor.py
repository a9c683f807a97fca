"""LadderTensor: a parameter like any other, that autograd saves as codes and nobody can write floats into."""

import copy
import io
import pickle
import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils.checkpoint import checkpoint

import torchmadam
from compiler import needs_a_compiler, needs_cc
from torchmadam import LadderTensor, Madam, to_ladder_

LADDERS = ["paper12", "paper8", "signed8", "synapse"]
every_ladder = pytest.mark.parametrize("ladder", LADDERS)


def conv_net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 5, 3), nn.BatchNorm2d(5), nn.ReLU(), nn.Flatten(), nn.Linear(20, 7))


def images():
    return torch.randn(4, 3, 4, 4, generator=torch.Generator().manual_seed(1))


def twins(model, ladder="paper12", **arguments):
    """A coded model and an ordinary one with the very weights that it decodes to."""
    coded = to_ladder_(model, ladder, **arguments)
    return coded, torchmadam.to_dense_(copy.deepcopy(coded))


def assert_twins_agree(coded, dense, run):
    """Equal outputs and gradients; the gradients of codes are plain tensors of the tensor's dtype."""
    ours, theirs = run(coded), run(dense)
    torch.testing.assert_close(ours, theirs)
    ours.float().square().sum().backward()
    theirs.float().square().sum().backward()
    for (name, p), q in zip(coded.named_parameters(), dense.parameters(), strict=True):
        assert type(p.grad) is torch.Tensor, name
        assert p.grad.dtype == p.dtype
        torch.testing.assert_close(p.grad, q.grad)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(11, 6)
        self.out = nn.Linear(6, 11)
        self.out.weight = self.table.weight

    def forward(self, x):
        return self.out(self.table(x))


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = nn.LSTM(6, 5, num_layers=2, bidirectional=True)

    def forward(self, x):
        return self.cell(x)[0]


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2)

    def forward(self, x):
        return self.attention(x, x, x)[0]


MODULES = {
    "linear": (lambda: nn.Linear(13, 7), torch.randn(5, 13)),
    "linear of a vector": (lambda: nn.Linear(13, 7), torch.randn(13)),
    "conv net": (conv_net, images()),
    "conv1d": (lambda: nn.Conv1d(3, 5, 3, groups=1), torch.randn(2, 3, 9)),
    "grouped conv": (lambda: nn.Conv2d(4, 8, 3, groups=2), torch.randn(2, 4, 6, 6)),
    "transposed conv": (lambda: nn.ConvTranspose2d(3, 5, 3), torch.randn(2, 3, 4, 4)),
    "layer norm": (lambda: nn.LayerNorm((3, 5)), torch.randn(2, 3, 5)),
    "group norm": (lambda: nn.GroupNorm(2, 6), torch.randn(2, 6, 3)),
    "embedding": (lambda: nn.Embedding(11, 6), torch.tensor([[1, 2, 2], [0, 10, 5]])),
    "embedding bag": (lambda: nn.EmbeddingBag(11, 6), torch.tensor([[1, 2, 2], [0, 10, 5]])),
    "tied": (Tied, torch.tensor([[1, 2, 2], [0, 10, 5]])),
    "attention": (Attention, torch.randn(4, 2, 8)),
    "encoder layer": (lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0), torch.randn(4, 2, 8)),
    "lstm": (Recurrent, torch.randn(4, 2, 6)),
    "bilinear": (lambda: nn.Bilinear(4, 5, 3), torch.randn(2, 9)),
    "prelu": (lambda: nn.PReLU(4), torch.randn(2, 4)),
}


@every_ladder
@pytest.mark.parametrize("kind", MODULES)
def test_a_module_computes_with_codes_as_with_the_floats_they_stand_for(kind, ladder):
    make, x = MODULES[kind]
    torch.manual_seed(0)
    coded, dense = twins(make(), ladder)
    assert all(isinstance(p, LadderTensor) and isinstance(p, nn.Parameter) for p in coded.parameters())
    run = (lambda m: m(x[:, :4], x[:, 4:])) if kind == "bilinear" else (lambda m: m(x))
    assert_twins_agree(coded, dense, run)
    coded.eval()
    dense.eval()
    with torch.no_grad():
        torch.testing.assert_close(run(coded), run(dense))


@every_ladder
def test_spectral_norm_divides_a_decoded_view_and_the_codes_stay_the_parameter(ladder):
    torch.manual_seed(0)
    coded, dense = twins(spectral_norm(nn.Conv2d(3, 4, 3)), ladder)
    assert isinstance(coded.parametrizations.weight.original, LadderTensor)
    assert_twins_agree(coded, dense, lambda m: m(torch.ones(2, 3, 5, 5)))
    optimizer = Madam.paper(coded.parameters(), lr=0.2)
    before = coded.parametrizations.weight.original.codes()
    optimizer.step()
    assert not torch.equal(before, coded.parametrizations.weight.original.codes())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_computes_as_with_floats(dtype):
    coded, dense = twins(conv_net())
    with torch.autocast("cpu", dtype):
        assert_twins_agree(coded, dense, lambda m: m(images()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_dtype_is_what_it_decodes_to_and_the_dtype_of_its_gradients(dtype):
    torch.manual_seed(0)
    coded = to_ladder_(nn.Linear(13, 7), "paper12", dtype=dtype)
    assert coded.weight.dtype == dtype
    coded(torch.randn(5, 13).to(dtype)).sum().backward()
    assert coded.weight.grad.dtype == dtype


# ---- what autograd saves


def saved_by(run):
    saved = []

    def keep(t):
        saved.append(t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        out = run()
    return saved, out


def float_copies(saved, model):
    """Ordinary float tensors among those saved that are as large as a weight matrix of the model."""
    sizes = {p.numel() for p in model.parameters() if p.dim() > 1}
    return [
        t
        for t in saved
        if not isinstance(t, LadderTensor) and t.is_floating_point() and t.numel() in sizes and t.dim() > 1
    ]


@every_ladder
@pytest.mark.parametrize("autocast", [None, torch.bfloat16, torch.float16])
def test_between_forward_and_backward_autograd_holds_codes(ladder, autocast):
    model = to_ladder_(conv_net(), ladder)
    with torch.autocast("cpu", autocast or torch.bfloat16, enabled=autocast is not None):
        saved, _ = saved_by(lambda: model(images()))
    coded = [t for t in saved if isinstance(t, LadderTensor)]
    assert {model[0].weight.numel(), model[4].weight.numel()} <= {t.numel() for t in coded}
    assert float_copies(saved, model) == []
    own = {plane.data_ptr() for p in model.parameters() for plane in p.planes}
    assert {plane.data_ptr() for t in coded for plane in t.planes} <= own  # not copies of the codes either


@needs_a_compiler
@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
def test_compiled_with_our_options_autograd_holds_codes_and_without_them_floats(autocast):
    x = images()
    for options, keeps_codes in ((torchmadam.compile_options(), True), (None, False)):
        torch._dynamo.reset()
        model = to_ladder_(conv_net(), "paper12")
        compiled = torch.compile(model, fullgraph=True, options=options)
        with warnings.catch_warnings(), torch.autocast("cpu", autocast or torch.bfloat16, enabled=autocast is not None):
            warnings.simplefilter("ignore")  # the compiler's own deprecations
            saved, out = saved_by(lambda compiled=compiled: compiled(x))
            out.float().square().sum().backward()
        assert (float_copies(saved, model) == []) == keeps_codes
        assert any(t.dtype == torch.uint8 for t in saved) or not keeps_codes  # PyTorch 2.15 has both without them
        eager = to_ladder_(conv_net(), "paper12")
        with torch.autocast("cpu", autocast or torch.bfloat16, enabled=autocast is not None):
            reference = eager(x)
        reference.float().square().sum().backward()
        tolerance = {"rtol": 1e-4, "atol": 1e-5} if autocast is None else {"rtol": 0.1, "atol": 0.05}
        for p, q in zip(model.parameters(), eager.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad, **tolerance)


def test_a_compiled_model_is_one_graph_and_sees_every_step():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model, x = to_ladder_(conv_net(), "paper12"), images()
    twin = copy.deepcopy(model)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    optimizers = [Madam(m.parameters()) for m in (model, twin)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(4):
            for m, run, o in ((model, compiled, optimizers[0]), (twin, twin, optimizers[1])):
                m.zero_grad()
                run(x).square().sum().backward()
                o.step()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert (p.codes() != q.codes()).float().mean() < 0.02  # the last bit of a gradient may round differently


STEPS = pytest.mark.parametrize("compile", [False, pytest.param(True, marks=needs_cc)])


@STEPS
@pytest.mark.parametrize("autocast", [False, True])
def test_backward_through_a_weight_changed_since_forward_raises(autocast, compile):
    model = to_ladder_(conv_net(), "paper12")
    optimizer = Madam(model.parameters(), compile=compile)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        model(images()).float().sum().backward()
        out = model(images())
    optimizer.step()
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation|changed by an optimiser step"):
        out.float().sum().backward()


@STEPS
def test_an_autocast_cast_of_a_changed_weight_raises_however_it_is_read(compile):
    layer = to_ladder_(nn.Linear(6, 5), "paper12")
    optimizer = Madam(layer.parameters(), compile=compile)
    layer(torch.randn(2, 6)).sum().backward()
    with torch.autocast("cpu", torch.bfloat16):
        cast = layer.weight.to(torch.bfloat16)
        snapshot = layer.weight.detach().to(torch.bfloat16)  # not the parameter itself: a copy of its own
    values = snapshot.decode()
    optimizer.step()
    for read in (lambda: cast + 0, lambda: cast.detach().float(), lambda: cast.detach().clone(), lambda: cast.codes()):
        with pytest.raises(RuntimeError, match="changed by an optimiser step since it was cast"):
            read()
    assert torch.equal(snapshot.decode(), values)


def test_a_whole_training_loop_may_stand_inside_one_autocast_context():
    model, x = to_ladder_(conv_net(), "paper12"), images()
    optimizer = Madam(model.parameters())
    with torch.autocast("cpu", torch.bfloat16):
        for _ in range(3):
            optimizer.zero_grad()
            model(x).float().square().sum().backward()
            optimizer.step()
        with torch.no_grad():
            model(x)


def test_a_model_cast_inside_autocast_goes_on_training():
    model = to_ladder_(nn.Linear(6, 5), "paper12")
    with torch.autocast("cpu", torch.bfloat16):
        model.bfloat16()
    optimizer = Madam(model.parameters())
    for _ in range(2):
        model(torch.randn(2, 6).bfloat16()).sum().backward()
        optimizer.step()


@pytest.mark.parametrize("autocast", [False, True])
def test_backward_through_a_weight_loaded_since_forward_raises(autocast):
    model = to_ladder_(conv_net(), "paper12")
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        out = model(images())
    model.load_state_dict(to_ladder_(conv_net(), "paper12", seed=5).state_dict())
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation|changed by an optimiser step"):
        out.float().sum().backward()


@needs_a_compiler
def test_a_compiled_lstm_computes_as_an_eager_one():
    torch._dynamo.reset()
    torch.manual_seed(0)
    cell, x = to_ladder_(nn.LSTM(5, 7), "paper12"), torch.randn(3, 2, 5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.testing.assert_close(torch.compile(cell)(x)[0], cell(x)[0])


def test_embedding_decodes_the_rows_it_needs_and_not_the_table():
    table = to_ladder_(nn.Embedding(50_000, 64), "paper12")
    seen = []

    class Sizes(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            seen.append(out.numel() if isinstance(out, torch.Tensor) and out.is_floating_point() else 0)
            return out

    with torch.no_grad():
        rows = torch.tensor([3, 49_999, 3])
        expected = table.weight.decode()[rows]
        with Sizes():
            found = table(rows)
    assert torch.equal(found, expected)
    assert max(seen) <= 3 * 64
    with pytest.raises((IndexError, RuntimeError), match="index"):
        table(torch.tensor([-1]))  # as an ordinary embedding


# ---- transformations


@every_ladder
def test_functional_call_and_torch_func_see_an_ordinary_parameter(ladder):
    coded, dense = twins(nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 3)), ladder)
    x = torch.randn(4, 6)

    def loss(model):
        return lambda params, x: functional_call(model, params, (x,)).square().sum()

    sides = [(m, {k: v.detach() for k, v in m.named_parameters()}) for m in (coded, dense)]
    for transform in (
        lambda m, p: grad(loss(m))(p, x),
        lambda m, p: vmap(grad(loss(m)), in_dims=(None, 0))(p, x),
        lambda m, p: functional_call(m, p, (x,)),
    ):
        torch.testing.assert_close(*(transform(m, p) for m, p in sides))


def test_non_reentrant_checkpointing_gives_the_same_gradients():
    model, x = to_ladder_(conv_net(), "paper12").eval(), images()
    plain = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
    again = torch.autograd.grad(checkpoint(model, x, use_reentrant=False).square().sum(), list(model.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))


@every_ladder
@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save", "state_dict"])
def test_copies_hold_the_same_codes_in_memory_of_their_own(ladder, how):
    model = to_ladder_(conv_net(), ladder)
    if how == "deepcopy":
        other = copy.deepcopy(model)
    elif how == "pickle":
        other = pickle.loads(pickle.dumps(model))
    else:
        buffer = io.BytesIO()
        torch.save(model if how == "torch.save" else model.state_dict(), buffer)
        buffer.seek(0)
        if how == "torch.save":
            other = torch.load(buffer, weights_only=False)
        else:
            other = to_ladder_(conv_net(), ladder, seed=5)
            other.load_state_dict(torch.load(buffer, weights_only=True))
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert isinstance(q, LadderTensor)
        assert isinstance(q, nn.Parameter)
        assert q.requires_grad
        assert p.coding == q.coding
        assert torch.equal(p.codes(), q.codes())
        assert torch.equal(p.limit, q.limit)
        assert {t.data_ptr() for t in p.planes}.isdisjoint({t.data_ptr() for t in q.planes})


def test_casts_of_a_model_change_the_dtype_and_not_one_code():
    model = to_ladder_(conv_net(), "paper12")
    before = [p.codes() for p in model.parameters()]
    optimizer = Madam(model.parameters())
    for cast, dtype in ((model.half, torch.float16), (model.bfloat16, torch.bfloat16), (model.double, torch.float64)):
        cast()
        for p, codes in zip(model.parameters(), before, strict=True):
            assert isinstance(p, LadderTensor)
            assert p.dtype == dtype
            assert torch.equal(p.codes(), codes)
    assert all(p is q for p, q in zip(model.parameters(), optimizer.param_groups[0]["params"], strict=True))
    model(images().double()).sum().backward()
    optimizer.step()
    assert not torch.equal(model[4].weight.codes(), before[4])


@every_ladder
@pytest.mark.parametrize("sign_seed", [None, 3])
def test_channels_last_moves_codes_and_keeps_weights(ladder, sign_seed):
    if ladder == "signed8":
        sign_seed = None
    model = to_ladder_(conv_net(), ladder, sign_seed=sign_seed)
    before = model[0].weight.decode()
    model.to(memory_format=torch.channels_last)
    weight = model[0].weight
    assert weight.is_contiguous(memory_format=torch.channels_last)
    assert isinstance(weight, LadderTensor)
    assert torch.equal(weight.decode(), before)
    assert weight.decode().is_contiguous(memory_format=torch.channels_last)
    model.to(memory_format=torch.contiguous_format)
    assert model[0].weight.is_contiguous()
    assert torch.equal(model[0].weight.decode(), before)


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("shape", [(4, 8, 1, 1), (4, 8, 1, 3), (8, 4, 3, 3), (4, 1, 3, 3)])
def test_codes_and_their_gradients_lie_as_floats_do(shape, memory_format):
    """Or DDP copies a gradient into its bucket, and says so; a 1x1 convolution is contiguous in both formats."""
    rows, columns, *size = shape
    model = nn.Sequential(nn.Conv2d(3, columns, 3), nn.Conv2d(columns, rows, size)).to(memory_format=memory_format)
    floats = copy.deepcopy(model)
    to_ladder_(model, bits=8)
    x = torch.randn(2, 3, 9, 9).contiguous(memory_format=memory_format)
    for m in (model, floats):
        m(x).square().sum().backward()
    ours, theirs = model[1].weight, floats[1].weight
    assert isinstance(ours, LadderTensor)
    assert ours.stride() == theirs.stride() == ours.decode().stride()
    assert ours.stride() == ours.detach().clone().stride() == copy.deepcopy(model)[1].weight.stride()
    assert ours.grad.stride() == theirs.grad.stride() == ours.stride()


VIEWS = {
    "t": lambda w: w.t(),
    "slice rows": lambda w: w[3:8],
    "slice both": lambda w: w[1:9:2, 2:7],
    "select": lambda w: w[4],
    "element": lambda w: w[4, 5],
    "view": lambda w: w.view(6, -1),
    "reshape of a transpose": lambda w: w.t().reshape(-1),
    "chunk": lambda w: torch.cat(w.chunk(3)[1:]),
    "unbind": lambda w: torch.stack(w.unbind(1)),
    "expand": lambda w: w[:1].expand(4, -1),
    "permute": lambda w: w[None].permute(2, 0, 1),
    "diagonal": lambda w: w.diagonal(),
    "advanced index": lambda w: w[torch.tensor([3, 3, 0])],
    "mask": lambda w: w[w > 0],
    "clone": lambda w: w.t().clone(),
    "contiguous": lambda w: w.t().contiguous(),
    "detach": lambda w: w.detach(),
    "cat": lambda w: torch.cat([w, w]),
    "where": lambda w: torch.where(w > 0, w, 0.0),
    "einsum": lambda w: torch.einsum("ij,kj->ik", w, w),
    "norm": lambda w: torch.linalg.vector_norm(w),
}


@every_ladder
@pytest.mark.parametrize("view", VIEWS)
def test_every_view_shows_the_elements_it_should(ladder, view):
    torch.manual_seed(0)
    weight = to_ladder_(nn.Linear(13, 12, bias=False), ladder).weight
    dense = weight.decode().detach().requires_grad_()
    ours, theirs = VIEWS[view](weight), VIEWS[view](dense)
    values = ours.decode() if isinstance(ours, LadderTensor) else ours
    assert torch.equal(values, theirs)
    if view != "detach":
        (ours * 1.5).sum().backward()
        (theirs * 1.5).sum().backward()
        torch.testing.assert_close(weight.grad, dense.grad)


@every_ladder
@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("made_there", [False, True])
def test_every_view_shows_the_elements_it_should_in_inference_mode_too(ladder, view, made_there):
    torch.manual_seed(0)
    weight = to_ladder_(nn.Linear(13, 12, bias=False), ladder).weight
    with torch.inference_mode():
        weight = weight.clone() if made_there else weight
        ours, theirs = VIEWS[view](weight), VIEWS[view](weight.decode())
        assert torch.equal(ours.decode() if isinstance(ours, LadderTensor) else ours, theirs)
        assert isinstance(ours, LadderTensor) or view not in ("reshape of a transpose", "contiguous", "clone", "view")


def test_a_reshape_that_copies_stays_coded_for_autograd():
    torch.manual_seed(0)
    weight = to_ladder_(nn.ParameterList([nn.Parameter(torch.randn(3, 4, 12))]), "paper12")[0]
    saved, _ = saved_by(
        lambda: F.linear(torch.randn(2, 12, requires_grad=True), weight.permute(1, 0, 2).reshape(12, 12))
    )
    assert [type(t) for t in saved if t.numel() == 144] == [LadderTensor]


def test_looking_at_the_bits_of_a_weight_looks_at_the_bits_of_its_floats():
    weight = to_ladder_(nn.Linear(6, 5), "paper12").weight.detach()
    dense = weight.decode()
    assert torch.equal(weight.view(torch.int32), dense.view(torch.int32))
    assert torch.equal(weight.view(torch.uint8), dense.view(torch.uint8))
    assert torch.equal(torch._neg_view(weight), -dense)
    assert torch.equal(torch.view_as_complex(weight.view(5, 3, 2)), torch.view_as_complex(dense.view(5, 3, 2)))


def test_numpy_lists_and_formats_show_decoded_weights():
    weight = to_ladder_(nn.Linear(6, 5), "paper12").weight
    dense = weight.decode().detach()
    assert weight.tolist() == dense.tolist()
    assert np.array_equal(np.asarray(weight.detach()), dense.numpy())
    assert np.array_equal(weight.detach().numpy(), dense.numpy())
    assert f"{weight[0, 0]:.3f}" == f"{dense[0, 0]:.3f}"
    assert "12-bit" in f"{weight}"


def test_a_coded_view_can_be_copied_pickled_and_saved():
    view = nn.Parameter(to_ladder_(nn.Linear(6, 5), "paper12").weight.detach()[1:4, 2:])
    buffer = io.BytesIO()
    torch.save(view, buffer)
    buffer.seek(0)
    for other in (copy.deepcopy(view), pickle.loads(pickle.dumps(view)), torch.load(buffer, weights_only=True)):
        assert torch.equal(other.decode(), view.decode())
        assert isinstance(other, nn.Parameter)
        assert other.requires_grad


def test_weights_in_column_major_memory_convert_and_copy_right():
    weight = torch.linalg.qr(torch.randn(6, 6))[0].t().contiguous().t()
    assert not weight.is_contiguous()
    for ladder in ("paper12", "signed8"):
        holder = to_ladder_(
            nn.ParameterList([nn.Parameter(weight.clone(memory_format=torch.preserve_format))]), ladder, init="nearest"
        )
        decoded = holder[0].decode()
        torch.testing.assert_close(decoded, weight, rtol=0, atol=0.02 if ladder == "paper12" else 0.01)
        assert torch.equal(holder[0].detach().t().contiguous().decode(), decoded.t())
        assert torch.equal(holder[0].detach().t().clone().decode(), decoded.t())


@pytest.mark.parametrize("ladder", ["paper12", "signed8"])
def test_in_inference_mode_weights_are_viewed_copied_and_saved_and_train_on_after_it(ladder):
    model = to_ladder_(nn.Linear(6, 6), ladder)
    want = model.weight.decode().clone()
    with torch.inference_mode():
        weight = model.weight
        assert torch.equal(weight.detach().decode(), want)
        assert torch.equal(weight.t().contiguous().decode(), want.t())
        assert torch.equal(weight.view(36)[3:].decode(), want.view(36)[3:])
        assert torch.equal(weight.chunk(2)[1].decode(), want.chunk(2)[1])
        assert torch.equal(weight.clone().t().detach().decode(), want.t())  # of a tensor that inference mode has made
        assert torch.equal(model.state_dict()["weight"].decode(), want)
        kept = copy.deepcopy(model)
        assert torch.equal(kept(torch.eye(6)), model(torch.eye(6)))
    model(torch.randn(2, 6)).sum().backward()
    Madam(model.parameters()).step()
    assert not torch.equal(model.weight.decode(), want)
    assert torch.equal(kept.weight.decode(), want)


def test_a_view_that_does_not_exist_is_refused_as_of_floats():
    weight = to_ladder_(nn.Conv1d(3, 4, 5), "signed8").weight
    assert weight[0, 0].t().shape == (5,)
    with pytest.raises(RuntimeError, match="<= 2 dimensions"):
        weight.t()


def test_a_view_follows_its_weight_through_a_step():
    layer = to_ladder_(nn.Linear(6, 5), "paper12")
    view = layer.weight.detach().t()
    layer(torch.randn(2, 6)).sum().backward()
    Madam(layer.parameters()).step()
    assert torch.equal(view.decode(), layer.weight.decode().t())


def test_what_is_made_like_a_weight_is_an_ordinary_tensor_unless_it_is_empty():
    weight = to_ladder_(nn.Linear(6, 5), "paper12").weight
    for made in (torch.zeros_like(weight), torch.randn_like(weight), weight.new_zeros(3), torch.full_like(weight, 2.0)):
        assert type(made) is torch.Tensor
        assert made.dtype == torch.float32
    assert isinstance(torch.empty_like(weight), LadderTensor)


def test_to_empty_and_meta_keep_parameters_coded():
    model = to_ladder_(conv_net(), "paper12")
    model.to("meta")
    assert all(isinstance(p, LadderTensor) and p.device.type == "meta" for p in model.parameters())
    model.to_empty(device="cpu")
    reference = to_ladder_(conv_net(), "paper12")
    model.load_state_dict(reference.state_dict())
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(p.decode(), q.decode())


# ---- writing floats


def sgd(p):
    p.grad = torch.ones(5, 6)
    torch.optim.SGD([p], 0.1).step()


def adam(p):
    p.grad = torch.ones(5, 6)
    torch.optim.Adam([p]).step()


@pytest.mark.parametrize(
    ("write", "operation"),
    [
        (lambda p: p.add_(1.0), "add_"),
        (lambda p: p.mul_(2.0), "mul_"),
        (lambda p: p.copy_(torch.zeros(5, 6)), "copy_"),
        (lambda p: p.fill_(1.0), "fill_"),
        (lambda p: p.zero_(), "zero_"),
        (lambda p: p.t().add_(1.0), "add_"),
        (lambda p: p[0].mul_(0.0), "mul_"),
        (lambda p: p.__setitem__(0, 1.0), "fill_|copy_"),
        (lambda p: setattr(p, "data", torch.zeros(5, 6)), r"p\.data = "),
        (lambda p: p.data.normal_(), "normal_"),
        (lambda p: nn.init.xavier_uniform_(p), "uniform_"),
        (lambda p: torch.add(torch.ones(5, 6), 1.0, out=p), "add.out"),
        (lambda p: torch._foreach_add_([p], 1.0), "_foreach_add_"),
        (lambda p: p.clamp_(-1, 1), "clamp_"),
        (lambda p: p.__iadd__(1.0), r"p \+= x"),
        (lambda p: exec("p -= 0.1 * q", {"p": p, "q": torch.ones(5, 6)}), r"p \+= x"),
        (lambda p: exec("p *= 2", {"p": p}), r"p \+= x"),
        (lambda p: exec("p **= 2", {"p": p}), r"p \+= x"),
        (sgd, "add_"),
        (adam, "_"),
    ],
)
def test_writing_floats_into_codes_raises_and_names_the_operation_and_the_remedy(write, operation):
    weight = to_ladder_(nn.Linear(6, 5), "paper12").weight
    before = weight.codes()
    with (
        torch.no_grad(),
        pytest.raises(TypeError, match=rf"{operation}.* would write floats into.*torchmadam\.Madam.*to_dense_"),
    ):
        write(weight)
    assert torch.equal(weight.codes(), before)


def test_sharing_memory_raises():
    with pytest.raises(TypeError, match=r"p\.planes"):
        to_ladder_(nn.Linear(6, 5), "paper12").weight.share_memory_()


def test_copying_codes_of_another_ladder_raises():
    ours, theirs = to_ladder_(nn.Linear(6, 5), "paper12"), to_ladder_(nn.Linear(6, 5), "paper8")
    with torch.no_grad(), pytest.raises(TypeError, match=r"one ladder.*torchmadam\.load"):
        ours.weight.copy_(theirs.weight)
    with pytest.raises(RuntimeError, match="one ladder"):
        ours.load_state_dict(theirs.state_dict())


def test_codes_may_be_read_into_floats():
    coded, plain = to_ladder_(nn.Linear(6, 5), "paper12"), nn.Linear(6, 5)
    plain.load_state_dict(coded.state_dict())
    assert type(plain.weight) is nn.Parameter
    assert torch.equal(plain.weight, coded.weight.decode())


def test_arithmetic_on_codes_is_exact_decoding():
    weight = to_ladder_(nn.Linear(6, 5), "paper12").weight
    dense = weight.decode()
    assert torch.equal(weight * 2 + 1, dense * 2 + 1)
    assert torch.equal(F.relu(weight), F.relu(dense))
    assert torch.equal(weight, dense)
