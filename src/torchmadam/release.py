"""The optimiser's step inside backward: gradients are used as they arrive, and freed."""

from collections.abc import Callable
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from torchmadam.madam import Madam
from torchmadam.messages import describe


class Released:
    """What :func:`release_gradients` returns: :meth:`remove` goes back to ordinary steps."""

    def __init__(self, optimizer: Madam) -> None:
        self._optimizer = optimizer
        self._stepped: set[Tensor] = set()
        self._handles: list[Any] = []

    def remove(self) -> None:
        """From now on gradients are kept for an ordinary ``optimizer.step()``."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        _RELEASED.discard(self._optimizer)
        self._optimizer._step_supports_amp_scaling = False

    def _watch(self, p: Tensor, name: str | None, step: Callable[[], None]) -> None:
        def arrived(param: Tensor) -> None:
            if param in self._stepped:
                raise RuntimeError(
                    f"{describe(name)} got a second gradient before optimizer.step(), and the first one is used and "
                    f"gone; call optimizer.step() after every backward (so gradients cannot be accumulated), and use "
                    f"checkpoint(..., use_reentrant=False)"
                )
            step()
            self._stepped.add(param)
            param.grad = None

        self._handles.append(p.register_post_accumulate_grad_hook(arrived))

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if getattr(optimizer, "grad_scale", None) is not None:
            del optimizer.grad_scale, optimizer.found_inf  # which the scaler would take back after the step
            raise RuntimeError(
                "a GradScaler scales gradients that release_gradients has already used, unscaled; train in bfloat16, "
                "which needs no scaler, or without release_gradients"
            )
        self._stepped.clear()


_RELEASED: WeakSet[Madam] = WeakSet()


def release_gradients(model: nn.Module, optimizer: Madam) -> Released:
    """Update each parameter inside ``backward``, as soon as its gradient is there, and free the gradient.

    Only one gradient at a time is then alive instead of all of them. The weights, or codes, are those of an ordinary
    step, bit for bit. Go on calling ``optimizer.step()`` after each backward: it marks the end of the step. The
    learning rate has to be set before backward, so call schedulers after ``optimizer.step()``, as usual.

    What needs all gradients at once cannot work: accumulating them over several backward passes raises, a
    ``GradScaler`` raises, and clipping by the norm of all gradients finds none to clip and cannot be seen from here.
    Use ``max_step``, which bounds each weight's step however large its gradient is, or clip values with
    ``p.register_hook(lambda g: g.clamp(-c, c))``.

    Args:
        model: its trainable parameters must be the optimiser's.
        optimizer: a :class:`torchmadam.Madam`.

    Returns:
        An object whose ``remove()`` ends this.
    """
    if not isinstance(optimizer, Madam):
        raise TypeError(f"release_gradients works with torchmadam.Madam, and this is a {type(optimizer).__name__}")
    if isinstance(model, nn.parallel.DistributedDataParallel):
        raise TypeError(
            "under DDP a gradient that has just arrived is this rank's own, not yet the mean of all ranks; use "
            "fully_shard, under which it is, or train without release_gradients"
        )
    if optimizer in _RELEASED:
        raise RuntimeError("this optimiser's gradients are released already; call remove() on what that returned first")
    owned = {p for group in optimizer.param_groups for p in group["params"]}
    strangers = [name for name, p in model.named_parameters() if p.requires_grad and p not in owned]
    if strangers:
        raise ValueError(
            f"the optimiser does not have {', '.join(strangers)}, so its gradient would never be released; "
            f"give the optimiser all trainable parameters, or freeze it"
        )
    released = Released(optimizer)
    for number, group in enumerate(optimizer.param_groups):
        names = group.get("param_names") or [None] * len(group["params"])
        for name, p in zip(names, group["params"], strict=True):
            if p.requires_grad:
                released._watch(p, name, _step_of_one(optimizer, number, name, p))
    released._handles.append(optimizer.register_step_pre_hook(released._before_step))
    # So that a GradScaler hands its scale to the optimiser, where it can be seen, instead of failing obscurely.
    optimizer._step_supports_amp_scaling = True
    _RELEASED.add(optimizer)
    return released


def _step_of_one(optimizer: Madam, number: int, name: str | None, p: Tensor) -> Callable[[], None]:
    @torch.no_grad()
    def step() -> None:
        # The group as it is now, schedulers included, with this parameter alone. By number: load_state_dict makes new
        # groups, and an old one would keep its learning rate for ever.
        group = optimizer.param_groups[number]
        alone = {**group, "params": [p], **({} if name is None else {"param_names": [name]})}
        optimizer.step_group(alone)

    return step
