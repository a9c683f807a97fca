"""y = x W^T in Triton, with W as codes that are decoded in registers: for generation, where W is most of what is read.

LANES weights of a row, 16 or 32, are a group, which fills at least two words of every plane. With 16, every load of a
program then gives a group to the same thread, and nothing goes from thread to thread before the sums are made.
Matrices of groups have columns first and rows second, because Triton then spreads a warp along the columns.
"""

import triton
import triton.language as tl

from torchmadam.kernels.planes import fetch


@triton.constexpr_function
def word_bits(width, lanes):
    """Bits of the words that a group is loaded in, from a plane of so many bits a weight: two words or more."""
    return min(32, width * lanes // 2)


@triton.jit
def load_groups(at, group, mask, WIDTH: tl.constexpr, LANES: tl.constexpr, EVEN: tl.constexpr):
    """What one plane holds of a matrix of groups, still packed: the words of a group are the last dimension."""
    UNIT: tl.constexpr = word_bits(WIDTH, LANES)
    COUNT: tl.constexpr = LANES * WIDTH // UNIT
    TYPE: tl.constexpr = tl.uint32 if UNIT == 32 else tl.uint16 if UNIT == 16 else tl.uint8
    place = group[:, :, None] * COUNT + tl.arange(0, COUNT)[None, None, :]
    return fetch(at.to(tl.pointer_type(TYPE)) + place, mask[:, :, None], EVEN).to(tl.int32)


@triton.jit
def load_weights(
    plane0, plane1, signs, group, mask, W0: tl.constexpr, W1: tl.constexpr, SIGNS: tl.constexpr, LANES: tl.constexpr,
    EVEN: tl.constexpr,
):  # fmt: skip
    """The words of k's one or two planes and of the signs; of a plane that is not there, those of the first."""
    words0 = load_groups(plane0, group, mask, W0, LANES, EVEN)
    words1, words2 = words0, words0
    if W1 > 0:
        words1 = load_groups(plane1, group, mask, W1, LANES, EVEN)
    if SIGNS:
        words2 = load_groups(signs, group, mask, 1, LANES, EVEN)
    return words0, words1, words2


@triton.jit
def spread(words, lowest, WIDTH: tl.constexpr, LANES: tl.constexpr, R: tl.constexpr, G: tl.constexpr):
    """Words, each once for every weight in it, shifted so that the weight's lowest bit is at ``lowest``."""
    EACH: tl.constexpr = word_bits(WIDTH, LANES) // WIDTH
    right = tl.arange(0, EACH)[None, None, None, :] * WIDTH - lowest
    shifted = (words[:, :, :, None] >> tl.maximum(right, 0)) << tl.maximum(-right, 0)
    return tl.reshape(shifted, [G, R, LANES])


@triton.jit
def whole_floats(
    words0, words1, ones, whole, zero, W0: tl.constexpr, W1: tl.constexpr, LANES: tl.constexpr, R: tl.constexpr,
    G: tl.constexpr,
):  # fmt: skip
    """K - zero as float32. Conversions are slow, but the bits of k below those of 2^n are those of 2^n + k.

    Which n, is free: of a word of four codes the first two stay where they are, and two planes meet at bit 8. ``whole``
    is 2^23 and ``ones`` are as many as W0 says. Neither is a constant: an instruction has room for one, and the
    compiler would take shifts that two weights share for something better.
    """
    if W1 > 0:
        LOW: tl.constexpr = 8 - W1
        size = whole * (1.0 / (1 << LOW)) + tl.zeros([1, 1, LANES], tl.float32)
        lower = (spread(words1, LOW, W1, LANES, R, G) & (((1 << W1) - 1) << LOW)) | size.to(tl.int32, bitcast=True)
        raw = (spread(words0, 8, W0, LANES, R, G) & (((1 << W0) - 1) << 8)) ^ lower  # | would be sorted otherwise
    else:
        EACH: tl.constexpr = word_bits(W0, LANES) // W0
        lowest = (tl.arange(0, EACH) % 2)[None, None, None, :] * 8
        odd = (tl.arange(0, LANES) % 2)[None, None, :]
        size = tl.where(odd > 0, whole * 0.00390625, whole)
        k = spread(words0, lowest, W0, LANES, R, G) & tl.where(odd > 0, ones << 8, ones)
        raw = k | size.to(tl.int32, bitcast=True)
    return raw.to(tl.float32, bitcast=True) - (size + zero)


@triton.jit
def rungs(
    words0, words1, words2, ones, whole, zero, spacing, p1, p2, W0: tl.constexpr, W1: tl.constexpr, SIGNS: tl.constexpr,
    KIND: tl.constexpr, LANES: tl.constexpr, R: tl.constexpr, G: tl.constexpr,
):  # fmt: skip
    """Float32 weights, G x R x LANES, less the factor that all of them share (launch_linear.arithmetic).

    KIND 0: the paper's, 2^(k spacing), here with a spacing below zero. 1: sinh, as k ((k^2 + p1)^2 + p2), which is
    large, 2e19 at 12 bits, but in three instructions. 2: sinh, as a difference of powers, each as slow as eight others.
    """
    k = whole_floats(words0, words1, ones, whole, zero, W0, W1, LANES, R, G)
    if KIND == 0:
        w = tl.exp2(k * spacing)
        if SIGNS:
            negative = spread(words2, 0, 1, LANES, R, G) << 31
            w = (w.to(tl.int32, bitcast=True) ^ negative).to(tl.float32, bitcast=True)
    elif KIND == 1:
        square = k * k + p1
        w = k * (square * square + p2)
    else:
        w = tl.exp2(k * spacing) - tl.exp2(k * -spacing)
    return w


@triton.jit
def load_inputs(x, start, group, inside, LANES: tl.constexpr, EVEN: tl.constexpr, B: tl.constexpr, G: tl.constexpr):
    """B rows of x beside groups of weights: G x B x 1 x LANES. In two halves, since a load has at most 16 bytes."""
    HALF: tl.constexpr = LANES // 2
    place = start[None, :, None] + (group[:, None, None] * LANES + tl.arange(0, HALF)[None, None, :])
    low = fetch(x + place, inside[:, None, None], EVEN)
    high = fetch(x + HALF + place, inside[:, None, None], EVEN)
    return tl.reshape(tl.permute(tl.join(low, high), (0, 1, 3, 2)), [G, B, 1, LANES]).to(tl.float32)


@triton.jit
def after_loads(whole, limit):
    """``whole``, in a way that keeps loads before what is computed from it, where the compiler would mix them.

    It saves registers so, but then waits for some weights before it asks for others. Loads do not move across a
    barrier, and nothing that needs a limit comes before the limit is there, which is never below zero.
    """
    tl.debug_barrier()
    return tl.where(tl.load(limit) >= 0, whole, 0.0)


@triton.jit
def vector_kernel(
    out, x, bias, limit, plane0, plane1, signs, batch, rows, ones, whole, zero, spacing, p1, p2, factor,
    W0: tl.constexpr, W1: tl.constexpr, SIGNS: tl.constexpr, KIND: tl.constexpr, BIAS: tl.constexpr, EVEN: tl.constexpr,
    EARLY: tl.constexpr, GROUPS: tl.constexpr, LANES: tl.constexpr, B: tl.constexpr, R: tl.constexpr, G: tl.constexpr,
):  # fmt: skip
    """At most B rows of x with R rows of W, of GROUPS each; G groups at a time, the next ones under way.

    Weights are float32 and not rounded; the limit, which they share, multiplies the sums. EARLY: all loads of a turn
    come before its arithmetic.
    """
    row, input = tl.program_id(0) * R + tl.arange(0, R), tl.arange(0, B)
    # Beyond the last row it is the last again; nothing of that is stored.
    first = tl.minimum(row, rows - 1).to(tl.int64)[None, :] * GROUPS
    start = tl.minimum(input, batch - 1).to(tl.int64) * (GROUPS * LANES)
    group = tl.arange(0, G)
    words0, words1, words2 = load_weights(
        plane0, plane1, signs, first + group[:, None], (group < GROUPS)[:, None], W0, W1, SIGNS, LANES, EVEN
    )
    total = tl.zeros([G, B, R], tl.float32)
    LAST: tl.constexpr = (GROUPS - 1) // G * G
    if EARLY and LAST == 0:
        whole = after_loads(whole, limit)
    for at in range(0, LAST, G):
        ahead = at + G + group
        next0, next1, next2 = load_weights(
            plane0, plane1, signs, first + ahead[:, None], (ahead < GROUPS)[:, None], W0, W1, SIGNS, LANES, EVEN
        )
        if EARLY:
            whole = after_loads(whole, limit)
        inputs = load_inputs(x, start, at + group, at + group < GROUPS, LANES, EVEN, B, G)
        w = rungs(words0, words1, words2, ones, whole, zero, spacing, p1, p2, W0, W1, SIGNS, KIND, LANES, R, G)
        total += tl.sum(w[:, None, :, :] * inputs, 3)
        words0, words1, words2 = next0, next1, next2
    inputs = load_inputs(x, start, LAST + group, LAST + group < GROUPS, LANES, EVEN, B, G)
    w = rungs(words0, words1, words2, ones, whole, zero, spacing, p1, p2, W0, W1, SIGNS, KIND, LANES, R, G)
    total += tl.sum(w[:, None, :, :] * inputs, 3)
    y = tl.sum(total, 0) * (tl.load(limit) * factor)
    if BIAS:
        y += tl.load(bias + row, row < rows, other=0).to(tl.float32)[None, :]
    place = input.to(tl.int64)[:, None] * rows + row[None, :]
    tl.store(out + place, y.to(out.dtype.element_ty), (input < batch)[:, None] & (row < rows)[None, :])


@triton.jit
def tile_kernel(
    out, x, bias, limit, plane0, plane1, signs, batch, rows, ones, whole, zero, spacing, p1, p2, factor,
    W0: tl.constexpr, W1: tl.constexpr, SIGNS: tl.constexpr, KIND: tl.constexpr, BIAS: tl.constexpr, EVEN: tl.constexpr,
    GROUPS: tl.constexpr, LANES: tl.constexpr, B: tl.constexpr, R: tl.constexpr, G: tl.constexpr,
):  # fmt: skip
    """The same on tensor cores, for more rows of x: weights have the limit in them and are rounded to x's dtype."""
    row, input = tl.program_id(0) * R + tl.arange(0, R), tl.arange(0, B)
    first = tl.minimum(row, rows - 1).to(tl.int64)[None, :] * GROUPS
    start = tl.minimum(input, batch - 1).to(tl.int64)[:, None] * (GROUPS * LANES)
    scale = tl.load(limit) * factor
    total = tl.zeros([R, B], tl.float32)
    for at in range(0, GROUPS, G):
        group = at + tl.arange(0, G)
        column = at * LANES + tl.arange(0, G * LANES)
        words0, words1, words2 = load_weights(
            plane0, plane1, signs, first + group[:, None], (group < GROUPS)[:, None], W0, W1, SIGNS, LANES, EVEN
        )
        inputs = fetch(x + start + column[None, :], (column < GROUPS * LANES)[None, :], EVEN)
        w = rungs(words0, words1, words2, ones, whole, zero, spacing, p1, p2, W0, W1, SIGNS, KIND, LANES, R, G) * scale
        w = tl.reshape(tl.permute(w, (1, 0, 2)), [R, G * LANES]).to(x.dtype.element_ty)
        total = tl.dot(w, tl.trans(inputs), total)
    if BIAS:
        total += tl.load(bias + row, row < rows, other=0).to(tl.float32)[:, None]
    place = input.to(tl.int64)[None, :] * rows + row[:, None]
    tl.store(out + place, total.to(out.dtype.element_ty), (input < batch)[None, :] & (row < rows)[:, None])
