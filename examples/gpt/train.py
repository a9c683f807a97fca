"""One run: a loop that can stop at any step and go on later as if it had not."""

import io
import math
import os
import time
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from examples.gpt import record
from examples.gpt.data import Corpus
from examples.gpt.methods import Method, autocast, build, training_step
from examples.gpt.model import Shape
from madam_lab.records import provenance
from madam_lab.trainer import Limits, Stopped
from torchmadam.files import write_atomically

_SPEAK_EVERY = 10.0  # seconds


@dataclass(frozen=True)
class Settings:
    """Everything that decides what a run computes, but for the text."""

    shape: Shape
    method: Method
    tokens: str
    batch: int
    steps: int
    seed: int = 0
    valid_share: float = 0.05
    valid_every: int = 100
    valid_tokens: int = 100_000
    checkpointing: bool = False
    compiled: bool = False
    deterministic: bool = False


class Run:
    """A run and its state, which ``save`` writes to ``checkpoint`` and ``restore`` reads."""

    def __init__(self, settings: Settings, corpus: Corpus, device: torch.device, checkpoint: Path) -> None:
        self.settings, self.corpus, self.device, self.checkpoint = settings, corpus, device, checkpoint
        self.provenance = provenance()  # now: the files may change while it runs
        self.started = datetime.now(UTC).isoformat(timespec="seconds")
        if device.type == "cuda":
            torch.set_float32_matmul_precision("high")
        if settings.deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS asks for it
            torch.use_deterministic_algorithms(True)
        self.model, self.optimiser = build(
            settings.shape,
            settings.method,
            device,
            seed=settings.seed,
            checkpointing=settings.checkpointing,
            compiled=settings.compiled,
        )
        self.step, self.seconds, self.peak = 0, 0.0, 0
        self.curve: list[dict[str, Any]] = []
        # The sum of losses since the last point of the curve, kept on the device: reading it would wait for the GPU.
        self.loss = torch.zeros((), device=device)

    def train(self, limits: Limits, save_steps: int | None = None) -> dict[str, Any]:
        """Train to the end and return the record; or save and raise :class:`madam_lab.trainer.Stopped`."""
        clock = saved = spoke = time.monotonic()
        first = self.step
        while self.step < self.settings.steps:
            loss = self._advance()
            if self.step % self.settings.valid_every == 0 or self.step == self.settings.steps:
                self._note(self.seconds + time.monotonic() - clock)
                if not math.isfinite(self.curve[-1]["train"]):
                    break
                spoke = time.monotonic()
            now = time.monotonic()
            if now - spoke > _SPEAK_EVERY:
                left = (now - clock) / (self.step - first) * (self.settings.steps - self.step)
                print(f"step {self.step}/{self.settings.steps}, loss {float(loss):.3f}, {left:.0f} s left", flush=True)
                spoke = now
            if self.step < self.settings.steps and (
                limits.reached() or now - saved > limits.save_every or (save_steps and self.step % save_steps == 0)
            ):
                self._save(self.seconds + time.monotonic() - clock)
                saved = time.monotonic()
                if limits.reached():
                    raise Stopped
        self.seconds += time.monotonic() - clock
        self._save(self.seconds)
        return self._record()

    def _advance(self) -> Tensor:
        settings = self.settings
        lr = settings.method.lr_at(self.step, settings.steps)
        for group in self.optimiser.param_groups:
            group["lr"] = lr
        batch = self.corpus.batch(self.step, settings.batch, settings.shape.length, settings.seed)
        tokens, targets = (t.to(self.device) for t in batch)
        loss = training_step(self.model, self.optimiser, settings.method, tokens, targets)
        self.loss += loss
        self.step += 1
        return loss

    def _note(self, seconds: float) -> None:
        """Add a point to the curve, and say it."""
        before = self.curve[-1] if self.curve else {"step": 0, "tokens": 0, "seconds": 0.0}
        train = float(self.loss) / (self.step - before["step"])
        self.loss.zero_()
        settings, valid = self.settings, self.valid_loss()
        tokens = self.step * settings.batch * settings.shape.length
        rate = (tokens - before["tokens"]) / max(seconds - before["seconds"], 1e-9)
        point = {"step": self.step, "tokens": tokens, "seconds": seconds, "train": train, "valid": valid}
        point["lr"] = settings.method.lr_at(self.step - 1, settings.steps)
        self.curve.append(point)
        left = seconds / self.step * (settings.steps - self.step)
        bits = point["bits_per_byte"] = valid / math.log(2) / self.corpus.bytes_per_token
        print(
            f"step {self.step}/{settings.steps}, train {train:.4f}, valid {valid:.4f} (perplexity "
            f"{_perplexity(valid):.2f}, {bits:.4f} bits a byte), {rate:,.0f} tokens/s, {left:.0f} s left",
            flush=True,
        )

    @torch.no_grad()
    def valid_loss(self) -> float:
        """The mean loss over the validation text, or over as much of it as the settings say."""
        settings = self.settings
        total, count = torch.zeros((), device=self.device), 0
        self.model.eval()
        for tokens, targets in self.corpus.valid_batches(settings.batch, settings.shape.length, settings.valid_tokens):
            with autocast(self.device, settings.method):
                total += self.model(tokens.to(self.device), targets.to(self.device)) * len(tokens)
            count += len(tokens)
        self.model.train()
        return float(total) / count

    def _record(self) -> dict[str, Any]:
        last = self.curve[-1]
        return {
            "kind": "train",
            "settings": asdict(self.settings),
            "text": self.corpus.digest,
            "status": "finished" if math.isfinite(last["train"] + last["valid"]) else "diverged",
            "curve": self.curve,
            "perplexity": _perplexity(last["valid"]),
            "tokens": last["tokens"],
            "seconds": self.seconds,
            "bytes": record.bytes_by_kind(self.model, self.optimiser),
            "peak": max(self.peak, record.peak_bytes(self.device)),
            "started": self.started,
            "device": record.name_of(self.device),
            **self.provenance,
        }

    # ---- stopping and going on

    def _save(self, seconds: float) -> None:
        cuda = self.device.type == "cuda"
        state = {
            "settings": asdict(self.settings),
            "text": self.corpus.digest,
            "tokenizer": self.corpus.tokenizer.saved,
            "source": self.provenance["source"],
            "model": self.model.state_dict(),
            "optimiser": self.optimiser.state_dict(),
            "random": torch.get_rng_state(),
            "random_cuda": torch.cuda.get_rng_state(self.device) if cuda else None,
            "loss": self.loss,
            "seconds": seconds,
            "peak": max(self.peak, record.peak_bytes(self.device)),
            **{name: getattr(self, name) for name in ("step", "started", "curve")},
        }
        buffer = io.BytesIO()
        torch.save(state, buffer)
        self.checkpoint.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(self.checkpoint, [buffer.getbuffer()])

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from what a checkpoint holds."""
        ours = asdict(self.settings)
        other = [name for name, value in state["settings"].items() if value != ours[name]]
        if other or state["text"] != self.corpus.digest:
            raise ValueError(
                f"{self.checkpoint} was begun with another {', '.join(other) or 'text'}; resume with the arguments it "
                f"was begun with, or begin a run under another --name"
            )
        if state["source"] != self.provenance["source"]:
            self.provenance |= {"dirty": True, "source": "mixed"}  # other code began the run
        self.model.load_state_dict(state["model"])
        self.optimiser.load_state_dict(state["optimiser"])
        torch.set_rng_state(state["random"].cpu())
        if state["random_cuda"] is not None:
            torch.cuda.set_rng_state(state["random_cuda"].cpu(), self.device)
        self.loss.copy_(state["loss"])
        for name in ("step", "started", "curve", "seconds", "peak"):
            setattr(self, name, state[name])


def _perplexity(loss: float) -> float:
    return math.exp(loss) if loss < 700 else math.inf
