"""Parameters that a model has others in place of: an optimiser that still holds them would train nothing."""

import gc
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from torchmadam.messages import warn

_MARK = "was_replaced"
_replacements = 0


def mark(old: Any, new: Any) -> None:
    """Note that a model has a new parameter in place of an old one."""
    global _replacements
    _replacements += 1
    setattr(old, _MARK, True)
    setattr(new, _MARK, False)  # it may have been there before


def count() -> int:
    """How many there have been, of all models: while it stays the same, nothing has to be checked again."""
    return _replacements


def check(params: Sequence[Tensor]) -> None:
    """Raise if some of these are in no module any more; warn of those that are in some, but not where they were."""
    replaced = [p for p in params if getattr(p, _MARK, False)]
    if not replaced:
        return
    if not {id(p) for p in replaced} <= _held_by_modules():
        raise RuntimeError(
            "the model's parameters were replaced after this optimiser was made, by to_ladder_, to_dense_ or load, "
            "so that it would train what is no longer there; convert and load first, make the optimiser afterwards"
        )
    for p in replaced:
        setattr(p, _MARK, False)
    shapes = ", ".join(str(tuple(p.shape)) for p in replaced[:3])
    warn(
        f"{len(replaced)} of the parameters (of shape {shapes}) were shared with a module that to_ladder_, to_dense_ "
        f"or load gave a tensor of its own: what was one weight is trained as two now; convert the whole model, if it "
        f"should stay one",
    )


def _held_by_modules() -> set[int]:
    """The ids of all parameters that some module holds. Takes as long as a garbage collection."""
    found: set[int] = set()
    for thing in gc.get_objects():
        if issubclass(type(thing), nn.Module):  # isinstance would ask proxies for the class they stand for
            own = vars(thing).get("_parameters")
            found |= {id(p) for p in own.values()} if isinstance(own, dict) else set()
    return found
