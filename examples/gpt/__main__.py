"""The command line: ``python -m examples.gpt train|sample|memory --help``."""

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import torch

from examples.gpt import memory, record
from examples.gpt.data import Corpus, restored
from examples.gpt.methods import METHODS, Method
from examples.gpt.model import SIZES, Shape
from examples.gpt.sample import read, sample
from examples.gpt.train import Run, Settings
from madam_lab.trainer import Limits, Stopped


def main(arguments: list[str] | None = None) -> int:
    """Run a command; returns the exit status."""
    given = sys.argv[1:] if arguments is None else arguments
    options = _parser().parse_args(given)
    device = torch.device(options.device)
    try:
        if options.command == "train":
            return _train(options, device)
        if options.command == "memory":
            return _memory(options, device, given[1:])
        chosen = (options.prompt, options.count, options.temperature, options.top, options.seed)
        print(sample(options.checkpoint, *chosen, device))
        return 0
    except (ValueError, FileNotFoundError, FileExistsError, ImportError) as error:
        print(f"gpt: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m examples.gpt", description="A language model, end to end.")
    style: dict[str, Any] = {"formatter_class": argparse.ArgumentDefaultsHelpFormatter, "allow_abbrev": False}
    commands = parser.add_subparsers(dest="command", required=True)

    train = commands.add_parser("train", help="train on text files", **style)
    _add_model(train, size="tiny", length=256, batch=16)
    train.add_argument("--text", nargs="+", type=Path, required=True, help="files; their last part is for validation")
    train.add_argument("--tokens", default="bytes", help="bytes, or bpe:8192 for an encoding trained on the text")
    train.add_argument("--valid-share", type=float, default=0.05, help="of the text")
    train.add_argument("--steps", type=int, default=1000)
    train.add_argument("--seed", type=int, default=0)
    train.add_argument("--lr", type=float, help="0.01 for Madam, 3e-4 for AdamW")
    train.add_argument("--schedule", choices=("cosine", "linear"), help="cosine for AdamW, linear for Madam")
    train.add_argument("--warmup", type=float, help="share of the steps: 0.05 for AdamW, 0 for Madam")
    train.add_argument("--checkpoint-activations", action="store_true", help="compute them twice, hold few")
    train.add_argument("--deterministic", action="store_true", help="slower; on a GPU, resuming is exact only with it")
    train.add_argument("--valid-every", type=int, help="steps; a tenth of them")
    train.add_argument("--valid-tokens", type=int, default=100_000, help="at most so many")
    train.add_argument("--checkpoint", type=Path, help="runs/gpt/NAME.pt")
    train.add_argument("--resume", action="store_true", help="go on from the checkpoint")
    train.add_argument("--save-minutes", type=float, default=10.0)
    train.add_argument("--save-steps", type=int)
    train.add_argument("--minutes", type=float, default=float("inf"), help="save and leave after so many")

    step = commands.add_parser("memory", help="what a step of training takes", **style)
    _add_model(step, size="124M", length=1024, batch=1)
    step.add_argument("--vocabulary", type=int, default=32_768)
    step.add_argument("--largest", action="store_true", help="find the largest model that fits; needs a GPU")

    text = commands.add_parser("sample", help="write text", **style)
    text.add_argument("--checkpoint", type=Path, required=True)
    text.add_argument("--prompt", default="", help="what to continue")
    text.add_argument("--count", type=int, default=200, help="tokens to add")
    text.add_argument("--temperature", type=float, default=0.8)
    text.add_argument("--top", type=int, default=50, help="draw from so many of the likeliest tokens; 0: from all")
    text.add_argument("--seed", type=int, default=0)
    text.add_argument("--device", default=_device())
    return parser


def _add_model(parser: argparse.ArgumentParser, size: str, length: int, batch: int) -> None:
    parser.add_argument("--method", choices=METHODS, default="madam-12bit")
    parser.add_argument("--moment", choices=("float32", "8bit"), help="Madam's second moment; float32")
    parser.add_argument("--release", action="store_true", help="Madam: step inside backward, and free each gradient")
    parser.add_argument("--size", choices=SIZES, default=size)
    for name in ("layers", "width", "heads"):
        parser.add_argument(f"--{name}", type=int, help="instead of the size's")
    parser.add_argument("--tied", action=argparse.BooleanOptionalAction, default=True, help="output is embedding")
    parser.add_argument("--length", type=int, default=length, help="tokens in a row")
    parser.add_argument("--batch", type=int, default=batch, help="rows in a step")
    parser.add_argument("--compile", action="store_true", help="torch.compile, block by block")
    parser.add_argument("--device", default=_device())
    parser.add_argument("--name", help="of the run; made from the size and the method")
    parser.add_argument("--out", type=Path, help="the record; results/gpt/NAME.json")


