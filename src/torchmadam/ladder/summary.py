"""What a model's weights take, as numbers and as a table."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from torchmadam import shards
from torchmadam.ladder.tensor import LadderTensor
from torchmadam.messages import require_module


@dataclass(frozen=True)
class Row:
    """One parameter: its bytes, scale included, and the shares of its codes at the ends of the ladder."""

    name: str
    shape: tuple[int, ...]
    format: str
    weights: int
    bytes: int
    at_upper_end: float | None
    at_lower_end: float | None


@dataclass(frozen=True)
class Summary:
    """A model's parameters, each once. ``print`` it for a table."""

    rows: tuple[Row, ...]

    @property
    def weights(self) -> int:
        """Number of weights."""
        return sum(row.weights for row in self.rows)

    @property
    def bytes(self) -> int:
        """Bytes held, scales included."""
        return sum(row.bytes for row in self.rows)

    @property
    def ratio(self) -> float:
        """Bytes held over the bytes of float32."""
        return self.bytes / max(4 * self.weights, 1)

    def __str__(self) -> str:
        head = ("parameter", "shape", "format", "bytes", "of float32", "at the top", "at the bottom")
        lines = [head, *(_cells(row) for row in self.rows)]
        lines.append(("total", f"{self.weights:,} weights", "", f"{self.bytes:,}", f"{self.ratio:.3f}", "", ""))
        widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
        return "\n".join("  ".join(_padded(line, widths)) for line in lines)


def summary(model: nn.Module) -> Summary:
    """The parameters of a model, coded and float: format, bytes, and how many codes sit at the ends of their ladder.

    Many codes at the top mean that weights want to grow past the bound; many at the bottom, that they want to vanish.
    Of what is spread over ranks, only what is here counts.
    """
    require_module(model, "summary")
    return Summary(tuple(_row(name, param) for name, param in model.named_parameters()))


@torch.no_grad()
def _row(name: str, param: Tensor) -> Row:
    param = shards.local(param)
    shape, count = tuple(param.shape), param.numel()
    if not isinstance(param, LadderTensor):
        return Row(
            name, shape, str(param.dtype).removeprefix("torch."), count, count * param.element_size(), None, None
        )
    ladder = param.coding.format
    codes = param.codes()
    held = sum(plane.numel() for plane in param.planes) + param.limit.element_size()
    ends = ladder.at_upper_end(codes), ladder.at_lower_end(codes)
    shares = (int(torch.count_nonzero(end)) / max(count, 1) for end in ends)
    return Row(name, shape, str(ladder), count, held, *shares)


def _cells(row: Row) -> tuple[str, ...]:
    shape = " x ".join(map(str, row.shape)) or "1"
    ends = ["" if share is None else f"{100 * share:.1f} %" for share in (row.at_upper_end, row.at_lower_end)]
    return (row.name, shape, row.format, f"{row.bytes:,}", f"{row.bytes / max(4 * row.weights, 1):.3f}", *ends)


def _padded(cells: tuple[str, ...], widths: list[int]) -> list[str]:
    return [c.ljust(w) if i < 3 else c.rjust(w) for i, (c, w) in enumerate(zip(cells, widths, strict=True))]
