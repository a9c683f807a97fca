"""Hugging Face's Trainer with Madam: floats or codes, checkpoints, and a folder that ``from_pretrained`` reads.

python -m examples.hf.trainer README.md docs/*.md --bits 12 --out my-model
"""

import argparse
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel, Trainer, TrainingArguments

from examples.hf.text import pieces, small_gpt2
from torchmadam import Madam, hf, summary, to_ladder_


def trainer(
    model: PreTrainedModel,
    data: list[dict[str, Tensor]],
    folder: Path,
    *,
    lr: float = 0.01,
    **arguments: Any,
) -> Trainer:
    """A Trainer that steps with Madam. Any of ``TrainingArguments`` may be given; its learning_rate does nothing."""
    settings = TrainingArguments(
        str(folder),
        **{"lr_scheduler_type": "cosine", "weight_decay": 0.2, "logging_steps": 20, "report_to": "none", **arguments},
    )
    # Stochastic rounding, of the paper's ladders too, because the schedule ends at zero: below half of its spacing a
    # ladder rounded to nearest stands still.
    madam = (Madam, {"lr": lr, "rounding": "stochastic"})
    return Trainer(model, settings, train_dataset=data, optimizer_cls_and_kwargs=madam)


def coded(model: PreTrainedModel, bits: int | str) -> PreTrainedModel:
    """The model with codes for weights, which Transformers is told about, so that it can save and load them."""
    return hf.register_(to_ladder_(model, bits))


def main(arguments: list[str] | None = None) -> None:
    """Train on text files, save, and read the folder back."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("text", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, default=Path("hf-model"))
    parser.add_argument("--bits", help="12, 10, 8, signed8, ...; without it, weights are floats")
    parser.add_argument("--epochs", type=float, default=3)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint in --out")
    given = parser.parse_args(arguments)

    model = small_gpt2(given.length)
    if given.bits:
        coded(model, int(given.bits) if given.bits.isdigit() else given.bits)
    run = trainer(model, pieces(given.text, given.length), given.out, num_train_epochs=given.epochs)
    run.train(resume_from_checkpoint=given.resume)
    run.save_model()
    print(summary(AutoModelForCausalLM.from_pretrained(given.out)))


if __name__ == "__main__":
    main()
