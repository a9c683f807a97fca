"""Planes of packed bits in Triton: which elements a program works on, and how their codes are read and written.

Elements come in groups of LANES, 4 or 8, that one thread holds. Eight elements always fill whole bytes; four do so in
planes of 2 bits or more, and let every load and store be as wide as a thread can make it, without a shuffle.
"""

import triton
import triton.language as tl


@triton.jit
def load_plane(
    at, start, row, group, bytes_per_row, mask, FLAT: tl.constexpr, WIDTH: tl.constexpr, LANES: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """What one plane of WIDTH bits holds of ROWS groups, as a ROWS x LANES matrix of integers.

    ``start``, ``row`` and ``group`` are what :func:`groups_of` says.
    """
    EACH: tl.constexpr = 8 // WIDTH
    lane = tl.arange(0, LANES)[None, :]
    if EACH > LANES:  # two groups share a byte
        place = group // 2 if FLAT else row * bytes_per_row + group // 2
        values = tl.load(at + (start // 8 * WIDTH + place), mask, other=0).to(tl.int32)
        values = (values >> ((group % 2).to(tl.int32) * LANES + lane)) & 1
    else:
        BYTES: tl.constexpr = WIDTH * LANES // 8
        byte = tl.arange(0, BYTES)[None, :]
        place = group * BYTES if FLAT else row * bytes_per_row + group * BYTES
        inside = mask if FLAT else mask & (group * BYTES + byte < bytes_per_row)
        values = tl.load(at + (start // 8 * WIDTH + place + byte), inside, other=0).to(tl.int32)
        if BYTES == 1:
            values = (values >> (lane * WIDTH)) & ((1 << WIDTH) - 1)
        elif EACH > 1:
            shifts = tl.arange(0, EACH)[None, None, :] * WIDTH
            values = tl.reshape((values[:, :, None] >> shifts) & ((1 << WIDTH) - 1), [ROWS, LANES])
    return values


@triton.jit
def store_plane(
    at, start, row, group, bytes_per_row, mask, values, FLAT: tl.constexpr, WIDTH: tl.constexpr, LANES: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Put a ROWS x LANES matrix of integers into one plane; the inverse of :func:`load_plane`."""
    EACH: tl.constexpr = 8 // WIDTH
    BYTES: tl.constexpr = WIDTH * LANES // 8
    tl.static_assert(BYTES > 0, "groups that are stored fill whole bytes")
    byte = tl.arange(0, BYTES)[None, :]
    place = group * BYTES if FLAT else row * bytes_per_row + group * BYTES
    inside = mask if FLAT else mask & (group * BYTES + byte < bytes_per_row)
    if EACH > 1:
        shifts = tl.arange(0, EACH)[None, None, :] * WIDTH
        values = tl.sum(tl.reshape(values, [ROWS, BYTES, EACH]) << shifts, 2)
    tl.store(at + (start // 8 * WIDTH + place + byte), values.to(tl.uint8), inside)


@triton.jit
def groups_of(block, rows, columns, FLAT: tl.constexpr, INDEX: tl.constexpr, LANES: tl.constexpr, ROWS: tl.constexpr):
    """Where a block of ROWS groups is: its start, each group's row, place in the row and mask; elements and their mask.

    In a FLAT matrix, whose rows end on bytes, there is one long row: groups and elements count from the block's start,
    one number for all of them, so that what a thread adds to it does not change from block to block.
    """
    group = tl.arange(0, ROWS)[:, None]
    lane = tl.arange(0, LANES)[None, :]
    if FLAT:
        start = block.to(INDEX) * (ROWS * LANES)
        whole = group * LANES < tl.minimum(rows * columns - start, ROWS * LANES).to(tl.int32)
        return start, group, group, whole, group * LANES + lane, tl.broadcast_to(whole, [ROWS, LANES])
    else:
        start = (block * 0).to(INDEX)
        in_row = (columns + LANES - 1) // LANES
        group = block.to(INDEX) * ROWS + group.to(INDEX)
        row, group = group // in_row, group % in_row
        column = group * LANES + lane.to(INDEX)
        return start, row, group, row < rows, row * columns + column, (row < rows) & (column < columns)
