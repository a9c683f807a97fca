"""What Triton's own compiler makes of the kernels for a Hopper GPU; no GPU is needed to look.

The interpreter, under which the kernels are tested, takes more than the compiler does.
"""

import os
import subprocess
from pathlib import Path

import pytest
import torch

import launches
from torchmadam import LadderFormat

triton = pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="under the interpreter nothing is compiled"
)
# Registers. None with the Triton that limits were chosen for; 3.9 has a few in kernels of 1,500 instructions.
SPILLS = 0 if triton.__version__.startswith("3.6.") else 4


def machine_code(source, folder, **options):
    """Disassembled, for compute capability 9.0."""
    from triton.backends.compiler import GPUTarget

    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    (folder / "kernel.cubin").write_bytes(compiled.asm["cubin"])
    disassembler = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
    command = [disassembler, "-c", folder / "kernel.cubin"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("eight", [False, True])
@pytest.mark.parametrize(
    ("kind", "ptx"),
    [
        *((kind, False) for kind in ("float32", "bfloat16", "paper12", "signed8", "large paper12", "large signed8")),
        *((kind, True) for kind in ("paper12", "large paper12", "large signed8")),
    ],
)
def test_every_kernel_of_a_step_compiles_for_a_gpu_as_it_is_launched(kind, eight, ptx, momentum, monkeypatch, tmp_path):
    from torchmadam.kernels import launch

    monkeypatch.setattr(launch, "_takes_ptx", lambda device: ptx)
    for one in launches.of_a_step(kind, eight, momentum, monkeypatch):
        code = machine_code(launches.source_of(one), tmp_path, **one.options, **launch.EXACT)
        if one.arguments.get("EIGHT") and one.arguments.get("FLAT", True):
            assert "REDUX" in code  # one instruction of a warp
            # Nothing goes from thread to thread, but whether this is a tensor's last program, which counts the step.
            assert kind in ("float32", "bfloat16") or code.count("LDS") <= one.arguments["ALONE"]
        assert not one.arguments.get("EVEN") or code.count("STL") <= SPILLS
        if ptx and one.arguments.get("EIGHT") and one.arguments.get("FLAT"):
            permutes = [line for line in code.splitlines() if "PRMT" in line]
            assert (
                sum("0x2444" in p for p in permutes) == 4
            )  # the third bytes of two words of moments; again if in doubt
            assert sum("0x6240" in p for p in permutes) == (2 if "12" in kind else 0)  # the words of an 8-bit plane


@pytest.mark.parametrize("bits", [3, 8, 12])
@pytest.mark.parametrize("flat", [True, False])
@pytest.mark.parametrize("narrow", [True, False])
def test_decoding_signed_ladders_never_packs_two_subtractions_into_one_register(bits, flat, narrow, tmp_path):
    """With the code of zero as a constant it did, and ptxas 12.8 subtracted from some weights not at all."""
    import triton.language as tl

    from torchmadam.kernels import launch, launch_decode
    from torchmadam.kernels.decode import decode_kernel
    from torchmadam.ladder.layout import CodeLayout

    arguments = launch._ladder_arguments(CodeLayout.contiguous(LadderFormat.signed(bits, 1.0), (8, 8)))
    del arguments["TOP"]
    constants = {**arguments, "RAW": False, "NARROW": narrow, "FLAT": flat, "INDEX": tl.int32, "BLOCK": 1024}
    pointers = dict.fromkeys(("signs", "plane0", "plane1", "plane2", "plane3"), "*u8")
    integers = {"rows": "i32", "columns": "i32", "first": "i32", "sign_key": "i64"}
    types = {"out": "*bf16" if narrow else "*fp32", "limit": "*fp32", **pointers, **integers}
    signature = {n: "constexpr" if n in constants else types.get(n, "fp32") for n in decode_kernel.arg_names}
    code = machine_code(launches.source(decode_kernel, signature, constants), tmp_path, **launch_decode.OPTIONS)
    assert "MUFU.EX2" in code
    assert "16x2" not in code


# Instructions a weight in the loop of a linear layer for one row of x: what they were, and a twentieth. An H200 has 8.9
# turns a weight for the time in which signed8 is 1.6 times as fast as bfloat16. Powers of 2 take eight, but of another
# unit.
LINEAR = {"paper8": 6.7, "paper10": 7.4, "paper12": 7.2, "signed8": 4.4, "signed12": 7.9}


@pytest.mark.parametrize(("name", "dtype"), [*((name, torch.bfloat16) for name in LINEAR), ("signed8", torch.float16)])
def test_a_linear_layer_of_codes_decodes_in_registers_with_few_instructions_a_weight(name, dtype, tmp_path):
    code, tile = linear_code(name, dtype, 1, tmp_path)
    weights = 2 * tile["R"] * 128 // 32  # of a thread, in the two turns of the loop
    loop = loop_of(code)
    assert len(loop) / weights < LINEAR[name] + 2 * (dtype == torch.float16)  # which is for more precise weights
    assert sum("HMMA.16816.F32" in line for line in loop) == weights // 8
    powers = {"paper8": weights - weights // 8, "paper10": weights, "paper12": weights}
    assert sum("MUFU.EX2" in line for line in loop) == powers.get(name, 0)
    # No slow conversion, nothing spilled, nothing from thread to thread: tensor cores take weights from registers.
    assert not any(slow in line for line in loop for slow in ("I2F", "STL", "LDL", "STS", "LDS", "SHFL", "BAR"))


@pytest.mark.parametrize("name", ["paper8", "paper12", "signed8"])
@pytest.mark.parametrize("batch", [16, 32, 64])
def test_larger_batches_decode_a_weight_once_and_in_registers(name, batch, tmp_path):
    code, tile = linear_code(name, torch.bfloat16, batch, tmp_path)
    loop = loop_of(code)
    weights = tile["R"] * 128 // 32
    assert sum("HMMA.16816.F32" in line for line in loop) == weights * batch // 64
    assert sum("F2FP" in line for line in loop) == weights // 2
    assert sum("LDL" in line for line in loop) < 16
    assert not any("STS" in line for line in loop)


def loop_of(code):
    """The instructions of the loop, which ends with a branch back to where it begins."""
    labels, instructions = {}, []
    for line in code.splitlines():
        if line.startswith(".L_"):
            labels[line.rstrip(":")] = len(instructions)
        elif line.lstrip().startswith("/*") and ";" in line:
            instructions.append(line)
            target = line.partition("`(")[2].partition(")")[0]
            if "BRA" in line and labels.get(target, len(instructions)) < len(instructions) - 1:
                return instructions[labels[target] :]
    raise AssertionError("no loop")


def linear_code(name, dtype, batch, folder):
    """Of 4,096 columns; and the sizes of what a program works on."""
    from torchmadam.kernels import launch_linear
    from torchmadam.kernels.launch import Launch
    from torchmadam.ladder.layout import CodeLayout

    coding = CodeLayout.contiguous(LadderFormat.preset(name), (4096, 4096))
    planes = [torch.empty(s, dtype=torch.uint8) for s in coding.plane_shapes]
    x, out, limit = torch.zeros(batch, 4096, dtype=dtype), torch.empty(batch, 4096, dtype=dtype), torch.ones(())
    own = launch_linear.prepared(coding, batch, dtype, False)
    given = (*launch_linear.tensors(out, x, planes, limit, coding, None), *own.rest)
    one = Launch(own.kernel, own.programs, dict(zip(own.kernel.arg_names, given, strict=True)), options=own.options)
    return machine_code(launches.source_of(one, special=True), folder, **one.options), one.arguments
