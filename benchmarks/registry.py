"""What is timed: our steps and the peers'. One entry each; a peer that is not installed shows as missing."""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.workloads import Shapes, odd
from torchmadam import LadderFormat, LadderTensor, Madam, to_ladder_, update

Step = Callable[[], object]


@dataclass(frozen=True)
class Entry:
    """One way to make a step.

    Attributes:
        name: as the table shows it.
        make: parameters from shapes, then an optimiser on them.
        weights, grads: dtypes.
        ladder: the number system of coded weights.
        traffic: the bytes a weight that a step must at least read and write; None for peers.
        devices: where it runs.
        capturable: as a CUDA graph, too.
        ours: checked against the reference before it is timed.
        reference: what it is checked against on a CPU, where ``make`` would not be the reference itself.
    """

    name: str
    make: Callable[[list[nn.Parameter], torch.device], Step]
    weights: torch.dtype = torch.float32
    ladder: LadderFormat | None = None
    traffic: float | None = None
    devices: tuple[str, ...] = ("cuda", "cpu")
    capturable: bool = False
    ours: bool = False
    reference: Callable[[list[nn.Parameter], torch.device], Step] | None = None

    def parameters(self, shapes: Shapes, device: torch.device, seed: int = 0) -> list[nn.Parameter]:
        """Random weights with random gradients."""
        generator = torch.Generator(device).manual_seed(seed)
        params = []
        for shape in shapes:
            holder = nn.Module()
            weight = 0.02 * torch.randn(shape, generator=generator, device=device)
            holder.weight = nn.Parameter(weight.to(self.weights))
            if self.ladder is not None:
                to_ladder_(holder, self.ladder, dtype=self.weights)
            param = next(holder.parameters())
            param.grad = (1e-3 * torch.randn(shape, generator=generator, device=device)).to(self.weights)
            params.append(param)
        return params

    def check(self, device: torch.device) -> str | None:
        """What is wrong with a few steps on awkward shapes, compared with the reference on the CPU; None if nothing."""
        here, there = self.parameters(odd(), torch.device("cpu")), self.parameters(odd(), torch.device("cpu"))
        there = [_moved(p, device) for p in there]
        steps = [(self.reference or self.make)(here, torch.device("cpu")), self.make(there, device)]
        for round_number in range(3):
            for p, q in zip(here, there, strict=True):
                new = torch.randn(p.shape, generator=torch.Generator().manual_seed(round_number))
                p.grad, q.grad = new.to(self.weights), new.to(device, self.weights)
            for step in steps:
                step()
        for p, q in zip(here, there, strict=True):
            if isinstance(p, LadderTensor) and isinstance(q, LadderTensor):
                if not torch.equal(p.codes(), q.codes().cpu()):
                    return f"codes of {tuple(p.shape)} differ from the reference's"
                continue
            # Weights that pass through zero lose the digits that they have in common with their steps.
            rtol, atol = (1e-5, 2e-7) if p.dtype == torch.float32 else (2**-6, 1e-4)
            if not torch.allclose(p.detach(), q.detach().cpu(), rtol=rtol, atol=atol):
                return f"weights of {tuple(p.shape)} differ from the reference's"
        return None


def _moved(param: nn.Parameter, device: torch.device) -> nn.Parameter:
    return param if device.type == "cpu" else nn.Parameter(param.detach().to(device))


class Missing(Exception):  # noqa: N818 (said in the table, not an error)
    """A peer that cannot run here, and why."""


# ---- ours


def _madam(params: list[nn.Parameter], device: torch.device, **arguments: Any) -> Step:
    lr: Any = torch.tensor(0.01, device=device) if device.type == "cuda" else 0.01
    return Madam(params, lr, **arguments).step


def _plain_rule(params: list[nn.Parameter], device: torch.device) -> Step:
    """The rule as one eager operation after another: what the kernels have to beat."""
    weights = [p.detach() for p in params]
    zeros: Callable[[], list[Tensor]] = lambda: [torch.zeros((), device=device) for _ in params]  # noqa: E731
    moments, steps = [torch.zeros_like(w) for w in weights], zeros()
    scales = [w.square().mean().sqrt() for w in weights]
    bad = [torch.zeros((), dtype=torch.int64, device=device) for _ in params]
    streams, crossings = list(range(len(params))), [0.0] * len(params)
    return lambda: update.madam_(
        weights, [p.grad for p in params], [], moments, [], steps, scales, bad, streams=streams, crossings=crossings,
        lr=0.01, momentum=0.0, beta=0.999, max_step=8.0, bound=3.0, weight_decay=0.0, bias_correction=True,
        rounding=None, maximize=False,
    )  # fmt: skip


# ---- peers


def _adamw(params: list[nn.Parameter], device: torch.device, **how: bool) -> Step:
    return torch.optim.AdamW(params, lr=1e-4, **how).step


def _sgd(params: list[nn.Parameter], device: torch.device) -> Step:
    return torch.optim.SGD(params, lr=1e-4, momentum=0.9, fused=True).step


def _bitsandbytes(params: list[nn.Parameter], device: torch.device) -> Step:
    try:
        import bitsandbytes
    except ImportError as error:
        raise Missing("not installed") from error
    return bitsandbytes.optim.AdamW8bit(params, lr=1e-4).step  # type: ignore[no-any-return]


