"""A step of coded parameters in Triton: codes in, codes out, one launch for a whole list of tensors."""

import triton
import triton.language as tl

from torchmadam.kernels.arithmetic import (
    DOUBTFUL,
    WHOLE,
    averaged,
    direction,
    fast_constants,
    fast_move,
    fast_rounded,
    moment_of,
    random_bits,
    random_key,
    rounded,
    shared_bits,
    upper_bits,
    widened,
)
from torchmadam.kernels.moments import (
    decoded,
    decoded_raised,
    encoded,
    largest_bits,
    load_exponents,
    of_rows,
    store_codes,
    store_exponents,
)
from torchmadam.kernels.planes import (
    code_of,
    fetch,
    groups_of,
    load_code,
    load_words,
    put,
    raised,
    raised_bytes,
    store_code,
    unpacked,
)
from torchmadam.kernels.tables import address, count_bad, entry, leave, mean_correction, time_of


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
            flip = negative & -2147483648
            move = (move.to(tl.int32, bitcast=True) ^ flip).to(tl.float32, bitcast=True)
        if DECAYS:
            move = move + pull
    return move


@triton.jit
def dropped(move, by, negative, SIGNED: tl.constexpr, TURN: tl.constexpr):
    """What rounding left of a step, in the direction of u (LadderFormat.climbed), from a move of :func:`directed`."""
    whole = by.to(tl.float32, bitcast=True) - 12582912.0
    rest = tl.fma(move, 32768.0, whole if SIGNED else -whole)
    if TURN > 0:
        rest = (rest.to(tl.int32, bitcast=True) ^ (negative & -2147483648)).to(tl.float32, bitcast=True)
    return rest


