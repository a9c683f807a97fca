"""What launches leave on a device: tables of addresses, kept from step to step, and what captured graphs refer to."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from torchmadam.kernels import tables

# The tables of the last steps; and what captured graphs refer to, which must stay.
_TABLES: dict[tuple[Any, ...], tuple[Tensor, ...]] = {}
_CAPTURED: dict[int, Tensor] = {}


def _cached(key: tuple[Any, ...], device: torch.device, make: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    """What ``make`` makes, kept: addresses rarely change from one step to the next.

    What is made while a graph is captured is not kept: its memory is the graph's, and is filled when it is replayed.
    """
    made = _TABLES.get((device, *key))
    if made is None:
        made = make()
        if not _is_capturing(device):
            while len(_TABLES) >= 128:
                del _TABLES[next(iter(_TABLES))]
            _TABLES[device, *key] = made
    return tuple(_keep(tensor) for tensor in made)


def table(rows: list[list[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """The rows on the device, and room for a clock's notes on them."""

    def make() -> tuple[Tensor, Tensor]:
        notes = torch.empty(tables.CLOCK.value * len(rows), dtype=torch.int32, device=device)
        return _sent(torch.tensor(rows, dtype=torch.int64), device), notes

    sent, notes = _cached(tuple(tuple(row) for row in rows), device, make)
    return sent, notes


def blocks(counts: tuple[int, ...], device: torch.device, first: int = 0) -> Tensor:
    """For each program the tensor it works on, counted from ``first``, which of its spans, and of how many."""

    def make() -> tuple[Tensor]:
        tensor = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
        starts = torch.tensor([0, *counts]).cumsum(0)[:-1]
        block = torch.arange(len(tensor)) - starts[tensor]
        return (
            _sent(torch.stack([tensor + first, block, torch.tensor(counts)[tensor]], dim=1).to(torch.int32), device),
        )

    (made,) = _cached((counts, first), device, make)
    return made


def _sent(host: Tensor, device: torch.device) -> Tensor:
    """A tensor on the device. From pinned memory: then the copy does not synchronise, and may be captured."""
    if device.type == "cuda":
        host = _keep(host.pin_memory())
    return host.to(device, non_blocking=True)


def _keep(tensor: Tensor) -> Tensor:
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        _CAPTURED[tensor.data_ptr()] = tensor
    return tensor


def _is_capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def on(device: torch.device) -> AbstractContextManager[object]:
    """Triton launches on the current device, whatever device the tensors are on."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(device)
