"""An average of a model's weights over training, for evaluation."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from torchmadam import shards
from torchmadam.ladder.convert import replace_tensors
from torchmadam.ladder.tensor import LadderTensor
from torchmadam.messages import require_module


class Average:
    """A running mean of the decoded weights and of batch norm's statistics, in float32. Made by :func:`average`."""

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
        means, values = [], []
        for name, own in self._averaged().items():
            value = own.decode(torch.float32) if isinstance(own, LadderTensor) else own.to(_wide(own.dtype))
            if name not in self._means:
                self._means[name] = value.clone()
            elif value is own:
                means.append(self._means[name])
                values.append(value)
            else:  # at once, so that there is one copy at a time
                self._means[name].lerp_(value, share)
        if means:
            torch._foreach_lerp_(means, values, share)

    @contextmanager
    def applied(self) -> Iterator[nn.Module]:
        """Inside this context the model computes with the mean; afterwards its own parameters are back, untouched.

        It is for evaluation: what the model has inside needs no gradients, and a backward pass through it fails.
        """
        if not self._means:
            raise RuntimeError("there is no average yet; call update() after a step first")
        own, means = self._averaged(), dict[str, Tensor]()
        for name, tensor in own.items():
            if isinstance(tensor, nn.Parameter):
                means[name] = nn.Parameter(self._means[name].to(tensor.dtype), requires_grad=False)
            else:  # which a forward pass may write to
                means[name] = self._means[name].to(tensor.dtype, copy=True)
        for name, counter in self._model.named_buffers():
            if name.endswith("num_batches_tracked"):
                own[name], means[name] = counter, counter.clone()
        replace_tensors(self._model, {own[name]: means[name] for name in own})
        try:
            yield self._model
        finally:
            replace_tensors(self._model, {means[name]: own[name] for name in own})

    def _averaged(self) -> dict[str, Tensor]:
        """The model's parameters, and the statistics of its batch norms. Other buffers may be masks, or anything."""
        own: dict[str, Tensor] = dict(self._model.named_parameters())
        for prefix, module in self._model.named_modules():
            if isinstance(module, _NormBase):
                statistics = {"running_mean": module.running_mean, "running_var": module.running_var}
                own |= {f"{prefix}.{name}".lstrip("."): s for name, s in statistics.items() if s is not None}
        return own

    def state_dict(self) -> dict[str, object]:
        """The mean and how many updates it has seen, in plain tensors."""
        return {"count": self.count, "means": {name: mean.clone() for name, mean in self._means.items()}}

    def load_state_dict(self, state: dict[str, object]) -> None:
        """Go on from what :meth:`state_dict` returned."""
        means, count = state["means"], state["count"]
        if not isinstance(means, dict) or not isinstance(count, int):
            raise ValueError("this is not the state of an average: it has no 'means' and 'count'")
        own = self._averaged()
        shapes = {name: tensor.shape for name, tensor in own.items()}
        if means and {name: mean.shape for name, mean in means.items()} != shapes:
            raise ValueError(
                "the average was taken of another model: names or shapes differ; load it into the same one"
            )
        self.count = count
        self._means = {name: mean.to(own[name].device, copy=True) for name, mean in means.items()}


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
    one keeps its mean in float32 beside the model: 4 bytes a weight, while it exists. The statistics of batch norm are
    averaged alike; other buffers are the model's own. For the mean's exact statistics run
    ``torch.optim.swa_utils.update_bn`` inside :meth:`Average.applied`; what it writes there is gone afterwards.
    """
    require_module(model, "average")
    return Average(model, decay)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
