"""State dicts: which ones Madam accepts, and how their tensors keep their dtypes."""

from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from torchmadam import groups, held, shards
from torchmadam.ladder.tensor import LadderTensor

# Written into every param group, and so into every state dict. Raise it when the state changes its meaning.
STATE_VERSION = 2
# 1: a float's scale was its sigma; zeros had a crossing of their own (held.renew).
_READABLE = {1, STATE_VERSION}
# Arguments that a state may be older than, and what was done then.
OLDER: dict[str, Any] = {"momentum": 0.0}


class Exact:
    """A state tensor on its way through ``Optimizer.load_state_dict``, which would cast it to the parameter's dtype."""

    def __init__(self, value: Tensor | float) -> None:
        self.value = value

    def on(self, device: torch.device) -> Tensor:
        """A copy on this device, of the dtype it was saved in."""
        value = self.value if isinstance(self.value, Tensor) else torch.as_tensor(self.value, dtype=torch.float32)
        return value.detach().clone().to(device)


def shield(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Refuse states that are not Madam's; hide the tensors of those that are from the base class's casts."""
    if not {"state", "param_groups"} <= state_dict.keys():
        raise ValueError(
            f"this is not the state of an optimiser: it has {sorted(map(str, state_dict))[:5]} and no 'param_groups'; "
            f"pass what optimizer.state_dict() returned"
        )
    versions = {group.get("state_version") for group in state_dict["param_groups"]}
    if not versions or not versions <= _READABLE:
        keys = sorted({str(key) for state in state_dict["state"].values() for key in state})
        raise ValueError(
            f"this state dict was written by another optimiser, or by a newer torchmadam (version {versions}, state "
            f"{keys}), and Madam (version {STATE_VERSION}) cannot continue from it; load the model's weights and let "
            f"Madam start its own state"
        )
    order = [index for group in state_dict["param_groups"] for index in group["params"]]
    params = dict(zip(order, (p for group in optimizer.param_groups for p in group["params"]), strict=False))
    shielded = {}
    for index, state in state_dict["state"].items():
        for moment in (state.get(name) for name in (*held.MEANS, "second_moment")):
            if index in params and moment is not None and moment.shape != groups.as_real(params[index]).shape:
                raise ValueError(
                    f"a moment of parameter {index} has shape {tuple(moment.shape)} where the parameter has "
                    f"{tuple(groups.as_real(params[index]).shape)}; load the state of the same model, with its "
                    f"parameters in the same order"
                )
        if index in params and "exponents" in state:
            p = params[index]
            fits = state["exponents"].numel() == held.count_exponents(p)
            if not fits or ("scale" in state) == isinstance(shards.local(p), LadderTensor):
                raise ValueError(
                    f"the 8-bit second moment of parameter {index} was made for another kind of weights, floats or "
                    f"codes, or on another number of ranks, and its exponents do not fit; convert before saving, move "
                    f"between ranks with torchmadam.distributed.save and load, or let Madam start its own state"
                )
        shielded[index] = {
            name: Exact(value) if isinstance(value, Tensor) or name == "step" else value
            for name, value in state.items()
        }
    # Whether to compile is this machine's business, not the state's.
    own = optimizer.param_groups
    loaded = state_dict["param_groups"]
    if len(own) == len(loaded):
        loaded = [{**OLDER, **group, "compile": mine["compile"]} for group, mine in zip(loaded, own, strict=True)]
    return {**state_dict, "state": shielded, "param_groups": loaded}
