"""Codes <-> bytes. A code is cut into planes of 8, 4, 2 and 1 bits, so that the bytes held are the bits promised.

12 bits and a sign, for example, are a plane of the upper 8 bits, a plane of the lower 4, two to a byte, and a plane of
signs, eight to a byte. Within a byte, earlier elements lie in lower bits. Codes form a matrix of rows and columns, and
every row starts on a byte of every plane, so that rows can be gathered and sharded.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad


def plane_widths(bits: int) -> tuple[int, ...]:
    """The planes, widest first, that hold this many bits: 12 -> (8, 4), 10 -> (8, 2), 5 -> (4, 1)."""
    return (8,) * (bits // 8) + tuple(width for width in (4, 2, 1) if bits & width)


def bytes_per_row(columns: int, width: int) -> int:
    """Bytes that one row takes in a plane of this width."""
    return -(-columns * width // 8)


def pack(codes: Tensor, widths: Sequence[int]) -> list[Tensor]:
    """A matrix of integer codes as uint8 planes; the first plane takes the highest bits."""
    planes = []
    shift = sum(widths)
    for width in widths:
        shift -= width
        planes.append(_pack_plane((codes >> shift) & ((1 << width) - 1), width))
    return planes


def unpack(planes: Sequence[Tensor], widths: Sequence[int], columns: int) -> Tensor:
    """The matrix of int32 codes that :func:`pack` packed."""
    parts = [_unpack_plane(plane, width, columns) for plane, width in zip(planes, widths, strict=True)]
    codes = parts[0]
    for part, width in zip(parts[1:], widths[1:], strict=True):
        codes.bitwise_left_shift_(width).bitwise_or_(part)  # in place: fresh memory costs more than arithmetic
    return codes


def _pack_plane(values: Tensor, width: int) -> Tensor:
    values = values.to(torch.uint8, memory_format=torch.contiguous_format)
    if width == 8:
        return values
    rows, columns = values.shape
    each = 8 // width
    values = pad(values, (0, -columns % each)).view(rows, bytes_per_row(columns, width), each)
    # One place in a byte after another: a sum over the last dimension takes five times as long.
    packed = values[:, :, 0]
    for i in range(1, each):
        packed = packed | (values[:, :, i] << (i * width))
    return packed


def _unpack_plane(plane: Tensor, width: int, columns: int) -> Tensor:
    if width == 8:
        return plane.to(torch.int32)
    values = torch.stack([(plane >> shift) & ((1 << width) - 1) for shift in range(0, 8, width)], -1)
    # Without the padding, and contiguous without it: callers take strided views of the result.
    return values.flatten(1)[:, :columns].to(torch.int32, memory_format=torch.contiguous_format)