@triton.jit
def halves(pairs, sign_words, group, TURN: tl.constexpr, LANES: tl.constexpr, ROWS: tl.constexpr):
    """Gradients as float32, from words of two bfloat16, the upper half of it each.

    TURN: of the other sign where the weight is negative, two at once. Then they are gradients of the weight's size, and
    there is nothing left to turn for :func:`directed`.
    """
    if TURN:
        signs = sign_words >> ((group % (8 // LANES)).to(tl.int32) * LANES)
        pair = tl.arange(0, LANES // 2)[None, :]
        # The product has them twice, 15 bits apart: two neighbours' are its bits 15 and 31.
        pairs = pairs ^ ((signs * (0x8001 << (15 - 2 * pair))) & -2147450880)
    return (unpacked(pairs, group, True, 16, LANES, ROWS) << 16).to(tl.float32, bitcast=True)


@triton.jit
def load_gradients(
    at, start, row, group, columns, whole, element, mask, FLAT: tl.constexpr, WIDE: tl.constexpr, EVEN: tl.constexpr,
    LANES: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """Gradients; PAIRS: as words of two bfloat16."""
    if PAIRS:
        return load_words(at, start, row, group, columns, whole, FLAT, WIDE, 16, LANES, EVEN)
    else:
        return fetch(at + start + element, mask, EVEN)


@triton.jit
def load_block(
    block, gradients, moments, exponents_at, signs, plane0, plane1, plane2, plane3, rows, columns, exponents_end,
    HAS_MOMENT: tl.constexpr, EIGHT: tl.constexpr, SIGN_MODE: tl.constexpr, W0: tl.constexpr, W1: tl.constexpr,
    W2: tl.constexpr, W3: tl.constexpr, FLAT: tl.constexpr, WIDE: tl.constexpr, EVEN: tl.constexpr, LANES: tl.constexpr,
    INDEX: tl.constexpr, GROUPS: tl.constexpr, EXPONENTS: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """What a block needs: gradients; moments, as floats or words of codes, and exponents; words of codes, of signs.

    Of what there is not, just anything.
    """
    start, row, group, whole, element, mask = groups_of(block, rows, columns, FLAT, INDEX, LANES, GROUPS, EVEN)
    grad = load_gradients(gradients, start, row, group, columns, whole, element, mask, FLAT, WIDE, EVEN, LANES, PAIRS)
    if not HAS_MOMENT:
        held = grad.to(tl.float32)
    elif WIDE and EIGHT:
        held = load_words(moments, start, row, group, columns, whole, FLAT, WIDE, 8, LANES, EVEN)
    else:
        held = fetch(moments + start + element, mask, EVEN)
        held = held.to(tl.int32) if EIGHT else held
    exponents = tl.zeros([GROUPS, 1], tl.int32)
    if EIGHT:
        first = block * EXPONENTS
        exponents = load_exponents(exponents_at, first, exponents_end, EXPONENTS, GROUPS, EVEN).to(tl.int32)
    words0, words1, words2, words3 = load_code(
        plane0, plane1, plane2, plane3, start, row, group, columns, whole, W0, W1, W2, W3, FLAT, WIDE, LANES, EVEN
    )  # fmt: skip
    sign_words = words0
    if SIGN_MODE == 1:
        sign_words = load_words(signs, start, row, group, (columns + 7) // 8, whole, FLAT, WIDE, 1, LANES, EVEN)
    return grad, held, exponents, words0, words1, words2, words3, sign_words


@triton.jit
def opened(
    grad, held, exponents, words0, words1, words2, words3, sign_words, begin, start, group, element, low, high,
    sign_low, sign_high, SIGN_MODE: tl.constexpr, TURN: tl.constexpr, MAXIMIZE: tl.constexpr, EIGHT: tl.constexpr,
    STOCHASTIC: tl.constexpr, W0: tl.constexpr, W1: tl.constexpr, W2: tl.constexpr, W3: tl.constexpr,
    FLAT: tl.constexpr, WIDE: tl.constexpr, LANES: tl.constexpr, INDEX: tl.constexpr, GROUPS: tl.constexpr,
    PAIRS: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Of what :func:`load_block` gives, each weight's: k, gradient, moment, below zero if it is; and random bits."""
    position = (begin + start.to(INDEX)) + element
    k = code_of(words0, words1, words2, words3, group, W0, W1, W2, W3, WIDE, LANES, GROUPS, PTX)
    g = halves(grad, sign_words, group, TURN < SIGN_MODE, LANES, GROUPS) if PAIRS else grad.to(tl.float32)
    if MAXIMIZE:
        g = -g
    if WIDE and EIGHT:
        held = decoded_raised(raised_bytes(held, LANES, GROUPS, PTX), exponents)
    elif EIGHT:
        held = decoded(held, exponents)
    negative = element
    if TURN == 1:
        negative = raised(sign_words, group, LANES)
    if TURN == 2:
        negative = random_bits(position, sign_low, sign_high).to(tl.int32, bitcast=True)
    bits = position.to(tl.uint32)
    if STOCHASTIC and FLAT:  # each group lies within eight neighbours
        bits = shared_bits((begin + start.to(INDEX) + group * LANES) >> 3, element & 7, low, high)
    elif STOCHASTIC:
        bits = shared_bits(position >> 3, position & 7, low, high)
    return k, g, held, negative, bits


@triton.jit
def coded_kernel(
    table, blocks, clock, log_beta, log_beta_rest, log_momentum, log_momentum_rest, lr_at, lr, spacing, middle,
    momentum, recent, returned, room, per_rung, beta, fresh, max_step, decay,
    G: tl.constexpr, HAS_MEAN: tl.constexpr, HAS_MOMENT: tl.constexpr, EIGHT: tl.constexpr, CORRECT: tl.constexpr,
    DECAYS: tl.constexpr, MAXIMIZE: tl.constexpr, STOCHASTIC: tl.constexpr, LR_IS_TENSOR: tl.constexpr,
    SIGNED: tl.constexpr, TOP: tl.constexpr, SIGN_MODE: tl.constexpr, W0: tl.constexpr, W1: tl.constexpr,
    W2: tl.constexpr, W3: tl.constexpr, FLAT: tl.constexpr, EVEN: tl.constexpr, LANES: tl.constexpr,
    ALIGNED: tl.constexpr, INDEX: tl.constexpr, FIELDS: tl.constexpr, BLOCK: tl.constexpr, SPAN: tl.constexpr,
    ALONE: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """update.madam_coded_ on up to SPAN blocks of a matrix of codes.

    ``returned``, ``room`` and ``per_rung``, the spacing's inverse, are for means (update.Pace).

    SIGN_MODE: all weights are positive (0), or signs are in a plane (1) or come from a seed (2). EIGHT: the second
    moment is codes as well. EVEN: all matrices are FLAT and end with a block. PTX: see :func:`permuted`.

    A block is loaded while the one before it is worked on.

    What rounding drops of a step goes into the mean as the fast arithmetic has it, whether a block is doubtful or not:
    so means do not depend on which weights share a block, though their last bits may not be the reference's. And
    nothing where a moment is below 2^-126, which a GPU's root takes for zero: of gradients below 4e-18.
    """
    GROUPS: tl.constexpr = BLOCK // LANES
    LAST: tl.constexpr = 2 * TOP if SIGNED else TOP
    program = tl.program_id(0).to(tl.int64)
    tensor = entry(blocks + 3 * program).to(tl.int64)
    first = entry(blocks + 3 * program + 1).to(tl.int64) * SPAN
    at = table + tensor * FIELDS
    rows, columns, begin = entry(at + 7).to(INDEX), entry(at + 8).to(INDEX), entry(at + 14).to(INDEX)
    MOMENT: tl.constexpr = tl.uint8 if EIGHT else tl.float32
    WIDE: tl.constexpr = FLAT and ALIGNED
    PAIRS: tl.constexpr = WIDE and EIGHT and G == tl.bfloat16
    # How moves are to be turned, where gradients are not: means are of those as they are.
    TURN: tl.constexpr = 0 if PAIRS and SIGN_MODE == 1 and not HAS_MEAN else SIGN_MODE
    means = address(at + 0, tl.int16, ALIGNED)
    gradients, moments = address(at + 1, G, ALIGNED), address(at + 2, MOMENT, ALIGNED)
    correction, inverse, low, high, phase = time_of(at, clock, tensor, log_beta, log_beta_rest, ALONE)
    EXPONENTS: tl.constexpr = BLOCK // 128  # of a block
    exponents_at = address(at + 5, tl.uint8, False) if EIGHT else moments
    exponents_end = (rows * ((columns + LANES - 1) // LANES * LANES) + 127) // 128
    sign_low, sign_high = low, high
    if SIGN_MODE == 2:
        sign_low, sign_high = random_key(entry(at + 9), tl.zeros([], tl.float32))
    rate = lr  # in rungs
    if LR_IS_TENSOR:
        rate = tl.div_rn(tl.load(lr_at).to(tl.float32), spacing)

    plane0 = address(at + 10, tl.uint8, ALIGNED)
    plane1 = address(at + 11, tl.uint8, ALIGNED) if W1 > 0 else plane0
    plane2 = address(at + 12, tl.uint8, ALIGNED) if W2 > 0 else plane0
    plane3 = address(at + 13, tl.uint8, ALIGNED) if W3 > 0 else plane0
    signs = address(at + 9, tl.uint8, ALIGNED) if SIGN_MODE == 1 else plane0

    inverse = inverse if CORRECT else inverse * 0 + 1
    of_mean = inverse
    # Rungs for each of u, its largest size, and rungs of a step that is a sign.
    speed, most, whole_step = rate * 1.0, max_step * 1.0, rate * 1.0
    if HAS_MEAN:  # u has it above the line, and the moment's root below
        of_mean = mean_correction(at, log_momentum, log_momentum_rest, ALONE) if CORRECT else inverse * 0 + 1
        inverse = inverse * (of_mean * of_mean)
        pace = rate * spacing  # means are of steps
        recent = recent * pace
        speed, most = rate * 0.0 + per_rung, tl.where(rate > 0, pace * max_step + room, 0.0)
        whole_step = pace * per_rung
    factor, share, most_moment, least_moment, least_grad, least_exponent = fast_constants(
        inverse, speed, beta, fresh, tl.maximum(most, 1e-18) if HAS_MEAN else most, HAS_MOMENT
    )
    FEEDS: tl.constexpr = HAS_MEAN and HAS_MOMENT and STOCHASTIC

    grad, held, exponents, words0, words1, words2, words3, sign_words = load_block(
        first, gradients, moments, exponents_at, signs, plane0, plane1, plane2, plane3, rows, columns, exponents_end,
        HAS_MOMENT, EIGHT, SIGN_MODE, W0, W1, W2, W3, FLAT, WIDE, EVEN, LANES, INDEX, GROUPS, EXPONENTS, PAIRS,
    )  # fmt: skip
    groups = rows * ((columns + LANES - 1) // LANES)
    block, turns = first, tl.minimum((groups + GROUPS - 1) // GROUPS - first, SPAN).to(tl.int32)
    turn = turns * 0
    while turn < turns:
        start, row, group, whole, element, mask = groups_of(block, rows, columns, FLAT, INDEX, LANES, GROUPS, EVEN)
        next_grad, next_held, next_exponents, next_signs = grad, held, exponents, sign_words
        next0, next1, next2, next3 = words0, words1, words2, words3
        if turn + 1 < turns:
            next_grad, next_held, next_exponents, next0, next1, next2, next3, next_signs = load_block(
                block + 1, gradients, moments, exponents_at, signs, plane0, plane1, plane2, plane3, rows, columns,
                exponents_end, HAS_MOMENT, EIGHT, SIGN_MODE, W0, W1, W2, W3, FLAT, WIDE, EVEN, LANES, INDEX, GROUPS,
                EXPONENTS, PAIRS,
            )  # fmt: skip

        k, g, held, negative, bits = opened(
            grad, held, exponents, words0, words1, words2, words3, sign_words, begin, start, group, element, low, high,
            sign_low, sign_high, SIGN_MODE, TURN, MAXIMIZE, EIGHT, STOCHASTIC, W0, W1, W2, W3, FLAT, WIDE, LANES, INDEX,
            GROUPS, PAIRS, PTX,
        )  # fmt: skip
        square = g * g
        moment = held * beta + square * fresh if HAS_MOMENT else square
        if HAS_MEAN:
            g = averaged(g, widened(fetch(means + start + element, mask, EVEN)), momentum, recent)
            square = g * g
        move = fast_move(g, square, moment, factor, share, whole_step, HAS_MOMENT)
        move = directed(move, k, negative, rate * decay * 3.0517578125e-05, spacing, middle, SIGNED, TURN, DECAYS)
        lost = rate * decay * 6.103515625e-05 if DECAYS else 0.0
        by, doubt = fast_rounded(move, lost, bits, SIGNED, STOCHASTIC)
        back = move
        if FEEDS:
            back = dropped(move, by, negative, SIGNED, TURN) * (tl.sqrt(moment * inverse) * returned)

        largest = tl.zeros([EXPONENTS], tl.int32)
        worst = tl.max(doubt.to(tl.int32, bitcast=True), 1)[:, None]
        if HAS_MEAN:
            # A mean may be as large as it likes beside its moment, and there where the gradient is zero.
            size = tl.max(tl.max(tl.maximum(moment, square * share).to(tl.uint32, bitcast=True), 1), 0)
            small = tl.min(tl.min(tl.where(g == 0, 3e38, moment), 1), 0)
            doubtful = (tl.max(tl.max(worst, 1), 0) > DOUBTFUL) | (size > most_moment)
            if HAS_MOMENT:
                doubtful = doubtful | (small < least_moment)
            if EIGHT:
                largest = largest_bits(moment, EXPONENTS, GROUPS, LANES)
        elif EIGHT:
            # Threads are asked once whether anything is unusual, and only then, what.
            largest = largest_bits(moment, EXPONENTS, GROUPS, LANES)
            unusual = of_rows(largest, EXPONENTS, GROUPS).to(tl.uint32, bitcast=True) > most_moment
            unusual = unusual | (exponents < least_exponent)
            doubtful = tl.max(tl.max(tl.where(unusual, DOUBTFUL + 1, worst), 1), 0) > DOUBTFUL
            if doubtful:  # small exponents only matter where there is a gradient
                grad = load_gradients(
                    gradients, start, row, group, columns, whole, element, mask, FLAT, WIDE, EVEN, LANES, PAIRS
                )  # fmt: skip
                sizes = grad & 0x7FFF7FFF if PAIRS else tl.abs(grad.to(tl.float32)).to(tl.int32, bitcast=True)
                doubtful = (tl.max(tl.max(sizes, 1), 0) > 0) | (tl.max(tl.max(worst, 1), 0) > DOUBTFUL)
                doubtful = doubtful | (tl.max(largest.to(tl.uint32, bitcast=True), 0) > most_moment)
        else:
            size = tl.max(tl.max(moment.to(tl.uint32, bitcast=True), 1), 0)
            doubtful = (tl.max(tl.max(worst, 1), 0) > DOUBTFUL) | (size > most_moment)
            if HAS_MOMENT:
                raw = g.to(tl.uint32, bitcast=True)
                doubtful = doubtful | (tl.min(tl.min(raw + raw - 1, 1), 0) < least_grad)
        if doubtful:
            # All is loaded again, ``begin`` as well: registers in which it would wait are room for more programs.
            grad, held, exponents, words0, words1, words2, words3, sign_words = load_block(
                block, gradients, moments, exponents_at, signs, plane0, plane1, plane2, plane3, rows, columns,
                exponents_end, HAS_MOMENT, EIGHT, SIGN_MODE, W0, W1, W2, W3, FLAT, WIDE, EVEN, LANES, INDEX, GROUPS,
                EXPONENTS, PAIRS,
            )  # fmt: skip
            same_k, g, held, negative, bits = opened(
                grad, held, exponents, words0, words1, words2, words3, sign_words, entry(at + 14).to(INDEX), start,
                group, element, low, high, sign_low, sign_high, SIGN_MODE, TURN, MAXIMIZE, EIGHT, STOCHASTIC, W0, W1,
                W2, W3, FLAT, WIDE, LANES, INDEX, GROUPS, PAIRS, PTX,
            )  # fmt: skip
            held, usable = moment_of(g, held, beta, fresh, HAS_MOMENT)
            moment, towards = held, g
            if HAS_MEAN:
                mean = widened(fetch(means + start + element, mask, EVEN))
                g = tl.where(usable, averaged(g, mean, momentum, recent), mean)
                towards = tl.div_rn(g, of_mean)
            u = tl.where(usable, direction(towards, held, correction, most, HAS_MOMENT, CORRECT), 0.0)
            exact = directed(
                u * (speed if HAS_MOMENT else whole_step), same_k, negative, rate * decay, spacing, middle, SIGNED,
                TURN, DECAYS,
            )  # fmt: skip
            rungs = tl.where(usable, rounded(-exact if SIGNED else exact, bits, STOCHASTIC), 0.0)
            by = tl.minimum(tl.maximum(rungs, -1048576.0), 1048576.0).to(tl.int32) + WHOLE  # no ladder is as long
            # ``by``, never zero, says which threads count; else the compiler would hand all gradients to other ones.
            if FEEDS:
                again = fast_move(g, g * g, moment, factor, share, whole_step, HAS_MOMENT)
                again = directed(
                    again, same_k, negative, rate * decay * 3.0517578125e-05, spacing, middle, SIGNED, TURN, DECAYS
                )  # fmt: skip
                rest = dropped(again, by, negative, SIGNED, TURN)
                large = tl.maximum(moment, g * g * share).to(tl.uint32, bitcast=True) > most_moment
                fine = ((moment >= least_moment) | (g == 0)) & (large == 0)
                rest = tl.where(fine, rest, dropped(exact * 3.0517578125e-05, by, negative, SIGNED, TURN))
                rest = tl.where(usable & (tl.abs(rungs) < 1048576.0), rest, 0.0)  # nothing is owed beyond the ladder
                back = rest * (tl.sqrt(moment * inverse) * returned)
                back = tl.where(tl.abs(back) <= 3.4028234663852886e38, back, 0.0)
            bad = mask & (tl.where(usable, 0, by) != 0)
            count_bad(at + 4, tl.sum(tl.sum(bad.to(tl.int32), 1), 0))
            if EIGHT:
                largest = largest_bits(moment, EXPONENTS, GROUPS, LANES)
        if HAS_MEAN:
            g = g + back if FEEDS else g
            put(means + start + element, upper_bits(g, (begin + start.to(INDEX)) + element, phase), mask, EVEN)
        if EIGHT:
            position = (begin + start.to(INDEX)) + element
            codes, new_exponents = encoded(moment, largest, position, phase, EXPONENTS, GROUPS)
            store_codes(moments, start, group, element, whole, mask, codes, WIDE, LANES, GROUPS, EVEN, PTX)
            store_exponents(exponents_at, block * EXPONENTS, exponents_end, new_exponents, EXPONENTS, GROUPS, EVEN)
        elif HAS_MOMENT:
            put(moments + start + element, moment, mask, EVEN)
        k = tl.minimum(tl.maximum(k + by, WHOLE), WHOLE + LAST)
        if not FLAT:
            k = tl.where(mask, k, 0)  # bits between the end of a row and that of its last byte
        store_code(
            plane0, plane1, plane2, plane3, start, row, group, columns, whole, k, W0, W1, W2, W3, FLAT, WIDE, LANES,
            GROUPS, EVEN, PTX,
        )  # fmt: skip
        grad, held, exponents = next_grad, next_held, next_exponents
        words0, words1, words2, words3, sign_words = next0, next1, next2, next3, next_signs
        block, turn = block + 1, turn + 1
    if ALONE:
        leave(at, entry(blocks + 3 * program + 2), FIELDS)
