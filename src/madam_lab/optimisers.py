"""What makes a step: Madam, PyTorch's own, and others of which it is said that they need no tuning."""

import functools
import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from typing import Any

import torch
from torch import nn

from madam_lab.recipes import Recipe
from torchmadam import Madam

# Name of the optimiser: its package, and what it is called there. `pip install ".[peers]"` brings them.
PEERS = {
    "prodigy": ("prodigyopt", "Prodigy"),
    "schedule_free_adamw": ("schedulefree", "AdamWScheduleFree"),
    "schedule_free_radam": ("schedulefree", "RAdamScheduleFree"),
}


def build_optimiser(
    recipe: Recipe, model: nn.Module, device: torch.device, compiled: bool = False
) -> torch.optim.Optimizer:
    """The recipe's optimiser. On a GPU its learning rate is a tensor there, so that a captured step can follow it.

    Madam's arguments are what differs from the paper's. ``compiled``: a CPU steps in one pass over memory, too.
    """
    first, on_gpu = recipe.lr_at(0.0), device.type == "cuda"
    lr: Any = torch.tensor(first, device=device) if on_gpu else first
    fast: dict[str, Any] = {"fused": True} if on_gpu or compiled else {}
    named = list(model.named_parameters())
    if recipe.optimiser == "madam":
        conversions = ("bound", "zero_scale") if recipe.ladder is not None else ()  # which to_ladder_ had
        arguments = {name: value for name, value in recipe.arguments.items() if name not in conversions}
        optimiser = Madam.paper(named, lr=lr, compile=compiled and not on_gpu, **arguments)
        if recipe.floor is not None:
            optimiser.register_step_post_hook(functools.partial(_lift, floor=recipe.floor))
        return optimiser
    if recipe.optimiser == "sgd":
        return torch.optim.SGD(named, lr=lr, **fast, **recipe.arguments)
    if recipe.optimiser in ("adam", "adamw"):
        kind = torch.optim.Adam if recipe.optimiser == "adam" else torch.optim.AdamW
        fast |= {"capturable": True} if on_gpu else {}
        return kind(named, lr=lr, **fast, **recipe.arguments)
    if recipe.optimiser in PEERS:
        return _peer(recipe.optimiser, [p for _, p in named], lr=first, **recipe.arguments)
    raise ValueError(f"optimiser {recipe.optimiser!r} is unknown; use sgd, adam, adamw, madam, {', '.join(PEERS)}")


def is_capturable(recipe: Recipe) -> bool:
    """Whether a CUDA graph can replay its steps. Peers look at numbers on the way, and count steps in Python."""
    return recipe.optimiser not in PEERS


def evaluates_elsewhere(optimiser: torch.optim.Optimizer) -> bool:
    """Whether the weights to evaluate with are others than those that gradients are taken at."""
    return hasattr(optimiser, "eval")


@contextmanager
def evaluating(optimiser: torch.optim.Optimizer) -> Iterator[None]:
    """Inside it the model has the weights that this optimiser wants to be evaluated with."""
    if not evaluates_elsewhere(optimiser):
        yield
        return
    optimiser.eval()  # type: ignore[attr-defined]
    try:
        yield
    finally:
        optimiser.train()  # type: ignore[attr-defined]


def versions(recipe: Recipe) -> dict[str, str]:
    """Name and version of the package that a peer comes from."""
    if recipe.optimiser not in PEERS:
        return {}
    package, _ = PEERS[recipe.optimiser]
    return {package: metadata.version(package)}


def _peer(name: str, params: list[nn.Parameter], **arguments: Any) -> torch.optim.Optimizer:
    package, called = PEERS[name]
    try:
        module = importlib.import_module(package)
    except ModuleNotFoundError as error:
        raise ValueError(f'{name} is in {package}, which is not installed; pip install ".[peers]"') from error
    optimiser: torch.optim.Optimizer = getattr(module, called)(params, **arguments)
    if evaluates_elsewhere(optimiser):
        optimiser.train()  # type: ignore[attr-defined]
    return optimiser


@torch.no_grad()
def _lift(optimiser: torch.optim.Optimizer, *_: Any, floor: float) -> None:
    """After a step, no weight is smaller than a share of its tensor's clamp; zeros stay."""
    for group in optimiser.param_groups:
        for p in (p for p in group["params"] if p.grad is not None):
            least = optimiser.state[p]["scale"] * (group["bound"] or 1.0) * floor
            p.copy_(torch.where(p == 0, p, torch.copysign(p.abs().clamp(min=least), p)))
