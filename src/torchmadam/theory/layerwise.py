"""The layer-wise rule that the paper starts from, to compare with."""

from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import Optimizer, ParamsT


class LayerWise(Optimizer):
    """W - lr |W| / |g| g for each tensor: every layer moves by the same relative amount, along its own gradient.

    This is the core of LARS (You et al. 2017) and Fromage (Bernstein et al. 2020). It is a reference for lines in
    figures: it has neither momentum nor a second moment, and weights grow a little with every step.
    """

    def __init__(self, params: ParamsT, lr: float = 0.01) -> None:
        if lr < 0:
            raise ValueError(f"lr={lr:g} climbs; it must be 0 or more")
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Move every tensor that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    size = p.norm() / p.grad.norm()
                    p.sub_(p.grad * torch.where(size.isfinite(), size, 0.0) * group["lr"])
        return loss
