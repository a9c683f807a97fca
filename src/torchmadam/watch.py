"""Warnings about training that is about to go wrong, each given once: of codes, of bounds, of gradients."""

import math
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from torchmadam import groups, shards
from torchmadam.ladder.format import LadderFormat
from torchmadam.ladder.tensor import LadderTensor
from torchmadam.messages import warn
from torchmadam.start import given_scale

# Looking at all weights reads them once more, and at codes synchronises with the device, so it is done rarely.
_EARLY, _EVERY = (10, 100, 300), 1000
_FULL = 0.2
_FULL_OF_FLOATS = 0.3  # a last layer that learns well may have a quarter of its weights there
_FEW, _FULL_OF_FEW = 16, 0.5  # of a tensor of fewer weights than 16, two or three at the end mean nothing
_NOT_FINITE = 0.25  # of the gradients' elements since the last look; a single bad step soon after the first is no more

# A parameter's name, itself, its state, and whether its scale was given.
_Float = tuple[str | None, Tensor, dict[str, Any], bool]

# What codes have from to_ladder_, and what it is when nothing was said about it, to Madam and to Madam.paper.
_OF_FLOATS = {"bound": 5.0, "crossing": None, "scale": None, "zero_scale": 0.01}
_OF_PAPER = {**_OF_FLOATS, "bound": 3.0, "crossing": 0.0}


