"""Operators that move elements of coded tensors (views, copies, casts, transfers, rows): the result stays coded.

Each handler is called with the operator and its arguments, and registered in ``MOVES`` at the end.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils._python_dispatch import _disable_current_modes, return_and_correct_aliasing
from torch.utils._pytree import tree_flatten, tree_map_only

from torchmadam.kernels import ops
from torchmadam.ladder.layout import BLANK, PLANE, SEED, CodeLayout
from torchmadam.ladder.tensor import MOVES, LadderTensor, refusal, version

aten = torch.ops.aten


def _like(source: LadderTensor, planes: Sequence[Tensor], limit: Tensor, **changes: Any) -> LadderTensor:
    """Another tensor on these planes, with the source's view unless changes say otherwise."""
    view = {"size": source.shape, "stride": source.stride(), "offset": source.storage_offset(), "dtype": source.dtype}
    return LadderTensor(planes, limit, source.coding, **{**view, **changes})


def _inside_autocast() -> bool:
    # torch.is_autocast_enabled says False in here: autocast switches itself off for the casts it makes.
    depth = torch.autocast_increment_nesting()
    torch.autocast_decrement_nesting()
    return depth > 1


def _view(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Apply a view operator to size, stride and offset; the planes are shared."""
    source = args[0]
    if not isinstance(source, LadderTensor):
        return NotImplemented
    with _disable_current_modes():
        base = torch.empty(max(source.coding.numel, 1), dtype=source.dtype, device="meta")
        shape_only = base.as_strided(source.shape, source.stride(), source.storage_offset())
        viewed = func(shape_only, *args[1:], **kwargs)
    tensors = [t for t in tree_flatten(viewed)[0] if isinstance(t, Tensor)]
    if any(t.dtype != source.dtype or t.is_neg() or t.is_conj() for t in tensors):
        return NotImplemented  # view(torch.int32) and the like look at bits, and codes have others

    def coded(t: Tensor) -> LadderTensor:
        return _seen(source, size=t.shape, stride=t.stride(), offset=t.storage_offset())

    out = tree_map_only(Tensor, coded, viewed)
    return return_and_correct_aliasing(func, args, kwargs, out) if func.is_view else out


# Views so frequent that it pays to know what they do: every linear layer turns its weight, twice a step.


def _t(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    source: LadderTensor = args[0]
    if source.dim() > 2:
        return _view(func, args, kwargs)  # which says that there is no such view
    return _same(func, args, kwargs, size=source.shape[::-1], stride=source.stride()[::-1])


def _same(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], **changes: Any) -> Any:
    return return_and_correct_aliasing(func, args, kwargs, _seen(args[0], **changes))


def _seen(source: LadderTensor, **changes: Any) -> LadderTensor:
    """A view. In inference mode, too, an ordinary tensor's is an ordinary one, as PyTorch demands."""
    ordinary = torch.is_inference_mode_enabled() and not source.is_inference()
    with torch.inference_mode(False) if ordinary else nullcontext():
        out = _like(source, source.planes, source.limit, **changes)
    out._cast_at = source._cast_at
    return out


def _recoded(source: LadderTensor, order: Sequence[int]) -> LadderTensor:
    """The same elements in fresh storage of their own, in this memory order."""
    coding = source.coding
    if source.is_whole:
        coding = coding.reordered(order)  # signs from a seed go by logical position and stay unstored
    else:
        signs = PLANE if coding.signs == SEED else coding.signs
        coding = CodeLayout(coding.format, tuple(source.shape), tuple(order), signs)
    planes = coding.pack(coding.matrix(source.codes()))
    return LadderTensor(planes, source.limit.clone(), coding, dtype=source.dtype)


def _order_for(source: LadderTensor, memory_format: torch.memory_format | None) -> tuple[int, ...]:
    """The memory order of a copy of this tensor."""
    dims = source.dim()
    if memory_format == torch.channels_last:
        return (0, 2, 3, 1)
    if memory_format == torch.channels_last_3d:
        return (0, 2, 3, 4, 1)
    if memory_format in (None, torch.preserve_format) and source.is_whole:
        return source.coding.order  # which strides do not tell where a dimension has the length 1
    if memory_format in (None, torch.preserve_format) and dims:
        strides = source.stride()
        order = tuple(sorted(range(dims), key=lambda d: (-strides[d], d)))
        if order[0] == 0:
            return order
    return tuple(range(dims))


def _keeps_storage(source: LadderTensor, order: tuple[int, ...]) -> bool:
    """Whether a copy has storage like its source's: of whole tensors, and of shards, whose last rows may be filling."""
    shard = source.coding.whole_rows is not None and source.as_rows() is not None
    return (source.is_whole or shard) and order == source.coding.order


def _clone(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    source: LadderTensor = args[0]
    source._check_current()
    order = _order_for(source, kwargs.get("memory_format"))
    if _keeps_storage(source, order):
        out = _like(source, [plane.clone() for plane in source.planes], source.limit.clone())
    else:
        out = _recoded(source, order)
    return return_and_correct_aliasing(func, args, kwargs, out)


def _to_copy(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    source: LadderTensor = args[0]
    source._check_current()
    dtype = kwargs.get("dtype") or source.dtype
    device = kwargs.get("device")
    if not dtype.is_floating_point:
        return func(source.decode(), **kwargs)
    if kwargs.get("memory_format") not in (None, torch.preserve_format):
        source = _recoded(source, _order_for(source, kwargs["memory_format"]))
    if device is None and isinstance(source, Parameter) and torch.is_grad_enabled() and _inside_autocast():
        # Autocast keeps its casts of parameters, and autograd saves them. Sharing the planes, a cast costs nothing, and
        # the version tells whether an optimiser step has come in between. All other casts are copies.
        out = _like(source, source.planes, source.limit, dtype=dtype)
        out._cast_at = version(source.planes)
        return out
    moved = {"device": device, "non_blocking": kwargs.get("non_blocking", False), "copy": True}
    planes = [plane.to(**moved) for plane in source.planes]
    return _like(source, planes, source.limit.to(**moved), dtype=dtype)


def _empty_like(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    source: LadderTensor = args[0]
    dtype = kwargs.get("dtype") or source.dtype
    device = kwargs.get("device")
    order = _order_for(source, kwargs.get("memory_format"))
    if not dtype.is_floating_point or not (source.is_whole or _keeps_storage(source, order)):
        return func(_placeholder(source), **kwargs)
    if not source.is_whole:
        planes = [torch.empty_like(plane, device=device) for plane in source.planes]
        return _like(source, planes, torch.empty_like(source.limit, device=device), dtype=dtype)
    coding = source.coding.reordered(order)
    planes = [torch.empty_like(plane, device=device) for plane in source.planes]
    return LadderTensor(planes, torch.empty_like(source.limit, device=device), coding, dtype=dtype)


def _copy_(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    target, source = args[0], args[1]
    if not isinstance(target, LadderTensor):
        return func(target, source.decode(), *args[2:], **kwargs)
    if not isinstance(source, LadderTensor):
        raise refusal("copy_")
    into, rows = target.as_rows(), source.as_rows()
    if into is None or rows is None or into[1].shape != rows[1].shape or into[1].format != rows[1].format:
        raise TypeError(
            f"copy_ between LadderTensors needs whole tensors, or rows, of one shape and one ladder, and got {source} "
            f"for {target}; convert the target to the source's ladder first, with torchmadam.to_ladder_ (12 is signed, "
            f'the paper\'s ladder is "paper12") or torchmadam.load'
        )
    ours, theirs = into[1], rows[1]
    moved = ours.signs == SEED and ours.first_row not in (theirs.first_row, BLANK)
    if ours.signs != theirs.signs or ours.sign_key != theirs.sign_key or moved:
        raise TypeError(
            f"copy_ between LadderTensors whose signs differ in kind ({theirs.signs} to {ours.signs}) would lose "
            f"signs; load the file into a float model instead, with torchmadam.load"
        )
    if not _is_all(target, ours) and not torch.equal(target.limit, source.limit.to(target.device)):
        raise TypeError(
            f"copy_ into some rows of a LadderTensor needs the same limit, and got {float(source.limit):g} for "
            f"{float(target.limit):g}: the other rows would change their size; copy whole tensors"
        )
    planes = rows[0] if ours.order == theirs.order else _recoded(source, ours.order).planes
    for plane, new in zip(into[0], planes, strict=True):
        plane.copy_(new)
        torch.autograd.graph.increment_version(plane)  # in here PyTorch does not count by itself
    target.limit.copy_(source.limit)
    if ours.first_row == BLANK:
        _place(target, theirs.first_row)
    return return_and_correct_aliasing(func, args, kwargs, target)


def _is_all(target: LadderTensor, rows: CodeLayout) -> bool:
    """Whether these rows of a tensor are all that it has, but for the filling of a shard."""
    if target.is_whole or rows.first_row == BLANK:
        return True
    own = target.coding
    if own.whole_rows is None:
        return False
    return target.storage_offset() == 0 and rows.rows == min(own.rows, own.whole_rows - own.first_row)


def _place(shard: LadderTensor, first_row: int) -> None:
    """Tell a blank shard, and the storage that it is a view of, which rows it holds from now on."""
    base = shard._base
    if shard.storage_offset() or not (base is None or isinstance(base, LadderTensor)):
        raise TypeError("a blank shard is filled from its first row on")
    for tensor in (shard, base):
        if tensor is not None:
            tensor.coding = replace(tensor.coding, first_row=first_row)
            tensor._as_rows = None


def _embedding(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Gather packed rows, then decode those: never the whole table."""
    table, indices = args[0], args[1]
    if not (isinstance(table, LadderTensor) and table.is_whole and table.coding.signs != SEED):
        return NotImplemented
    flat = indices.reshape(-1)
    coding = CodeLayout(table.coding.format, (flat.numel(), table.shape[1]), (0, 1), table.coding.signs)
    # index_select refuses what an ordinary embedding refuses: numbers below zero.
    rows = ops.decode([p.index_select(0, flat) for p in table.planes], table.limit, coding, 0, table.dtype)
    return rows.view(*indices.shape, table.shape[1])


def _pin_memory(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """In memory that a GPU copies from directly; FSDP keeps shards there that are offloaded."""
    source: LadderTensor = args[0]
    return _like(source, [plane.pin_memory() for plane in source.planes], source.limit.pin_memory())


def _is_pinned(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return all(plane.is_pinned() for plane in args[0].planes)


def _made_like(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Make an ordinary tensor like a coded one, without decoding it."""
    return func(_placeholder(args[0]), *args[1:], **kwargs)


def _new_zeros(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """An ordinary tensor; but among ranks, rows like the source's are a blank shard, which FSDP then fills.

    A blank shard reads as zeros, and refuses floats.
    """
    source, size = args[0], tuple(args[1])
    # FSDP shards without gradients; somebody's forward pass, which may want zeros of this size, mostly has them.
    sharding = not torch.is_grad_enabled() or source.coding.whole_rows is not None
    among_ranks = torch.distributed.is_available() and torch.distributed.is_initialized()
    rows = source.as_rows() if sharding and among_ranks else None
    same = kwargs.get("dtype") in (None, source.dtype) and kwargs.get("device") in (None, source.device)
    if rows is None or not same or not size or size[1:] != tuple(source.shape[1:]):
        if rows is not None and isinstance(source, Parameter) and len(size) > 1 and size[0] == source.shape[0]:
            raise TypeError("a coded parameter is sharded by rows, and not along other dimensions: use Shard(0)")
        return _made_like(func, args, kwargs)
    total = rows[1].rows if rows[1].whole_rows is None else rows[1].whole_rows
    coding = replace(rows[1], shape=size, first_row=BLANK, whole_rows=total)
    planes = [source.planes[0].new_zeros(shape) for shape in coding.plane_shapes]
    return LadderTensor(planes, source.limit.clone(), coding, dtype=source.dtype)


def _placeholder(source: LadderTensor) -> Tensor:
    return torch.empty_strided(source.shape, source.stride(), dtype=source.dtype, device=source.device)


MOVES.update(
    {
        "view": _view,
        aten.clone.default: _clone,
        aten._to_copy.default: _to_copy,
        aten.empty_like.default: _empty_like,
        aten.copy_.default: _copy_,
        aten.embedding.default: _embedding,
        aten._unsafe_view.default: _view,
        aten.t.default: _t,
        aten.detach.default: _same,
        aten.alias.default: _same,
        aten.new_zeros.default: _new_zeros,
        aten._pin_memory.default: _pin_memory,
        aten.is_pinned.default: _is_pinned,
    }
)
for _name in ("zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "new_ones", "new_full",
              "new_empty", "new_empty_strided"):  # fmt: skip
    MOVES[getattr(aten, _name).default] = _made_like
