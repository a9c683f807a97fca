"""The first moment in two bytes a weight: where each weight's gradient has pointed lately."""

from dataclasses import dataclass

import torch
from torch import Tensor

from torchmadam import noise

_PLACES = 0xC2B2AE35 - 2**32  # any odd number with well mixed bits, other than that of 8-bit moments


def returned(momentum: float) -> float:
    """How much a mean has to hold, of what is to come with the next steps: a tenth of it with the next one, at 0.9.

    (1 - m) / m, of which m is left in the next step and again in each after it, so that all of it has come in the end.
    A small m would have to hold more than all of it, and owe too much if m grew; there less comes.
    """
    return min((1 - momentum) / momentum, 1.0) if momentum else 0.0


def room(momentum: float) -> float:
    """The largest part of what is held that comes with a single step."""
    return momentum * returned(momentum)


@dataclass(frozen=True)
class Mean:
    """A part of a parameter's first moment.

    Rounded to nearest, a mean would stop short of a gradient that stays the same, and of zero. So it is rounded up as
    often as the bits that are cut off say: where they carry, added to a *dither* that fills their range evenly over
    time (moment8.py), begun elsewhere for each weight.

    For codes it is a mean of steps instead of gradients, and also keeps what rounding dropped of them (update.py).

    Attributes:
        value: bfloat16.
        phase: of this step's dither.
        first: the position in the parameter of the first weight.
    """

    value: Tensor
    phase: Tensor
    first: int

    def folded(self, grad: Tensor, where: Tensor | None, *, momentum: float, pace: Tensor | None = None) -> Tensor:
        """momentum m + (1 - momentum) g, for the elements in ``where`` only, in float32.

        With a ``pace``, the lr of codes: m is a mean of steps, lr g, so that each step keeps the lr that it was made
        with.
        """
        held = self.value.float()
        new = held * momentum + grad * (1 - momentum if pace is None else pace * (1 - momentum))
        return new if where is None else torch.where(where, new, held)

    def store_(self, new: Tensor) -> None:
        """Hold a mean, rounded."""
        place = noise.positions_like(self.value, self.first).to(torch.int32)
        if torch.compiler.is_compiling():
            # Else Inductor takes the product for arithmetic of indices, and writes a sequence with such a step in C++,
            # where overflow is not defined: GCC then leaves out what follows the last whole vector (PyTorch 2.11).
            place = place & -1
        dither = ((place * _PLACES + self.phase) >> 16) & 0xFFFF
        self.value.copy_(((new.view(torch.int32) + dither) & -65536).view(torch.float32))
