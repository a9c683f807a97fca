"""Five ways to hold weights and to move them: what differs between the runs that are compared."""

import math
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

import torchmadam
from examples.gpt.model import GPT, Shape

ADAMW = ("adamw", "adamw-bf16")
LADDERS = {"madam-12bit": "paper12", "madam-signed8": "signed8"}
METHODS = (*ADAMW, "madam", *LADDERS)


@dataclass(frozen=True)
class Method:
    """A method and its arguments. ``warmup`` is a share of the run; ``moment`` and ``release`` are Madam's."""

    name: str
    lr: float
    schedule: str
    warmup: float
    moment: str | None
    release: bool

    @classmethod
    def of(
        cls,
        name: str,
        lr: float | None = None,
        schedule: str | None = None,
        warmup: float | None = None,
        moment: str | None = None,
        release: bool = False,
    ) -> "Method":
        """A method with its usual arguments where none are given."""
        adamw = name in ADAMW
        if adamw and (moment is not None or release):
            raise ValueError(f"--moment and --release are Madam's; leave them out with {name}")
        return cls(
            name,
            (3e-4 if adamw else 0.01) if lr is None else lr,
            schedule or ("cosine" if adamw else "linear"),
            (0.05 if adamw else 0.0) if warmup is None else warmup,
            None if adamw else moment or "float32",
            release,
        )

    def lr_at(self, step: int, steps: int) -> float:
        """The learning rate of a step: up in ``warmup``, then down to zero at the end."""
        rising = math.ceil(self.warmup * steps)
        if step < rising:
            return self.lr * (step + 1) / rising
        done = (step - rising) / max(steps - rising, 1)
        return self.lr * (0.5 + 0.5 * math.cos(math.pi * done) if self.schedule == "cosine" else 1 - done)

    def holds_bf16(self) -> bool:
        """Whether weights decode to bfloat16, or are bfloat16."""
        return self.name == "adamw-bf16" or self.name in LADDERS


def build(
    shape: Shape,
    method: Method,
    device: torch.device,
    *,
    seed: int,
    checkpointing: bool = False,
    compiled: bool = False,
) -> tuple[GPT, torch.optim.Optimizer]:
    """A model on its device, its weights held as the method holds them, and its optimiser."""

    def made(part: nn.Module, number: int) -> None:
        if method.name in LADDERS:
            # The nearest rungs to the float initialisation, up to 3 times its RMS: so all methods start from the same
            # weights, and rungs drawn uniformly, the default on the paper's ladder, trained no better (docs/log.md).
            arguments: dict[str, Any] = {"init": "nearest", "bound": 3.0, "seed": 1000 * seed + number}
            torchmadam.to_ladder_(part, LADDERS[method.name], dtype=torch.bfloat16, **arguments)
        elif method.holds_bf16():
            part.to(torch.bfloat16)

    torch.manual_seed(seed)
    model = GPT(shape, device, made, checkpointing)
    for name, p in model.named_parameters():
        if isinstance(p, torchmadam.LadderTensor):
            p.label = name  # in messages: to_ladder_ saw one part at a time
    if compiled:
        model.compile_parts(torchmadam.compile_options() if method.name in LADDERS else None)
    return model, optimiser_of(model, method)


def optimiser_of(model: nn.Module, method: Method) -> torch.optim.Optimizer:
    """AdamW as language models are usually trained; Madam's rule as the paper has it."""
    named = list(model.named_parameters())
    if method.name in ADAMW:
        matrices = {"params": [p for _, p in named if p.dim() > 1], "weight_decay": 0.1}
        gains = {"params": [p for _, p in named if p.dim() <= 1], "weight_decay": 0.0}
        return torch.optim.AdamW([matrices, gains], lr=method.lr, betas=(0.9, 0.95), fused=True)
    arguments: dict[str, Any] = {"second_moment": method.moment}
    if method.name in LADDERS:
        arguments["rounding"] = "stochastic"  # to nearest, weights would freeze once lr falls below the spacing
    optimiser = torchmadam.Madam.paper(named, method.lr, **arguments)
    if method.release:
        torchmadam.release_gradients(model, optimiser)
    return optimiser


def autocast(device: torch.device, method: Method) -> torch.autocast:
    """Matrix products in bfloat16 on a GPU; on a CPU only where the weights are bfloat16 anyway."""
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda" or method.holds_bf16())


def training_step(
    model: GPT, optimiser: torch.optim.Optimizer, method: Method, tokens: Tensor, targets: Tensor
) -> Tensor:
    """Forward, backward, step. Gradients stay alive until the next call, unless they are released in backward."""
    optimiser.zero_grad()
    with autocast(tokens.device, method):
        loss = model(tokens, targets)
    loss.backward()
    if method.name in ADAMW:  # Madam bounds each weight's step by itself
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimiser.step()
    return cast(Tensor, loss.detach())
