"""Codes to floats, or to integers, in Triton: one launch a tensor."""

import triton
import triton.language as tl

from torchmadam.kernels.arithmetic import random_bits, random_key, sinh
from torchmadam.kernels.planes import code_of, groups_of, load_code, load_words, unpacked


@triton.jit
def decode_kernel(
    out, limit, signs, plane0, plane1, plane2, plane3, rows, columns, first, spacing, crossing, middle, sign_key,
    SIGNED: tl.constexpr, SIGN_MODE: tl.constexpr, W0: tl.constexpr, W1: tl.constexpr,
    W2: tl.constexpr, W3: tl.constexpr, RAW: tl.constexpr, NARROW: tl.constexpr, FLAT: tl.constexpr,
    INDEX: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Rows of a matrix of codes; ``first`` is the position of the first of them in the whole, which keys the signs.

    RAW: the codes themselves, as CodeLayout.unpack gives them. NARROW: floats of 16 bits, so that 16 are enough.
    """
    GROUPS: tl.constexpr = BLOCK // 8
    # Numbers given by Python may be constants to the compiler; adding them to a zero makes them values.
    zero = tl.zeros([], tl.int64)
    rows, columns = (zero + rows).to(INDEX), (zero + columns).to(INDEX)
    block = tl.program_id(0).to(tl.int64)
    start, row, group, whole, element, mask = groups_of(block, rows, columns, FLAT, INDEX, 8, GROUPS)
    words0, words1, words2, words3 = load_code(
        plane0, plane1, plane2, plane3, start, row, group, columns, whole, W0, W1, W2, W3, FLAT, False, 8, False
    )  # fmt: skip
    k = code_of(words0, words1, words2, words3, group, W0, W1, W2, W3, False, 8, GROUPS)
    negative = k * 0
    if SIGN_MODE == 1:
        words = load_words(signs, start, row, group, (columns + 7) // 8, whole, FLAT, False, 1, 8)
        negative = unpacked(words, group, False, 1, 8, GROUPS)
    if SIGN_MODE == 2:
        low, high = random_key(zero + sign_key, tl.zeros([], tl.float32))
        negative = (random_bits(element + (zero + first + start), low, high) >> 31).to(tl.int32)
    if RAW:
        value = k | (negative << (W0 + W1 + W2 + W3))
    elif SIGNED:
        # ``middle``, the code of zero, is no constant: LLVM would narrow the subtraction to 16-bit integers, two to a
        # register, and ptxas 12.8 then subtracts from some of them not at all, and from others twice.
        rungs = k.to(tl.float32) - middle
        if NARROW:  # next to zero the difference loses bits, but the nearest rung is not that near
            x = rungs * (spacing * 1.4426950408889634)
            value = (tl.exp2(x) - tl.exp2(-x)) * (0.5 * tl.load(limit) * crossing)
        else:
            value = sinh(rungs * spacing) * (tl.load(limit) * crossing)
    else:
        if NARROW:
            value = tl.exp2(k.to(tl.float32) * (spacing * -1.4426950408889634)) * tl.load(limit)
        else:
            value = tl.exp(k.to(tl.float32) * -spacing) * tl.load(limit)
        if SIGN_MODE > 0:
            value = tl.where(negative > 0, -value, value)
    tl.store(out + start + element, value.to(out.dtype.element_ty), mask)
