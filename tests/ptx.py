"""The PTX of the kernels, executed in NumPy: Triton's interpreter knows none."""

import re

import numpy as np
import triton.language as tl
from triton.runtime.interpreter import TensorHandle


def inline_asm_elementwise(asm, constraints, args, dtype, is_pure, pack):
    """As Triton's. Results that are bfloat16 come as float16, which the interpreter can multiply."""
    assert is_pure
    assert pack == 1
    kinds = dtype if isinstance(dtype, tuple) else (dtype,)
    outputs = len(kinds)
    assert constraints.count("=") == outputs
    assert constraints.count(",") + 1 == outputs + len(args)
    values = np.broadcast_arrays(*(each.handle.data if hasattr(each, "handle") else np.int32(each) for each in args))
    registers = {f"${outputs + i}": np.ascontiguousarray(value).view(np.uint32) for i, value in enumerate(values)}
    for line in re.sub(r"\.reg [^;]*;|^{|}$", "", asm.strip()).split(";"):
        if line.strip():
            operation, places = line.strip().split(" ", 1)
            execute(operation, re.findall(r"{[^}]*}|[^, ]+", places), registers)
    results = [registers[f"${i}"] for i in range(outputs)]
    if kinds[0] == tl.int32:
        return as_tensor(results[0].view(np.int32), tl.int32)
    if kinds[0] == tl.bfloat16:
        results = [(r.astype(np.uint32) << 16).view(np.float32).astype(np.float16) for r in results]
    return tuple(as_tensor(r.view(np.float16), tl.float16) for r in results)


def execute(operation, places, registers):
    """One instruction."""
    target, *given = places
    if operation == "mov.b32" and target.startswith("{"):
        low, high = target.strip("{}").split(", ")
        word = registers[given[0]]
        registers[low], registers[high] = (word & 0xFFFF).astype(np.uint16), (word >> 16).astype(np.uint16)
        return
    a, *rest = [np.asarray(registers[g] if g in registers else np.uint32(int(g, 16))) for g in given]
    if operation == "prmt.b32":
        second, chosen = rest
        source = [(word >> np.uint32(8 * i)) & 255 for word in (a, second) for i in range(4)]
        picked = [np.choose((chosen >> np.uint32(4 * i)) & 7, source) << np.uint32(8 * i) for i in range(4)]
        found = picked[0] | picked[1] | picked[2] | picked[3]
    elif operation == "lop3.b32":
        assert rest[2] == 0x78
        found = a ^ (rest[0] & rest[1])
    elif operation in ("fma.rn.f16x2", "mul.rn.f16x2"):
        x, y, *z = [np.ascontiguousarray(np.broadcast_to(r, np.shape(a))).view(np.float16) for r in (a, *rest)]
        found = x.astype(np.float64) * y + (z[0].astype(np.float64) if z else 0)
        found = found.astype(np.float16).view(np.uint32)
    elif operation == "cvt.f32.f16":
        found = a.view(np.float16).astype(np.float32)
    elif operation in ("cvt.rn.bf16x2.f32", "cvt.rn.f16x2.f32"):
        high, low = (rounded(r.view(np.float32), operation) for r in (a, *rest))
        found = low | (high << 16)
    else:  # a kernel has a new instruction, which has to be added here before its test can say anything
        raise AssertionError(f"no test knows the instruction {operation}")
    registers[target] = found


def rounded(values, operation):
    """The bits of float32 as 16-bit floats, in words."""
    if operation == "cvt.rn.f16x2.f32":
        return values.astype(np.float16).view(np.uint16).astype(np.uint32)
    bits = values.view(np.uint32)
    return (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16


def fma(x, y, z):
    """A multiply-add with one rounding, which the interpreter's has not."""
    return as_tensor((x.handle.data.astype(np.float64) * float(y) + float(z)).astype(np.float32), tl.float32)


def as_tensor(values, kind):
    """Of Triton's kind."""
    return tl.core.tensor(TensorHandle(values, kind), tl.block_type(kind, list(values.shape)))
