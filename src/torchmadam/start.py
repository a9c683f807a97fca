"""Where a tensor starts: the size of its weights, the zone around zero where steps are additive, how far they may grow.

sigma      the root mean square of what the tensor holds at its first step, or what stands for it
width      crossing x bound x sigma: below it steps are additive                       [beta_w]
limit      room x bound x sigma: weights are clamped to it                             [sigma*]

The kernels know a tensor's ``scale``, room x sigma, and its own crossing, which is the width as a share of the limit.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from torchmadam import doubles, shards
from torchmadam.groups import as_real, crossing_of, unwrapped
from torchmadam.ladder.format import LadderFormat
from torchmadam.messages import describe, warn

# Sums of squares are taken over so many elements at a time: in one go float32 loses digits, and float64 takes memory.
_CHUNK = 2**22
# Tensors whose RMS is below this share of zero_scale are as good as zeros. No initialisation at random is so small.
_NEXT_TO_ZERO = 0.01
# The sigma of a matrix of zeros, times the root of its inputs. PyTorch's layers begin with 0.58 over that root.
_OF_INPUTS = 0.5
# What vectors may grow to, in units of the bound. Floats: 100 under the usual one, which is not too much for sums in
# bfloat16. Codes, where they begin as zeros: as far as norms' gains, which begin at 1; on a ladder of 2 bits no further
# than others, since its only rungs are its ends and zero.
_VECTORS, _CODED_VECTORS, _FEWEST_BITS = 20.0, 1.0, 3
_JUST_ABOVE = 1 + 1e-6  # a limit is a product of float32 numbers, and may come out a little less


@dataclass(frozen=True)
class Start:
    """What a parameter's steps are measured by.

    Attributes:
        sigma: the size of its weights.
        room: its limit is this many times bound x sigma; infinite, if nothing moves it.
        is_zeros: all of its weights are zero.
    """

    sigma: float
    room: float = 1.0
    is_zeros: bool = False

    @property
    def scale(self) -> float:
        """Of which the limit is ``bound`` times."""
        return self.sigma if self.is_stuck else self.sigma * self.room

    @property
    def is_stuck(self) -> bool:
        """Whether the rule cannot move it."""
        return math.isinf(self.room)

    def share(self, crossing: float) -> float:
        """The width of its zone as a share of its limit, by a group's crossing."""
        return share(crossing, self.room, self.is_zeros)


def share(crossing: float, room: float, is_zeros: bool) -> float:
    """A tensor's own crossing, by that of its group.

    Zeros have a zone under the paper's rule, too: nothing multiplied by zero moves.
    """
    return (crossing or float(is_zeros)) / room


def starts(
    group: Mapping[str, Any], names: Iterable[str | None], params: list[Tensor], ladder: LadderFormat | None = None
) -> list[Start]:
    """Where each parameter of a group starts, by what it holds now. ``ladder``: it is to become codes of that.

    An all-zero tensor has an RMS of zero, and the pure rule never moves it. It gets the signed rule instead, and as its
    sigma ``zero_scale``, or, of a matrix where weights cross zero, a little less than PyTorch would have begun with, if
    that is more. ``zero_scale=0`` leaves it alone, as the paper does. What is next to zero on purpose (LayerScale's
    gains of 1e-5, heads that begin silent) is to grow far beyond its size, and gets it, too.

    Where weights cross zero, the limit is further away than bound x sigma for two kinds of tensors, whose zones, and so
    their steps near zero, are no wider for that: biases and other vectors, whose first size says nothing about the one
    that they need; and what begins with some weights beyond it, as trained tensors do. Of codes it is only so for
    vectors of zeros: a longer ladder is another ladder, and which one must not depend on what was drawn.
    """
    found: list[Start] = []
    for name, (measured, largest), param in zip(names, sizes(params), params, strict=True):
        if not math.isfinite(measured):
            raise ValueError(
                f"{describe(name)} holds a value that is not finite, so its scale cannot be measured; initialise it "
                f"before the first step"
            )
        start = _start(group, name, param, measured, largest, ladder)
        limit = start.scale * float(group["bound"] or 1.0)
        if limit > 0 and torch.tensor(limit, dtype=torch.float64).to(as_real(shards.local(param)).dtype) == 0:
            raise ValueError(
                f"{describe(name)} has a scale of {start.scale:g}, which {param.dtype} rounds to zero; raise it"
            )
        found.append(start)
    return found


