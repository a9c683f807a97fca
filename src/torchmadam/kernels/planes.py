"""Planes of packed bits in Triton: which elements a program works on, and how their codes are read and written.

Elements come in groups of LANES, 4 or 8, that one thread holds. Eight elements always fill whole bytes; four do so in
planes of 2 bits or more, and let every load and store be as wide as a thread can make it, without a shuffle.
"""

import triton
import triton.language as tl


@triton.jit
def fetch(at, mask, EVEN: tl.constexpr):
    """Load; EVEN: nothing lies outside, so that no mask is needed."""
    if EVEN:
        return tl.load(at)
    else:
        return tl.load(at, mask, other=0)


@triton.jit
def put(at, values, mask, EVEN: tl.constexpr):
    """Store, likewise."""
    if EVEN:
        tl.store(at, values)
    else:
        tl.store(at, values, mask)


@triton.constexpr_function
def unit(bits, wide):
    """Bits of the words that a group is loaded in, which has so many in a plane."""
    return min(bits, 32) if wide and bits >= 8 else 8


@triton.jit
def load_words(
    at, start, row, group, bytes_per_row, mask, FLAT: tl.constexpr, WIDE: tl.constexpr, WIDTH: tl.constexpr,
    LANES: tl.constexpr, EVEN: tl.constexpr = False,
):  # fmt: skip
    """What one plane of WIDTH bits holds of some groups, still packed, a row a group.

    ``start``, ``row`` and ``group`` are what :func:`groups_of` says. Words are bytes; or WIDE, up to 32 bits, which is
    for FLAT matrices that are aligned: in a loop, what waits to be worked on then takes few registers.
    """
    BITS: tl.constexpr = WIDTH * LANES
    UNIT: tl.constexpr = unit(BITS, WIDE)
    if BITS < 8:  # two groups share a byte
        place = group // 2 if FLAT else row * bytes_per_row + group // 2
        words = fetch(at + start // 8 * WIDTH + place, mask, EVEN)
    else:
        COUNT: tl.constexpr = BITS // UNIT
        word = tl.arange(0, COUNT)[None, :]
        if UNIT > 8:
            TYPE: tl.constexpr = tl.uint32 if UNIT == 32 else tl.uint16
            begin = at.to(tl.pointer_type(TYPE)) + start // UNIT * WIDTH
            words = fetch(begin + (group * COUNT + word), mask, EVEN)
        else:
            place = group * COUNT if FLAT else row * bytes_per_row + group * COUNT
            inside = mask if FLAT else mask & (group * COUNT + word < bytes_per_row)
            words = fetch(at + start // 8 * WIDTH + (place + word), inside, EVEN)
    return words.to(tl.int32)


@triton.jit
def unpacked(words, group, WIDE: tl.constexpr, WIDTH: tl.constexpr, LANES: tl.constexpr, ROWS: tl.constexpr):
    """The integers in words, as a ROWS x LANES matrix."""
    lane = tl.arange(0, LANES)[None, :]
    BITS: tl.constexpr = WIDTH * LANES
    UNIT: tl.constexpr = unit(BITS, WIDE)
    EACH: tl.constexpr = UNIT // WIDTH
    if EACH > LANES:
        values = (words >> ((group % 2).to(tl.int32) * LANES + lane)) & 1
    elif EACH == 1:
        values = words
    elif EACH == LANES:
        values = (words >> (lane * WIDTH)) & ((1 << WIDTH) - 1)
    else:
        shifts = tl.arange(0, EACH)[None, None, :] * WIDTH
        values = tl.reshape((words[:, :, None] >> shifts) & ((1 << WIDTH) - 1), [ROWS, LANES])
    return values


@triton.jit
def permuted(a, b, selectors, PTX: tl.constexpr):
    """Words of four of the eight bytes of two words, any in any place.

    The lowest hex digit of a selector says which one comes first: 0 to 3 are those of ``a``. In PTX that is one
    instruction; elsewhere, shifts and masks.
    """
    if PTX:
        words = tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, $2, $3;", "=r,r,r,r", [a, b, selectors], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        words = a * 0
        for place in tl.static_range(4):
            which = (selectors >> (4 * place)) & 7
            byte = (tl.where(which < 4, a, b) >> (which % 4 * 8)) & 255
            words = words | (byte << (8 * place))
    return words.to(tl.int32)


@triton.jit
def raised_bytes(words, LANES: tl.constexpr, ROWS: tl.constexpr, PTX: tl.constexpr):
    """The bytes of words, each as the upper one of 32 bits, as a ROWS x LANES matrix."""
    selectors = (tl.arange(0, 4) << 12) | 0x444
    return tl.reshape(permuted(words[:, :, None], 0, selectors[None, None, :], PTX), [ROWS, LANES])


@triton.jit
def raised(words, group, LANES: tl.constexpr):
    """Of words that hold a bit a weight: each weight's bit, where integers have their sign. Below it is anything."""
    lane = tl.arange(0, LANES)[None, :]
    return words << (31 - ((group % (8 // LANES)).to(tl.int32) * LANES + lane))


@triton.jit
def store_plane(
    at, start, row, group, bytes_per_row, mask, values, FLAT: tl.constexpr, WIDTH: tl.constexpr, LANES: tl.constexpr,
    ROWS: tl.constexpr, EVEN: tl.constexpr = False,
):  # fmt: skip
    """Put a ROWS x LANES matrix of integers into one plane; the inverse of :func:`unpacked`."""
    EACH: tl.constexpr = 8 // WIDTH
    BYTES: tl.constexpr = WIDTH * LANES // 8
    tl.static_assert(BYTES > 0, "groups that are stored fill whole bytes")
    byte = tl.arange(0, BYTES)[None, :]
    place = group * BYTES if FLAT else row * bytes_per_row + group * BYTES
    inside = mask if FLAT else mask & (group * BYTES + byte < bytes_per_row)
    if EACH > 1:
        shifts = tl.arange(0, EACH)[None, None, :] * WIDTH
        values = tl.sum(tl.reshape(values, [ROWS, BYTES, EACH]) << shifts, 2)
    put(at + start // 8 * WIDTH + (place + byte), values.to(tl.uint8), inside, EVEN)


@triton.jit
def load_code(
    plane0, plane1, plane2, plane3, start, row, group, columns, whole, W0: tl.constexpr, W1: tl.constexpr,
    W2: tl.constexpr, W3: tl.constexpr, FLAT: tl.constexpr, WIDE: tl.constexpr, LANES: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """The words of k's planes; of a plane that is not there, those of the first."""
    words0 = load_words(plane0, start, row, group, (columns * W0 + 7) // 8, whole, FLAT, WIDE, W0, LANES, EVEN)
    words1, words2, words3 = words0, words0, words0
    if W1 > 0:
        words1 = load_words(plane1, start, row, group, (columns * W1 + 7) // 8, whole, FLAT, WIDE, W1, LANES, EVEN)
    if W2 > 0:
        words2 = load_words(plane2, start, row, group, (columns * W2 + 7) // 8, whole, FLAT, WIDE, W2, LANES, EVEN)
    if W3 > 0:
        words3 = load_words(plane3, start, row, group, (columns * W3 + 7) // 8, whole, FLAT, WIDE, W3, LANES, EVEN)
    return words0, words1, words2, words3


@triton.jit
def code_of(
    words0, words1, words2, words3, group, W0: tl.constexpr, W1: tl.constexpr, W2: tl.constexpr, W3: tl.constexpr,
    WIDE: tl.constexpr, LANES: tl.constexpr, GROUPS: tl.constexpr, PTX: tl.constexpr = False,
):  # fmt: skip
    """K, put together from the words of its planes."""
    if WIDE and W0 == 8 and W1 > 0 and W1 * LANES >= 8:
        # The byte of the first plane, and below it that of the second with the bits wanted uppermost.
        byte = tl.arange(0, 4)[None, None, :]
        lane = tl.arange(0, LANES // 4)[None, :, None] * 4 + byte
        rest = words1[:, :, None] << (8 - W1 - W1 * lane % 8)
        selectors = (byte << 12) | ((4 + W1 * lane // 8) << 8)
        k = tl.reshape(permuted(words0[:, :, None], rest, selectors, PTX), [GROUPS, LANES])
        k = (k.to(tl.uint32, bitcast=True) >> (24 - W1)).to(tl.int32)
    else:
        k = unpacked(words0, group, WIDE, W0, LANES, GROUPS)
        if W1 > 0:
            k = (k << W1) | unpacked(words1, group, WIDE, W1, LANES, GROUPS)
    if W2 > 0:
        k = (k << W2) | unpacked(words2, group, WIDE, W2, LANES, GROUPS)
    if W3 > 0:
        k = (k << W3) | unpacked(words3, group, WIDE, W3, LANES, GROUPS)
    return k


@triton.jit
def store_twelve(plane0, plane1, start, group, whole, k, GROUPS: tl.constexpr, EVEN: tl.constexpr, PTX: tl.constexpr):
    """Groups of eight codes of 12 bits, as planes of 8 and of 4; above those bits is anything."""
    two = tl.permute(tl.reshape(k, [GROUPS, 2, 2, 2]), [0, 1, 3, 2])
    lower, upper = tl.split(two)  # of the eight, 0 1 4 5 and 2 3 6 7
    even, odd = tl.split(permuted(lower, upper, 0x5410, PTX))  # 0|2 4|6 and 1|3 5|7
    words = permuted(even >> 4, odd >> 4, 0x6240, PTX)
    put(plane0.to(tl.pointer_type(tl.uint32)) + start // 4 + (group * 2 + tl.arange(0, 2)[None, :]), words, whole, EVEN)
    even0, even1 = tl.split(tl.reshape(even, [GROUPS, 1, 2]))
    odd0, odd1 = tl.split(tl.reshape(odd, [GROUPS, 1, 2]))
    even, odd = permuted(even0, even1, 0x6420, PTX), permuted(odd0, odd1, 0x6420, PTX)
    words = (even & 0x0F0F0F0F) | ((odd << 4) & -252645136)  # 0xF0F0F0F0
    put(plane1.to(tl.pointer_type(tl.uint32)) + start // 8 + group, words, whole, EVEN)


@triton.jit
def store_code(
    plane0, plane1, plane2, plane3, start, row, group, columns, whole, k, W0: tl.constexpr, W1: tl.constexpr,
    W2: tl.constexpr, W3: tl.constexpr, FLAT: tl.constexpr, WIDE: tl.constexpr, LANES: tl.constexpr,
    GROUPS: tl.constexpr, EVEN: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """K, spread over its planes; above its bits may be anything. WIDE as in :func:`load_words`."""
    if WIDE and W0 == 8 and W1 == 4 and W2 == 0 and LANES == 8:
        store_twelve(plane0, plane1, start, group, whole, k, GROUPS, EVEN, PTX)
        return
    part = (k >> (W1 + W2 + W3)) & ((1 << W0) - 1)
    store_plane(plane0, start, row, group, (columns * W0 + 7) // 8, whole, part, FLAT, W0, LANES, GROUPS, EVEN)
    if W1 > 0:
        part = (k >> (W2 + W3)) & ((1 << W1) - 1)
        store_plane(plane1, start, row, group, (columns * W1 + 7) // 8, whole, part, FLAT, W1, LANES, GROUPS, EVEN)
    if W2 > 0:
        part = (k >> W3) & ((1 << W2) - 1)
        store_plane(plane2, start, row, group, (columns * W2 + 7) // 8, whole, part, FLAT, W2, LANES, GROUPS, EVEN)
    if W3 > 0:
        part = k & ((1 << W3) - 1)
        store_plane(plane3, start, row, group, (columns * W3 + 7) // 8, whole, part, FLAT, W3, LANES, GROUPS, EVEN)


@triton.jit
def groups_of(
    block, rows, columns, FLAT: tl.constexpr, INDEX: tl.constexpr, LANES: tl.constexpr, ROWS: tl.constexpr,
    EVEN: tl.constexpr = False,
):  # fmt: skip
    """Where a block of ROWS groups is: its start, each group's row, place in the row and mask; elements and their mask.

    In a FLAT matrix, whose rows end on bytes, there is one long row: groups and elements count from the block's start,
    one number for all of them, so that what a thread adds to it does not change from block to block. That number has
    64 bits and comes first in sums of addresses: the compiler then sees that all of them advance evenly, and adds to
    each once a block. EVEN: no mask says no.
    """
    group = tl.arange(0, ROWS)[:, None]
    lane = tl.arange(0, LANES)[None, :]
    if FLAT:
        start = block.to(tl.int64) * (ROWS * LANES)
        if EVEN:
            whole = group >= 0
        else:
            whole = group * LANES < tl.minimum(rows * columns - start, ROWS * LANES).to(tl.int32)
        return start, group, group, whole, group * LANES + lane, tl.broadcast_to(whole, [ROWS, LANES])
    else:
        start = block * 0
        in_row = (columns + LANES - 1) // LANES
        group = block.to(INDEX) * ROWS + group.to(INDEX)
        row, group = group // in_row, group % in_row
        column = group * LANES + lane.to(INDEX)
        return start, row, group, row < rows, row * columns + column, (row < rows) & (column < columns)
