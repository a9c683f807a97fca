"""What Triton's own compiler makes of the kernels for AMD's GPUs, large and small; none is needed to look."""

import os
import re

import pytest
import torch

import launches

triton = pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="under the interpreter nothing is compiled"
)
GPUS = {"gfx942": 64, "gfx1100": 32}  # MI300 and RX 7900, with the threads of a warp


def assembly(source, gpu, **options):
    from triton.backends.compiler import GPUTarget

    return triton.compile(source, target=GPUTarget("hip", gpu, GPUS[gpu]), options=options).asm["amdgcn"]


def spilled(code):
    """Bytes a thread has in memory. Scalars go to lanes of other registers first."""
    (found,) = re.findall(r"\.private_segment_fixed_size: +(\d+)", code)
    return int(found)


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("eight", [False, True])
@pytest.mark.parametrize(
    "kind", ["float32", "bfloat16", "paper8", "paper12", "signed8", "large paper12", "large signed8"]
)
def test_every_kernel_of_a_step_compiles_as_it_is_launched(kind, eight, gpu, monkeypatch):
    from torchmadam.kernels import launch

    monkeypatch.setattr(launch, "HIP", True)
    assert not launch._takes_ptx(torch.device("cuda"))  # as AMD's devices are called, too
    for momentum in (0.0, 0.9):
        for one in launches.of_a_step(kind, eight, momentum, monkeypatch):
            code = assembly(launches.source_of(one), gpu, **accepted(one.options), **launch.EXACT)
            assert "global_load" in code or "buffer_load" in code
            assert spilled(code) <= 8  # of a 12-bit ladder with all moments, on the smaller one; 0 of all others


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int32])
@pytest.mark.parametrize("name", ["paper8", "paper12", "signed8", "signed12"])
def test_decoding_compiles_as_it_is_launched(name, dtype, gpu):
    for shape in ((64, 64), (40, 27)):
        one = launches.of_decoding(name, dtype, shape)
        code = assembly(launches.source_of(one), gpu, **accepted(one.options))
        assert spilled(code) == 0


def accepted(options):
    """Launch options, of which AMD's backend has to know each: on a launch Triton refuses others, here it would not."""
    from triton.backends.amd.compiler import HIPOptions

    assert set(options) <= set(HIPOptions.__dataclass_fields__)
    return options


def test_a_layer_of_codes_is_decoded_first(monkeypatch):
    from torchmadam.kernels import launch, launch_linear
    from torchmadam.ladder.format import LadderFormat
    from torchmadam.ladder.layout import CodeLayout

    coding = CodeLayout.contiguous(LadderFormat.preset("signed8"), (64, 64))
    planes, x = [torch.empty(s, dtype=torch.uint8) for s in coding.plane_shapes], torch.empty(1, 64)
    assert launch_linear.takes(x, planes, coding)
    monkeypatch.setattr(launch, "HIP", True)
    assert not launch_linear.takes(x, planes, coding)
