"""Trial weights: a model evaluated somewhere else than where it is, and put back exactly."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from torchmadam.theory.sums import as_float, squared_length

Closure = Callable[[], Tensor]


class Trial:
    """A model whose parameters are float copies for a while; what it was is put back in the end."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.originals: dict[str, Tensor] = dict(model.named_parameters())
        self.buffers = {name: b.detach().clone() for name, b in model.named_buffers()}
        self.places = [
            (module, key, p)
            for module in model.modules()
            for key, p in module._parameters.items()
            if p is not None
        ]  # fmt: skip
        copies = {id(p): nn.Parameter(as_float(p).clone()) for _, _, p in self.places}
        self.weights = {name: copies[id(p)] for name, p in self.originals.items()}
        for module, key, p in self.places:
            module._parameters[key] = copies[id(p)]
        self.random = torch.get_rng_state()
        self.random_cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []

    def restore(self) -> None:
        """Put the model's own parameters back."""
        for module, key, p in self.places:
            module._parameters[key] = p
        self.reset()

    def reset(self) -> None:
        """Buffers and random numbers as they were, so that every evaluation sees the same function."""
        with torch.no_grad():
            for name, b in self.model.named_buffers():
                b.copy_(self.buffers[name])
        torch.set_rng_state(self.random)
        for i, state in enumerate(self.random_cuda):
            torch.cuda.set_rng_state(state, i)

    def gradients(self, closure: Closure) -> tuple[float, dict[str, Tensor]]:
        """Loss and gradients at the trial weights."""
        self.reset()
        with torch.enable_grad():
            loss = closure()
            if not isinstance(loss, Tensor):
                raise TypeError(f"the closure returned a {type(loss).__name__}; it must return the loss, a tensor")
            found = torch.autograd.grad(loss, list(self.weights.values()), allow_unused=True)
        named = zip(self.weights.items(), found, strict=True)
        return float(loss.detach()), {name: torch.zeros_like(w) if g is None else g.detach() for (name, w), g in named}

    def differences(self, closure: Closure, start: Mapping[str, Tensor]) -> dict[str, float]:
        """|g - start|^2 of every parameter; each gradient is dropped as soon as it has been looked at."""
        self.reset()
        found = {name: squared_length(start[name]) for name in self.weights}  # where no gradient comes, it is zero
        handles = []
        for name, w in self.weights.items():

            def look(p: Tensor, name: str = name) -> None:
                found[name] = squared_length(p.grad - start[name])  # type: ignore[operator]
                p.grad = None

            handles.append(w.register_post_accumulate_grad_hook(look))
        try:
            with torch.enable_grad():
                closure().backward()
        finally:
            for handle in handles:
                handle.remove()
        return found

    @torch.no_grad()
    def move(self, step: Mapping[str, Tensor], t: float) -> None:
        """To W + t dW."""
        for name, w in self.weights.items():
            w.copy_(as_float(self.originals[name]))
            if name in step:
                w.add_(step[name], alpha=t)


@contextmanager
def trial_of(model: nn.Module) -> Iterator[Trial]:
    """Trial weights for a while."""
    trial = Trial(model)
    try:
        yield trial
    finally:
        trial.restore()
