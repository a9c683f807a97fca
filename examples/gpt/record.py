"""Records: what a run found and what is needed to trust it, one JSON file each. Written once, and by programs only."""

import json
import math
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn

import torchmadam
from torchmadam.files import write_atomically


def check_free(path: Path) -> None:
    """Raise if there is a record already: now, before hours of training."""
    if path.exists():
        raise FileExistsError(f"{path} is there already, and records are written once; use another --name or --out")


def write(path: Path, record: dict[str, Any]) -> None:
    """Put a record in its place, whole or not at all."""
    check_free(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, [(json.dumps(_writable(record), indent=1, sort_keys=True) + "\n").encode()])


def _writable(value: Any) -> Any:
    """JSON has neither infinity nor NaN; both become null."""
    if isinstance(value, dict):
        return {key: _writable(held) for key, held in value.items()}
    if isinstance(value, list):
        return [_writable(held) for held in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def bytes_by_kind(model: nn.Module, optimiser: torch.optim.Optimizer) -> dict[str, int]:
    """What :func:`torchmadam.memory` counts, and its sum."""
    found = torchmadam.memory(model, optimiser)
    return {**asdict(found), "total": found.total}


def peak_bytes(device: torch.device) -> int:
    """The most memory this process has held: tensors on a GPU; everything, the interpreter included, on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def name_of(device: torch.device) -> str:
    """The GPU's name, or "CPU"."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
