"""What the step kernels share: tables of tensors, and a clock that prepares each tensor's numbers of the step.

Tensors come in a table of 64-bit integers, a row a tensor, that holds their addresses and numbers; a second table tells
each program which tensor it works on, and where in it.
"""

import triton
import triton.language as tl

from torchmadam.kernels.arithmetic import random_key

# Columns of the tables. A float's bits are stored in the low half of an integer.
PARAM, GRAD, MOMENT, STEP, NONFINITE, COUNT, STREAM, SCALE, CROSSING, EXPONENTS, FIRST, FLOAT_COLUMNS = range(12)
# Coded tensors: rows and columns of the matrix of codes, the plane of signs (or the key of a seed), and the planes of
# k; the exponents of an 8-bit moment in the place of COUNT. PARAM stays empty. FIRST is where in the whole parameter
# this tensor, which may be a shard, begins.
ROWS, COLUMNS, SIGNS, PLANES, CODED_FIRST, CODED_COLUMNS = 7, 8, 9, 10, 14, 15
CODED_EXPONENTS = COUNT
CLOCK = 5  # numbers that the clock notes for each tensor


@triton.jit
def clock_kernel(
    table, clock, count, log_beta, log_beta_rest, FIELDS: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr
):
    """Count a step for every tensor, and note what its programs need: 1 - beta^t, its inverse, random keys, a phase.

    Five 32-bit numbers a tensor. Ln beta comes in two halves: float32 has too few digits. EARLY: the next kernel may
    begin at once, and waits where it reads the clock.
    """
    if EARLY:
        tl.inline_asm_elementwise(
            "griddepcontrol.launch_dependents; // $0", "=r", [], dtype=tl.int32, is_pure=False, pack=1
        )
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = i < count
    at = tl.load(table + i * FIELDS + 3, mask, other=0).to(tl.pointer_type(tl.float32))
    t = tl.load(at, mask, other=0.0) + 1
    tl.store(at, t, mask)
    exponent = t.to(tl.float64) * log_beta + t.to(tl.float64) * log_beta_rest
    correction = (1 - tl.exp(exponent)).to(tl.float32)
    stream = tl.load(table + i * FIELDS + 6, mask, other=0)
    low, high = random_key(stream, t)
    phase = (t.to(tl.int64) * -1640531527 + stream).to(tl.int32)  # moment8.phase
    tl.store(clock + 5 * i, correction.to(tl.int32, bitcast=True), mask)
    tl.store(clock + 5 * i + 1, (1 / correction).to(tl.int32, bitcast=True), mask)
    tl.store(clock + 5 * i + 2, low.to(tl.int32, bitcast=True), mask)
    tl.store(clock + 5 * i + 3, high.to(tl.int32, bitcast=True), mask)
    tl.store(clock + 5 * i + 4, phase, mask)


@triton.jit
def read_clock(clock, tensor, EARLY: tl.constexpr):
    """1 - beta^t, its inverse, the two halves of the random key, and the phase of the dither of a tensor.

    EARLY: waits for the clock to have been written. Nothing may be stored before.
    """
    if EARLY:
        tl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], dtype=tl.int32, is_pure=False, pack=1)
    at = clock + 5 * tensor
    correction, inverse = tl.load(at).to(tl.float32, bitcast=True), tl.load(at + 1).to(tl.float32, bitcast=True)
    low, high = tl.load(at + 2).to(tl.uint32, bitcast=True), tl.load(at + 3).to(tl.uint32, bitcast=True)
    return correction, inverse, low, high, tl.load(at + 4).to(tl.uint32, bitcast=True)


@triton.jit
def address(entry, TYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """A pointer from an entry of a table. ALIGNED promises 16 bytes, so that loads and stores can be that wide."""
    pointer = tl.load(entry).to(tl.pointer_type(TYPE))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def count_bad(entry, bad):
    """Add the number of gradients that could not be used to a tensor's count; nearly always there are none."""
    count = tl.sum(tl.sum(bad.to(tl.int32), 1), 0)
    if count > 0:
        tl.atomic_add(tl.load(entry).to(tl.pointer_type(tl.int64)), count.to(tl.int64))