def _device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def _shape(options: argparse.Namespace, vocabulary: int) -> Shape:
    sizes = zip(("layers", "width", "heads"), SIZES[options.size], strict=True)
    chosen = {name: getattr(options, name) or usual for name, usual in sizes}
    return Shape(**chosen, vocabulary=vocabulary, length=options.length, tied=options.tied)


def _size(options: argparse.Namespace) -> str:
    shape = _shape(options, 0)
    usual = (shape.layers, shape.width, shape.heads) == SIZES[options.size]
    return str(options.size) if usual else f"{shape.layers}x{shape.width}x{shape.heads}"


def _name(options: argparse.Namespace, size: str, *more: str) -> str:
    """A name that says what was chosen, for files."""
    parts = [size, options.method, options.moment and f"moment-{options.moment}", options.release and "release", *more]
    return options.name or "_".join(part for part in parts if part)


def _train(options: argparse.Namespace, device: torch.device) -> int:
    method = Method.of(options.method, options.lr, options.schedule, options.warmup, options.moment, options.release)
    name = _name(options, _size(options), options.tokens.replace(":", ""), f"seed{options.seed}")
    out = options.out or Path("results/gpt") / f"{name}.json"
    checkpoint = options.checkpoint or Path("runs/gpt") / f"{name}.pt"
    record.check_free(out)
    if checkpoint.exists() and not options.resume:
        raise FileExistsError(f"{checkpoint} is there already; --resume goes on from it, or use another --name")
    state: dict[str, Any] | None = read(checkpoint) if options.resume else None
    tokenizer = restored(state["tokenizer"]) if state else None
    corpus = Corpus(options.text, options.tokens, options.valid_share, tokenizer)
    settings = Settings(
        _shape(options, corpus.tokenizer.vocabulary),
        method,
        tokens=options.tokens,
        batch=options.batch,
        steps=options.steps,
        seed=options.seed,
        valid_share=options.valid_share,
        valid_every=options.valid_every or max(options.steps // 10, 1),
        valid_tokens=options.valid_tokens,
        checkpointing=options.checkpoint_activations,
        compiled=options.compile,
        deterministic=options.deterministic,
    )
    run = Run(settings, corpus, device, checkpoint)
    if state:
        run.restore(state)
        del state
    count = sum(p.numel() for p in run.model.parameters())
    print(f"{name}: {count:,} parameters, {len(corpus.train):,} tokens of text, at step {run.step}", flush=True)
    limits = Limits(deadline=time.monotonic() + 60 * options.minutes, save_every=60 * options.save_minutes)
    try:
        with limits.watching_signals():
            record.write(out, run.train(limits, options.save_steps))
    except Stopped:
        print(
            f"stopped at step {run.step} and saved to {checkpoint}; the same command with --resume goes on", flush=True
        )
        return 130 if limits.signalled else 0
    print(f"{out}\n{checkpoint}")
    return 0


def _memory(options: argparse.Namespace, device: torch.device, given: list[str]) -> int:
    method = Method.of(options.method, moment=options.moment, release=options.release)
    shape = _shape(options, options.vocabulary)
    name = _name(options, "largest" if options.largest else _size(options), "memory")
    out = options.out or Path("results/gpt") / f"{name}.json"
    record.check_free(out)
    if options.largest:
        if device.type != "cuda":
            raise ValueError("--largest fills a GPU's memory; there is none here")
        found = memory.largest([part for part in given if part != "--largest"], options.width)
    else:
        try:
            found = memory.measure(shape, method, device, batch=options.batch, compiled=options.compile)
        except RuntimeError as error:
            if not memory.is_out_of_memory(error):
                raise
            print(f"gpt: too large for {record.name_of(device)}: {error}", file=sys.stderr)
            return memory.TOO_LARGE
    record.write(out, found)
    print(out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
