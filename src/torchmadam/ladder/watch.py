"""Warnings about training that is about to go wrong, each given once: of codes, and of floats that began as zeros."""

from collections import Counter
from typing import Any

import torch
from torch import Tensor

from torchmadam import shards
from torchmadam.ladder.format import LadderFormat
from torchmadam.ladder.tensor import LadderTensor
from torchmadam.messages import warn

# Looking at all codes reads them once more and synchronises with the device, so it is done rarely.
_EARLY, _EVERY = (10, 100, 300), 1000
_FULL = 0.2
_FEWEST = 16  # weights of a tensor whose share at the end means something


class Watch:
    """Looks at the coded parameters of an optimiser as it steps, and at its float matrices that began as zeros."""

    def __init__(self) -> None:
        self._ticks: Counter[int] = Counter()
        self._lr: dict[int, tuple[float, str | None]] = {}
        self._said: set[object] = set()
        # Float parameters that began as zeros, with their names and scales.
        self.zeros: list[tuple[str | None, Tensor, Tensor]] = []

    def began_as_zeros(self, name: str | None, param: Tensor, scale: Tensor) -> None:
        """Keep an eye on this float parameter. Biases are left out: zero_scale is made for them."""
        is_bias = param.dim() == 1 if name is None else "bias" in name.rpartition(".")[2]
        if not is_bias and (param.numel() >= _FEWEST or param.dim() == 0):
            self.zeros.append((name, param, scale))

    def look(self, group: dict[str, Any]) -> None:
        """Look before a step of a param group."""
        if not group["params"]:
            return
        place, lr = id(group["params"][0]), group["lr"]
        if not isinstance(lr, Tensor) or lr.device.type == "cpu":
            now = float(lr), group["rounding"]
            if self._lr.get(place) != now:
                self._lr[place] = now
                coded = [here for p in group["params"] if isinstance(here := shards.local(p), LadderTensor)]
                for ladder in {here.coding.format for here in coded}:
                    self._look_at_lr(ladder, now[0], now[1] or ladder.default_rounding)
        self._ticks[place] += 1
        due = self._ticks[place] in _EARLY or self._ticks[place] % _EVERY == 0
        if due and not (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):
            self._look_at_codes(group)
            self._look_at_zeros(group)

    def _look_at_lr(self, ladder: LadderFormat, lr: float, rounding: str) -> None:
        # At half the spacing only gradients above their usual size still move a weight.
        if rounding == "nearest" and 0 < lr <= 0.5 * ladder.spacing and ladder not in self._said:
            self._said.add(ladder)
            warn(
                f"lr={lr:g} is at most half the ladder's spacing {ladder.spacing:g}, so rounding to nearest freezes "
                f'most weights; use rounding="stochastic" or a finer ladder',
            )

    def _look_at_codes(self, group: dict[str, Any]) -> None:
        names = group.get("param_names") or [None] * len(group["params"])
        fresh = [
            (name, here)
            for name, p in zip(names, group["params"], strict=True)
            if isinstance(here := shards.local(p), LadderTensor)
            and p.grad is not None
            and id(here) not in self._said
            and here.numel() >= _FEWEST
        ]
        if not fresh:
            return
        shares = [_share_at_the_end(p) for _, p in fresh]
        for (name, p), share in zip(fresh, [float(share) for share in shares], strict=True):
            if share > _FULL:
                self._said.add(id(p))
                label = name or p.label or f"a tensor of shape {tuple(p.shape)}"
                warn(
                    f"{100 * share:.0f} % of the codes of {label} are at the upper end of their ladder: they want "
                    f"to grow past the bound; convert with a larger bound= (or zero_scale=, if it began as zeros)",
                )

    def _look_at_zeros(self, group: dict[str, Any]) -> None:
        own = {id(p) for p in group["params"]}
        fresh = [(name, p, scale) for name, p, scale in self.zeros if id(p) in own and id(p) not in self._said]
        if not fresh or group["bound"] is None:
            return
        shares = [
            (shards.local(p).detach().abs() >= (1 - 1e-4) * group["bound"] * scale).float().mean()
            for _, p, scale in fresh
        ]
        for (name, p, scale), share in zip(fresh, [float(share) for share in shares], strict=True):
            if share > _FULL:
                self._said.add(id(p))
                warn(
                    f"{100 * share:.0f} % of {name or f'a tensor of shape {tuple(p.shape)}'} is at its bound, "
                    f"{group['bound']:g} x {float(scale):g}: it began as zeros, whose scale is zero_scale, and "
                    f"wants to grow; use a larger zero_scale= for it, such as 0.1 or 0.3, or initialise it off zero",
                )


def _share_at_the_end(p: LadderTensor) -> Tensor:
    """The share of weights as large as the ladder allows. Decoding takes fewer launches than taking codes apart."""
    below = p.limit * (1 - p.coding.format.spacing / 4)  # and above the next rung
    return (p.decode(torch.float32).abs() > below).float().mean()
