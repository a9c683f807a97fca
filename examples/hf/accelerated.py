"""A training loop of one's own under Accelerate: accumulation, clipping, a schedule, and states saved and loaded.

accelerate launch -m examples.hf.accelerated README.md docs/*.md
"""

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor
from torch.utils.data import DataLoader

from examples.hf.text import pieces, small_gpt2
from torchmadam import Madam, hf, to_ladder_


class Loop:
    """A model, its optimiser and schedule, and what Accelerate makes of them."""

    def __init__(self, data: list[dict[str, Tensor]], length: int, bits: int | str | None, **accelerator: Any) -> None:
        self.accelerator = Accelerator(**accelerator)
        model = small_gpt2(length)
        if bits is not None:
            hf.register_(to_ladder_(model, bits))  # a model of one's own: torchmadam.plain_state_dict_(model)
        optimizer = Madam(model.parameters(), rounding="stochastic")
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
        loader: DataLoader[dict[str, Tensor]] = DataLoader(data, batch_size=8)  # type: ignore[arg-type]
        prepared = self.accelerator.prepare(model, optimizer, schedule, loader)
        self.model, self.optimizer, self.schedule, self.loader = prepared

    def epoch(self) -> Iterator[float]:
        """One pass over the data; yields the loss of every batch."""
        for batch in self.loader:
            with self.accelerator.accumulate(self.model):
                loss = self.model(**batch).loss
                self.accelerator.backward(loss)
                if self.accelerator.sync_gradients:
                    self.accelerator.clip_grad_norm_(self.model.parameters(), 1.0)
                self.optimizer.step()
                self.schedule.step()
                self.optimizer.zero_grad()
            yield loss.item()


def main(arguments: list[str] | None = None) -> None:
    """Train, save the whole state, load it and train on."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("text", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, default=Path("accelerate-state"))
    parser.add_argument("--bits", default="12")
    given = parser.parse_args(arguments)

    bits = int(given.bits) if given.bits.isdigit() else given.bits
    loop = Loop(pieces(given.text, 64), 64, bits, gradient_accumulation_steps=2)
    first = list(loop.epoch())
    loop.accelerator.save_state(str(given.out))
    loop.accelerator.load_state(str(given.out))
    second = list(loop.epoch())
    print(f"mean loss {sum(first) / len(first):.3f}, then {sum(second) / len(second):.3f}")


if __name__ == "__main__":
    main()
