"""A step of coded parameters in Triton: codes in, codes out, one launch for a whole list of tensors."""

import triton
import triton.language as tl

from torchmadam.kernels.arithmetic import (
    direction,
    fast_constants,
    fast_move,
    fast_rounded,
    moment_of,
    random_bits,
    random_key,
    rounded,
)
from torchmadam.kernels.moments import decoded, encoded, largest_bits, load_exponents, store_exponents
from torchmadam.kernels.planes import groups_of, load_plane, store_plane
from torchmadam.kernels.tables import address, count_bad, read_clock


@triton.jit
def directed(
    move, k, negative, pull, spacing, middle, SIGNED: tl.constexpr, SIGN_MODE: tl.constexpr, DECAYS: tl.constexpr
):  # fmt: skip
    """The move of k from that of the weight, u times the rate in rungs (LadderFormat.climbed); ``pull`` is decay's.

    On a signed ladder, its negative.
    """
    if SIGNED:
        if DECAYS:
            x = (k.to(tl.float32) - middle) * spacing  # not a constant: see decode_kernel
            fallen = tl.exp(-2 * tl.abs(x))
            tanh = (1 - fallen) / (1 + fallen)
            move = move + tl.where(x < 0, -tanh, tanh) * pull
    else:
        if SIGN_MODE > 0:
            move = (move.to(tl.int32, bitcast=True) ^ negative).to(tl.float32, bitcast=True)
        if DECAYS:
            move = move + pull
    return move


