"""x W^T with W as codes, against the reference: decode W, and multiply in float64."""

import pytest
import torch

from torchmadam import LadderFormat
from torchmadam.kernels import launch_linear
from torchmadam.ladder.layout import CodeLayout

# The interpreter computes in NumPy, which warns where a shift wraps around.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
PRESETS = ["paper8", "paper10", "paper12", "signed8", "signed12"]
OTHERS = {
    "signed8, crossing 0.1": LadderFormat.signed(8, 0.1),  # beyond what the polynomial of sinh is for
    "paper9": LadderFormat.paper(9, 0.008),
    "paper4": LadderFormat.paper(4, 0.25),
    "synapse": LadderFormat.preset("synapse"),
}


@pytest.fixture(autouse=True)
def _large_programs(monkeypatch):
    """As for the large matrices that all this is for."""
    monkeypatch.setattr(launch_linear, "FEW_ROWS", 1)


def matrix(ladder, shape, device, signs="plane"):
    """A random matrix of codes, in planes that are cut out of poisoned memory; its layout and its weights."""
    coding = CodeLayout.contiguous(ladder, shape, signs)
    generator = torch.Generator().manual_seed(shape[0] + shape[1])
    codes = torch.randint(0, ladder.levels, shape, generator=generator, dtype=torch.int32)
    if not ladder.is_signed and signs == "plane":
        codes |= torch.randint(0, 2, shape, generator=generator, dtype=torch.int32) << ladder.code_bits
    planes = []
    for plane in coding.pack(codes):
        memory = torch.full((plane.numel() + 64,), 0xA5, dtype=torch.uint8, device=device)
        memory[32 : 32 + plane.numel()] = plane.flatten().to(device)
        planes.append(memory[32 : 32 + plane.numel()].view(plane.shape))
    limit = torch.tensor(0.37)
    return coding, planes, limit.to(device), ladder.decode(codes, limit).double()


def check(ladder, shape, batch, dtype, device, biased=False, signs="plane"):
    coding, planes, limit, weight = matrix(ladder, shape, device, signs)
    generator = torch.Generator().manual_seed(batch)
    x = torch.randn(batch, shape[1], generator=generator).to(dtype)
    bias = torch.randn(shape[0], generator=generator).to(dtype) if biased else None
    assert launch_linear.takes(x.to(device), planes, coding)
    found = launch_linear.forward(x.to(device), planes, limit, coding, None if bias is None else bias.to(device)).cpu()
    expected = x.double() @ weight.T + (0 if bias is None else bias.double())
    assert found.dtype == dtype
    assert found.shape == (batch, shape[0])
    # The result is rounded once, and bfloat16 in the interpreter cut off. Before that, float32 weights and sums err in
    # proportion to the products' sizes; weights that are rounded to 16 bits err by half of their last one.
    rounding = {torch.float16: 2**-11, torch.bfloat16: 2**-7}[dtype]
    weights = 5e-6 if batch <= launch_linear.VECTOR_MOST else rounding
    bound = rounding * expected.abs() * 1.01 + weights * (x.double().abs() @ weight.abs().T)
    assert torch.all((found.double() - expected).abs() <= bound)


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("batch", [1, 2, 7, 16, 17, 64])
def test_every_ladder_and_batch_gives_the_product_of_the_reference(name, batch, device):
    """Rows that no program's number divides, columns that end within a block."""
    check(LadderFormat.preset(name), (37, 96), batch, torch.float16, device, biased=batch % 2 == 1)


@pytest.mark.parametrize(("name", "early"), [*((name, True) for name in PRESETS), ("paper12", False)])
def test_columns_of_several_blocks_are_summed_with_and_without_masks(name, early, device, monkeypatch):
    monkeypatch.setattr(launch_linear, "VECTOR_WARPS", 1)
    monkeypatch.setattr(launch_linear, "VECTOR_EARLY", early)
    for columns in (512, 1024, 1056):
        check(LadderFormat.preset(name), (6, columns), 3, torch.bfloat16, device)
        check(LadderFormat.preset(name), (6, columns), 5, torch.float16, device)


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("batch", [1, 9])
def test_ladders_of_other_widths_and_crossings_give_the_product_of_the_reference(name, batch, device):
    check(OTHERS[name], (5, 64), batch, torch.float16, device)


@pytest.mark.parametrize("batch", [1, 9])
def test_weights_that_are_all_positive_have_no_plane_of_signs(batch, device):
    check(LadderFormat.preset("paper8"), (5, 64), batch, torch.float16, device, signs="positive")


@pytest.mark.parametrize(("batch", "name"), [(3, "paper12"), (3, "signed8"), (17, "paper8")])
def test_every_element_of_the_result_is_written_and_nothing_beside_it(batch, name, device):
    shape, memory = (37, 64), torch.full((batch * 37 + 64,), float("nan"), dtype=torch.float16, device=device)
    cut = memory[32 : 32 + batch * 37].view(batch, 37)
    coding, planes, limit, weight = matrix(LadderFormat.preset(name), shape, device)
    x = torch.ones(batch, 64, dtype=torch.float16, device=device)
    own = launch_linear.prepared(cut, x, planes, limit, coding, None)
    own.kernel[(own.programs,)](**own.arguments, **own.options)
    torch.testing.assert_close(cut.cpu().double(), weight.sum(1).expand(batch, 37), rtol=2e-3, atol=2e-3)
    assert torch.all(memory[:32].isnan())
    assert torch.all(memory[-32:].isnan())


def test_the_formulas_of_weights_agree_with_decoding_to_four_millionths():
    for name in PRESETS:
        ladder = LadderFormat.preset(name)
        arithmetic = launch_linear.arithmetic(ladder)
        k = torch.arange(ladder.levels, dtype=torch.float64) - arithmetic["zero"]
        if arithmetic["KIND"] == 0:
            found = torch.exp2(k * arithmetic["spacing"])
        else:
            found = k * ((k**2 + arithmetic["p1"]) ** 2 + arithmetic["p2"])
        expected = ladder.decode(torch.arange(ladder.levels, dtype=torch.int32), torch.ones(())).double()
        torch.testing.assert_close(found * arithmetic["factor"], expected, rtol=4e-6, atol=0)


@pytest.mark.parametrize("batch", [1, 3])
def test_small_matrices_have_a_program_for_every_row(batch, device, monkeypatch):
    monkeypatch.setattr(launch_linear, "FEW_ROWS", 2048)
    assert launch_linear.plan(batch, 5, 64, lean=False)[2]["R"] == 1
    check(LadderFormat.preset("paper12"), (5, 64), batch, torch.float16, device)


def test_matrices_that_the_kernels_cannot_take_are_declined(device):
    x = torch.zeros(1, 96, dtype=torch.float16, device=device)
    ladder = LadderFormat.preset("paper8")
    coding, planes, _, _ = matrix(ladder, (4, 96), device)
    assert launch_linear.takes(x, planes, coding)
    shifted = torch.zeros(4 * 96 + 1, dtype=torch.uint8, device=device)[1:].view(4, 96)
    assert not launch_linear.takes(x, [shifted, planes[1]], coding)
    assert not launch_linear.takes(x, planes, CodeLayout.contiguous(ladder, (4, 80)))
    assert not launch_linear.takes(x, planes, CodeLayout.contiguous(ladder, (4, 96), "seed"))
    assert not launch_linear.takes(x, planes, CodeLayout.contiguous(LadderFormat.paper(15, 1e-4), (4, 96)))
