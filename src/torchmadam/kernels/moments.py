"""The 8-bit second moment in Triton (moment8.py): a byte a weight, and an exponent for each group of 128 in memory."""

import triton
import triton.language as tl

from torchmadam.kernels.planes import fetch, permuted, put


@triton.jit
def group_of_rows(first, end, COUNT: tl.constexpr, ROWS: tl.constexpr):
    """For each row of a tile of ROWS rows and COUNT groups: the group it is in, and whether that is there.

    Groups count from the tile's first, which is number ``first``; there are none from ``end`` on.
    """
    group = (tl.arange(0, ROWS) // (ROWS // COUNT))[:, None]
    return group, group < tl.minimum(end - first, COUNT).to(tl.int32)


@triton.jit
def load_exponents(at, first, end, COUNT: tl.constexpr, ROWS: tl.constexpr, EVEN: tl.constexpr = False):
    """The exponents of a tile's rows."""
    group, mask = group_of_rows(first, end, COUNT, ROWS)
    return fetch(at + first + group, mask, EVEN)


@triton.jit
def store_exponents(at, first, end, values, COUNT: tl.constexpr, ROWS: tl.constexpr, EVEN: tl.constexpr = False):
    """The inverse of :func:`load_exponents`: the first row of each group writes."""
    group, mask = group_of_rows(first, end, COUNT, ROWS)
    leads = (tl.arange(0, ROWS) % (ROWS // COUNT) == 0)[:, None]
    tl.store(at + first + group, values.to(tl.uint8), leads if EVEN else leads & mask)


@triton.jit
def decoded(codes, exponents):
    """moment8.decoded, from codes as int32."""
    return decoded_raised(codes.to(tl.uint32) << 24, exponents)


@triton.jit
def decoded_raised(codes, exponents):
    """The same, from codes as the upper byte of 32 bits."""
    bits = tl.umulhi(codes.to(tl.uint32), 429496730).to(tl.int32)
    return (bits + (exponents.to(tl.int32) << 23)).to(tl.float32, bitcast=True)


@triton.jit
def largest_bits(moment, COUNT: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr):
    """Of each group, the bits of its largest moment."""
    bits = moment.to(tl.int32, bitcast=True)
    return tl.max(tl.max(tl.reshape(bits, [COUNT, ROWS // COUNT, LANES]), 2), 1)


@triton.jit
def of_rows(values, COUNT: tl.constexpr, ROWS: tl.constexpr):
    """For each row, its group's value."""
    return tl.reshape(tl.broadcast_to(values[:, None], [COUNT, ROWS // COUNT]), [ROWS])[:, None]


@triton.jit
def encoded(moment, largest, position, phase, COUNT: tl.constexpr, ROWS: tl.constexpr):
    """moment8.encode_: codes, as the upper byte of 32 bits, and the exponents of their rows.

    What lies outside of the tensor must be zero.
    """
    exponents = tl.maximum((of_rows(largest, COUNT, ROWS) >> 23) - 50, 0)
    above = tl.maximum(moment.to(tl.int32, bitcast=True) - ((exponents << 23) - 52), 0)
    dither = tl.umulhi(position.to(tl.uint32) * 0x85EBCA6B + phase, 16776192)
    return above.to(tl.uint32) * 10 + dither, exponents


@triton.jit
def store_codes(
    at, start, group, element, whole, mask, values, WIDE: tl.constexpr, LANES: tl.constexpr, ROWS: tl.constexpr,
    EVEN: tl.constexpr, PTX: tl.constexpr = False,
):  # fmt: skip
    """Write the upper bytes; WIDE as in load_words."""
    if WIDE:
        even, odd = tl.split(tl.reshape(values, [ROWS, LANES // 4, 2, 2]))
        first, third = tl.split(even)
        second, fourth = tl.split(odd)
        words = permuted(permuted(first, second, 0x73, PTX), permuted(third, fourth, 0x73, PTX), 0x5410, PTX)
        place = group * (LANES // 4) + tl.arange(0, LANES // 4)[None, :]
        put(at.to(tl.pointer_type(tl.uint32)) + start // 4 + place, words, whole, EVEN)
    else:
        put(at + start + element, (values >> 24).to(tl.uint8), mask, EVEN)
