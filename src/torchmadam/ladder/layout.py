"""How the codes of one tensor lie in memory: its format, its shape, the order of its dimensions, and its signs."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from torchmadam import noise
from torchmadam.ladder import packing
from torchmadam.ladder.format import LadderFormat

# Where the signs of the paper's ladder are.
PLANE = "plane"  # in a plane of their own
POSITIVE = "positive"  # nowhere: all weights are positive, like the gains of a norm
SEED = "seed"  # nowhere: a counter-based generator gives them
# The first row of a shard that has been made but not filled; it reads as zeros.
BLANK = -1


@dataclass(frozen=True)
class CodeLayout:
    """Everything about a coded tensor but its bytes.

    Codes form a matrix: a row for each index of the first dimension, the other dimensions in memory order along it.

    Attributes:
        format: the ladder.
        shape: the tensor's shape.
        order: its dimensions from the slowest to the fastest in memory; the first is always 0. (0, 1, 2, 3) is
            contiguous, (0, 2, 3, 1) channels_last.
        signs: "plane", "positive" or "seed" on the paper's ladder; "plane" and without meaning on the signed one.
        sign_key: the generator's key, for signs from a seed.
        first_row: of a shard, which of its tensor's rows it begins with. Signs from a seed, and random bits, go by an
            element's position in the whole tensor, so that sharding changes neither. BLANK: not filled yet.
        whole_rows: of a shard, the rows of its tensor; None: this is no shard.
    """

    format: LadderFormat
    shape: tuple[int, ...]
    order: tuple[int, ...]
    signs: str = PLANE
    sign_key: int = 0
    first_row: int = 0
    whole_rows: int | None = None

    @classmethod
    def contiguous(
        cls, ladder: LadderFormat, shape: Sequence[int], signs: str = PLANE, sign_key: int = 0
    ) -> "CodeLayout":
        """A layout in row-major order."""
        return cls(ladder, tuple(shape), tuple(range(len(shape))), signs, sign_key)

    @property
    def rows(self) -> int:
        """Length of the first dimension; 1 for a number."""
        return self.shape[0] if self.shape else 1

    @property
    def columns(self) -> int:
        """Weights in a row."""
        return math.prod(self.shape[1:])

    @property
    def numel(self) -> int:
        """Weights in the tensor."""
        return math.prod(self.shape)

    @property
    def first(self) -> int:
        """The position in the whole tensor of the first weight."""
        return max(self.first_row, 0) * self.columns

    @property
    def strides(self) -> tuple[int, ...]:
        """The tensor's strides, in elements."""
        strides, step = [0] * len(self.shape), 1
        for dim in reversed(self.order):
            strides[dim] = step
            step *= max(self.shape[dim], 1)
        return tuple(strides)

    @property
    def widths(self) -> tuple[int, ...]:
        """Bits per weight of each plane; a plane of signs comes last."""
        sign = (1,) if not self.format.is_signed and self.signs == PLANE else ()
        return packing.plane_widths(self.format.code_bits) + sign

    @property
    def plane_shapes(self) -> list[tuple[int, int]]:
        """Shape of each uint8 plane."""
        return [(self.rows, packing.bytes_per_row(self.columns, width)) for width in self.widths]

    def matrix(self, tensor: Tensor) -> Tensor:
        """A dense tensor of this shape as rows and columns in memory order; a view where its strides allow one."""
        return tensor.permute(self.order).reshape(self.rows, self.columns)

    def pack(self, codes: Tensor) -> list[Tensor]:
        """A matrix of codes as planes. Signs that are not stored are dropped."""
        planes = self.pack_k(codes)
        if self.format.is_signed or self.signs != PLANE:
            return planes
        return planes + packing.pack(codes >> self.format.code_bits, (1,))

    def pack_k(self, codes: Tensor) -> list[Tensor]:
        """The planes of a matrix of codes, without one of signs."""
        return packing.pack(codes, packing.plane_widths(self.format.code_bits))

    def unpack(self, planes: Sequence[Tensor], first_row: int = 0) -> Tensor:
        """The int32 codes, signs included, of planes that hold the rows from ``first_row`` on."""
        if self.format.is_signed or self.signs == POSITIVE:
            return packing.unpack(planes, self.widths, self.columns)
        if self.signs == PLANE:
            k = packing.unpack(planes[:-1], self.widths[:-1], self.columns)
            sign = packing.unpack(planes[-1:], (1,), self.columns)
        else:
            k = packing.unpack(planes, self.widths, self.columns)
            sign = self.generated_signs(first_row, k.shape[0], k.device)
        return k.bitwise_or_(sign.bitwise_left_shift_(self.format.code_bits))

    def generated_signs(self, first_row: int, rows: int, device: torch.device) -> Tensor:
        """Sign bits of some rows from the seed, by logical position, so that they do not depend on the memory order."""
        step = torch.zeros((), dtype=torch.int64, device=device)
        shape = torch.Size((rows, *self.shape[1:]))
        bits = noise.random_bits(shape, self.sign_key, step, self.first + first_row * self.columns)
        return ((bits >> 31) & 1).permute(self.order or (0,)).reshape(rows, self.columns)

    def reordered(self, order: Sequence[int]) -> "CodeLayout":
        """The same tensor in another memory order."""
        return replace(self, order=tuple(order))
