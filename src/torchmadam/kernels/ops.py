"""Operators of the library ``torchmadam``: PyTorch picks the device, and its compilers see one node.

Defined with ``torch.library.Library``: ``torch.library.custom_op`` costs several times as much a call.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from torchmadam.ladder.format import LadderFormat
from torchmadam.ladder.layout import CodeLayout

_LIBRARY = torch.library.Library("torchmadam", "DEF")
_LIBRARY.define(
    "decode(Tensor[] planes, Tensor limit, int levels, float spacing, float crossing, SymInt[] shape, int[] order, "
    "str signs, int sign_key, SymInt first_row, ScalarType dtype) -> Tensor"
)


def decode(planes: Sequence[Tensor], limit: Tensor, layout: CodeLayout, first_row: int, dtype: torch.dtype) -> Tensor:
    """The rows from ``first_row`` on that these planes hold, as a float matrix in memory order."""
    ladder = layout.format
    out: Tensor = torch.ops.torchmadam.decode(
        planes, limit, ladder.levels, ladder.spacing, ladder.crossing, layout.shape, layout.order, layout.signs,
        layout.sign_key, first_row, dtype,
    )  # fmt: skip
    return out


def _decode_reference(
    planes: list[Tensor], limit: Tensor, levels: int, spacing: float, crossing: float, shape: list[int],
    order: list[int], signs: str, sign_key: int, first_row: int, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    ladder = LadderFormat(levels, spacing, crossing)
    layout = CodeLayout(ladder, tuple(shape), tuple(order), signs, sign_key)
    return ladder.decode(layout.unpack(planes, first_row), limit).to(dtype)


def _decode_shape(
    planes: list[Tensor], limit: Tensor, levels: int, spacing: float, crossing: float, shape: list[int],
    order: list[int], signs: str, sign_key: int, first_row: int, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    columns = 1
    for length in shape[1:]:
        columns = columns * length
    return planes[0].new_empty((planes[0].shape[0], columns), dtype=dtype)


_LIBRARY.impl("decode", _decode_reference, "CompositeExplicitAutograd")
torch.library.register_fake("torchmadam::decode", _decode_shape, lib=_LIBRARY)
