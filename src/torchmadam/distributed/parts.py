"""Models and optimisers as plain tensors, sharded ones as DTensors, to write and to fill."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from torchmadam import groups, held, shards
from torchmadam.ladder import checkpoint
from torchmadam.ladder.layout import CodeLayout
from torchmadam.ladder.plain import LadderFileError, description
from torchmadam.ladder.tensor import LadderTensor
from torchmadam.madam import Madam
from torchmadam.state import OLDER

MODEL, OPTIMIZER = "model/", "optimizer/"
_NUMBERS = ("index", "room", "zeros")  # of a state, which are no tensors


def of_model(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors of a model, and a description of which are codes, and which names share one."""
    tensors: dict[str, Tensor] = {}
    coded: dict[str, Any] = {}
    shared: dict[str, str] = {}
    first: dict[int, str] = {}
    for name, value in _named(model):
        if first.setdefault(id(value), name) != name:
            shared[name] = first[id(value)]
            continue
        tensors |= {f"{MODEL}{key}": tensor for key, tensor in _plain(name, value).items()}
        if isinstance(shards.local(value), LadderTensor):
            coded[name] = description(_whole(value), value.dtype)
    return tensors, {"version": checkpoint.VERSION, "coded": coded, "shared": shared}


def of_optimizer(model: nn.Module, optimizer: Madam) -> tuple[dict[str, Tensor], list[dict[str, Any]]]:
    """The state of an optimiser by the names of its parameters, and its param groups in terms of JSON.

    8-bit moments are written as the float32 numbers that they stand for, since their groups end with the shard.
    """
    names = _names(model, optimizer)
    params = [p for group in optimizer.param_groups for p in group["params"]]
    known = [p for p in params if optimizer.state.get(p)]
    counts = shards.over_parts([optimizer.state[p]["nonfinite"] for p in known], known)
    tensors: dict[str, Tensor] = {}
    for p, count in zip(known, counts, strict=True):
        at, state = f"{OPTIMIZER}{names[p]}", optimizer.state[p]
        tensors |= {f"{at}.step": state["step"], f"{at}.nonfinite": count}
        if "scale" in state:
            tensors[f"{at}.scale"] = state["scale"]
        tensors |= {f"{at}.{name}": state[name] for name in held.MEANS if name in state}
        if "second_moment" in state:
            tensors[f"{at}.second_moment"] = held.as_float(state, p)
    described = []
    for group in optimizer.param_groups:
        own = {name: _as_json(name, value) for name, value in group.items() if name not in ("params", "param_names")}
        members = {
            names[p]: {name: optimizer.state[p][name] for name in _NUMBERS if name in optimizer.state[p]}
            if optimizer.state.get(p)
            else None
            for p in group["params"]
        }
        described.append({"arguments": own, "params": members})
    return tensors, described


def to_fill(model: nn.Module, about: Mapping[str, Any], names: Mapping[str, Any]) -> dict[str, Tensor]:
    """The model's own tensors, under the names that they have in a checkpoint; LadderFileError if they do not fit."""
    own, described = of_model(model)
    problems = [f"missing: {name}" for name in sorted(own.keys() - names.keys())]
    theirs = {name for name in names if name.startswith(MODEL)}
    problems += [f"not in the model: {name}" for name in sorted(theirs - own.keys())]
    for name in sorted(described["coded"].keys() | about["coded"].keys()):
        if described["coded"].get(name) != about["coded"].get(name):
            problems.append(f"{name} is coded otherwise, or not at all, in one of the two")
    for name in sorted(own.keys() & names.keys()):
        if tuple(own[name].shape) != tuple(names[name].size) or own[name].dtype != names[name].properties.dtype:
            problems.append(
                f"{name} is {names[name].properties.dtype} of shape {tuple(names[name].size)}, in the model "
                f"{own[name].dtype} of shape {tuple(own[name].shape)}"
            )
    if problems:
        more = f", and {len(problems) - 8} more" if len(problems) > 8 else ""
        raise LadderFileError(
            f"this is no checkpoint of this model: {'; '.join(problems[:8])}{more}; convert the model first, with "
            f"torchmadam.to_ladder_, as the one that was saved"
        )
    return own


@torch.no_grad()
def filled(model: nn.Module) -> None:
    """Tell autograd that a model's tensors have been written."""
    for _, value in _named(model):
        here = shards.local(value)
        if isinstance(here, LadderTensor):
            for plane in here.planes:
                torch.autograd.graph.increment_version(plane)
        torch.autograd.graph.increment_version(value)


