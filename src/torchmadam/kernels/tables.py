"""What the step kernels share: tables of tensors, and each tensor's numbers of the step, from a clock or their own.

Tensors come in a table of 64-bit integers, a row a tensor, that holds their addresses and numbers; a second table tells
each program which tensor it works on, where in it, and how many programs do.
"""

import triton
import triton.language as tl

from torchmadam.kernels.arithmetic import random_key

# Columns of the tables. A float's bits are stored in the low half of an integer. The last column counts the programs of
# a step without a clock; between steps it is zero.
PARAM, GRAD, MOMENT, STEP, NONFINITE, COUNT, STREAM, SCALE, CROSSING, EXPONENTS, FIRST, MEAN = range(12)
FLOAT_COLUMNS = 13
# Coded tensors: rows and columns of the matrix of codes, the plane of signs (or the key of a seed), and the planes of
# k; the exponents of an 8-bit moment in the place of COUNT, and the first moment in that of PARAM. FIRST is where in
# the whole parameter this tensor, which may be a shard, begins.
ROWS, COLUMNS, SIGNS, PLANES, CODED_FIRST, CODED_COLUMNS = 7, 8, 9, 10, 14, 16
CODED_MEAN, CODED_EXPONENTS = PARAM, COUNT
CLOCK = tl.constexpr(5)  # numbers that a clock notes for each tensor


@triton.jit
def entry(at):
    """What a table says; every program waits for it, so it is to stay in the cache from one step to the next."""
    return tl.load(at, eviction_policy="evict_last")


@triton.jit
def ticked(t, stream, log_beta, log_beta_rest):
    """What the programs of a step t need: 1 - beta^t, its inverse, the two halves of a random key, a dither's phase.

    Ln beta comes in two halves: float32 has too few digits.
    """
    exponent = t.to(tl.float64) * log_beta + t.to(tl.float64) * log_beta_rest
    correction = (1 - tl.exp(exponent)).to(tl.float32)
    low, high = random_key(stream, t)
    phase = (t.to(tl.int64) * -1640531527 + stream).to(tl.int32)  # moment8.phase
    return correction, 1 / correction, low, high, phase.to(tl.uint32, bitcast=True)


@triton.jit
def clock_kernel(table, clock, count, log_beta, log_beta_rest, FIELDS: tl.constexpr, BLOCK: tl.constexpr):
    """Count a step for every tensor, and note what its programs need: a launch more, but each of them is shorter."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = i < count
    at = tl.load(table + i * FIELDS + 3, mask, other=0).to(tl.pointer_type(tl.float32))
    t = tl.load(at, mask, other=0.0) + 1
    tl.store(at, t, mask)
    stream = tl.load(table + i * FIELDS + 6, mask, other=0)
    correction, inverse, low, high, phase = ticked(t, stream, log_beta, log_beta_rest)
    notes = clock + CLOCK * i
    tl.store(notes, correction.to(tl.int32, bitcast=True), mask)
    tl.store(notes + 1, inverse.to(tl.int32, bitcast=True), mask)
    tl.store(notes + 2, low.to(tl.int32, bitcast=True), mask)
    tl.store(notes + 3, high.to(tl.int32, bitcast=True), mask)
    tl.store(notes + 4, phase.to(tl.int32, bitcast=True), mask)


@triton.jit
def time_of(row, clock, tensor, log_beta, log_beta_rest, ALONE: tl.constexpr):
    """What :func:`ticked` gives for the step that is being made. ALONE: no clock has noted it, nor counted the step."""
    if ALONE:
        t = tl.load(entry(row + 3).to(tl.pointer_type(tl.float32))) + 1
        correction, inverse, low, high, phase = ticked(t, entry(row + 6), log_beta, log_beta_rest)
    else:
        notes = clock + CLOCK * tensor
        correction = tl.load(notes).to(tl.float32, bitcast=True)
        inverse = tl.load(notes + 1).to(tl.float32, bitcast=True)
        low, high = tl.load(notes + 2).to(tl.uint32, bitcast=True), tl.load(notes + 3).to(tl.uint32, bitcast=True)
        phase = tl.load(notes + 4).to(tl.uint32, bitcast=True)
    return correction, inverse, low, high, phase


@triton.jit
def mean_correction(row, log_momentum, log_momentum_rest, ALONE: tl.constexpr):
    """1 - momentum^t for the step t that is being made, which a clock, unless it goes without, has counted."""
    t = tl.load(entry(row + 3).to(tl.pointer_type(tl.float32)))
    if ALONE:
        t = t + 1
    return (1 - tl.exp(t.to(tl.float64) * log_momentum + t.to(tl.float64) * log_momentum_rest)).to(tl.float32)


@triton.jit
def leave(row, programs, FIELDS: tl.constexpr):
    """The end of a program of a step without a clock: the last one of a tensor's, of so many, counts the step.

    All others have by then read the count from before, and used it: within a program, the barrier sees to that.
    """
    tl.debug_barrier()
    arrived = row + (FIELDS - 1)
    if tl.atomic_add(arrived, 1, sem="relaxed") == programs - 1:
        tl.store(arrived, 0)
        at = entry(row + 3).to(tl.pointer_type(tl.float32))
        tl.store(at, tl.load(at) + 1)


@triton.jit
def address(at, TYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """A pointer from an entry of a table. ALIGNED promises 16 bytes, so that loads and stores can be that wide."""
    pointer = entry(at).to(tl.pointer_type(TYPE))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def count_bad(at, count):
    """Add the number of gradients that could not be used to a tensor's count; nearly always there are none."""
    if count > 0:
        tl.atomic_add(entry(at).to(tl.pointer_type(tl.int64)), count.to(tl.int64))
