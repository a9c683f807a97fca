"""The second moment: how large each weight's gradient usually is."""

import math

import torch
from torch import Tensor

from torchmadam import doubles

LARGEST = 2.0**126  # of a square: an 8-bit moment may be rounded up from there


def usable(square: Tensor) -> Tensor | None:
    """Where the square of a float32 gradient is finite, with room above it; None: everywhere.

    Elsewhere one step would poison the second moment for good. A mask costs as much as five multiplications, and is
    rarely needed, so a CPU, which can know that without waiting, first looks at the sum.
    """
    if square.is_cpu and not torch.compiler.is_compiling() and float(square.sum()) <= LARGEST:
        return None
    return square <= LARGEST


def fold_(moment: Tensor, square: Tensor, where: Tensor | None, *, beta: float) -> None:
    """v <- beta v + (1 - beta) g^2, for the elements in ``where`` only."""
    if where is None:
        moment.mul_(beta).add_(square * (1 - beta))
    else:
        moment.copy_(torch.where(where, moment * beta + square * (1 - beta), moment))


def correction(step: Tensor, *, beta: float) -> Tensor:
    """1 - beta^t, the share of its full weight that a moment of t gradients has."""
    if not doubles.are_on(step.device):
        return -torch.expm1(step * (math.log(beta) if beta > 0 else -1e30))
    # As a float32 power this loses four digits at t = 1; from float64 it also rounds alike on every device.
    return (1 - torch.pow(beta, step.double())).float()


def normalised(grad: Tensor, moment: Tensor, correction: Tensor | None, *, max_step: float | Tensor) -> Tensor:
    """u = clamp(g / gbar, -max_step, +max_step) with gbar = sqrt(v / (1 - beta^t)), where 0/0 counts as 0.

    ``max_step`` is the paper's eta*/eta; its text has no bias correction, then gbar = sqrt(v). A gradient of which the
    moment knows nothing, because its square is too small for float32, counts as 0 as well.
    """
    u = (grad / rms(moment, correction)).nan_to_num_(0.0, 0.0, 0.0)
    if isinstance(max_step, Tensor):
        max_step = max_step.to(u.device)  # a GPU does not clamp by a number that is elsewhere
    return u.clamp_(-max_step, max_step)  # type: ignore[arg-type]  # which takes either


def rms(moment: Tensor, correction: Tensor | None) -> Tensor:
    """The usual size of a gradient."""
    return _sqrt(moment if correction is None else moment / correction)


def _sqrt(x: Tensor) -> Tensor:
    """Rounded correctly wherever there is float64. Float32 roots of some CPU libraries are not, one in ten thousand."""
    plain = torch.compiler.is_compiling() or not doubles.are_on(x.device)
    return x.sqrt() if plain else x.double().sqrt_().float()