class Watch:
    """Looks at the parameters of an optimiser as it steps."""

    def __init__(self) -> None:
        self._ticks: Counter[int] = Counter()
        self._lr: dict[int, tuple[float, str | None, float]] = {}
        self._said: set[object] = set()
        # Numbers on their way from a GPU, for which nobody waits, and what is to be done with them.
        self._coming: list[tuple[Any, Tensor, Callable[[Tensor], None]]] = []
        # Elements of gradients at the last look, those of them that could not be used, and before which step that was.
        self._looked: dict[object, tuple[float, float, int]] = {}

    def look(self, group: dict[str, Any], state: Mapping[Tensor, dict[str, Any]], *, coded: bool) -> None:
        """Look before a step of a param group. ``coded``: some of its parameters are."""
        if not group["params"]:
            return
        place, lr = id(group["params"][0]), group["lr"]
        if coded and (not isinstance(lr, Tensor) or lr.device.type == "cpu"):
            # The sign of a mean is as large as any other.
            averaged = 0.0 if group["second_moment"] == "none" else group["momentum"]
            now = float(lr), group["rounding"], averaged
            if self._lr.get(place) != now:
                self._lr[place] = now
                own = [here for p in group["params"] if isinstance(here := shards.local(p), LadderTensor)]
                sizes: Counter[LadderFormat] = Counter()
                for here in own:
                    sizes[here.coding.format] += here.numel()
                for ladder, size in sizes.items():
                    share = size / max(1, sizes.total())
                    self._look_at_lr(ladder, share, now[0], now[1] or ladder.default_rounding, now[2])
        if coded and not self._ticks[place]:
            self._look_at_arguments(group)
        self._ticks[place] += 1
        begins = self._ticks[place] == 1
        due = self._ticks[place] in _EARLY or self._ticks[place] % _EVERY == 0
        if not (begins or due or self._coming) or (
            torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
        ):
            return
        self._take_what_has_come()
        if due:
            self._look_at_codes(group)
            self._look_at_floats(group, state)
        if begins or due:
            self._look_at_gradients(group, state, place)

    def _look_at_lr(self, ladder: LadderFormat, share: float, lr: float, rounding: str, momentum: float) -> None:
        # At half the spacing only gradients above their usual size still move a weight, and means are smaller.
        step = lr * math.sqrt((1 - momentum) / (1 + momentum))
        if rounding == "nearest" and 0 < step <= 0.5 * ladder.spacing and ladder not in self._said:
            self._said.add(ladder)
            size = f"lr={lr:g}" + (f" at momentum={momentum:g} makes steps of {step:.2g}, which" if momentum else "")
            which = "most weights" if share > 0.5 else f"the {100 * share:.2g} % of the weights that are {ladder}"
            warn(
                f"{size} is at most half the ladder's spacing {ladder.spacing:.4g}, so rounding to nearest freezes "
                f'{which}; use rounding="stochastic" or a finer ladder{", or momentum=0" if momentum else ""}',
            )

    def _look_at_arguments(self, group: dict[str, Any]) -> None:
        own = [shards.local(p) for p in group["params"]]
        ladders = [here.coding.format for here in own if isinstance(here, LadderTensor)]
        said = dict(group)
        if group["crossing"] == groups.usual_crossing(group["bound"]):
            said["crossing"] = None
        given = min(
            ([name for name in usual if said[name] != usual[name]] for usual in (_OF_FLOATS, _OF_PAPER)), key=len
        )
        if "crossing" in given and any(ladder.crossing == group["crossing"] for ladder in ladders):
            given.remove("crossing")
        if given and len(ladders) == len(own) and "arguments" not in self._said:
            self._said.add("arguments")
            warn(
                f"{', '.join(f'{name}=' for name in given)}: Madam has this for floats, and these parameters are "
                f"codes, which have theirs from to_ladder_; say it there, and crossing= by a signed ladder",
            )

    def _look_at_codes(self, group: dict[str, Any]) -> None:
        names = group.get("param_names") or [None] * len(group["params"])
        fresh = [
            (name, here)
            for name, p in zip(names, group["params"], strict=True)
            if isinstance(here := shards.local(p), LadderTensor) and p.grad is not None and id(here) not in self._said
        ]
        shares = [_share_at_the_end(p) for _, p in fresh]
        for (name, p), share in zip(fresh, [float(share) for share in shares], strict=True):
            if share > _most(p, _FULL):
                self._said.add(id(p))
                label = name or p.label or f"a tensor of shape {tuple(p.shape)}"
                warn(
                    f"{100 * share:.0f} % of the codes of {label} are at the upper end of their ladder: they want "
                    f"to grow past the bound; convert with a larger bound=",
                )

    def _look_at_floats(self, group: dict[str, Any], state: Mapping[Tensor, dict[str, Any]]) -> None:
        bound = group["bound"]
        if bound is None or bound <= 1:  # where many weights begin at their bound
            return
        names = group.get("param_names") or [None] * len(group["params"])
        fresh: list[_Float] = []
        for name, p in zip(names, group["params"], strict=True):
            known = state.get(p, {})
            if id(p) not in self._said and "scale" in known and _matters(name, p, known):
                fresh.append((name, p, known, given_scale(group, name) is not None))
        for device in {p.device for _, p, _, _ in fresh}:
            own = [each for each in fresh if each[1].device == device]
            shares = torch.stack([_share_at_the_bound(p, bound * known["scale"]) for _, p, known, _ in own])
            found = torch.stack([shares, torch.stack([known["scale"].float() for _, _, known, _ in own])])
            self._when_here(found, partial(self._warn_of_floats, own=own, bound=bound))

    def _look_at_gradients(self, group: dict[str, Any], state: Mapping[Tensor, dict[str, Any]], place: int) -> None:
        """Elements of gradients that could not be used since the last look: all, where the loss is nan."""
        known = [(p, state[p]) for p in group["params"] if "nonfinite" in state.get(p, {})]
        for device in {own["nonfinite"].device for _, own in known}:
            here = [(p, own) for p, own in known if own["nonfinite"].device == device]
            sizes = [groups.as_real(shards.local(p)).numel() for p, _ in here]
            seen = torch.stack(torch._foreach_mul([own["step"] for _, own in here], sizes)).sum()
            lost = torch.stack([own["nonfinite"] for _, own in here]).sum()
            found = torch.stack([seen, lost.to(seen.dtype)])
            self._when_here(found, partial(self._warn_of_gradients, key=(place, device), tick=self._ticks[place]))

    def _when_here(self, found: Tensor, then: Callable[[Tensor], None]) -> None:
        if found.device.type != "cuda":
            then(found)
            return
        here = torch.empty(found.shape, dtype=found.dtype, device="cpu", pin_memory=True)
        here.copy_(found, non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record(torch.cuda.current_stream(found.device))
        self._coming.append((arrived, here, then))

    def _take_what_has_come(self) -> None:
        coming, self._coming = self._coming, []
        for arrived, found, then in coming:
            if arrived.query():
                then(found)
            else:
                self._coming.append((arrived, found, then))

    def _warn_of_gradients(self, found: Tensor, key: object, tick: int) -> None:
        seen, lost = found.tolist()
        seen_before, lost_before, since = self._looked.get(key, (0.0, 0.0, 1))
        self._looked[key] = seen, lost, tick
        share = (lost - lost_before) / max(1.0, seen - seen_before)
        if tick > 1 and _NOT_FINITE < share <= 1.0 and "nonfinite" not in self._said:
            self._said.add("nonfinite")
            warn(
                f"{100 * share:.0f} % of all elements of the last {tick - since} gradients were nan, infinite or too "
                f"large to square, and their weights were left as they are: look at the loss, and for where it begins "
                f"use torch.autograd.set_detect_anomaly(True)"
            )

    def _warn_of_floats(self, found: Tensor, own: list[_Float], bound: float) -> None:
        for (name, p, known, given), share, scale in zip(own, *found.tolist(), strict=True):
            zeros = known["zeros"] and not given
            # Not a number: of a shard that is empty. No scale: zeros that are to stay.
            if not scale or not share > _most(p, _FULL if zeros else _FULL_OF_FLOATS):
                continue
            self._said.add(id(p))
            where = f"{100 * share:.0f} % of {name or f'a tensor of shape {tuple(p.shape)}'} is at its bound, "
            if known["room"] > 1:
                warn(
                    f"{where}{bound * scale:.3g}: it wants to grow; use no bound (bound=None), or rescale what the "
                    f"network is to predict",
                )
            elif zeros:
                warn(
                    f"{where}{bound:g} x {scale:.2g}: it began as zeros, which have no scale of their own, and wants "
                    f"to grow; use a larger zero_scale= for it, such as {3 * scale:.1g}, or initialise it off zero",
                )
            else:
                warn(
                    f"{where}{bound:g} x its scale {scale:.2g}: it wants to grow; use a larger scale= for it, or no "
                    f"bound (bound=None), or rescale what the network is to predict",
                )


def _matters(name: str | None, p: Tensor, known: dict[str, Any]) -> bool:
    """Whether a share of this float tensor says something. It does not of biases that zero_scale bounds, on purpose."""
    if isinstance(shards.local(p), LadderTensor):
        return False
    is_bias = p.dim() == 1 if name is None else "bias" in name.rpartition(".")[2]
    return not (is_bias and known["zeros"] and known["room"] == 1)


def _most(p: Tensor, usual: float) -> float:
    """The share of a tensor's weights that may be at their end."""
    return usual if p.numel() >= _FEW else _FULL_OF_FEW


def _share_at_the_bound(p: Tensor, limit: Tensor) -> Tensor:
    """Of short types the limit is cut to what they have, up to one part in eps below. One byte a weight at a time."""
    here = groups.as_real(shards.local(p).detach())
    near = (limit * (1 - max(1e-4, 2 * torch.finfo(here.dtype).eps))).to(here.dtype)
    return (torch.count_nonzero(here >= near) + torch.count_nonzero(here <= -near)).float() / here.numel()


def _share_at_the_end(p: LadderTensor) -> Tensor:
    """The share of weights as large as the ladder allows. Decoding takes fewer launches than taking codes apart."""
    below = p.limit * (1 - p.coding.format.spacing / 4)  # and above the next rung
    return (p.decode(torch.float32).abs() > below).float().mean()
