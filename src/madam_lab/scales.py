"""Scales from a trained model: tensors of a file lend Madam their sizes, by name and shape.

The paper's 12-bit run on ImageNet fell from 29 % to 25 % when its scales came from a pre-trained model.
"""

import hashlib
import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from madam_lab.recipes import Recipe
from torchmadam import LadderTensor, scales_of
from torchmadam.groups import unwrapped
from torchmadam.ladder import checkpoint
from torchmadam.ladder.plain import LadderFileError


def digest(path: Path) -> str:
    """What a recipe calls a file: the beginning of its hash."""
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def read(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file, a coded one included, or of a state dict that torch.save wrote."""
    if path.suffix == ".safetensors":
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        try:
            state: Mapping[str, Any] = checkpoint.unflatten(*checkpoint.read(path))
        except LadderFileError:
            try:
                state = load_file(path)
            except SafetensorError as error:
                raise ValueError(f"{path} is no safetensors file ({error})") from error
    else:
        try:
            state = torch.load(path, map_location="cpu", weights_only=True)
        except OSError:
            raise
        except Exception as error:  # torch's unpickler raises whatever the bytes make of it
            raise ValueError(f"{path} is neither a safetensors file nor a state dict of plain tensors") from error
        for key in ("state_dict", "model"):  # what checkpoints are often wrapped in
            state = state[key] if isinstance(state, Mapping) and isinstance(state.get(key), Mapping) else state
    named = state.items() if isinstance(state, Mapping) else ()
    tensors = {unwrapped(name): t for name, t in named if isinstance(name, str) and isinstance(t, Tensor)}
    if not tensors:
        raise ValueError(f"{path} holds no tensors by name; give a state dict, or a safetensors file")
    return {name: t.decode() if isinstance(t, LadderTensor) else t for name, t in tensors.items()}


def matched(model: nn.Module, tensors: Mapping[str, Tensor]) -> tuple[dict[str, float], list[str]]:
    """Scales for the parameters whose name and shape a file has; and a line about each parameter that got none."""
    wanted = dict(model.named_parameters())
    fitting = {name: t for name, t in tensors.items() if name in wanted and t.shape == wanted[name].shape}
    scales = scales_of(fitting)
    without = []
    for name, p in wanted.items():
        if name in scales:
            continue
        if name in fitting:
            reason = "is all zeros there"
        elif name in tensors:
            reason = f"is {tuple(tensors[name].shape)} there and {tuple(p.shape)} here"
        else:
            reason = "is not there"
        without.append(f"{name} {reason}")
    return scales, without


def borrowing(recipe: Recipe, model: nn.Module, path: Path | None) -> Recipe:
    """The recipe with its scales filled in from the file they are to come from; says which tensors keep their own."""
    if path is None or digest(path) != recipe.scales:
        raise ValueError(
            f"{recipe.name} takes its scales from a file with the hash {recipe.scales}; give --scales FILE"
        )
    tensors = read(path)
    scales, without = matched(model, tensors)
    if not scales:
        raise ValueError(f"no tensor of {path} has the name and the shape of one of {recipe.name}'s; {without[0]}")
    if without:
        shown = "; ".join(without)
        warnings.warn(f"{path} has no scale for {len(without)} tensors, which keep their own: {shown}", stacklevel=2)
    if unused := sorted(tensors.keys() - model.state_dict().keys()):
        shown = ", ".join(unused)
        warnings.warn(f"{path} has {len(unused)} tensors that {recipe.name} does not have: {shown}", stacklevel=2)
    own = {name: float(p.detach().double().square().mean().sqrt()) for name, p in model.named_parameters()}
    # Every tensor is named, so that nobody warns a second time; an all-zero one has no scale to name.
    whole = {name: scales.get(name, own[name]) for name in own if scales.get(name, own[name]) > 0}
    if recipe.ladder is not None:
        return replace(recipe, conversion={**recipe.conversion, "scale": whole})
    return replace(recipe, arguments={**recipe.arguments, "scale": whole})
