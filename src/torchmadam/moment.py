"""The second moment: how large each weight's gradient usually is."""

import math

import torch
from torch import Tensor


def usable(grad: Tensor) -> Tensor:
    """True where a float32 gradient has a finite square. Elsewhere one step would poison the second moment for good."""
    return torch.isfinite(grad * grad)


def fold_(moment: Tensor, grad: Tensor, where: Tensor, *, beta: float) -> None:
    """v <- beta v + (1 - beta) g^2, for the elements in ``where`` only."""
    folded = moment * beta + (grad * grad) * (1 - beta)
    moment.copy_(torch.where(where, folded, moment))


def root(moment: Tensor, step: Tensor, *, beta: float, bias_correction: bool) -> Tensor:
    """gbar = sqrt(v / (1 - beta^t)), or plain sqrt(v) as in the paper's text, which has no bias correction."""
    if not bias_correction or beta == 0:
        return _sqrt(moment)
    # In float32 this loses four digits at t = 1; from float64 it also rounds alike on every device.
    correction = 1 - torch.exp(step.double() * math.log(beta))
    return _sqrt(moment / correction.float())


def _sqrt(x: Tensor) -> Tensor:
    """Rounded correctly on every device. The float32 roots of some CPU libraries are not, one in ten thousand."""
    return x.sqrt() if torch.compiler.is_compiling() else x.double().sqrt().float()


def normalised(grad: Tensor, rms: Tensor, *, max_step: float) -> Tensor:
    """u = clamp(g / gbar, -max_step, +max_step), where 0/0 counts as 0 (max_step is the paper's eta*/eta)."""
    return torch.where(rms > 0, (grad / rms).clamp(-max_step, max_step), 0.0)
