"""Tensors that are spread over ranks as DTensors: the part that is here, where it begins, and sums over all parts."""

import math
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_sharded(tensor: Any) -> "TypeGuard[DTensor]":
    """Whether this is a DTensor: one of which this process may hold a part only."""
    module = sys.modules.get("torch.distributed.tensor")  # importing it takes a second, and most runs never need it
    return module is not None and isinstance(tensor, module.DTensor)


def are_any_sharded(tensors: Sequence[Tensor]) -> bool:
    """Whether there is a DTensor among these."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and are_any(tensors, module.DTensor)


def are_any(tensors: Sequence[Tensor], kind: type) -> bool:
    """Whether there is one of a kind among these. Many tensors have few types, so this is faster than asking each."""
    return any(issubclass(own, kind) for own in {*map(type, tensors)})


def local(tensor: Tensor) -> Tensor:
    """The part of a tensor that this process holds: of most tensors, all."""
    if not is_sharded(tensor):
        return tensor
    here: Any = tensor._local_tensor
    found: Tensor = here.wait() if hasattr(here, "wait") else here  # a result of a collective may still be under way
    return found


def first_of(tensor: Tensor) -> int | None:
    """The position in the whole tensor of the first element that is here; None if what is here is not one stretch."""
    if not is_sharded(tensor):
        return 0
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    for placement in tensor.placements:
        if type(placement) is not Replicate and not (type(placement) is Shard and placement.dim == 0):
            return None
    _, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return offset[0] * math.prod(tensor.shape[1:]) if offset else 0


def like(part: Tensor, whole: Tensor) -> Tensor:
    """A part, of any dtype, as the local part of a tensor that is spread over ranks as ``whole`` is."""
    if not is_sharded(whole):
        return part
    from torch.distributed.tensor import DTensor

    shape = (*whole.shape, *part.shape[whole.dim() :])  # a complex tensor's numbers are pairs
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        part, whole.device_mesh, whole.placements, run_check=False, shape=torch.Size(shape), stride=stride
    )


def part_of(full: Tensor, whole: Tensor) -> Tensor:
    """What this rank holds of a tensor that every rank has in full, if it is spread over ranks as ``whole`` is."""
    if not is_sharded(whole) or is_sharded(full):
        return full
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, offset = compute_local_shape_and_global_offset(whole.shape, whole.device_mesh, whole.placements)
    for dim, (length, start) in enumerate(zip(shape, offset, strict=True)):
        full = full.narrow(dim, min(start, full.shape[dim]), length)
    return like(full.contiguous(), whole)


def over_parts(values: Sequence[Tensor], wholes: Sequence[Tensor], *, largest: bool = False) -> list[Tensor]:
    """Numbers, one of each tensor's local part, added up over all parts, or the largest; a collective a mesh dimension.

    Every rank that holds parts of these tensors has to call this.
    """
    totals = list(values)
    spread: dict[Any, list[int]] = {}
    for i, whole in enumerate(wholes):
        if is_sharded(whole):
            dims = tuple(dim for dim, placement in enumerate(whole.placements) if not placement.is_replicate())
            spread.setdefault((whole.device_mesh, dims), []).append(i)
    reduction = torch.distributed.ReduceOp.MAX if largest else torch.distributed.ReduceOp.SUM
    for (mesh, dims), places in spread.items():
        stacked = torch.stack([totals[i] for i in places])
        for dim in dims:
            torch.distributed.all_reduce(stacked, reduction, group=mesh.get_group(dim))
        for i, total in zip(places, stacked.unbind(), strict=True):
            totals[i] = total
    return totals
