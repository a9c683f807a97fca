"""From packed planes to launches of decode.py's kernel. Layers are decoded in every pass, so the way there is short."""

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from torchmadam.kernels import decode as decoding
from torchmadam.kernels import launch
from torchmadam.kernels.direct import Direct
from torchmadam.ladder.layout import CodeLayout

BLOCK = 1024  # eight for each thread of four warps
OPTIONS = {"num_warps": 4, **launch.FUSED}


def decode(planes: Sequence[Tensor], limit: Tensor, coding: CodeLayout, first_row: int, dtype: torch.dtype) -> Tensor:
    """The rows from ``first_row`` on that these planes hold, as a float matrix in memory order."""
    return _decoded(planes, limit, coding, first_row, dtype, raw=False)


def codes(planes: Sequence[Tensor], coding: CodeLayout, first_row: int) -> Tensor:
    """The same rows as CodeLayout.unpack gives them."""
    return _decoded(planes, planes[0], coding, first_row, torch.int32, raw=True)


def _decoded(
    planes: Sequence[Tensor], limit: Tensor, coding: CodeLayout, first_row: int, dtype: torch.dtype, *, raw: bool
) -> Tensor:
    rows = planes[0].shape[0]
    out = torch.empty(rows, coding.columns, dtype=dtype, device=planes[0].device)
    if out.numel() > 0:
        run, k_planes = _prepared(coding, rows, first_row, dtype, raw)
        used = [plane.contiguous() for plane in planes]
        run([out, limit, used[-1], *used[:k_planes], *[out] * (4 - k_planes)])
    return out


@functools.lru_cache(maxsize=4096)
def _prepared(coding: CodeLayout, rows: int, first_row: int, dtype: torch.dtype, raw: bool) -> tuple[Direct, int]:
    """All of a launch but its tensors, and how many planes of k there are."""
    ladder, columns = coding.format, coding.columns
    constants = launch._ladder_arguments(coding) | {
        "RAW": raw, "NARROW": dtype.itemsize == 2, "FLAT": launch._is_flat(coding),
        "INDEX": launch._index_type(coding.numel), "BLOCK": BLOCK,
    }  # fmt: skip
    numbers = (rows, columns, first_row * columns, ladder.spacing, ladder.crossing, float(ladder.top), coding.sign_key)
    programs = launch._count_blocks(rows, columns, BLOCK)
    return Direct(decoding.decode_kernel, programs, 7, numbers, constants, OPTIONS), len(launch._code_widths(coding))