def _torchao(params: list[nn.Parameter], device: torch.device, name: str) -> Step:
    try:
        from torchao import optim
    except ImportError as error:
        raise Missing("not installed") from error
    return getattr(optim, name)(params, lr=1e-4, bf16_stochastic_round=True).step  # type: ignore[no-any-return]


def _floats(
    name: str,
    weights: torch.dtype = torch.float32,
    moment: str = "float32",
    momentum: float = 0.9,
    compile: bool = False,
) -> Entry:
    # The gradient is read; weight and moments are read and written.
    traffic = 3 * weights.itemsize + _held(moment, momentum)
    plain = functools.partial(_madam, second_moment=moment, momentum=momentum)
    entry = Entry(name, plain, weights, traffic=traffic, capturable=True, ours=True)
    return _in_c(entry) if compile else entry


def _coded(
    name: str,
    preset: str,
    weights: torch.dtype = torch.bfloat16,
    moment: str = "float32",
    momentum: float = 0.9,
    compile: bool = False,
) -> Entry:
    ladder = LadderFormat.preset(preset)
    stored = ladder.stored_bits / 8
    # Codes are read and written, but for the signs of the paper's ladder, which are only read.
    codes = 2 * stored if ladder.is_signed else 2 * stored - 1 / 8
    plain = functools.partial(_madam, rounding="stochastic", second_moment=moment, momentum=momentum)
    traffic = codes + weights.itemsize + _held(moment, momentum)
    entry = Entry(name, plain, weights, ladder, traffic, capturable=True, ours=True)
    return _in_c(entry) if compile else entry


def _held(moment: str, momentum: float) -> float:
    """Bytes a weight that moments take, read and written."""
    return (8 if moment == "float32" else 2 * (1 + 1 / 128)) + (4 if momentum else 0)


def _in_c(entry: Entry) -> Entry:
    fast = functools.partial(entry.make, compile=True)
    name = f"{entry.name}, compile=True"
    return replace(entry, name=name, make=fast, devices=("cpu",), capturable=False, reference=entry.make)


ENTRIES = [
    Entry("torch AdamW fused, float32", lambda p, d: _adamw(p, d, fused=True)),
    Entry("torch AdamW foreach, float32", lambda p, d: _adamw(p, d, foreach=True)),
    Entry("torch AdamW fused, bfloat16", lambda p, d: _adamw(p, d, fused=True), torch.bfloat16),
    Entry("torch SGD momentum fused, float32", _sgd, capturable=True),
    Entry("bitsandbytes AdamW8bit, float32", _bitsandbytes, devices=("cuda",)),
    Entry("bitsandbytes AdamW8bit, bfloat16", _bitsandbytes, torch.bfloat16, devices=("cuda",)),
    Entry("the paper's rule, one operation after another", _plain_rule),
    _floats("Madam float32"),
    _floats("Madam bfloat16", torch.bfloat16),
    _coded("Madam 12-bit", "signed12"),
    _coded("Madam 8-bit", "signed8"),
    _coded("Madam 8-bit, 8-bit moment", "signed8", moment="8bit"),
    _floats("Madam float32", compile=True),
    _floats("Madam bfloat16", torch.bfloat16, compile=True),
    _coded("Madam 12-bit", "signed12", compile=True),
    _coded("Madam 8-bit", "signed8", compile=True),
    _coded("Madam 8-bit, 8-bit moment", "signed8", moment="8bit", compile=True),
    _floats("no momentum, float32", momentum=0.0),
    _floats("no momentum, bfloat16", torch.bfloat16, momentum=0.0),
    _coded("no momentum, 12-bit", "signed12", momentum=0.0),
    _coded("no momentum, 8-bit", "signed8", momentum=0.0),
    _floats("no momentum, float32, 8-bit moment", moment="8bit", momentum=0.0),
    _coded("no momentum, 12-bit, 8-bit moment", "signed12", moment="8bit", momentum=0.0),
    _coded("no momentum, 8-bit, 8-bit moment", "signed8", moment="8bit", momentum=0.0),
    _floats("no momentum, float32", momentum=0.0, compile=True),
    _floats("no momentum, float32, 8-bit moment", moment="8bit", momentum=0.0, compile=True),
    _coded("no momentum, 8-bit", "signed8", momentum=0.0, compile=True),
    _coded("no momentum, 8-bit, 8-bit moment", "signed8", moment="8bit", momentum=0.0, compile=True),
    _coded("the paper's 12-bit", "paper12", momentum=0.0),
    _coded("the paper's 10-bit", "paper10", momentum=0.0),
    _coded("the paper's 8-bit", "paper8", momentum=0.0),
    _coded("the paper's 12-bit, 8-bit moment", "paper12", moment="8bit", momentum=0.0),
    _coded("the paper's 12-bit", "paper12", momentum=0.0, compile=True),
    _coded("the paper's 8-bit", "paper8", momentum=0.0, compile=True),
    # Last, because they compile for minutes.
    Entry("torchao AdamW8bit, bfloat16", lambda p, d: _torchao(p, d, "AdamW8bit"), torch.bfloat16, devices=("cuda",)),
    Entry("torchao AdamW4bit, bfloat16", lambda p, d: _torchao(p, d, "AdamW4bit"), torch.bfloat16, devices=("cuda",)),
]
