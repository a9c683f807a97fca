"""A step of float parameters in Triton: one launch for a whole list of tensors."""

import triton
import triton.language as tl

from torchmadam.kernels.arithmetic import (
    averaged,
    fast_direction,
    moment_of,
    moved,
    narrowed,
    nearest_bfloat16,
    random_bits,
    upper_bits,
    widened,
)
from torchmadam.kernels.moments import decoded, encoded, largest_bits, load_exponents, store_exponents
from torchmadam.kernels.tables import address, count_bad, entry, leave, mean_correction, time_of


@triton.jit
def float_elements(
    row, begin, offset, mask, grad, mean, held, exponents, exponents_first, exponents_end, old, limit, width, inverse,
    low, high, phase, lr, momentum, recent, beta, fresh, max_step, decay, least, most,
    ROWS: tl.constexpr, P: tl.constexpr, HAS_MEAN: tl.constexpr, HAS_MOMENT: tl.constexpr, EIGHT: tl.constexpr,
    CORRECT: tl.constexpr, BOUNDED: tl.constexpr, DECAYS: tl.constexpr, MAXIMIZE: tl.constexpr, LOST: tl.constexpr,
    STOCHASTIC: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """update.madam_ on the elements of one tensor at these offsets, a matrix, which have been loaded.

    ``begin``: where in the whole parameter the tensor begins. Returns how many gradients of a row could not be used.
    """
    grad, old = grad.to(tl.float32), old.to(tl.float32)
    if MAXIMIZE:
        grad = -grad
    COUNT: tl.constexpr = (ROWS * 4 + 127) // 128
    if EIGHT:
        held, usable = moment_of(grad, decoded(held, exponents), beta, fresh, HAS_MOMENT)
        codes, exponents = encoded(held, largest_bits(held, COUNT, ROWS, 4), begin + offset, phase, COUNT, ROWS)
        tl.store(address(row + 2, tl.uint8, ALIGNED) + offset, (codes >> 24).to(tl.uint8), mask)
        store_exponents(address(row + 9, tl.uint8, False), exponents_first, exponents_end, exponents, COUNT, ROWS)
    else:
        held, usable = moment_of(grad, held, beta, fresh, HAS_MOMENT)
        if HAS_MOMENT:
            tl.store(address(row + 2, tl.float32, ALIGNED) + offset, held, mask)
    if HAS_MEAN:
        mean = widened(mean)
        grad = tl.where(usable, averaged(grad, mean, momentum, recent), mean)
        tl.store(address(row + 11, tl.int16, ALIGNED) + offset, upper_bits(grad, begin + offset, phase), mask)
    u = fast_direction(grad, held, inverse, max_step, HAS_MOMENT, CORRECT)
    a = tl.minimum(tl.maximum(tl.where(usable, u, 0.0) * lr, -80.0), 80.0)
    new = moved(old, a, width)
    if DECAYS:
        new = new * tl.exp(-lr * decay)
    moves = usable & (new != old)
    top = most
    if BOUNDED:
        top = limit
        if LOST > 0:  # the largest number of the narrow type that is not above the limit
            top = (limit.to(tl.int32, bitcast=True) & (-1 << LOST)).to(tl.float32, bitcast=True)
            top = tl.minimum(top, most)
        if LOST == 13:  # float16 below 2^-14
            top = tl.where(limit < 6.103515625e-05, tl.floor(limit * 16777216.0) * 5.9604644775390625e-08, top)
    new = tl.minimum(tl.maximum(new, -top), top)
    if width == 0:
        new = tl.where((tl.abs(new) < least) & (old != 0), tl.where(old < 0, -least, least), new)
    new = tl.where(moves, new, old)
    if STOCHASTIC:
        new = narrowed(new, random_bits(begin + offset, low, high), LOST)
    elif LOST == 16:
        new = nearest_bfloat16(new)
    tl.store(address(row + 0, P, ALIGNED) + offset, new.to(P), mask)
    return tl.sum((mask & (usable == 0)).to(tl.int32), 1)


@triton.jit
def float_kernel(
    table, blocks, clock, log_beta, log_beta_rest, log_momentum, log_momentum_rest, lr_at, lr, momentum, recent, beta,
    fresh, max_step, bound, decay, least, most,
    P: tl.constexpr, G: tl.constexpr, HAS_MEAN: tl.constexpr, HAS_MOMENT: tl.constexpr, EIGHT: tl.constexpr,
    CORRECT: tl.constexpr, BOUNDED: tl.constexpr, DECAYS: tl.constexpr, MAXIMIZE: tl.constexpr, LOST: tl.constexpr,
    STOCHASTIC: tl.constexpr, LR_IS_TENSOR: tl.constexpr, ALIGNED: tl.constexpr, INDEX: tl.constexpr,
    FIELDS: tl.constexpr, BLOCK: tl.constexpr, SPAN: tl.constexpr, ALONE: tl.constexpr,
):  # fmt: skip
    """update.madam_ on SPAN blocks of one tensor: in groups of 4, which vectorise, and what is left of the last.

    A block is loaded while the one before it is worked on.
    """
    GROUPS: tl.constexpr = BLOCK // 4
    program = tl.program_id(0).to(tl.int64)
    tensor = entry(blocks + 3 * program).to(tl.int64)
    first = entry(blocks + 3 * program + 1) * SPAN
    row = table + tensor * FIELDS
    count, begin = entry(row + 5).to(INDEX), entry(row + 10).to(INDEX)
    limit = tl.load(entry(row + 7).to(tl.pointer_type(tl.float32)))
    crossing = entry(row + 8).to(tl.int32).to(tl.float32, bitcast=True)
    param, grad = address(row + 0, P, ALIGNED), address(row + 1, G, ALIGNED)
    MOMENT: tl.constexpr = tl.uint8 if EIGHT else tl.float32
    moment = address(row + 2, MOMENT, ALIGNED)
    means = address(row + 11, tl.int16, ALIGNED) if HAS_MEAN else moment
    if LR_IS_TENSOR:
        lr = tl.load(lr_at).to(tl.float32)
    if BOUNDED:
        limit = limit * bound
    width = limit * crossing

    whole = count // 4
    lane = tl.arange(0, 4).to(INDEX)[None, :]
    group = first.to(INDEX) * GROUPS + tl.arange(0, GROUPS).to(INDEX)[:, None]
    mask = tl.broadcast_to(group < whole, [GROUPS, 4])
    offset = group * 4 + lane
    g = tl.load(grad + offset, mask, other=0.0)
    old = tl.load(param + offset, mask, other=0.0)
    held = g.to(tl.float32)
    if HAS_MOMENT:
        held = tl.load(moment + offset, mask, other=0)
    mean = tl.load(means + offset, mask, other=0) if HAS_MEAN else g
    EXPONENTS: tl.constexpr = BLOCK // 128  # of a block
    exponents_at = address(row + 9, tl.uint8, False) if EIGHT else moment
    exponents_end = (whole * 4 + 127) // 128
    exponents = tl.zeros([GROUPS, 1], tl.uint8)
    if EIGHT:
        exponents = load_exponents(exponents_at, first * EXPONENTS, exponents_end, EXPONENTS, GROUPS)
    _correction, inverse, low, high, phase = time_of(row, clock, tensor, log_beta, log_beta_rest, ALONE)
    if HAS_MEAN and CORRECT:  # u has the mean above the line, and the moment's root below
        of_mean = mean_correction(row, log_momentum, log_momentum_rest, ALONE)
        inverse = inverse * (of_mean * of_mean)
    bad = tl.zeros([GROUPS], tl.int32)
    for turn in range(SPAN):
        next_group = group + GROUPS
        next_mask = tl.broadcast_to((next_group < whole) & (turn + 1 < SPAN), [GROUPS, 4])
        next_offset = next_group * 4 + lane
        next_g = tl.load(grad + next_offset, next_mask, other=0.0)
        next_old = tl.load(param + next_offset, next_mask, other=0.0)
        next_held = next_g.to(tl.float32)
        if HAS_MOMENT:
            next_held = tl.load(moment + next_offset, next_mask, other=0)
        next_mean = tl.load(means + next_offset, next_mask, other=0) if HAS_MEAN else next_g
        next_exponents = exponents
        if EIGHT:
            next_exponents = load_exponents(
                exponents_at, (first + turn + 1) * EXPONENTS, exponents_end, EXPONENTS, GROUPS
            )
        bad += float_elements(
            row, begin, offset, mask, g, mean, held, exponents, (first + turn) * EXPONENTS, exponents_end, old, limit,
            width, inverse, low, high, phase, lr, momentum, recent, beta, fresh, max_step, decay, least, most, GROUPS,
            P, HAS_MEAN, HAS_MOMENT, EIGHT, CORRECT, BOUNDED, DECAYS, MAXIMIZE, LOST, STOCHASTIC, ALIGNED,
        )  # fmt: skip
        group, mask, offset, g, old, held = next_group, next_mask, next_offset, next_g, next_old, next_held
        exponents, mean = next_exponents, next_mean

    if (count % 4 > 0) & (whole // GROUPS // SPAN == first // SPAN):
        rest = whole * 4 + lane
        inside = rest < count
        rest_g = tl.load(grad + rest, inside, other=0.0)
        rest_held = rest_g.to(tl.float32)
        if HAS_MOMENT:
            rest_held = tl.load(moment + rest, inside, other=0)
        rest_mean = tl.load(means + rest, inside, other=0) if HAS_MEAN else rest_g
        rest_exponents = tl.zeros([1, 1], tl.uint8)
        if EIGHT:
            rest_exponents = load_exponents(exponents_at, exponents_end, exponents_end + 1, 1, 1)
        rest_bad = float_elements(
            row, begin, rest, inside, rest_g, rest_mean, rest_held, rest_exponents, exponents_end, exponents_end + 1,
            tl.load(param + rest, inside, other=0.0), limit, width, inverse, low, high, phase, lr, momentum, recent,
            beta, fresh, max_step, decay, least, most, 1, P, HAS_MEAN, HAS_MOMENT, EIGHT, CORRECT,
            BOUNDED, DECAYS, MAXIMIZE, LOST, STOCHASTIC, False,
        )  # fmt: skip
        count_bad(row + 4, tl.sum(rest_bad, 0))
    count_bad(row + 4, tl.sum(bad, 0))
    if ALONE:
        leave(row, entry(blocks + 3 * program + 2), FIELDS)
