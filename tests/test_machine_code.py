"""What Triton's own assembler makes of the kernels for a Hopper GPU; no GPU is needed to look."""

import os
import subprocess
from pathlib import Path

import pytest

from torchmadam import LadderFormat

triton = pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="under the interpreter nothing is compiled"
)


@pytest.mark.parametrize("bits", [3, 8, 12])
@pytest.mark.parametrize("flat", [True, False])
def test_decoding_signed_ladders_never_packs_two_subtractions_into_one_register(bits, flat, tmp_path):
    """With the code of zero as a constant it did, and ptxas 12.8 subtracted from some weights not at all."""
    import triton.language as tl
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from torchmadam.kernels import launch
    from torchmadam.kernels.decode import decode_kernel
    from torchmadam.ladder.layout import CodeLayout

    arguments = launch._ladder_arguments(CodeLayout.contiguous(LadderFormat.signed(bits, 1.0), (8, 8)))
    del arguments["TOP"]
    constants = {**arguments, "FLAT": flat, "INDEX": tl.int32, "BLOCK": 512}
    pointers = dict.fromkeys(("signs", "plane0", "plane1", "plane2", "plane3"), "*u8")
    integers = {"rows": "i32", "columns": "i32", "first": "i32", "sign_key": "i64"}
    types = {"out": "*fp32", "limit": "*fp32", **pointers, **integers}
    signature = {n: "constexpr" if n in constants else types.get(n, "fp32") for n in decode_kernel.arg_names}
    places = {(decode_kernel.arg_names.index(n),): value for n, value in constants.items()}
    source = ASTSource(fn=decode_kernel, signature=signature, constexprs=places)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32))
    (tmp_path / "kernel.cubin").write_bytes(compiled.asm["cubin"])
    disassembler = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
    code = subprocess.run(
        [disassembler, "-c", tmp_path / "kernel.cubin"], capture_output=True, text=True, check=True
    ).stdout
    assert "MUFU.EX2" in code
    assert "16x2" not in code
