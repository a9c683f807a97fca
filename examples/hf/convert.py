"""Going on from trained weights: the loss of a float model before its weights become codes, just after, and later.

A small GPT-2 is built from its config and trained with AdamW on WikiText-2, byte by byte. Then its weights take the
nearest codes, with ``to_ladder_(init="nearest")``, and Madam trains them for 500 more steps: as it comes, but for the
decay, and by the paper's rule. AdamW going on, and Madam on floats, are the controls.

python -m examples.hf.convert --seeds 0,1,2      # 15 minutes a seed on one core; tables by `madam report`
"""

import argparse
import copy
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR
from transformers import GPT2LMHeadModel

from examples.hf.text import pieces, small_gpt2
from madam_lab import data, records
from madam_lab.studies.study import Point, Study
from torchmadam import Madam, to_ladder_


def measure(
    *, seed: int, files: Sequence[str], length: int, layers: int, width: int, batch: int, train_steps: int,
    more_steps: int, adamw_lr: float, later_adamw_lr: float, lrs: Sequence[float], weights: Mapping[str, Sequence[str]],
    valid_pieces: int,
) -> list[Point]:  # fmt: skip
    """Train once with AdamW, then go on in every way; a point each. All schedules fall linearly to zero."""
    train, valid = (_tokens(data.root(None) / name, length) for name in files)
    valid = valid[:valid_pieces]

    def trained(model: GPT2LMHeadModel, optimizer: torch.optim.Optimizer, steps: int, key: int) -> float:
        """The loss on the validation text after so many steps on pieces that the key chooses."""
        order = torch.Generator().manual_seed(1000 * seed + key)
        schedule = LambdaLR(optimizer, lambda step: 1 - step / steps)
        model.train()
        for _ in range(steps):
            x = train[torch.randint(len(train), (batch,), generator=order)]
            optimizer.zero_grad()
            model(input_ids=x, labels=x).loss.backward()
            optimizer.step()
            schedule.step()
        return _loss(model, valid)

    model = small_gpt2(length, layers=layers, width=width, seed=seed)
    before = trained(model, torch.optim.AdamW(model.parameters(), adamw_lr), train_steps, key=0)

    def point(rule: str, kind: str, lr: float) -> Point:
        changed = copy.deepcopy(model)
        if kind != "float32":
            to_ladder_(changed, kind, init="nearest")
        at_the_switch = _loss(changed, valid)
        optimizer = RULES[rule](changed, lr, kind == "float32")
        after = trained(changed, optimizer, more_steps, key=1)
        return {"rule": rule, "kind": kind, "lr": lr, "before": before, "switch": at_the_switch, "after": after}

    points = [point("AdamW", "float32", later_adamw_lr)]
    return points + [point(rule, kind, lr) for rule, kinds in weights.items() for kind in kinds for lr in lrs]


def _default(model: GPT2LMHeadModel, lr: float, floats: bool) -> torch.optim.Optimizer:
    """As docs/migration.md has it for trained weights: no decay, and nothing that would cut outliers."""
    uncut: dict[str, Any] = {"bound": None, "crossing": 5.0} if floats else {}
    return Madam(model.parameters(), lr, weight_decay=0.0, **uncut)


RULES: dict[str, Callable[[GPT2LMHeadModel, float, bool], torch.optim.Optimizer]] = {
    "AdamW": lambda model, lr, floats: torch.optim.AdamW(model.parameters(), lr),
    "Madam": _default,
    "Madam.paper": lambda model, lr, floats: Madam.paper(
        model.parameters(), lr, rounding=None if floats else "stochastic"
    ),
}


def _tokens(path: Path, length: int) -> Tensor:
    return torch.stack([piece["input_ids"] for piece in pieces([path], length)])


@torch.no_grad()
def _loss(model: GPT2LMHeadModel, tokens: Tensor) -> float:
    """Nats a byte, without dropout."""
    model.eval()
    return float(sum(model(input_ids=x, labels=x).loss * len(x) for x in tokens.split(64))) / len(tokens)


STUDY = Study(
    "conversion_gpt2",
    measure,
    {
        "files": ["wikitext-2/train.txt", "wikitext-2/valid.txt"],
        "length": 64,
        "layers": 2,
        "width": 96,
        "batch": 16,
        "train_steps": 3000,
        "more_steps": 500,
        "adamw_lr": 0.002,
        "later_adamw_lr": 0.0005,
        "lrs": [0.01, 0.003, 0.001],
        "weights": {
            "Madam": ["float32", "signed12", "signed8"],
            "Madam.paper": ["float32", "paper12", "signed8"],
        },
        "valid_pieces": 1024,
    },
    tiny={"train_steps": 4, "more_steps": 2, "width": 32, "layers": 1, "lrs": [0.01], "valid_pieces": 8, "length": 16},
)


def main(arguments: list[str] | None = None) -> None:
    """Make the study for some seeds, and write a record for each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--results", type=Path, default=records.RESULTS)
    parser.add_argument("--smoke", action="store_true", help="in seconds, to show that it works")
    given = parser.parse_args(arguments)
    study = STUDY.as_smoke() if given.smoke else STUDY
    for seed in map(int, given.seeds.split(",")):
        for point in study.run(seed, given.results)["points"]:
            print(seed, point)


if __name__ == "__main__":
    main()