@triton.jit
def load_code(
    plane0, plane1, plane2, plane3, start, row, group, columns, whole, W0: tl.constexpr, W1: tl.constexpr,
    W2: tl.constexpr, W3: tl.constexpr, FLAT: tl.constexpr, LANES: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """K, put together from its planes."""
    k = load_plane(plane0, start, row, group, (columns * W0 + 7) // 8, whole, FLAT, W0, LANES, GROUPS)
    if W1 > 0:
        k = (k << W1) | load_plane(plane1, start, row, group, (columns * W1 + 7) // 8, whole, FLAT, W1, LANES, GROUPS)
    if W2 > 0:
        k = (k << W2) | load_plane(plane2, start, row, group, (columns * W2 + 7) // 8, whole, FLAT, W2, LANES, GROUPS)
    if W3 > 0:
        k = (k << W3) | load_plane(plane3, start, row, group, (columns * W3 + 7) // 8, whole, FLAT, W3, LANES, GROUPS)
    return k


@triton.jit
def store_code(
    plane0, plane1, plane2, plane3, start, row, group, columns, whole, k, W0: tl.constexpr, W1: tl.constexpr,
    W2: tl.constexpr, W3: tl.constexpr, FLAT: tl.constexpr, LANES: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """K, spread over its planes."""
    part = k >> (W1 + W2 + W3)
    store_plane(plane0, start, row, group, (columns * W0 + 7) // 8, whole, part, FLAT, W0, LANES, GROUPS)
    if W1 > 0:
        part = (k >> (W2 + W3)) & ((1 << W1) - 1)
        store_plane(plane1, start, row, group, (columns * W1 + 7) // 8, whole, part, FLAT, W1, LANES, GROUPS)
    if W2 > 0:
        part = (k >> W3) & ((1 << W2) - 1)
        store_plane(plane2, start, row, group, (columns * W2 + 7) // 8, whole, part, FLAT, W2, LANES, GROUPS)
    if W3 > 0:
        part = k & ((1 << W3) - 1)
        store_plane(plane3, start, row, group, (columns * W3 + 7) // 8, whole, part, FLAT, W3, LANES, GROUPS)


@triton.jit
def coded_kernel(
    table, blocks, clock, lr_at, lr, spacing, middle, beta, fresh, max_step, decay,
    G: tl.constexpr, HAS_MOMENT: tl.constexpr, EIGHT: tl.constexpr, CORRECT: tl.constexpr, DECAYS: tl.constexpr,
    MAXIMIZE: tl.constexpr, STOCHASTIC: tl.constexpr, LR_IS_TENSOR: tl.constexpr, SIGNED: tl.constexpr,
    TOP: tl.constexpr, SIGN_MODE: tl.constexpr, W0: tl.constexpr, W1: tl.constexpr, W2: tl.constexpr, W3: tl.constexpr,
    FLAT: tl.constexpr, LANES: tl.constexpr, ALIGNED: tl.constexpr, INDEX: tl.constexpr, FIELDS: tl.constexpr,
    BLOCK: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    """update.madam_coded_ on SPAN blocks of a matrix of codes. SIGN_MODE: 0 all positive, 1 a plane, 2 from a seed.

    EIGHT: the second moment is codes as well.

    A block is loaded while the one before it is worked on.
    """
    GROUPS: tl.constexpr = BLOCK // LANES
    LAST: tl.constexpr = 2 * TOP if SIGNED else TOP
    program = tl.program_id(0).to(tl.int64)
    tensor = tl.load(blocks + 2 * program).to(tl.int64)
    first = tl.load(blocks + 2 * program + 1) * SPAN
    at = table + tensor * FIELDS
    rows, columns, begin = tl.load(at + 7).to(INDEX), tl.load(at + 8).to(INDEX), tl.load(at + 14).to(INDEX)
    MOMENT: tl.constexpr = tl.uint8 if EIGHT else tl.float32
    gradients, moments = address(at + 1, G, ALIGNED), address(at + 2, MOMENT, ALIGNED)
    correction, inverse, low, high, phase = read_clock(clock, tensor)
    EXPONENTS: tl.constexpr = BLOCK // 128  # of a block
    exponents_at = address(at + 5, tl.uint8, False) if EIGHT else moments
    exponents_end = (rows * ((columns + LANES - 1) // LANES * LANES) + 127) // 128
    sign_low, sign_high = low, high
    if SIGN_MODE == 2:
        sign_low, sign_high = random_key(tl.load(at + 9), tl.zeros([], tl.float32))
    rate = lr  # in rungs
    if LR_IS_TENSOR:
        rate = tl.div_rn(tl.load(lr_at).to(tl.float32), spacing)

    plane0 = address(at + 10, tl.uint8, ALIGNED)
    plane1 = address(at + 11, tl.uint8, ALIGNED) if W1 > 0 else plane0
    plane2 = address(at + 12, tl.uint8, ALIGNED) if W2 > 0 else plane0
    plane3 = address(at + 13, tl.uint8, ALIGNED) if W3 > 0 else plane0
    signs = address(at + 9, tl.uint8, ALIGNED) if SIGN_MODE == 1 else plane0

    inverse = inverse if CORRECT else inverse * 0 + 1
    factor, most_move, most_moment, least_grad = fast_constants(inverse, rate, fresh, max_step, HAS_MOMENT)

    start, row, group, whole, element, mask = groups_of(first, rows, columns, FLAT, INDEX, LANES, GROUPS)
    grad = tl.load(gradients + (start + element), mask, other=0.0)
    held = grad.to(tl.float32)
    if HAS_MOMENT:
        held = tl.load(moments + (start + element), mask, other=0)
    exponents = tl.zeros([GROUPS, 1], tl.uint8)
    if EIGHT:
        exponents = load_exponents(exponents_at, first * EXPONENTS, exponents_end, EXPONENTS, GROUPS)
    k = load_code(
        plane0, plane1, plane2, plane3, start, row, group, columns, whole, W0, W1, W2, W3, FLAT, LANES, GROUPS
    )  # fmt: skip
    for turn in range(SPAN):
        start, row, group, whole, element, mask = groups_of(first + turn, rows, columns, FLAT, INDEX, LANES, GROUPS)
        position = (begin + start) + element
        negative = element  # the sign of the weight, in the bit where floats have theirs
        if SIGN_MODE == 1:
            bytes_per_row = (columns + 7) // 8
            negative = load_plane(signs, start, row, group, bytes_per_row, whole, FLAT, 1, LANES, GROUPS) << 31
        if SIGN_MODE == 2:
            negative = (random_bits(position, sign_low, sign_high) & 0x80000000).to(tl.int32, bitcast=True)
        next_start, next_row, next_group, next_whole, ahead, inside = groups_of(
            first + turn + 1, rows, columns, FLAT, INDEX, LANES, GROUPS
        )
        inside, next_whole = inside & (turn + 1 < SPAN), next_whole & (turn + 1 < SPAN)
        next_grad = tl.load(gradients + (next_start + ahead), inside, other=0.0)
        next_held = next_grad.to(tl.float32)
        if HAS_MOMENT:
            next_held = tl.load(moments + (next_start + ahead), inside, other=0)
        next_exponents = exponents
        if EIGHT:
            next_exponents = load_exponents(
                exponents_at, (first + turn + 1) * EXPONENTS, exponents_end, EXPONENTS, GROUPS
            )
        next_k = load_code(
            plane0, plane1, plane2, plane3, next_start, next_row, next_group, columns, next_whole, W0, W1, W2, W3,
            FLAT, LANES, GROUPS,
        )  # fmt: skip

        g = grad.to(tl.float32)
        if MAXIMIZE:
            g = -g
        if EIGHT:
            held = decoded(held, exponents)
        square = g * g
        moment = held * beta + square * fresh if HAS_MOMENT else square
        bits = position.to(tl.uint32)
        if STOCHASTIC:
            bits = random_bits(position, low, high)
        move = fast_move(g, moment, factor, most_move, rate, HAS_MOMENT)
        move = directed(move, k, negative, rate * decay * 3.0517578125e-05, spacing, middle, SIGNED, SIGN_MODE, DECAYS)
        by, doubt = fast_rounded(move, bits, SIGNED, STOCHASTIC)

        largest = tl.zeros([EXPONENTS], tl.int32)
        if EIGHT:
            largest = largest_bits(moment, EXPONENTS, GROUPS, LANES)
            size = tl.max(largest.to(tl.uint32, bitcast=True), 0)
        else:
            size = tl.max(tl.max(moment.to(tl.uint32, bitcast=True), 1), 0)
        doubtful = tl.max(tl.max(doubt.to(tl.int32, bitcast=True), 1), 0) > 0x3EFFFFE5
        doubtful = doubtful | (size > most_moment)
        if HAS_MOMENT:
            raw = g.to(tl.uint32, bitcast=True)
            doubtful = doubtful | (tl.min(tl.min(raw + raw - 1, 1), 0) < least_grad)
        if doubtful:
            held, usable = moment_of(g, held, beta, fresh, HAS_MOMENT)
            moment = held
            u = tl.where(usable, direction(g, held, correction, max_step, HAS_MOMENT, CORRECT), 0.0)
            exact = directed(u * rate, k, negative, rate * decay, spacing, middle, SIGNED, SIGN_MODE, DECAYS)
            by = tl.where(usable, rounded(-exact if SIGNED else exact, bits, STOCHASTIC), 0.0).to(tl.int32)
            count_bad(at + 4, mask & (usable == 0))
            if EIGHT:
                largest = largest_bits(moment, EXPONENTS, GROUPS, LANES)
        if EIGHT:
            packed, new_exponents = encoded(moment, largest, position, phase, EXPONENTS, GROUPS)
            tl.store(moments + (start + element), packed, mask)
            store_exponents(exponents_at, (first + turn) * EXPONENTS, exponents_end, new_exponents, EXPONENTS, GROUPS)
        elif HAS_MOMENT:
            tl.store(moments + (start + element), moment, mask)
        k = tl.minimum(tl.maximum(k + by, 0), LAST)
        if not FLAT:
            k = tl.where(mask, k, 0)  # bits between the end of a row and that of its last byte
        store_code(
            plane0, plane1, plane2, plane3, start, row, group, columns, whole, k, W0, W1, W2, W3, FLAT, LANES, GROUPS
        )  # fmt: skip
        grad, held, exponents, k = next_grad, next_held, next_exponents, next_k
