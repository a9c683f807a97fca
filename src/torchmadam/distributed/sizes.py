"""What a model takes on many devices: bytes held and bytes sent, from figures measured on a small layer.

``python -m torchmadam.distributed.sizes docs/distributed.md`` writes the tables of that page.
"""

import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from torchmadam.ladder.convert import to_ladder_
from torchmadam.ladder.tensor import LadderTensor
from torchmadam.madam import Madam
from torchmadam.memory import memory

WEIGHTS = (1, 7, 70)  # billions
DEVICES = (1, 8, 64)
_SIDE = 512  # of the layer that is measured: what a tensor costs apart from its weights is then a 10,000th


@dataclass(frozen=True)
class Way:
    """A way to train.

    Attributes:
        name: in the tables.
        dtype: of the weights that a rank holds, or that codes decode to, and so of its gradients.
        gathered: dtype in which float weights travel.
        reduced: dtype in which gradients travel.
        ladder: of coded weights; None: floats.
        moment: Madam's second moment; None: AdamW.
        momentum: Madam's.
        released: whether gradients are freed as they arrive.
    """

    name: str
    dtype: torch.dtype = torch.bfloat16
    gathered: torch.dtype = torch.bfloat16
    reduced: torch.dtype = torch.bfloat16
    ladder: str | None = None
    moment: Any = None
    momentum: float = 0.9
    released: bool = False


WAYS = (
    Way("AdamW, bfloat16"),
    Way("AdamW, float32 shards, bfloat16 on the wire", dtype=torch.float32),
    Way("Madam, bfloat16", moment="float32"),
    Way("Madam, bfloat16, no momentum", moment="float32", momentum=0.0),
    Way("Madam 12-bit", ladder="signed12", moment="float32"),
    Way("Madam 12-bit, no momentum, 8-bit moment", ladder="signed12", moment="8bit", momentum=0.0),
    Way("Madam 8-bit, no momentum, 8-bit moment", ladder="signed8", moment="8bit", momentum=0.0),
    Way("Madam 8-bit, the same, gradients released", ladder="signed8", moment="8bit", momentum=0.0, released=True),
)


@dataclass(frozen=True)
class Measured:
    """Bytes a weight: held on all devices together, gathered in a pass, and reduced in a step."""

    held: float
    gathered: float
    reduced: float

    def on_each(self, weights: float, devices: int) -> float:
        """Bytes that each device holds, activations and gathered layers apart."""
        return weights * self.held / devices

    def sent_by_each(self, weights: float, devices: int) -> float:
        """Bytes that each device sends in a step: weights before forward and again before backward, and gradients.

        Of whatever all devices have together, each sends or passes on all but its own part.
        """
        return weights * (2 * self.gathered + self.reduced) * (devices - 1) / devices


def measured(way: Way) -> Measured:
    """Train a layer for a step, and look at what it holds."""
    layer = nn.Linear(_SIDE, _SIDE, bias=False).to(way.dtype)
    if way.ladder is not None:
        to_ladder_(layer, way.ladder, dtype=way.dtype)
    optimizer: Any = torch.optim.AdamW(layer.parameters())
    if way.moment is not None:
        optimizer = Madam(layer.parameters(), second_moment=way.moment, momentum=way.momentum)
    layer(torch.ones(1, _SIDE, dtype=way.dtype)).sum().backward()
    optimizer.step()
    found = memory(layer, optimizer)
    weight = layer.weight
    gathered: float = way.gathered.itemsize
    if isinstance(weight, LadderTensor):
        gathered = sum(plane.nbytes for plane in weight.planes) / found.weights
    held = (found.total - (found.gradients if way.released else 0)) / found.weights
    return Measured(held, gathered, way.reduced.itemsize)


def tables() -> str:
    """Two tables in Markdown: gigabytes (10^9 bytes) that each device holds, and sends in a step."""
    figures = {way.name: measured(way) for way in WAYS}
    places = [(weights, devices) for weights in WEIGHTS for devices in DEVICES]
    head = "".join(f" {weights} B on {devices} |" for weights, devices in places)
    line = "|---" * (len(places) + 2) + "|"
    held = [f"| held by each device, GB | bytes a weight |{head}", line]
    sent = [f"| sent by each device in a step, GB | bytes a weight |{head}", line]
    for name, found in figures.items():
        cells = [f"{found.on_each(weights, devices):.2f}" for weights, devices in places]
        held.append(f"| {name} | {found.held:.2f} | {' | '.join(cells)} |")
        cells = [f"{found.sent_by_each(weights, devices):.2f}" for weights, devices in places]
        sent.append(f"| {name} | {2 * found.gathered + found.reduced:.2f} | {' | '.join(cells)} |")
    return "\n".join([*held, "", *sent])


def written(page: str) -> str:
    """A page with its tables made anew, between its two marks."""
    marks = r"(<!-- sizes -->\n).*?(\n<!-- end -->)"
    if not re.search(marks, page, re.DOTALL):
        raise ValueError("the page has no marks <!-- sizes --> and <!-- end --> to write between")
    made = tables()
    return re.sub(marks, lambda match: match[1] + made + match[2], page, flags=re.DOTALL)


def main() -> None:
    """Write the tables of the pages named on the command line; without one, print them."""
    if not sys.argv[1:]:
        print(tables())
    for name in sys.argv[1:]:
        page = Path(name)
        page.write_text(written(page.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
