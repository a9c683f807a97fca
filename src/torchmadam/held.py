"""What an optimiser's state holds: begun at a parameter's first gradient, moments of its kind in its memory order."""

import math
from collections.abc import MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor

from torchmadam import groups, moment8, noise, shards
from torchmadam.ladder.layout import CodeLayout
from torchmadam.ladder.tensor import LadderTensor
from torchmadam.messages import describe
from torchmadam.start import share, starts, warn_stuck

Group = dict[str, Any]
States = MutableMapping[Tensor, dict[str, Any]]

MEANS = ("first_moment", "step_moment")


def is_coded(p: Tensor) -> bool:
    """Whether a parameter, or the part of it that is here, is codes."""
    return isinstance(shards.local(p), LadderTensor)


def mean_name(p: Tensor) -> str:
    """What a parameter's first moment is called in its state: of gradients, for floats, or of steps, for codes."""
    return MEANS[is_coded(p)]


def ready(group: Group, states: States, every: Sequence[Group], *, coded: bool) -> list[tuple[str | None, Any]]:
    """Name and parameter of those of one kind, float or coded, that have a gradient; each has its state now.

    ``states`` and ``every``: the state of all parameters, and all groups.
    """
    names = group.get("param_names") or [None] * len(group["params"])
    found = [
        (name, p) for name, p in zip(names, group["params"], strict=True) if p.grad is not None and is_coded(p) == coded
    ]
    for name, p in found:
        if p.grad.layout != torch.strided:
            raise ValueError(
                f"{describe(name)} has a gradient of layout {p.grad.layout}, and Madam's moments are "
                f"dense; use sparse=False in the embedding, or p.grad.to_dense()"
            )
    # New ones, whose state is empty if somebody looked at it; and those whose state is from when they were codes,
    # which carry their scale themselves.
    needed = "step" if coded else "scale"
    fresh = [(name, p) for name, p in found if needed not in states[p]]
    if fresh:
        _begin(group, states, every, [name for name, _ in fresh], [p for _, p in fresh], coded=coded)
    for _, p in found:
        state = states[p]
        if coded:  # what it had as a float
            for each in ("scale", "room", "zeros"):
                state.pop(each, None)
        elif state["scale"].dtype != (wide := _wide(p)):  # of a state from when the parameter had another dtype
            state["scale"] = state["scale"].to(wide)
        prepare(state, p, group["second_moment"], group["momentum"], noise.stream(group["seed"], state["index"]))
    return found


def _begin(
    group: Group, states: States, every: Sequence[Group], names: list[str | None], params: list[Any], *, coded: bool
) -> None:
    """Give these parameters of a group the state of a first step, moments apart."""
    position = {p: i for i, p in enumerate(p for g in every for p in g["params"])}
    taken = {own["index"] for own in states.values() if "index" in own}  # perhaps by one whose group moved up
    for p in params:
        if position[p] in taken and "index" not in states[p]:
            position[p] = max(*taken, *position.values()) + 1
    begun: list[dict[str, Any]] = [
        {
            "step": torch.zeros((), dtype=torch.float32, device=p.device),
            "nonfinite": torch.zeros((), dtype=torch.int64, device=p.device),
            "index": position[p],
        }
        for p in params
    ]
    if not coded:  # a coded parameter carries its own scale
        found = starts(group, names, params)
        for p, state, start in zip(params, begun, found, strict=True):
            state["scale"] = torch.full((), start.scale, dtype=_wide(p), device=p.device)
            state["room"], state["zeros"] = start.room, start.is_zeros
        stuck = [(name, p) for name, p, start in zip(names, params, found, strict=True) if start.is_stuck]
        if stuck:
            warn_stuck([name or f"parameter {position[p]}" for name, p in stuck])
    for p, state in zip(params, begun, strict=True):
        states[p] = state | states[p]


def crossing_of(group: Group, state: dict[str, Any]) -> float:
    """A float parameter's own crossing: the width of its zone as a share of its limit."""
    return share(groups.crossing_of(group), state["room"], state["zeros"])


def renew(group: Group, states: States) -> None:
    """Bring the states of float parameters from before 0.2 up to date: only zeros had something else than others."""
    usual = groups.crossing_of(group) or 1.0
    for state in (states[p] for p in group["params"] if p in states):
        crossing = state.pop("crossing", None)
        if "scale" in state and "room" not in state:
            state["zeros"] = crossing is not None
            state["room"] = 1.0 if crossing is None else usual / crossing if crossing else math.inf


def _wide(p: Tensor) -> torch.dtype:
    """Of a parameter's scale."""
    return torch.promote_types(groups.as_real(shards.local(p)).dtype, torch.float32)


