"""How the library speaks to its user."""

import sys
import warnings
from typing import Any

_OURS = ("torch", "torchmadam", "contextlib")


def warn(message: str) -> None:
    """Warn at the line of the user's code that led here, however deep in the library that is."""
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] in _OURS:
        level, frame = level + 1, frame.f_back
    warnings.warn(message, stacklevel=level)


def describe(name: str | None) -> str:
    """How a message refers to a parameter."""
    return f"parameter {name!r}" if name is not None else "a parameter without a name"


def require_module(value: Any, function: str) -> None:
    """Raise unless this is a module: parameters and state dicts are easily passed instead."""
    if not hasattr(value, "named_parameters"):
        raise TypeError(
            f"{function} takes a model, an nn.Module, and got a {type(value).__name__}; pass the model itself, not its "
            f"parameters or its state dict"
        )