class Filling:
    """New state for an optimiser, which :meth:`finish` gives to it once its tensors have been filled."""

    def __init__(self, model: nn.Module, optimizer: Madam, about: Mapping[str, Any], names: Mapping[str, Any]) -> None:
        by_name = {name: p for p, name in _names(model, optimizer).items()}
        self._optimizer, self._groups = optimizer, about.get("groups")
        if self._groups is None:
            raise LadderFileError("this checkpoint holds no optimiser; load the model alone")
        ours = [set(_members(model, group)) for group in optimizer.param_groups]
        if ours != [set(group["params"]) for group in self._groups]:
            raise LadderFileError("the checkpoint's param groups are not the optimiser's; make the same groups")
        self.tensors: dict[str, Tensor] = {}
        self._states: list[tuple[Tensor, dict[str, Any]]] = []
        for group in self._groups:
            for name, kept in group["params"].items():
                if kept is not None:
                    self._states.append((by_name[name], self._state(by_name[name], name, kept, names)))

    def _state(self, p: Tensor, name: str, kept: Mapping[str, Any], names: Mapping[str, Any]) -> dict[str, Any]:
        state: dict[str, Any] = {key: value for key, value in kept.items() if value is not None}
        for key in ("step", "nonfinite", "scale", *held.MEANS, "second_moment"):
            at = f"{OPTIMIZER}{name}.{key}"
            if at in names:
                dtype = names[at].properties.dtype
                here = groups.as_real(shards.local(p))
                is_moment = key.endswith("_moment")
                shape = here.shape if is_moment else ()
                empty = torch.zeros(shape, dtype=dtype, device=p.device)
                state[key] = self.tensors[at] = shards.like(empty, p) if is_moment else empty
        return state

    def finish(self) -> None:
        """Put state and arguments into the optimiser, in the place of what it had."""
        self._optimizer.state.clear()
        for p, state in self._states:
            if not _is_first(p):  # of a count over all ranks, which is saved as a sum
                state["nonfinite"].zero_()
            self._optimizer.state[p] = state
        for group, saved in zip(self._optimizer.param_groups, self._groups or (), strict=True):
            for name, value in {**OLDER, **saved["arguments"]}.items():
                if isinstance(group.get(name), Tensor):
                    group[name].fill_(value)
                elif name not in ("compile", "state_version"):  # this machine's business, and what it is from now on
                    group[name] = value
            held.renew(group, self._optimizer.state)


def _named(model: nn.Module) -> list[tuple[str, Tensor]]:
    state = model.state_dict(keep_vars=True)
    known = _shortened([*state])
    return [(known[name], value) for name, value in state.items()]


def _parameters(model: nn.Module) -> dict[Tensor, str]:
    known = _shortened([*model.state_dict(keep_vars=True)])
    return {p: known.get(name, name) for name, p in model.named_parameters()}


def _shortened(names: Sequence[str]) -> dict[str, str]:
    """Without what wrappers add to names; unless two of them would become one."""
    short = {name: groups.unwrapped(name) for name in names}
    return short if len(set(short.values())) == len(short) else {name: name for name in names}


def _names(model: nn.Module, optimizer: Madam) -> dict[Tensor, str]:
    """Parameter names, which an optimiser made of plain parameters does not know."""
    names = _parameters(model)
    strangers = [p for group in optimizer.param_groups for p in group["params"] if p not in names]
    if strangers:
        raise ValueError(
            f"the optimiser has {len(strangers)} parameters that are not the model's, such as one of shape "
            f"{tuple(strangers[0].shape)}; pass the model that it trains"
        )
    return names


def _members(model: nn.Module, group: Mapping[str, Any]) -> list[str]:
    names = _parameters(model)
    return [names[p] for p in group["params"]]


def _whole(value: Tensor) -> CodeLayout:
    """The layout of a coded parameter, of which this may be a shard, in row-major order."""
    coding = held.rows_of(value)[1]
    return CodeLayout.contiguous(coding.format, tuple(value.shape), coding.signs, coding.sign_key)


def _plain(name: str, value: Tensor) -> dict[str, Tensor]:
    """A tensor as plain ones, spread over ranks as it is, that share its memory."""
    if not isinstance(shards.local(value), LadderTensor):
        return {name: value.detach()}
    planes, coding = held.rows_of(value)
    if coding.order != tuple(range(len(coding.order))):
        raise ValueError(f"{name} is not in row-major order; use model.to(memory_format=torch.contiguous_format)")
    here = {f"{name}.plane{i}": _spread(plane, value) for i, plane in enumerate(planes)}
    limit: Any = shards.local(value)
    return {**here, f"{name}.limit": limit.limit}


def _spread(plane: Tensor, value: Tensor) -> Tensor:
    """Rows of bytes, spread over ranks as the rows of weights are."""
    if not shards.is_sharded(value):
        return plane
    from torch.distributed.tensor import DTensor

    shape = torch.Size((value.shape[0], plane.shape[1]))
    return DTensor.from_local(
        plane, value.device_mesh, value.placements, run_check=False, shape=shape, stride=(plane.shape[1], 1)
    )


def _is_first(p: Tensor) -> bool:
    if not shards.is_sharded(p):
        return True
    where: Any = p.device_mesh.get_coordinate() or []
    return all(at == 0 for at, placement in zip(where, p.placements, strict=True) if not placement.is_replicate())


def _as_json(name: str, value: Any) -> Any:
    value = float(value) if isinstance(value, Tensor) and value.numel() == 1 else value
    try:
        return json.loads(json.dumps(value))
    except TypeError as error:
        raise TypeError(f"the param group's {name}={value!r} cannot be written; take it out of the group") from error
