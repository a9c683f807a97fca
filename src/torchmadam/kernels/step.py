"""The optimiser's step in Triton: one launch for a whole list of tensors, floats or codes.

Tensors come in a table of 64-bit integers, a row a tensor, that holds their addresses and numbers; a second table tells
each program which tensor it works on, and where in it.
"""

import triton
import triton.language as tl

from torchmadam.kernels.arithmetic import direction, moved, narrowed, nearest_bfloat16, random_bits, random_key, rounded

# Columns of the tables. A float's bits are stored in the low half of an integer.
PARAM, GRAD, MOMENT, STEP, NONFINITE, COUNT, STREAM, SCALE, CROSSING, FLOAT_COLUMNS = range(10)
# Coded tensors: rows and columns of the matrix of codes, the plane of signs (or the key of a seed), and the planes of
# k. PARAM and COUNT stay empty.
ROWS, COLUMNS, SIGNS, PLANES, CODED_COLUMNS = 7, 8, 9, 10, 14


@triton.jit
def clock_kernel(
    table, corrections, count, log_beta, log_beta_rest, STEP_AT: tl.constexpr, FIELDS: tl.constexpr, BLOCK: tl.constexpr
):
    """Count a step for every tensor, and note 1 - beta^t. Ln beta comes in two halves: float32 has too few digits."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = i < count
    at = tl.load(table + i * FIELDS + STEP_AT, mask, other=0).to(tl.pointer_type(tl.float32))
    t = tl.load(at, mask, other=0.0) + 1
    tl.store(at, t, mask)
    exponent = t.to(tl.float64) * log_beta + t.to(tl.float64) * log_beta_rest
    tl.store(corrections + i, (1 - tl.exp(exponent)).to(tl.float32), mask)


@triton.jit
def address(entry, TYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """A pointer from an entry of a table. ALIGNED promises 16 bytes, so that loads and stores can be that wide."""
    pointer = tl.load(entry).to(tl.pointer_type(TYPE))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def float_elements(
    row, offset, mask, correction, lr, beta, fresh, max_step, bound, decay, least, most,
    P: tl.constexpr, G: tl.constexpr, HAS_MOMENT: tl.constexpr, CORRECT: tl.constexpr, BOUNDED: tl.constexpr,
    DECAYS: tl.constexpr, MAXIMIZE: tl.constexpr, LOST: tl.constexpr, STOCHASTIC: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """update.madam_ on the elements of one tensor at these offsets, a matrix."""
    param = address(row + 0, P, ALIGNED) + offset
    grad = tl.load(address(row + 1, G, ALIGNED) + offset, mask, other=0.0).to(tl.float32)
    if MAXIMIZE:
        grad = -grad
    moment_at = address(row + 2, tl.float32, ALIGNED) + offset
    held = grad
    if HAS_MOMENT:
        held = tl.load(moment_at, mask, other=0.0)
    old = tl.load(param, mask, other=0.0).to(tl.float32)
    u, held, usable = direction(grad, held, correction, beta, fresh, max_step, HAS_MOMENT, CORRECT)
    if HAS_MOMENT:
        tl.store(moment_at, held, mask)

    limit = tl.load(tl.load(row + 7).to(tl.pointer_type(tl.float32)))
    if BOUNDED:
        limit = limit * bound
    width = limit * tl.load(row + 8).to(tl.int32).to(tl.float32, bitcast=True)
    a = tl.minimum(tl.maximum(u * lr, -80.0), 80.0)
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
        low, high = random_key(tl.load(row + 6), tl.load(tl.load(row + 3).to(tl.pointer_type(tl.float32))))
        new = narrowed(new, random_bits(offset, low, high), LOST)
    elif LOST == 16:
        new = nearest_bfloat16(new)
    tl.store(param, new.to(P), mask)
    count_bad(row + 4, mask & (usable == 0))


@triton.jit
def count_bad(entry, bad):
    """Add the number of gradients that could not be used to a tensor's count; nearly always there are none."""
    count = tl.sum(tl.sum(bad.to(tl.int32), 1), 0)
    if count > 0:
        tl.atomic_add(tl.load(entry).to(tl.pointer_type(tl.int64)), count.to(tl.int64))


