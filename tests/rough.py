"""A GPU's fast arithmetic in Triton's interpreter, which else computes to the last bit and keeps the smallest numbers.

Roots, exponentials and quotients are off by up to so many units in the last place, always the same way for the same
operands; and roots and exponentials take numbers below 2^-126 for zeros. What Triton calls "_rn" stays exact.
"""

import numpy as np
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

SMALLEST = 2.0**-126
ULPS = {"sqrt": 1, "rsqrt": 1, "exp": 2, "exp2": 2, "fdiv": 2}


def flushed(x):
    return np.where(np.abs(x) < SMALLEST, x * 0, x)


def off(exact, ulps, *operands):
    """Float32 near float64 results; where one of them has no fraction to round, it is that one."""
    near = exact.astype(np.float32)
    words = np.zeros(near.shape, np.uint32)
    for operand in operands:
        words = (words ^ np.ascontiguousarray(operand).view(np.uint32)) * np.uint32(0x9E3779B1)
        words ^= words >> np.uint32(15)
    errors = (words % np.uint32(2 * ulps + 1)).astype(np.float64) - ulps
    usual = np.isfinite(near) & (near != exact) & (np.abs(near) > 4 * SMALLEST)
    return np.where(usual, (near.astype(np.float64) * (1 + errors * 2.0**-23)).astype(np.float32), near)


def rough(name, compute, flush):
    exactly = getattr(InterpreterBuilder, f"create_{name}")

    def create(self, *handles):
        given = [handle.data for handle in handles]
        if any(data.dtype != np.float32 for data in given):
            return exactly(self, *handles)
        wide = [(flushed(data) if flush else data).astype(np.float64) for data in given]
        found = off(compute(*wide), ULPS[name], *given)
        return TensorHandle(flushed(found) if flush else found, handles[0].dtype.scalar)

    return create


def install(monkeypatch):
    operations = {"sqrt": np.sqrt, "rsqrt": lambda x: 1 / np.sqrt(x), "exp": np.exp, "exp2": np.exp2}
    for name, compute in operations.items():
        monkeypatch.setattr(InterpreterBuilder, f"create_{name}", rough(name, compute, True))
    monkeypatch.setattr(InterpreterBuilder, "create_fdiv", rough("fdiv", np.divide, False))
