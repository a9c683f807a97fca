"""The first moment in two bytes a weight: where each weight's gradient has pointed lately."""

from dataclasses import dataclass

import torch
from torch import Tensor

from torchmadam import noise

_PLACES = 0xC2B2AE35 - 2**32  # any odd number with well mixed bits, other than that of 8-bit moments


@dataclass(frozen=True)
class Mean:
    """A part of a parameter's first moment.

    Rounded to nearest, a mean would stop short of a gradient that stays the same, and of zero. So it is rounded up as
    often as the bits that are cut off say: where they carry, added to a *dither* that fills their range evenly over
    time (moment8.py), begun elsewhere for each weight.

    Attributes:
        value: bfloat16.
        phase: of this step's dither.
        first: the position in the parameter of the first weight.
    """

    value: Tensor
    phase: Tensor
    first: int

    def fold_(self, grad: Tensor, where: Tensor | None, *, momentum: float) -> Tensor:
        """m <- momentum m + (1 - momentum) g, for the elements in ``where`` only. Returns m before it is rounded."""
        held = self.value.float()
        new = held * momentum + grad * (1 - momentum)
        if where is not None:
            new = torch.where(where, new, held)
        place = noise.positions_like(self.value, self.first).to(torch.int32)
        dither = ((place * _PLACES + self.phase) >> 16) & 0xFFFF
        self.value.copy_(((new.view(torch.int32) + dither) & -65536).view(torch.float32))
        return new
