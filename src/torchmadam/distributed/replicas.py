"""Data parallel training: replicas that start with the same codes, and a check that they keep them."""

import hashlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from torchmadam import noise, shards
from torchmadam.ladder.tensor import LadderTensor

_CHUNK = 2**22  # bytes hashed at a time


def data_parallel(
    model: nn.Module, *, process_group: dist.ProcessGroup | None = None, **arguments: Any
) -> DistributedDataParallel:
    """Rank 0's weights on every rank, and the model in DDP; ``arguments`` are DistributedDataParallel's own.

    DDP by itself would send floats into codes when it is made, and raise. Make the optimiser before or afterwards.
    """
    if "init_sync" in arguments:
        raise TypeError("init_sync is this function's own: it sends codes where DDP would send floats; leave it out")
    synchronise_(model, process_group)
    return DistributedDataParallel(model, init_sync=False, process_group=process_group, **arguments)


@torch.no_grad()
def synchronise_(model: nn.Module, process_group: dist.ProcessGroup | None = None) -> None:
    """Give every rank the parameters and buffers of rank 0: of coded ones the planes and limits, as they are."""
    _agree(_kinds(model), "is of another shape, dtype or ladder", "build the same model on every rank", process_group)
    source = 0 if process_group is None else dist.get_global_rank(process_group, 0)
    for _, tensor in _tensors(model, buffers=True):
        for part in _parts(tensor):
            dense = part if part.is_contiguous() else part.contiguous()
            dist.broadcast(dense, source, group=process_group)
            if dense is not part:
                part.copy_(dense)
            torch.autograd.graph.increment_version(part)
        torch.autograd.graph.increment_version(tensor)


@torch.no_grad()
def compare_replicas(model: nn.Module, process_group: dist.ProcessGroup | None = None) -> None:
    """Raise a RuntimeError, on every rank, that names the first parameter whose bits are not the same on all ranks."""
    hashes = {name: _hash(tensor) for name, tensor in _tensors(model, buffers=False)}
    _agree(hashes, "differs", "look for what a rank does by itself before this step", process_group)


def watch_replicas(
    model: nn.Module, optimizer: Optimizer, every: int, process_group: dist.ProcessGroup | None = None
) -> Any:
    """Call :func:`compare_replicas` after every so many steps; for looking for errors, since it reads all weights.

    Returns:
        A handle whose ``remove()`` ends this.
    """
    if every < 1:
        raise ValueError(f"every={every} cannot work: compare after one step or more")
    steps = 0

    def stepped(*_: Any) -> None:
        nonlocal steps
        steps += 1
        if steps % every == 0:
            compare_replicas(model, process_group)

    hook: Callable[..., None] = stepped
    return optimizer.register_step_post_hook(hook)


def _tensors(model: nn.Module, *, buffers: bool) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in [*model.named_parameters(), *(model.named_buffers() if buffers else ())]:
        if shards.is_sharded(tensor):
            raise TypeError(
                f"{name} is sharded, so that every rank holds another part of it; this is for whole replicas"
            )
        yield name, tensor


def _parts(tensor: Tensor) -> list[Tensor]:
    """The plain tensors that a tensor is made of."""
    tensor = tensor.detach()
    if not isinstance(tensor, LadderTensor):
        return [torch.view_as_real(tensor) if tensor.is_complex() else tensor]
    return [*tensor.planes, tensor.limit]


def _kinds(model: nn.Module) -> dict[str, Tensor]:
    """What each tensor is, but for its values, as a number."""
    kinds = {}
    for name, tensor in _tensors(model, buffers=True):
        about = (name, tuple(tensor.shape), tensor.dtype, tensor.coding if isinstance(tensor, LadderTensor) else None)
        digest = hashlib.blake2b(repr(about).encode(), digest_size=8).digest()
        kinds[name] = torch.tensor(int.from_bytes(digest, "little", signed=True), device=tensor.device)
    return kinds


def _hash(tensor: Tensor) -> Tensor:
    """64 bits, on the tensor's device, that change if any byte does."""
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for part in _parts(tensor):
        first = 0
        for chunk in part.contiguous().reshape(-1).view(torch.uint8).split(_CHUNK):
            weights = noise.random_bits(chunk.shape, 0, total * 0, first) | 1  # odd, so that no byte counts for nothing
            total = total * 3 + (chunk.to(torch.int64) * weights).sum()
            first += chunk.numel()
    return total


def _agree(numbers: dict[str, Tensor], differs: str, remedy: str, group: dist.ProcessGroup | None) -> None:
    """Raise, on every rank, if a rank has other numbers than rank 0, or another count of them."""
    count = torch.tensor([len(numbers)], device=next(iter(numbers.values())).device if numbers else None)
    counts = _gathered(count, group).flatten().tolist()
    if len(set(counts)) > 1:
        raise RuntimeError(f"the ranks' models have {counts} tensors; build the same model on every rank")
    if not numbers:
        return
    found = _gathered(torch.stack(list(numbers.values())), group)
    wrong = (found != found[0]).cpu()
    if wrong.any():
        place = int(wrong.any(0).nonzero()[0])
        ranks = [rank for rank, bad in enumerate(wrong[:, place].tolist()) if bad]
        raise RuntimeError(f"{list(numbers)[place]} {differs} on ranks {ranks} from rank 0's; {remedy}")


def _gathered(values: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """A row a rank."""
    rows = [torch.empty_like(values) for _ in range(dist.get_world_size(group))]
    dist.all_gather(rows, values, group=group)
    return torch.stack(rows)
