"""Checkpoints that every rank writes its part of, and that any number of ranks can read.

They are written with ``torch.distributed.checkpoint``, as plain tensors: NAME.plane0, ... and NAME.limit of a coded
parameter, other tensors as they are, and NAME.second_moment and so on of the optimiser. ``about`` holds JSON: the file
format's description of the codes (docs/format.md), and the optimiser's param groups.

A folder holds numbered checkpoints, and a file ``current`` that names the last complete one. It is replaced when all
ranks are done, so that whatever dies in between leaves the checkpoint before readable.
"""

import json
import os
import shutil
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load as read_parts
from torch.distributed.checkpoint.state_dict_saver import save as write_parts

from torchmadam.distributed import parts
from torchmadam.files import write_atomically
from torchmadam.ladder import checkpoint
from torchmadam.ladder.plain import LadderFileError
from torchmadam.madam import Madam

_CURRENT = "current"
_PREFIX = "checkpoint-"


def save(
    folder: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Madam | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> None:
    """Write a model, and its optimiser's state, sharded or not; every rank of the group has to call this.

    The folder keeps the last complete checkpoint, and the one before until the new one is complete.
    """
    folder = Path(folder)
    tensors, about = parts.of_model(model)
    if optimizer is not None:
        state, about["groups"] = parts.of_optimizer(model, optimizer)
        tensors |= state
    text = json.dumps(about, sort_keys=True).encode()
    tensors["about"] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    number = _next(folder, process_group)
    with _quietly():
        write_parts(dict(tensors), checkpoint_id=folder / number, process_group=process_group)
    if _rank(process_group) == 0:
        write_atomically(folder / _CURRENT, [number.encode()])
        for other in folder.iterdir():
            if other.is_dir() and other.name != number and _number_of(other) is not None:
                shutil.rmtree(other, ignore_errors=True)
    if dist.is_initialized():
        dist.barrier(process_group)


def load(
    folder: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Madam | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> None:
    """Read a checkpoint into a model, and an optimiser, of the same kind; every rank of the group has to call this.

    The number of ranks, and how tensors are spread over them, may differ from those that wrote it; one process without
    ranks will do. Parameters are filled in place, and have to be coded as the checkpoint's are.
    """
    at = _complete(folder)
    about, names = _about(at)
    tensors = parts.to_fill(model, about, names)
    filling = None
    if optimizer is not None:
        filling = parts.Filling(model, optimizer, about, names)
        tensors |= filling.tensors
    with _quietly():
        read_parts(dict(tensors), checkpoint_id=at, process_group=process_group)
    parts.filled(model)
    if filling is not None:
        filling.finish()


def export(folder: str | os.PathLike[str], file: str | os.PathLike[str]) -> None:
    """Make an ordinary coded file, as of :func:`torchmadam.save`, of a checkpoint's model; needs no model and no ranks.

    The file is read with :func:`torchmadam.load`. Call this in one process.
    """
    at = _complete(folder)
    about, names = _about(at)
    tensors = {
        name: torch.empty(found.size, dtype=found.properties.dtype)
        for name, found in names.items()
        if name.startswith(parts.MODEL)
    }
    with _quietly():
        read_parts(dict(tensors), checkpoint_id=at, no_dist=True)
    plain = {name.removeprefix(parts.MODEL): tensor for name, tensor in tensors.items()}
    described = {key: about[key] for key in ("version", "coded", "shared")}
    checkpoint.unflatten(plain, described)  # which checks every claim
    checkpoint.write(plain, described, file)


def _complete(folder: str | os.PathLike[str]) -> Path:
    """The last complete checkpoint in a folder."""
    current = Path(folder) / _CURRENT
    if not current.is_file():
        raise FileNotFoundError(f"{folder} holds no complete checkpoint: there is no file {current}")
    at = Path(folder) / current.read_text().strip()
    if not at.is_dir():
        raise LadderFileError(f"{current} names {at.name}, which is not there; restore that folder")
    return at


def _about(at: Path) -> tuple[dict[str, Any], Mapping[str, Any]]:
    """The description in a checkpoint, and what it says of its tensors."""
    names: dict[str, Any] = FileSystemReader(at).read_metadata().state_dict_metadata
    if "about" not in names:
        raise LadderFileError(f"{at} was not written by torchmadam.distributed.save: it does not describe any codes")
    text = torch.empty(names["about"].size, dtype=torch.uint8)
    with _quietly():
        read_parts({"about": text}, checkpoint_id=at, no_dist=True)
    about = json.loads(bytes(text.tolist()))
    if about["version"] != checkpoint.VERSION:
        raise LadderFileError(f"{at} has version {about['version']!r}; this torchmadam reads {checkpoint.VERSION}")
    return about, names


def _next(folder: Path, group: dist.ProcessGroup | None) -> str:
    """A name that no checkpoint in the folder has, the same on every rank."""
    chosen = [""]
    if _rank(group) == 0:
        folder.mkdir(parents=True, exist_ok=True)
        taken = [found for entry in folder.iterdir() if (found := _number_of(entry)) is not None]
        chosen = [f"{_PREFIX}{max(taken, default=0) + 1}"]
    if dist.is_initialized():
        dist.broadcast_object_list(chosen, 0 if group is None else dist.get_global_rank(group, 0), group)
    return chosen[0]


def _number_of(entry: Path) -> int | None:
    """The number in the name of a checkpoint; None: this is something else."""
    number = entry.name.removeprefix(_PREFIX)
    return int(number) if entry.name.startswith(_PREFIX) and number.isdecimal() else None


def _rank(group: dist.ProcessGroup | None) -> int:
    return dist.get_rank(group) if dist.is_available() and dist.is_initialized() else 0


class _quietly(warnings.catch_warnings):  # noqa: N801 (used as a function is)
    """Without PyTorch's warnings that there are no ranks, which is meant, and of its own deprecations."""

    def __enter__(self) -> Any:
        entered = super().__enter__()
        warnings.simplefilter("ignore")
        return entered