@triton.jit
def float_kernel(
    table, blocks, corrections, lr_at, lr, beta, fresh, max_step, bound, decay, least, most,
    P: tl.constexpr, G: tl.constexpr, HAS_MOMENT: tl.constexpr, CORRECT: tl.constexpr, BOUNDED: tl.constexpr,
    DECAYS: tl.constexpr, MAXIMIZE: tl.constexpr, LOST: tl.constexpr, STOCHASTIC: tl.constexpr,
    LR_IS_TENSOR: tl.constexpr, ALIGNED: tl.constexpr, FIELDS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """update.madam_ on BLOCK elements of one tensor: in groups of 8, which vectorise, and what is left of the last."""
    GROUPS: tl.constexpr = BLOCK // 8
    program = tl.program_id(0).to(tl.int64)
    tensor = tl.load(blocks + 2 * program).to(tl.int64)
    block = tl.load(blocks + 2 * program + 1).to(tl.int64)
    row = table + tensor * FIELDS
    count = tl.load(row + 5)
    correction = tl.load(corrections + tensor)
    if LR_IS_TENSOR:
        lr = tl.load(lr_at).to(tl.float32)
    lane = tl.arange(0, 8)[None, :]
    group = block * GROUPS + tl.arange(0, GROUPS)[:, None]
    mask = tl.broadcast_to(group < count // 8, [GROUPS, 8])
    float_elements(
        row, group * 8 + lane, mask, correction, lr, beta, fresh, max_step, bound, decay, least, most, P, G, HAS_MOMENT,
        CORRECT, BOUNDED, DECAYS, MAXIMIZE, LOST, STOCHASTIC, ALIGNED,
    )  # fmt: skip
    if (count % 8 > 0) & (count // 8 // GROUPS == block):
        offset = count // 8 * 8 + lane
        float_elements(
            row, offset, offset < count, correction, lr, beta, fresh, max_step, bound, decay, least, most, P, G,
            HAS_MOMENT, CORRECT, BOUNDED, DECAYS, MAXIMIZE, LOST, STOCHASTIC, False,
        )  # fmt: skip


@triton.jit
def load_plane(at, row, group, bytes_per_row, mask, FLAT: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr):
    """What one plane of WIDTH bits holds of ROWS groups of 8 elements, as a ROWS x 8 matrix of integers.

    A group is WIDTH bytes. ``row`` and ``group`` say in which row of the matrix of codes each group is, and where in
    that row; in a FLAT matrix, whose rows end on bytes, ``group`` alone counts through all of them.
    """
    EACH: tl.constexpr = 8 // WIDTH
    byte = tl.arange(0, WIDTH)[None, :]
    start = group * WIDTH if FLAT else row * bytes_per_row + group * WIDTH
    inside = mask if FLAT else mask & (group * WIDTH + byte < bytes_per_row)
    values = tl.load(at + start + byte, inside, other=0).to(tl.int32)
    if EACH == 8:
        values = (values >> tl.arange(0, 8)[None, :]) & 1
    elif EACH > 1:
        shifts = tl.arange(0, EACH)[None, None, :] * WIDTH
        values = tl.reshape((values[:, :, None] >> shifts) & ((1 << WIDTH) - 1), [ROWS, 8])
    return values


@triton.jit
def store_plane(
    at, row, group, bytes_per_row, mask, values, FLAT: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr
):
    """Put a ROWS x 8 matrix of integers into one plane; the inverse of :func:`load_plane`."""
    EACH: tl.constexpr = 8 // WIDTH
    byte = tl.arange(0, WIDTH)[None, :]
    start = group * WIDTH if FLAT else row * bytes_per_row + group * WIDTH
    inside = mask if FLAT else mask & (group * WIDTH + byte < bytes_per_row)
    if EACH > 1:
        shifts = tl.arange(0, EACH)[None, None, :] * WIDTH
        values = tl.sum(tl.reshape(values, [ROWS, WIDTH, EACH]) << shifts, 2)
    tl.store(at + start + byte, values.to(tl.uint8), inside)


@triton.jit
def groups_of(block, rows, columns, FLAT: tl.constexpr, INDEX: tl.constexpr, ROWS: tl.constexpr):
    """Row, place in the row, and mask of the ROWS groups of a block (ROWS x 1); elements and their mask (ROWS x 8)."""
    group = (block * ROWS).to(INDEX) + tl.arange(0, ROWS).to(INDEX)[:, None]
    lane = tl.arange(0, 8).to(INDEX)[None, :]
    if FLAT:
        whole = group * 8 < rows * columns
        return group, group, whole, group * 8 + lane, tl.broadcast_to(whole, [ROWS, 8])
    else:
        in_row = (columns + 7) // 8
        row, group = group // in_row, group % in_row
        column = group * 8 + lane
        return row, group, row < rows, row * columns + column, (row < rows) & (column < columns)


@triton.jit
def coded_kernel(
    table, blocks, corrections, lr_at, rate, spacing, beta, fresh, max_step, decay,
    G: tl.constexpr, HAS_MOMENT: tl.constexpr, CORRECT: tl.constexpr, DECAYS: tl.constexpr, MAXIMIZE: tl.constexpr,
    STOCHASTIC: tl.constexpr, LR_IS_TENSOR: tl.constexpr, SIGNED: tl.constexpr, TOP: tl.constexpr,
    SIGN_MODE: tl.constexpr, W0: tl.constexpr, W1: tl.constexpr, W2: tl.constexpr, W3: tl.constexpr,
    FLAT: tl.constexpr, ALIGNED: tl.constexpr, INDEX: tl.constexpr, FIELDS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """update.madam_coded_ on a block of one matrix of codes. SIGN_MODE: 0 all positive, 1 a plane, 2 from a seed."""
    GROUPS: tl.constexpr = BLOCK // 8
    program = tl.program_id(0).to(tl.int64)
    tensor = tl.load(blocks + 2 * program).to(tl.int64)
    at = table + tensor * FIELDS
    rows, columns = tl.load(at + 7).to(INDEX), tl.load(at + 8).to(INDEX)
    block = tl.load(blocks + 2 * program + 1).to(tl.int64)
    row, group, whole, element, mask = groups_of(block, rows, columns, FLAT, INDEX, GROUPS)

    grad = tl.load(address(at + 1, G, ALIGNED) + element, mask, other=0.0).to(tl.float32)
    if MAXIMIZE:
        grad = -grad
    moment_at = address(at + 2, tl.float32, ALIGNED) + element
    held = grad
    if HAS_MOMENT:
        held = tl.load(moment_at, mask, other=0.0)
    k = load_plane(address(at + 10, tl.uint8, ALIGNED), row, group, (columns * W0 + 7) // 8, whole, FLAT, W0, GROUPS)
    if W1 > 0:
        plane = address(at + 11, tl.uint8, ALIGNED)
        k = (k << W1) | load_plane(plane, row, group, (columns * W1 + 7) // 8, whole, FLAT, W1, GROUPS)
    if W2 > 0:
        plane = address(at + 12, tl.uint8, ALIGNED)
        k = (k << W2) | load_plane(plane, row, group, (columns * W2 + 7) // 8, whole, FLAT, W2, GROUPS)
    if W3 > 0:
        plane = address(at + 13, tl.uint8, ALIGNED)
        k = (k << W3) | load_plane(plane, row, group, (columns * W3 + 7) // 8, whole, FLAT, W3, GROUPS)

    correction = tl.load(corrections + tensor)
    u, held, usable = direction(grad, held, correction, beta, fresh, max_step, HAS_MOMENT, CORRECT)
    if HAS_MOMENT:
        tl.store(moment_at, held, mask)
    if LR_IS_TENSOR:
        rate = tl.div_rn(tl.load(lr_at).to(tl.float32), spacing)
    bits = element.to(tl.uint32)
    if STOCHASTIC:
        low, high = random_key(tl.load(at + 6), tl.load(tl.load(at + 3).to(tl.pointer_type(tl.float32))))
        bits = random_bits(element, low, high)
    if SIGNED:
        k = k - TOP
        move = u * -rate
        if DECAYS:
            x = k.to(tl.float32) * spacing
            fallen = tl.exp(-2 * tl.abs(x))
            tanh = (1 - fallen) / (1 + fallen)
            move = move - tl.where(x < 0, -tanh, tanh) * (rate * decay)
        k = k + tl.where(usable, rounded(move, bits, STOCHASTIC), 0.0).to(tl.int32)
        k = tl.minimum(tl.maximum(k, -TOP), TOP) + TOP
    else:
        if SIGN_MODE == 1:
            plane = address(at + 9, tl.uint8, ALIGNED)
            negative = load_plane(plane, row, group, (columns + 7) // 8, whole, FLAT, 1, GROUPS) > 0
            u = tl.where(negative, -u, u)
        if SIGN_MODE == 2:
            low, high = random_key(tl.load(at + 9), tl.zeros([], tl.float32))
            u = tl.where((random_bits(element, low, high) >> 31) > 0, -u, u)
        move = u * rate
        if DECAYS:
            move = move + rate * decay
        k = k + tl.where(usable, rounded(move, bits, STOCHASTIC), 0.0).to(tl.int32)
        k = tl.minimum(tl.maximum(k, 0), TOP)
    k = tl.where(mask, k, 0)

    plane = address(at + 10, tl.uint8, ALIGNED)
    store_plane(plane, row, group, (columns * W0 + 7) // 8, whole, k >> (W1 + W2 + W3), FLAT, W0, GROUPS)
    if W1 > 0:
        plane = address(at + 11, tl.uint8, ALIGNED)
        part = (k >> (W2 + W3)) & ((1 << W1) - 1)
        store_plane(plane, row, group, (columns * W1 + 7) // 8, whole, part, FLAT, W1, GROUPS)
    if W2 > 0:
        plane = address(at + 12, tl.uint8, ALIGNED)
        part = (k >> W3) & ((1 << W2) - 1)
        store_plane(plane, row, group, (columns * W2 + 7) // 8, whole, part, FLAT, W2, GROUPS)
    if W3 > 0:
        plane = address(at + 13, tl.uint8, ALIGNED)
        store_plane(plane, row, group, (columns * W3 + 7) // 8, whole, k & ((1 << W3) - 1), FLAT, W3, GROUPS)

    count_bad(at + 4, mask & (usable == 0))
