"""PyTorch Lightning: ``configure_optimizers`` returns Madam, and everything else is Lightning as usual.

python -m examples.with_lightning --bits 12
"""

import argparse
from pathlib import Path
from typing import Any

import lightning
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from madam_lab.tasks.digits import load
from torchmadam import Madam, summary, to_ladder_


class Digits(lightning.LightningModule):
    """A perceptron on handwritten digits, whose weights are floats or codes."""

    def __init__(self, bits: int | str | None = None, lr: float = 0.01, epochs: int = 20) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10))
        if bits is not None:
            to_ladder_(self.net, bits)  # here, so that load_from_checkpoint makes the same codes to load into

    def configure_optimizers(self) -> Any:
        """Madam, and a schedule that ends at zero."""
        optimizer = Madam(self.parameters(), lr=self.hparams["lr"], rounding="stochastic")
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.hparams["epochs"])
        return {"optimizer": optimizer, "lr_scheduler": schedule}

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        """The loss of a batch."""
        x, y = batch
        loss = F.cross_entropy(self.net(x), y)
        self.log("train_loss", loss, on_epoch=True, on_step=False)
        return loss

    def validation_step(self, batch: list[Tensor], index: int) -> None:
        """The share of digits that are told right."""
        x, y = batch
        self.log("accuracy", (self.net(x).argmax(1) == y).float().mean(), prog_bar=True)


def loaders(batch: int = 64) -> tuple[DataLoader[Any], DataLoader[Any]]:
    """Training and validation batches."""
    digits = load()
    train, valid = TensorDataset(digits.train_x, digits.train_y), TensorDataset(digits.test_x, digits.test_y)
    return DataLoader(train, batch, shuffle=True), DataLoader(valid, len(valid))


def main(arguments: list[str] | None = None) -> None:
    """Train, and read the checkpoint back."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bits")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--out", type=Path, default=Path("lightning-run"))
    given = parser.parse_args(arguments)

    bits = int(given.bits) if given.bits and given.bits.isdigit() else given.bits
    trainer = lightning.Trainer(max_epochs=given.epochs, default_root_dir=given.out, logger=False)
    trainer.fit(Digits(bits, epochs=given.epochs), *loaders())
    trainer.save_checkpoint(given.out / "last.ckpt")
    print(f"accuracy {float(trainer.callback_metrics['accuracy']):.3f}")
    print(summary(Digits.load_from_checkpoint(given.out / "last.ckpt")))


if __name__ == "__main__":
    main()
