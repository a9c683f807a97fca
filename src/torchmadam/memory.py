"""Where the bytes of training are: weights, scales, moments, gradients and buffers, as numbers and as a table."""

from collections.abc import Iterable
from dataclasses import dataclass, fields

from torch import Tensor, nn
from torch.optim import Optimizer

from torchmadam import shards
from torchmadam.held import MEANS
from torchmadam.ladder.tensor import LadderTensor
from torchmadam.messages import require_module

# What Madam has for each weight, a single one or a complex one too; others' moments are known by their shape.
_OURS = (*MEANS, "second_moment", "exponents")


@dataclass(frozen=True)
class Memory:
    """Bytes held for training, by kind; activations are not among them. ``print`` it for a table.

    Attributes:
        weights: number of weights, each once.
        floats: bytes of weights that are floats.
        codes: bytes of weights that are codes.
        scales: bytes of the coded tensors' scales.
        moments: bytes of optimiser state that has a number for each weight.
        counters: bytes of all other optimiser state: steps, scales, counts.
        gradients: bytes of the gradients that are alive now.
        buffers: bytes of the model's buffers, such as running means.
    """

    weights: int
    floats: int
    codes: int
    scales: int
    moments: int
    counters: int
    gradients: int
    buffers: int

    @property
    def total(self) -> int:
        """All bytes."""
        return sum(getattr(self, field.name) for field in fields(self) if field.name != "weights")

    @property
    def per_weight(self) -> float:
        """All bytes over the number of weights."""
        return self.total / max(self.weights, 1)

    def __str__(self) -> str:
        rows = [(f.name, getattr(self, f.name)) for f in fields(self) if f.name != "weights"]
        rows.append(("total", self.total))
        width = max(len(f"{count:,}") for _, count in rows)
        lines = [f"{name:<10} {count:>{width},}  {count / max(self.weights, 1):7.3f} a weight" for name, count in rows]
        return f"bytes of {self.weights:,} weights\n" + "\n".join(lines)


def memory(model: nn.Module, optimizer: Optimizer | None = None) -> Memory:
    """What a model and its optimiser hold at this moment, each tensor once.

    Call it after a step, when the optimiser has its state; and before ``zero_grad`` to see the gradients. Any PyTorch
    optimiser will do, so that one can compare. Of what is spread over ranks, only what is here counts.
    """
    require_module(model, "memory")
    params = {id(p): shards.local(p) for p in model.parameters()}
    coded = [p for p in params.values() if isinstance(p, LadderTensor)]
    state = [
        (shards.local(value), name in _OURS or (value.numel() >= p.numel() and value.dim() == p.dim() > 0))
        for p, held in (optimizer.state.items() if optimizer is not None else ())
        for name, value in held.items()
        if isinstance(value, Tensor)
    ]
    return Memory(
        weights=sum(p.numel() for p in params.values()),
        floats=_bytes(p for p in params.values() if not isinstance(p, LadderTensor)),
        codes=_bytes(plane for p in coded for plane in p.planes),
        scales=_bytes(p.limit for p in coded),
        moments=_bytes(value for value, is_moment in state if is_moment),
        counters=_bytes(value for value, is_moment in state if not is_moment),
        gradients=_bytes(shards.local(p.grad) for p in model.parameters() if p.grad is not None),
        buffers=_bytes(model.buffers()),
    )


def _bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of storage behind tensors; what several of them share is counted once."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if t.numel()}
    return sum(storages.values())
