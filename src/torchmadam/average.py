"""An average of a model's weights over training, for evaluation."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from torchmadam import shards
from torchmadam.ladder.convert import replace_tensors
from torchmadam.ladder.tensor import LadderTensor


class Average:
    """A running mean of the decoded weights, in float32. Made by :func:`average`."""

    def __init__(self, model: nn.Module, decay: float | None) -> None:
        if decay is not None and not 0 <= decay < 1:
            raise ValueError(f"decay={decay} cannot work: it is the memory of a running mean, 0 <= decay < 1, or None")
        if any(shards.is_sharded(p) for p in model.parameters()):
            raise TypeError(
                "an average holds whole tensors, and this model is spread over ranks; average a model that is not"
            )
        self._model = model
        self._decay = decay
        self.count = 0
        self._means: dict[str, Tensor] = {}

    @torch.no_grad()
    def update(self) -> None:
        """Take the weights as they are now into the mean; call it after ``optimizer.step()``."""
        self.count += 1
        # Without a decay every update counts alike. With one, early updates do too, until the memory is filled.
        share = 1 / self.count if self._decay is None else max(1 - self._decay, 1 / self.count)
        for name, p in self._model.named_parameters():
            weights = p.decode(torch.float32) if isinstance(p, LadderTensor) else p.to(_wide(p.dtype))
            if name in self._means:
                self._means[name].lerp_(weights, share)
            else:
                self._means[name] = weights.clone()

    @contextmanager
    def applied(self) -> Iterator[nn.Module]:
        """Inside this context the model computes with the mean; afterwards its own parameters are back, untouched."""
        if not self._means:
            raise RuntimeError("there is no average yet; call update() after a step first")
        own = dict(self._model.named_parameters())
        means = {
            name: nn.Parameter(self._means[name].to(p.dtype), requires_grad=False) for name, p in own.items()
        }  # fmt: skip
        replace_tensors(self._model, {own[name]: means[name] for name in own})
        try:
            yield self._model
        finally:
            replace_tensors(self._model, {means[name]: own[name] for name in own})

    def state_dict(self) -> dict[str, object]:
        """The mean and how many updates it has seen, in plain tensors."""
        return {"count": self.count, "means": {name: mean.clone() for name, mean in self._means.items()}}

    def load_state_dict(self, state: dict[str, object]) -> None:
        """Go on from what :meth:`state_dict` returned."""
        means, count = state["means"], state["count"]
        if not isinstance(means, dict) or not isinstance(count, int):
            raise ValueError("this is not the state of an average: it has no 'means' and 'count'")
        shapes = {name: p.shape for name, p in self._model.named_parameters()}
        if means and {name: mean.shape for name, mean in means.items()} != shapes:
            raise ValueError(
                "the average was taken of another model: names or shapes differ; load it into the same one"
            )
        devices = {name: p.device for name, p in self._model.named_parameters()}
        self.count = count
        self._means = {name: mean.to(devices[name], copy=True) for name, mean in means.items()}


def average(model: nn.Module, decay: float | None = 0.999) -> Average:
    """A weight average of a model, coded or float, to evaluate with.

    ::

        mean = torchmadam.average(model)  # an exponential moving average; decay=None weighs all updates alike (SWA)
        ...
        optimizer.step()
        mean.update()
        ...
        with mean.applied():
            evaluate(model)

    ``torch.optim.swa_utils.AveragedModel`` averages parameters in place, and codes cannot be averaged in place. This
    one keeps its mean in float32 beside the model: 4 bytes a weight, while it exists. Buffers, such as the statistics
    of batch norm, are not averaged; run ``torch.optim.swa_utils.update_bn`` inside :meth:`Average.applied` if the
    model has some.
    """
    return Average(model, decay)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
