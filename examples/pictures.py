"""Pictures of the docs that no training is needed for: the rungs of the ladders, and where the bytes of training are.

python -m examples.pictures        # writes docs/ladders.svg and docs/memory.svg
"""

from pathlib import Path

import torch
from torch import nn

from madam_lab.report.chart import Series, bars, line_chart
from torchmadam import LadderFormat, Madam, memory, release_gradients, to_ladder_

DOCS = Path("docs")
KINDS = {
    "AdamW, float32": None,
    "Madam, float32": {},
    "12 bits": {"bits": 12},
    "8 bits": {"bits": 8},
    "and no momentum": {"bits": 8, "momentum": 0.0},
    "and an 8-bit moment": {"bits": 8, "momentum": 0.0, "second_moment": "8bit"},
    "and gradients released": {"bits": 8, "momentum": 0.0, "second_moment": "8bit", "release": True},
}


def ladders() -> str:
    """The rungs of two ladders of 32 values."""
    series = []
    for name, ladder in (
        ("the paper's, 4 bits and a sign", LadderFormat.paper(4, spacing=0.27)),
        ("signed, 5 bits", LadderFormat.signed(5)),
    ):
        codes = torch.arange(2 * ladder.levels if not ladder.is_signed else ladder.levels, dtype=torch.int32)
        rungs = ladder.decode(codes, torch.tensor(1.0)).sort().values.tolist()
        series.append(Series(name, list(enumerate(rungs))))
    note = "Every rung of a small ladder, from the lowest to the highest, in units of the largest weight"
    return line_chart(
        series, title="Two ladders", note=note, x_label="rung", y_label="weight", y_range=(-1, 1), height=360
    )


def bytes_of_training() -> str:
    """What :func:`torchmadam.memory` counts for one large layer, a bar for every way of training it."""
    rows = []
    for name, arguments in KINDS.items():
        layer = nn.Linear(512, 512, bias=False)
        optimizer: torch.optim.Optimizer
        if arguments is None:
            optimizer = torch.optim.AdamW(layer.parameters())
        else:
            bits = arguments.get("bits")
            if isinstance(bits, int):
                to_ladder_(layer, bits, dtype=torch.bfloat16)
            others = {key: value for key, value in arguments.items() if key not in ("bits", "release")}
            optimizer = Madam(layer.parameters(), **others)  # type: ignore[arg-type]
            if arguments.get("release"):
                release_gradients(layer, optimizer)
        layer(torch.ones(1, 512, dtype=layer.weight.dtype)).sum().backward()
        optimizer.step()
        found = memory(layer, optimizer)
        parts = [
            ("weights", (found.floats + found.codes + found.scales) / found.weights),
            ("gradients", found.gradients / found.weights),
            ("optimiser state", (found.moments + found.counters) / found.weights),
        ]
        rows.append((name, parts))
    note = "Bytes a weight during training, without activations; codes have bfloat16 gradients"
    return bars(rows, title="Where the bytes are", note=note, unit="bytes a weight")


def main(folder: Path = DOCS) -> None:
    """Write both."""
    (folder / "ladders.svg").write_text(ladders(), encoding="utf-8")
    (folder / "memory.svg").write_text(bytes_of_training(), encoding="utf-8")


if __name__ == "__main__":
    main()
