"""Which parameter gets which arguments: groups, and their checks."""

import difflib
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from torchmadam import shards
from torchmadam.messages import describe

SECOND_MOMENTS = ("float32", "8bit", "none")
ROUNDINGS = (None, "nearest", "stochastic")

# Arguments that are numbers.
NUMBERS = ("lr", "beta", "momentum", "max_step", "bound", "crossing", "zero_scale", "weight_decay")
# Arguments of other optimisers, which would seem to do something. What else is in a group (a schedule's notes, a label,
# a layer's number) is its owner's business.
_FOREIGN = frozenset(
    {
        "alpha",
        "amsgrad",
        "centered",
        "dampening",
        "decay",
        "eps",
        "etas",
        "lambd",
        "learning_rate",
        "max_grad_norm",
        "momentum_decay",
        "nesterov",
        "wd",
    }
)
# What torch.compile, FSDP and activation checkpointing put into a parameter's name when they wrap a module.
_WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
# Where nothing is said about it, steps are additive for weights below so many sigma, or the bound if that is less.
ZONE = 5.0


def param_groups(
    model: nn.Module,
    *,
    weight_decay: float | None = None,
    weights: Mapping[str, Any] | None = None,
    embeddings: Mapping[str, Any] | None = None,
    norms_and_biases: Mapping[str, Any] | None = None,
) -> list[dict[str, Any]]:
    """The model's trainable parameters in up to three named groups, ready for ``Madam(param_groups(model))``.

    Args:
        model: any module. A parameter that several modules share appears once.
        weight_decay: of the weights only; None: the optimiser's. Embeddings, norms and biases get none unless their own
            mapping says so.
        weights: arguments for all that is neither of the following, for example ``{"bound": 2.0}``.
        embeddings: arguments for the tables of ``nn.Embedding`` and ``nn.EmbeddingBag``.
        norms_and_biases: arguments for the parameters of norms, those with "bias" in their name, and tensors with fewer
            than two dimensions.
    """
    tables = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag)}
    norms = {id(p) for m in model.modules() if "Norm" in type(m).__name__ for p in m.parameters(recurse=False)}
    kinds: dict[str, dict[str, Any]] = {
        "weights": {**({} if weight_decay is None else {"weight_decay": weight_decay}), **(weights or {})},
        "embeddings": {"weight_decay": 0.0, **(embeddings or {})},
        "norms_and_biases": {"weight_decay": 0.0, **(norms_and_biases or {})},
    }
    members: dict[str, list[tuple[str, nn.Parameter]]] = {kind: [] for kind in kinds}
    for name, param in model.named_parameters():
        if not param.requires_grad:
            continue
        if id(param) in tables:
            kind = "embeddings"
        elif id(param) in norms or param.dim() < 2 or "bias" in name.rpartition(".")[2]:
            kind = "norms_and_biases"
        else:
            kind = "weights"
        members[kind].append((name, param))
    return [{"params": members[kind], "kind": kind, **kinds[kind]} for kind in kinds if members[kind]]


