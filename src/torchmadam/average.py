"""An average of a model's weights over training, for evaluation."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from torchmadam import shards
from torchmadam.groups import unwrapped
from torchmadam.ladder.convert import replace_tensors
from torchmadam.ladder.tensor import LadderTensor
from torchmadam.messages import require_module

_FINE = 1000  # the least share of a mean is one of so many


class Average:
    """A running mean of the decoded weights and of batch norm's statistics, in float32. Made by :func:`average`."""

    def __init__(self, model: nn.Module, recent: float | None, decay: float | None) -> None:
        if (recent is None) == (decay is None):
            raise ValueError("an average has either recent=, a share of all updates, or a decay= an update; pass one")
        if decay is not None and not 0 <= decay < 1:
            raise ValueError(f"decay={decay} cannot work: it is the memory of a running mean, 0 <= decay < 1")
        if recent is not None and not 0 < recent <= 1:
            raise ValueError(f"recent={recent} cannot work: it is a share of all updates so far, 0 < recent <= 1")
        if any(shards.is_sharded(p) for p in model.parameters()):
            raise TypeError(
                "an average holds whole tensors, and this model is spread over ranks; average a model that is not"
            )
        self._model = model
        self._recent, self._decay = recent, decay
        self.count = 0
        self._means: dict[str, Tensor] = {}

    @torch.no_grad()
    def update(self) -> None:
        """Take the weights as they are now into the mean; call it after ``optimizer.step()``."""
        if not torch.compiler.is_compiling() and torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "a CUDA graph would replay one update's share of the mean for ever; call update() after graph.replay()"
            )
        self.count += 1
        share = self._share()
        if share == 0:
            return
        means, values = [], []
        for name, own in self._averaged().items():
            value = own.decode(torch.float32) if isinstance(own, LadderTensor) else own.to(_wide(own.dtype))
            if name not in self._means:
                self._means[name] = value.clone()
            elif value is own:
                means.append(self._means[name])
                values.append(value)
            else:  # at once, so that there is one copy at a time
                _take([self._means[name]], [value], share)
        if means:
            _take(means, values, share)

    def _share(self) -> float:
        """What the newest weights count, of 1."""
        if self._recent is None:
            assert self._decay is not None
            return max(1 - self._decay, 1 / self.count)  # until its memory is filled, all count alike
        memory = self._recent * self.count
        # A memory of many thousands takes in every second, third, ... for two, three, ...: in float32 less than a
        # thousandth of what weights are away from their mean would be lost.
        every = max(1, int(memory / _FINE))
        return min(1.0, every / memory) if self.count % every == 0 else 0.0

    @contextmanager
    def applied(self) -> Iterator[nn.Module]:
        """Inside this context the model computes with the mean; afterwards its own parameters are back, untouched.

        It is for evaluation: what the model has inside needs no gradients, and a backward pass through it fails. What
        is to outlive the context, such as a state dict, is to be copied.
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
        plain = {unwrapped(name): tensor for name, tensor in own.items()}
        return plain if len(plain) == len(own) else own  # a module may be called as a wrapper's

    def state_dict(self) -> dict[str, object]:
        """The mean, how many updates it has seen and what it remembers of them, in plain tensors and numbers."""
        means = {name: mean.clone() for name, mean in self._means.items()}
        return {"count": self.count, "means": means, "recent": self._recent, "decay": self._decay}

    def load_state_dict(self, state: dict[str, object]) -> None:
        """Go on from what :meth:`state_dict` returned."""
        means, count = state["means"], state["count"]
        if not isinstance(means, dict) or not isinstance(count, int):
            raise ValueError("this is not the state of an average: it has no 'means' and 'count'")
        own = self._averaged()
        plain = {unwrapped(name): mean for name, mean in means.items()}
        means = plain if len(plain) == len(means) else means
        shapes = {name: tensor.shape for name, tensor in own.items()}
        if means and {name: mean.shape for name, mean in means.items()} != shapes:
            raise ValueError(
                "the average was taken of another model: names or shapes differ; load it into the same one"
            )
        taken = (state.get("recent", self._recent), state.get("decay", self._decay))  # which states used not to say
        if taken != (self._recent, self._decay):
            raise ValueError(
                "the average was taken with recent={}, decay={}, and this one has recent={}, decay={}; make it with "
                "the same".format(*taken, self._recent, self._decay)
            )
        self.count = count
        self._means = {name: mean.to(own[name].device, copy=True) for name, mean in means.items()}


def average(model: nn.Module, *, recent: float | None = None, decay: float | None = None) -> Average:
    """A weight average of a model, coded or float, to evaluate with. It takes the place of a schedule.

    ::

        mean = torchmadam.average(model)
        ...
        optimizer.step()
        mean.update()
        ...
        with mean.applied():
            evaluate(model)

    Weights that move at a constant rate wander around where they want to be, and their mean is nearer to it: as near
    as a rate that falls to zero would bring them, and at any time, since nobody has to know when training ends.

    Args:
        model: what is trained.
        recent: how much of training so far the mean remembers, as a share of all updates; unless told otherwise 0.05.
            The mean is exponential, and its memory grows with training: the t-th update counts 1 / (recent t), and
            the first 1 / recent are no more than the last weights. 1.0 weighs all about alike. Update every step, or
            every tenth; where that is once an epoch take 1.0.
        decay: instead, the decay an update of an ordinary exponential average, such as 0.999.

    ``torch.optim.swa_utils.AveragedModel`` averages parameters in place, and codes cannot be averaged in place. This
    one keeps its mean in float32 beside the model: 4 bytes a weight, while it exists. The statistics of batch norm are
    averaged alike; other buffers are the model's own. For the mean's exact statistics run
    ``torch.optim.swa_utils.update_bn`` inside :meth:`Average.applied`; what it writes there is gone afterwards.
    """
    require_module(model, "average")
    return Average(model, 0.05 if recent is None and decay is None else recent, decay)


def _take(means: list[Tensor], values: list[Tensor], share: float) -> None:
    if share == 1:  # nothing is left of what was before, even if it was not finite
        torch._foreach_copy_(means, values)
    else:
        torch._foreach_lerp_(means, values, share)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