def _start(
    group: Mapping[str, Any], name: str | None, param: Tensor, measured: float, largest: float,
    ladder: LadderFormat | None,
) -> Start:  # fmt: skip
    crosses, given, zero_scale = crossing_of(group) > 0, given_scale(group, name), float(group["zero_scale"])
    zeros = measured == 0 and param.numel() > 0
    if zeros and zero_scale == 0 and (given is None or not crosses):
        return Start(given or 0.0, math.inf if ladder is None else 1.0, is_zeros=True)
    if given is not None:
        return Start(given, is_zeros=zeros)
    sigma, is_silent = measured, measured < _NEXT_TO_ZERO * zero_scale
    is_vector = param.numel() == max(param.shape, default=1)  # of any dimensions, such as n x 1 x 1
    if is_silent:
        sigma = zero_scale
        if crosses and param.numel() and (param.dim() == 2 or not is_vector):  # layers of one input or output are n x 1
            sigma = max(sigma, _OF_INPUTS / math.sqrt(param.numel() // len(param)))
    if group["bound"] is None or not crosses or not sigma or not param.numel():  # the paper's rule is left as it is
        return Start(sigma, is_zeros=zeros)
    bound, room = float(group["bound"]), 1.0
    if is_vector and ladder is None:
        room = max(room, _VECTORS / sigma)
    elif is_vector and is_silent and ladder is not None and ladder.stored_bits >= _FEWEST_BITS:
        room = max(room, _CODED_VECTORS / sigma)
    if ladder is None and largest > room * bound * sigma:
        room = _JUST_ABOVE * largest / (bound * sigma)
    return Start(sigma, room, zeros)


def given_scale(group: Mapping[str, Any], name: str | None) -> float | None:
    """The scale that the group's ``scale`` gives to a parameter of this name, or None: measure it."""
    scale = group["scale"]
    if isinstance(scale, Mapping):
        return None if name is None else scale.get(unwrapped(name))
    return None if scale is None else float(scale)


def scales_of(source: nn.Module | Mapping[str, Any]) -> dict[str, float]:
    """The RMS of every float tensor of a trained model or state dict, by name, for ``Madam(..., scale=...)``.

    The paper took its scales from a pre-trained network on ImageNet. All-zero tensors and the running statistics of
    norms have nothing to lend and are left out.
    """
    tensors = dict(source.named_parameters()) if isinstance(source, nn.Module) else source
    named = {
        name: tensor.detach()
        for name, tensor in tensors.items()
        if isinstance(tensor, Tensor)
        and (tensor.is_floating_point() or tensor.is_complex())
        and not name.endswith(("running_mean", "running_var"))
    }
    scales = {name: scale for name, (scale, _) in zip(named, sizes(named.values()), strict=True)}
    return {name: scale for name, scale in scales.items() if 0 < scale < math.inf}


@torch.no_grad()
def sizes(tensors: Iterable[Tensor]) -> list[tuple[float, float]]:
    """The root mean square of each tensor and its largest size (0 for an empty one), in one synchronisation a device.

    Of sharded tensors too they are those of the whole, so every rank that holds a part has to call this.
    """
    tensors = list(tensors)
    squares, largest = [], []
    for tensor in tensors:
        sums, ends = [], []
        for chunk in as_real(shards.local(tensor)).reshape(-1).split(_CHUNK):
            wide = doubles.doubled(chunk)
            sums.append(wide.square().sum())
            ends.append(wide.abs().max() if wide.numel() else sums[-1])
        squares.append(torch.stack(sums).sum())
        largest.append(torch.stack(ends).max())
    by_device: dict[torch.device, list[tuple[int, Tensor]]] = {}
    summed = shards.over_parts(squares, tensors)
    ended = shards.over_parts(largest, tensors, largest=True)
    for i, (tensor, total, end) in enumerate(zip(tensors, summed, ended, strict=True)):
        mean = total / max(tensor.numel() * (2 if tensor.is_complex() else 1), 1)
        by_device.setdefault(tensor.device, []).append((i, torch.stack([mean.sqrt(), end])))
    found: dict[int, tuple[float, float]] = {}
    for own in by_device.values():
        read = torch.stack([pair for _, pair in own]).tolist()
        found.update((i, (rms, end)) for (i, _), (rms, end) in zip(own, read, strict=True))
    return [found[i] for i in range(len(found))]


def warn_stuck(names: list[str]) -> None:
    """Say once that all-zero parameters cannot move."""
    warn(
        f"{', '.join(names)}: all zeros, and zero_scale=0, so a multiplicative step can never move "
        f"{'it' if len(names) == 1 else 'them'}; leave zero_scale at 0.01, or initialise off zero"
    )


def warn_unmatched(new: list[dict[str, Any]], earlier: Iterable[dict[str, Any]] = ()) -> None:
    """Report the parameters of new groups that their scales do not name, and the scales that no parameter took."""
    known: set[str] = set()
    wanted: set[str] = set()
    for group in new:
        if isinstance(group["scale"], Mapping):
            known |= group["scale"].keys()
            wanted |= {unwrapped(name) for name in group["param_names"]}
    taken = {unwrapped(name) for group in earlier for name in group.get("param_names", ())}
    if wanted - known:
        warn(f"no scale for {_listed(wanted - known)}: their own RMS is used")
    if known - wanted - taken:
        warn(f"scales that match no parameter: {_listed(known - wanted - taken)}")


def _listed(names: set[str]) -> str:
    first = sorted(names)[:8]
    return ", ".join(first) + (f" and {len(names) - len(first)} more" if len(names) > len(first) else "")