def as_real(tensor: Tensor) -> Tensor:
    """A complex tensor as pairs of reals; any other as it is. A gradient that awaits its conjugation is copied."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def first_of(group: Mapping[str, Any], name: str | None, param: Tensor) -> int:
    """Where in the whole float parameter the part that is here begins; 0 where nothing depends on it."""
    first = shards.first_of(param)
    if first is None and param.dtype in (torch.bfloat16, torch.float16) and group["rounding"] != "nearest":
        raise ValueError(
            f"{describe(name)} is {param.dtype} and sharded other than by rows, and stochastic rounding goes by an "
            f"element's place in the whole tensor; use Shard(0), float32 parameters, or rounding='nearest'"
        )
    return (first or 0) * (2 if param.is_complex() else 1)


def unwrapped(name: str) -> str:
    """A parameter's name without the parts that wrappers add; DDP's is the first."""
    return ".".join(part for part in name.removeprefix("module.").split(".") if part not in _WRAPPERS)


def check(group: Mapping[str, Any], known: Iterable[str]) -> None:
    """Raise a ValueError that says what is wrong with a param group, why, and what to do."""
    lr = group["lr"]
    if isinstance(lr, Tensor) and lr.numel() != 1:
        raise ValueError(f"Tensor lr must be 1-element, because a group has one lr; got shape {tuple(lr.shape)}")
    for param in group["params"]:
        if not getattr(param, "is_whole", True):
            raise ValueError(
                f"{describe(getattr(param, 'label', None))} is a view of codes, and an optimiser steps whole tensors; "
                f"pass the tensor it is a view of"
            )
    for name in NUMBERS:
        kinds = float | int if name == "momentum" else float | int | Tensor
        if not isinstance(group[name], kinds) and not (name in ("bound", "crossing") and group[name] is None):
            raise ValueError(f"{name}={group[name]!r} cannot work: it must be a number")
    _require(
        0 <= float(lr) < math.inf, group, "lr", "a step downhill needs a finite lr >= 0; to climb, use maximize=True"
    )
    _require(0 <= group["beta"] < 1, group, "beta", "it is the memory of a running mean: 0 <= beta < 1, usually 0.999")
    _require(
        0 <= group["momentum"] < 1, group, "momentum", "it is a running mean's memory: 0 <= momentum < 1, usually 0.9"
    )
    _require(group["max_step"] > 0, group, "max_step", "it limits a step to max_step times lr: use 8, the paper's")
    _require(
        group["bound"] is None or 0 < group["bound"] < math.inf,
        group,
        "bound",
        "matrices are clamped to bound times their initial RMS, so bound > 0 (5, the paper's 3), or None for no clamp",
    )
    _require(
        group["crossing"] is None or group["crossing"] == 0 or 1e-6 <= group["crossing"] <= 1e6,
        group,
        "crossing",
        "it is the width of the additive zone around zero in units of bound x sigma: 0 for the paper's rule, .1 to 3, "
        "or None for five sigma",
    )
    if isinstance(group["scale"], Mapping):
        bad = {name: scale for name, scale in group["scale"].items() if not 0 < scale < math.inf}
        if bad:
            raise ValueError(f"scales must be positive and finite, got {bad}; leave such tensors out of the mapping")
        if "param_names" not in group:
            raise ValueError(
                "a mapping of scales is matched by parameter name, and these parameters have none; "
                "use Madam(model.named_parameters(), scale=...)"
            )
    else:
        _require(
            group["scale"] is None or 0 < group["scale"] < math.inf,
            group,
            "scale",
            "it is the size of the weights: a positive number, scales_of(state_dict), or None to measure it",
        )
    _require(
        0 <= group["zero_scale"] < math.inf,
        group,
        "zero_scale",
        "it is the scale given to all-zero tensors: use 0.01, or 0 to leave them at zero",
    )
    _require(
        0 <= group["weight_decay"] < math.inf,
        group,
        "weight_decay",
        "weights are multiplied by exp(-lr weight_decay), so weight_decay >= 0",
    )
    for name, choices in (("second_moment", SECOND_MOMENTS), ("rounding", ROUNDINGS)):
        if group[name] not in choices:
            raise ValueError(f"{name}={group[name]!r} is unknown; choose one of {', '.join(map(repr, choices))}")
    _require(isinstance(group["compile"], bool), group, "compile", "a step is compiled or not: True or False")
    if not isinstance(group["seed"], int) or not -(2**63) <= group["seed"] < 2**63:
        raise ValueError(f"seed={group['seed']!r} must be an integer of at most 64 bits")

    for name in sorted(group.keys() - set(known) - {"params", "param_names"}):
        # What somebody's schedule keeps beside an argument is no mistake: base_momentum, weight_decay_end.
        own = any(re.fullmatch(rf"{each}_[a-z]\w+|[a-z]+_{each}", name) for each in known)
        close = [] if own else difflib.get_close_matches(name, known, n=1, cutoff=0.8)
        if close or name in _FOREIGN:
            hint = f"did you mean {close[0]!r}?" if close else "it would do nothing; remove it"
            raise ValueError(f"{name!r} is no argument of Madam: {hint}")


def crossing_of(group: Mapping[str, Any]) -> float:
    """A group's crossing; None is that of a zone of five sigma, or of the bound if that is less."""
    crossing: float | None = group["crossing"]
    return usual_crossing(group["bound"]) if crossing is None else crossing


def usual_crossing(bound: float | None) -> float:
    """The crossing with which steps are additive within five sigma, or within the bound if that is less."""
    return ZONE if bound is None else min(1.0, ZONE / float(bound))


def _require(holds: bool, group: Mapping[str, Any], name: str, why: str) -> None:
    if not holds:
        raise ValueError(f"{name}={group[name]!r} cannot work: {why}")