def prepare(state: dict[str, Any], p: Tensor, kind: str, momentum: float, stream: int) -> None:
    """See to it that a parameter's state has a second moment of this kind, in the parameter's memory order.

    And a first moment, if there is momentum; what the rule has no use for is dropped. That order changes with
    ``model.to(memory_format=...)``, the kind when somebody edits a param group. The moments of a sharded parameter are
    sharded alike.
    """
    _prepare_mean(state, p, momentum)
    if kind == "none":
        state.pop("second_moment", None)
        state.pop("exponents", None)
        return
    whole, p = p, shards.local(p)
    real = groups.as_real(p)
    held = shards.local(state["second_moment"]) if "second_moment" in state else None
    wanted = torch.float32 if kind == "float32" else torch.uint8
    if held is not None and held.dtype == wanted and _is_ordered(held, real):
        return
    _refuse_capture(p)
    if held is None:
        state["step"].zero_()  # which is how many gradients the moments have seen
        for name in MEANS:
            if name in state:
                shards.local(state[name]).zero_()
        held = _empty(real, wanted).zero_()
        state["second_moment"] = shards.like(held, whole)
        if kind == "8bit":
            state["exponents"] = torch.zeros(count_exponents(p), dtype=torch.uint8, device=held.device)
        return
    new, value = _empty(real, wanted), shards.local(as_float(state, whole))
    state.pop("exponents", None)
    state["second_moment"] = shards.like(new, whole)
    if wanted == torch.float32:
        new.copy_(value)
        return
    ordered = torch.empty_like(new, dtype=torch.float32).copy_(value)
    codes = _as_grouped(new, p)
    state["exponents"] = torch.empty(count_exponents(p), dtype=torch.uint8, device=held.device)
    begin = rows_of(p)[1].first if isinstance(p, LadderTensor) else shards.first_of(whole) or 0
    moment8.encode_(codes, state["exponents"], _as_grouped(ordered, p), moment8.phase(stream, state["step"]), begin)


def _prepare_mean(state: dict[str, Any], p: Tensor, momentum: float) -> None:
    """See to it that there is a first moment in the parameter's memory order, or, without momentum, none.

    A new one of a parameter that has stepped before is too small for some steps, and so are those.
    """
    own = mean_name(p)
    for name in MEANS:
        if not momentum or name != own:
            state.pop(name, None)
    if not momentum:
        return
    real = groups.as_real(shards.local(p))
    held = shards.local(state[own]) if own in state else None
    if held is not None and held.dtype == torch.bfloat16 and _is_ordered(held, real):
        return
    _refuse_capture(real)
    new = _empty(real, torch.bfloat16)
    state[own] = shards.like(new.zero_() if held is None else new.copy_(held), p)


def _refuse_capture(p: Tensor) -> None:
    if p.is_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "a moment is made, or changes its kind or memory order, in a CUDA graph, which would do that again at "
            "every replay; make one step outside of the capture first"
        )


def as_float(state: dict[str, Any], p: Tensor) -> Tensor:
    """A parameter's second moment in float32: what an 8-bit one stands for, exactly."""
    held: Tensor = state["second_moment"]
    if held.dtype != torch.uint8:
        return held
    here, own = shards.local(held), shards.local(p)
    value = torch.empty_like(here, dtype=torch.float32)
    _as_grouped(value, own).copy_(moment8.decoded(_as_grouped(here, own), state["exponents"]))
    return shards.like(value, p)


def count_exponents(p: Tensor) -> int:
    """Of the 8-bit moment of a parameter."""
    p = shards.local(p)
    if not isinstance(p, LadderTensor):
        return moment8.count_groups((groups.as_real(p).numel(),))
    coding = rows_of(p)[1]
    return moment8.count_groups((coding.rows, coding.columns))


def rows_of(p: Tensor) -> tuple[Sequence[Tensor], CodeLayout]:
    """Planes and layout of what is here of a coded parameter."""
    here = shards.local(p)
    rows = here.as_rows() if isinstance(here, LadderTensor) else None
    if rows is None:
        raise TypeError(f"Madam steps coded parameters that are sharded by rows, and this is {here!r}")
    return rows


def _empty(p: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(p.shape, _strides(p), dtype=dtype, device=p.device)


def _is_ordered(moment: Tensor, p: Tensor) -> bool:
    return moment.stride() == p.stride() or moment.stride() == _strides(p)


def _strides(p: Tensor) -> tuple[int, ...]:
    """Of a dense tensor in a parameter's memory order. A slice of something has gaps, and its moment has not."""
    return torch.empty_like(torch.empty_strided(p.shape, p.stride(), device="meta")).stride()


def _as_grouped(moment: Tensor, p: Tensor) -> Tensor:
    """A dense moment as it lies in memory: flat, or, of a coded parameter, as its matrix of codes."""
    flat = noise.in_memory_order(moment)
    if not isinstance(p, LadderTensor):
        return flat
    coding = rows_of(p)[1]
    return flat.view(coding.rows, coding.columns)
