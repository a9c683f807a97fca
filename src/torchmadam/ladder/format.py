"""Number systems: a weight is a rung of a ladder, and the rungs are evenly spaced where the optimiser steps.

Two ladders, one idea. Let sigma* be a tensor's limit, its largest representable weight.

    paper   w = s sigma* exp(-k spacing)        a sign s, frozen, and k in 0 .. levels-1; no zero
    signed  w = beta_w sinh(k spacing)          one signed integer k in -K .. K; beta_w = crossing sigma*

A step of Madam is an integer added to k, on both.
"""

import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

# The largest ratio of a ladder's ends: beyond it, rungs would leave float32.
_MAX_RANGE = 1e30
_PAPER_SPACING = {12: 0.001, 10: 0.004, 8: 0.016}


@dataclass(frozen=True)
class LadderFormat:
    """A ladder: how many rungs, how far apart, and whether they pass through zero.

    Make one with :meth:`paper`, :meth:`signed` or :meth:`preset`. A *code* is an integer in
    ``0 .. 2**stored_bits - 1``: on the paper's ladder k, with the sign above its bits (1 is negative); on the signed
    ladder k + K.

    Attributes:
        levels: the number of values of k.
        spacing: the distance between rungs in log space (the paper's eta_0), or in asinh space.
        crossing: 0 for the paper's ladder; on a signed one, beta_w / sigma*, the share of the range where rungs are
            nearly even.
    """

    levels: int
    spacing: float
    crossing: float = 0.0

    def __post_init__(self) -> None:
        if type(self.levels) is not int:
            raise ValueError(f"levels={self.levels!r} must be a whole number")
        if not 2 <= self.levels <= 2**15 or not 0 < self.spacing < math.inf or not 0 <= self.crossing < math.inf:
            raise ValueError(
                f"levels={self.levels}, spacing={self.spacing}, crossing={self.crossing} make no ladder: use 2 to "
                f"32768 levels, a spacing above 0 and a crossing of 0 or more"
            )
        if self.crossing and self.levels % 2 == 0:
            raise ValueError(
                f"a signed ladder has as many rungs below zero as above, so levels={self.levels} must be odd"
            )
        if self.crossing and not math.isclose(self.spacing, math.asinh(1 / self.crossing) / self.top, rel_tol=1e-9):
            raise ValueError(
                f"a signed ladder ends at its limit, so its spacing is asinh(1/crossing)/K, not {self.spacing}; "
                f"use LadderFormat.signed"
            )
        if not self.crossing and (self.levels - 1) * self.spacing > math.log(_MAX_RANGE):
            raise ValueError(
                f"{self.levels} levels spaced by {self.spacing} span exp({(self.levels - 1) * self.spacing:.0f}), "
                f"more than float32 can hold; use a smaller spacing"
            )

    @classmethod
    def paper(
        cls, bits: int | None = None, spacing: float | None = None, *, levels: int | None = None
    ) -> "LadderFormat":
        """The paper's ladder with ``2**bits`` rungs, or with any number of ``levels``, and a sign beside them.

        12, 10 and 8 bits know the paper's spacing for its classifiers (.001, .004, .016: a range of 60); any other
        ladder needs one, since bits alone say nothing about the range.
        """
        if (bits is None) == (levels is None):
            raise ValueError(
                f"bits={bits} and levels={levels}: give exactly one of the two, since each determines the other"
            )
        if bits is not None and (type(bits) is not int or not 1 <= bits <= 15):
            raise ValueError(f"bits={bits}: the paper's ladder has 1 to 15 bits beside the sign")
        if spacing is None:
            if bits not in _PAPER_SPACING:
                rungs = f"{bits}" if levels is None else f"levels={levels}"
                near = math.log(60) / max((levels or 2 ** (bits or 1)) - 1, 1)
                raise ValueError(
                    f"no spacing is known for bits={bits}, levels={levels}; for a range of 60, which 12, 10 and 8 bits "
                    f"have, use LadderFormat.paper({rungs}, spacing={near:.2g})"
                )
            spacing = _PAPER_SPACING[bits]
        return cls(levels=levels if bits is None else 2**bits, spacing=float(spacing))  # type: ignore[arg-type]

    @classmethod
    def signed(cls, stored_bits: int, crossing: float = 1.0) -> "LadderFormat":
        """The ladder through zero, in exactly this many bits. Its outermost rungs lie at -sigma* and +sigma*."""
        if type(stored_bits) is not int or not 2 <= stored_bits <= 15:
            raise ValueError(f"a signed ladder of {stored_bits} bits cannot be made: it has 2 to 15")
        if not 0 < crossing < math.inf:
            raise ValueError(
                f"crossing={crossing}: a signed ladder needs crossing > 0; crossing 0 is LadderFormat.paper"
            )
        top = 2 ** (stored_bits - 1) - 1
        return cls(levels=2 * top + 1, spacing=math.asinh(1 / crossing) / top, crossing=float(crossing))

    @classmethod
    def preset(cls, name: str) -> "LadderFormat":
        """A ladder by name: paper12, paper10, paper8, signed12, signed8, or synapse (26 levels over a range of 60)."""
        if name not in _PRESETS:
            raise ValueError(f"no ladder is named {name!r}; choose one of {', '.join(_PRESETS)}")
        return _PRESETS[name]

    @property
    def is_signed(self) -> bool:
        """Whether the ladder passes through zero, with the sign inside the code."""
        return self.crossing > 0

    @property
    def top(self) -> int:
        """The largest k: levels - 1 on the paper's ladder (its *smallest* weight), K on the signed one."""
        return self.levels // 2 if self.is_signed else self.levels - 1

    @property
    def code_bits(self) -> int:
        """Bits of the integer k."""
        return (self.levels - 1).bit_length()

    @property
    def stored_bits(self) -> int:
        """Bits of a whole weight; the paper does not count the sign, this does."""
        return self.code_bits if self.is_signed else self.code_bits + 1

    @property
    def dynamic_range(self) -> float:
        """The ratio of the largest to the smallest weight that is not zero."""
        if self.is_signed:
            return math.sinh(self.top * self.spacing) / math.sinh(self.spacing)
        return math.exp(self.top * self.spacing)

    @property
    def default_rounding(self) -> str:
        """To nearest on the paper's ladder, as in the paper; stochastic on the signed one."""
        return "stochastic" if self.is_signed else "nearest"

    def __str__(self) -> str:
        if self.is_signed:
            return f"signed {self.stored_bits}-bit, crossing {self.crossing:g}"
        name = f"{self.code_bits}-bit" if self.levels == 2**self.code_bits else f"{self.levels}-level"
        return f"{name}, spacing {self.spacing:.4g}"

    def decode(self, codes: Tensor, limit: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """The weights of integer codes, computed in float32; ``limit`` is sigma*."""
        # A table, because exp and sinh of vectors and of single numbers differ in the last bit on a CPU, and the weight
        # of a code must not depend on where it lies. Few weights are scaled and cast, or the table of many.
        # index_select takes half as long as indexing.
        rungs, places = _rungs(self, codes.device), codes.flatten()
        if len(places) < len(rungs):
            weights = (rungs.index_select(0, places) * limit).to(dtype)
        else:
            weights = (rungs * limit).to(dtype).index_select(0, places)
        return weights.view(codes.shape)

    def encode(self, values: Tensor, limit: Tensor, bits: Tensor | None = None) -> Tensor:
        """The int32 codes of float values: the nearest rung, half to even; or, given random ``bits``, stochastically.

        Values beyond the limit go to the outermost rung. The paper's ladder has no zero: there it is the smallest
        positive weight.
        """
        values = values.float()
        if self.is_signed:
            x = torch.asinh(values / (limit * self.crossing)) / self.spacing
            k = rounded(x.nan_to_num(0.0), bits).clamp(-self.top, self.top)  # 0/0: a tensor of zeros on a limit of zero
            return k.to(torch.int32) + self.top
        x = (limit.log() - values.abs().log()) / self.spacing
        k = rounded(x.nan_to_num(float(self.top), float(self.top)), bits).clamp(0, self.top).to(torch.int32)
        return k | ((values < 0).to(torch.int32) << self.code_bits)

    def split(self, codes: Tensor) -> tuple[Tensor, Tensor]:
        """Codes of the paper's ladder as k and the sign, +1 or -1."""
        return codes & self._mask, 1 - 2 * (codes >> self.code_bits)

    @property
    def _mask(self) -> int:
        """The bits of k."""
        return (1 << self.code_bits) - 1

    def climbed(
        self, codes: Tensor, u: Tensor, rate: float | Tensor, decay: float | Tensor, bits: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """The codes after one step of Madam: k moves by the rounded u lr / spacing, and stays on the ladder.

        And by how much u lr / spacing would have to be larger for what rounding took away.

        Args:
            codes: int32 codes.
            u: the normalised gradient.
            rate: lr / spacing.
            decay: rate x weight decay, the rungs by which a weight far from zero shrinks.
            bits: random bits for stochastic rounding; None rounds to nearest, half to even.
        """
        if self.is_signed:
            k = codes - self.top
            move = u * -rate
            if isinstance(decay, Tensor) or decay:
                # w <- w exp(-lr decay) moves x = asinh(w / beta_w) by -lr decay tanh x.
                move = move - torch.tanh(k.float() * self.spacing) * decay
            whole = rounded(move, bits)
            return (k + whole).clamp(-self.top, self.top).to(torch.int32) + self.top, whole - move
        k, sign = self.split(codes)
        move = u * sign * rate + decay
        whole = rounded(move, bits)
        moved = (k + whole).clamp(0, self.top).to(torch.int32)
        return moved | (codes & (1 << self.code_bits)), (move - whole) * sign

    def at_upper_end(self, codes: Tensor) -> Tensor:
        """True where a weight is as large as the ladder allows."""
        if self.is_signed:
            return (codes - self.top).abs() == self.top
        return (codes & self._mask) == 0

    def at_lower_end(self, codes: Tensor) -> Tensor:
        """True where a weight is as small as the ladder allows."""
        if self.is_signed:
            return codes == self.top
        return (codes & self._mask) == self.top


def rounded(x: Tensor, bits: Tensor | None) -> Tensor:
    """x as a whole number: the nearest, half to even; or, with random bits, floor(x + r), r uniform on [0, 1)."""
    if bits is None:
        return torch.round(x)
    # 24 bits fit float32 exactly.
    return torch.floor(x + ((bits >> 8) & 0xFFFFFF).float() * 2.0**-24)


@functools.lru_cache(maxsize=64)
def _rungs(ladder: LadderFormat, device: torch.device) -> Tensor:
    """The weight of every code on a limit of 1, rounded from float64. Codes that do not exist repeat the last one."""
    with _disable_current_modes():  # a table that is kept must be a real one, whoever is tracing
        k = torch.arange(2**ladder.code_bits, dtype=torch.float64, device="cpu").clamp(max=ladder.levels - 1)
        if ladder.is_signed:
            rungs = torch.sinh((k - ladder.top) * ladder.spacing) * ladder.crossing
        else:
            size = torch.exp(-k * ladder.spacing)
            rungs = torch.cat([size, -size])
        return rungs.float().to(device)


_PRESETS = {
    "paper12": LadderFormat.paper(12),
    "paper10": LadderFormat.paper(10),
    "paper8": LadderFormat.paper(8),
    "signed12": LadderFormat.signed(12),
    "signed8": LadderFormat.signed(8),
    "synapse": LadderFormat.paper(levels=26, spacing=math.log(60) / 25),
}
