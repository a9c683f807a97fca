"""Coded tensors that are some rows of others: shards, and what PyTorch's FSDP asks of them.

FSDP makes a rank's shard with ``new_zeros`` and copies rows into it; before a forward pass it asks the shard for plain
tensors to gather from all ranks, and makes a whole parameter of them. What travels is packed planes, never floats.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from torchmadam.ladder.layout import BLANK, CodeLayout


class Rows:
    """The part of LadderTensor that is about rows."""

    _as_rows: tuple[Sequence[Tensor], CodeLayout] | None = None

    def as_rows(self) -> tuple[Sequence[Tensor], CodeLayout] | None:
        """Planes and layout of exactly this tensor, where it is a range of rows of its storage; else None."""
        tensor: Any = self  # a LadderTensor
        if tensor.is_whole:
            return tensor.planes, tensor.coding
        if self._as_rows is None:
            self._as_rows = _range_of_rows(tensor)
        return self._as_rows

    # The form with one argument: FSDP would want planes of the shape of the shard from the other one.
    def fsdp_pre_all_gather(self, mesh: Any) -> tuple[tuple[Tensor, ...], CodeLayout]:
        """What FSDP gathers: the planes, filled up to equal numbers of rows; and the layout of the whole tensor."""
        tensor: Any = self  # a LadderTensor
        rows = tensor.as_rows()
        if rows is None:
            raise TypeError("FSDP can gather coded parameters that are sharded by rows; leave out shard_placement_fn")
        planes, coding = rows
        total = coding.rows if coding.whole_rows is None else coding.whole_rows
        padded = -(-total // mesh.size())
        if tensor.planes[0].shape[0] == padded and tensor.storage_offset() == 0:
            planes = tensor.planes  # already filled up
        elif coding.rows < padded:
            planes = [torch.cat([p, p.new_zeros(padded - coding.rows, p.shape[1])]) for p in planes]
        whole = replace(coding, shape=(total, *coding.shape[1:]), first_row=0, whole_rows=None)
        if mesh.size() == 1:  # of a parameter that is not spread at all, FSDP takes one tensor only
            return (torch.cat([plane.reshape(-1) for plane in planes]),), whole
        return tuple(planes), whole

    def fsdp_post_all_gather(
        self, outputs: Sequence[Tensor], whole: CodeLayout, dtype: torch.dtype, *, out: Any = None
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        """The whole parameter, coded, from what was gathered. ``out``: one that was made so before, to be refilled."""
        tensor: Any = self  # a LadderTensor
        if out is None:
            planes = _split(outputs[0], whole) if len(outputs) < len(whole.widths) else outputs
            wide = [shape[1] for shape in whole.plane_shapes]
            planes = [plane.view(-1, width)[: whole.rows] for plane, width in zip(planes, wide, strict=True)]
            return type(tensor)(planes, tensor.limit, whole, dtype=dtype), tuple(outputs)
        # Its planes are views of these outputs, which FSDP fills again and again; only the limit may be another.
        if any(a.data_ptr() != b.data_ptr() for a, b in zip(out.planes, outputs, strict=False)):
            raise RuntimeError("FSDP gathered codes into other memory than the first time; report this")
        out.limit = tensor.limit
        return None


def _split(flat: Tensor, coding: CodeLayout) -> Sequence[Tensor]:
    """Planes that lie one behind the other."""
    pieces: Sequence[Tensor] = flat.view(-1).split([rows * width for rows, width in coding.plane_shapes])
    return pieces


def _range_of_rows(tensor: Any) -> tuple[Sequence[Tensor], CodeLayout] | None:
    coding = tensor.coding
    if tensor.dim() != len(coding.shape) or tensor.dim() == 0 or tuple(tensor.shape[1:]) != coding.shape[1:]:
        return None
    if any(n > 1 and a != b for n, a, b in zip(tensor.shape, tensor.stride(), coding.strides, strict=True)):
        return None
    first, rest = divmod(int(tensor.storage_offset()), max(coding.columns, 1))
    if rest:
        return None
    count = tensor.shape[0]
    layout = replace(
        coding,
        shape=tuple(tensor.shape),
        first_row=BLANK if coding.first_row == BLANK else coding.first_row + first,
        whole_rows=coding.rows if coding.whole_rows is None else coding.whole_rows,
    )
    return [plane[first : first + count] for plane in tensor.planes], layout
