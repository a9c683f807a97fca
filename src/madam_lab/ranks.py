"""Runs that several processes share, started by torchrun: each takes its slice of every batch, the first one writes."""

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from madam_lab.tasks.task import Batch

_PATIENCE = timedelta(hours=12)  # for what the first rank does alone, such as a study


@dataclass(frozen=True)
class Ranks:
    """A process among those that share a run; most runs have one process, and then nothing here does anything."""

    rank: int = 0
    world: int = 1

    @property
    def is_first(self) -> bool:
        """Whether this is the process that decides and writes."""
        return self.rank == 0

    @property
    def are_many(self) -> bool:
        """Whether there are others."""
        return self.world > 1

    def agreed(self, value: Any) -> Any:
        """What the first rank has; so that all go the same way."""
        if not self.are_many:
            return value
        held = [value]
        dist.broadcast_object_list(held)
        return held[0]

    def total(self, sums: Tensor) -> Tensor:
        """Numbers on the CPU, added up over all ranks."""
        return torch.stack(self.gathered(sums)).sum(0) if self.are_many else sums

    def gathered(self, value: Any) -> list[Any]:
        """What every rank has, in order."""
        held: list[Any] = [value] * self.world
        if self.are_many:
            dist.all_gather_object(held, value)
        return held

    def same_(self, tensors: Iterable[Tensor]) -> None:
        """Give every rank what these tensors are on the first."""
        for tensor in tensors if self.are_many else ():
            dist.broadcast(tensor, 0)

    def wrapped(self, model: nn.Module) -> Callable[[Tensor], Tensor]:
        """The model to train: one whose gradients are the mean over all ranks, where there are many."""
        if not self.are_many:
            return model
        from torchmadam.distributed import data_parallel

        return data_parallel(model)

    def share(self, batch: Batch, dim: int) -> tuple[Batch, float]:
        """A batch's slice for this rank, and what its mean loss counts, so that the mean over ranks is the batch's.

        A rank that is left with nothing takes one example, which then counts nothing: all ranks have to go on alike.
        """
        if not self.are_many:
            return batch, 1.0
        count = batch[0].shape[dim]
        first, last = count * self.rank // self.world, count * (self.rank + 1) // self.world
        own = tuple(t.narrow(dim, min(first, count - 1), max(last - first, 1)) for t in batch)
        return own, (last - first) * self.world / count

    def on(self, device: str) -> str:
        """The name of a device, for records."""
        return f"{device} x {self.world}" if self.are_many else device


def here() -> Ranks:
    """The ranks that this process is one of."""
    if dist.is_available() and dist.is_initialized():
        return Ranks(dist.get_rank(), dist.get_world_size())
    return Ranks()


@contextmanager
def joined(device: torch.device | None) -> Iterator[torch.device | None]:
    """Under torchrun, join the other processes for a while; yields the device that this one should use."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1 or "RANK" not in os.environ:
        yield device
        return
    gpu = torch.cuda.is_available() if device is None else device.type == "cuda"
    if gpu:
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if gpu else "gloo", timeout=_PATIENCE)
    try:
        yield device
    finally:
        dist.destroy_process_group()
