"""The second moment in one byte a weight: logarithmic codes, and an exponent for each group of 128.

A code c stands for the float32 whose bits, as an integer, are

    2^23 exponent + 2^23 c / 5          five rungs an octave, over the 51 octaves below the group's largest

Between two rungs a float's bits are linear in its value, so rounding them up as often as their fraction says keeps the
moment's mean. Steps change it by a thousandth and rungs are a fifth apart: rounding to nearest would never move it, and
independent random bits would let it wander. So the fractions are compared with a *dither* that fills the interval
evenly over time, the multiples of the golden ratio, begun elsewhere for each weight. What follows the moment's own
arithmetic is integers, which every device computes alike.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from torchmadam import noise

GROUP = 128
_PER_OCTAVE, _OCTAVES = 5, 51
_FIFTH = 429_496_730  # of 2^31
_GOLDEN = 0x9E3779B9 - 2**32  # of 2^32, as a signed integer
_PLACES = 0x85EBCA6B - 2**32  # any odd number with well mixed bits: where each weight's dither begins


@dataclass(frozen=True)
class Piece:
    """A part of a parameter's moment, in whole groups.

    Attributes:
        codes: dense, of any shape; or some rows of the matrix of a coded parameter.
        exponents: of the groups, and perhaps of later ones.
        phase: of this step's dither.
        first: the position in the parameter of the first weight.
        is_matrix: whether rows are filled up.
    """

    codes: Tensor
    exponents: Tensor
    phase: Tensor
    first: int
    is_matrix: bool = False

    def decoded(self) -> Tensor:
        """As float32, of the shape of the codes."""
        value = torch.empty_like(self.codes, dtype=torch.float32)
        self._grouped(value).copy_(decoded(self._grouped(self.codes), self._own()))
        return value

    def encode_(self, value: Tensor) -> None:
        """Write what :meth:`decoded` gave, changed."""
        encode_(self._grouped(self.codes), self._own(), self._grouped(value), self.phase, self.first)

    def _grouped(self, tensor: Tensor) -> Tensor:
        return tensor if self.is_matrix else noise.in_memory_order(tensor)

    def _own(self) -> Tensor:
        return self.exponents[: count_groups(self._grouped(self.codes).shape)]


def count_groups(shape: Sequence[int]) -> int:
    """Exponents of a flat tensor, or of a matrix whose rows are filled up to multiples of 8: as the kernels go.

    The last 1 to 3 weights of a flat tensor, which they step apart, are a group of their own.
    """
    numel = shape[0] if len(shape) == 1 else shape[0] * (shape[1] + -shape[1] % 8)
    return -(-(numel - numel % 4) // GROUP) + (numel % 4 > 0)


def phase(key: int, step: Tensor) -> Tensor:
    """Where a parameter's dither is at this step, modulo 2^32, as a 0-d int32; ``key`` is its random stream.

    Steps are counted in float32, as PyTorch's optimisers do, so that dither and random bits stand still from 2^24 on.
    """
    return (step.to(torch.int64) * _GOLDEN + key).to(torch.int32)


def phase_number(key: int, step: int) -> int:
    """:func:`phase` of a number, as an unsigned one."""
    return (step * _GOLDEN + key) % 2**32


def decoded(codes: Tensor, exponents: Tensor) -> Tensor:
    """The moment as float32, of a flat tensor or a matrix of codes."""
    bits = (exponents.to(torch.int32) << 23).unsqueeze(1) + _in_groups((codes.to(torch.int64) * _FIFTH) >> 8)
    return _out_of_groups(bits.to(torch.int32), codes.shape).view(torch.float32)


def encode_(codes: Tensor, exponents: Tensor, moment: Tensor, at: Tensor, first: int = 0) -> None:
    """Write a float32 moment, a flat tensor or a matrix, into codes and exponents.

    ``at`` is the :func:`phase` of this step, ``first`` the position in its parameter of the first weight.
    """
    bits = _in_groups(moment.contiguous().view(torch.int32))
    exponents.copy_(((bits.amax(1) >> 23) - (_OCTAVES - 1)).clamp_(min=0))
    # 52, because division by 5 left rungs up to 2 too small; and the dither stops as far before 1: a rung stays one.
    above = (bits - ((exponents.to(torch.int32) << 23) - 52).unsqueeze(1)).clamp_(min=0)
    place = torch.arange(first, first + moment.numel(), device=moment.device).to(torch.int32).view(moment.shape)
    dither = (((place * _PLACES + at).to(torch.int64) & 0xFFFFFFFF) * (2**24 - 2**10)) >> 32
    codes.copy_((_out_of_groups(above, moment.shape).to(torch.int64) * (2 * _PER_OCTAVE) + dither) >> 24)


def _in_groups(values: Tensor) -> Tensor:
    """As a matrix, a group a row, filled up with zeros."""
    if values.dim() == 2:
        values = F.pad(values, (0, -values.shape[1] % 8)).flatten()
    apart = values.numel() % 4
    whole = values.numel() - apart
    rows = [F.pad(values[:whole], (0, -whole % GROUP)).view(-1, GROUP)]
    if apart:
        rows.append(F.pad(values[whole:], (0, GROUP - apart)).view(1, GROUP))
    return torch.cat(rows) if apart else rows[0]


def _out_of_groups(rows: Tensor, shape: Sequence[int]) -> Tensor:
    """The inverse of :func:`_in_groups`."""
    if len(shape) == 2:
        wide = shape[1] + -shape[1] % 8
        return rows.flatten()[: shape[0] * wide].view(shape[0], wide)[:, : shape[1]].contiguous()
    apart = shape[0] % 4
    whole = rows.flatten()[: shape[0] - apart]
    return torch.cat([whole, rows[-1, :apart]]) if apart else whole
