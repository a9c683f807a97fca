"""The rule, on plain tensors. This is the slow truth: the CPU path, and what every kernel is tested against.

Per weight w with gradient g, each step:

    v  <-  beta v + (1 - beta) g^2                                    second moment, gbar = sqrt(v / (1 - beta^t))
    u  <-  clamp(g / gbar, -max_step, +max_step)                      g: or its mean, with momentum
    w  <-  w exp(-lr u sign w)                                        crossing = 0: the paper's Madam, Algorithm 1
    w  <-  clamp(w, -sigma*, +sigma*)                                 sigma* = bound x the tensor's scale

With crossing > 0 the third line gets a second term, which lets small weights pass through zero. Weights that are codes
take the same step in whole rungs of their ladder.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from torchmadam import doubles, moment, moment8, noise
from torchmadam.ladder.layout import CodeLayout
from torchmadam.mean import Mean, returned, room

# exp(80) = 5.5e34 is finite in float32, with room for a weight in front of it.
MAX_LOG_STEP = 80.0
# Weights that a CPU's core steps at a time. A step is some thirty operations, each a pass over memory: of so few
# weights, what one operation leaves is still in the cache for the next. Fewer, and calling them takes the time. Whole
# groups of an 8-bit moment.
_CHUNK = 2**16


def moved(w: Tensor, a: Tensor, width: Tensor | None) -> Tensor:
    """One step of log-size ``a`` = lr u.

        w exp(-a sign w)  -  width^2 / (sqrt(w^2 + width^2) + |w|) sinh a

    ``width`` is beta_w = crossing x sigma*, the zone around zero where steps become additive; None (crossing = 0) is
    the paper's rule, under which signs are frozen. In the variable x = asinh(w / width) the rule is x <- x - a. The
    textbook form of that, w cosh a - sqrt(w^2 + width^2) sinh a, loses all digits at large a; this one does not.
    """
    multiplied = torch.sign(w).mul_(a).neg_().exp_().mul_(w)  # in place: fresh memory costs more than arithmetic
    if width is None:
        return multiplied
    # Divided by width, so that neither w^2 nor width^2 can underflow.
    x = (w / width).abs()
    return multiplied - width / (torch.sqrt(1 + x * x) + x) * sinh(a)


def sinh(a: Tensor) -> Tensor:
    """torch.sinh, but for its last bit, which on a CPU depends on where in memory a number lies."""
    grown = torch.expm1(a.abs())
    return torch.copysign((grown + grown / (grown + 1)) * 0.5, a)


def madam_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    means: Sequence[Tensor],
    moments: Sequence[Tensor],
    exponents: Sequence[Tensor],
    steps: Sequence[Tensor],
    scales: Sequence[Tensor],
    nonfinite: Sequence[Tensor],
    *,
    streams: Sequence[int],
    crossings: Sequence[float],
    lr: float | Tensor,
    momentum: float,
    beta: float,
    max_step: float,
    bound: float | None,
    weight_decay: float,
    bias_correction: bool,
    rounding: str | None,
    maximize: bool,
    firsts: Sequence[int] = (),
) -> None:
    """Step real float tensors of any dtype, shape, stride and device in place.

    ``means`` (like the parameters, bfloat16), the first moments, are empty where momentum is 0.
    ``moments`` (like the parameters, float32; or codes of :mod:`moment8`, which come with ``exponents``) may be empty:
    then u = sign g, the rule of the paper's theory section.
    ``steps``, ``scales`` (start.py: the RMS at the first step, or more) and ``nonfinite`` are 0-d tensors, one a
    parameter, on its device; ``streams`` and ``crossings`` are numbers, one a parameter. ``firsts``: where in the whole
    parameter each of these begins, which may be shards; empty: all are whole.
    """
    for i, param in enumerate(params):
        steps[i].add_(1)
        narrow = param.dtype in (torch.bfloat16, torch.float16)
        limit = scales[i] if bound is None else scales[i] * bound  # sigma*
        width = limit * crossings[i] if crossings[i] > 0 else None
        least, most = extremes(param.dtype, None if bound is None else limit)
        factor = None
        if weight_decay:
            # As exact as the weights are, whatever PyTorch's default dtype is.
            wide = doubles.widest(param.device)
            rate = lr.to(wide) if isinstance(lr, Tensor) else lr
            factor = torch.exp(torch.full((), -weight_decay, dtype=wide, device=param.device) * rate)
        corrections = _corrections(steps[i], momentum, beta, bias_correction)

        phase = moment8.phase(streams[i], steps[i]) if exponents or means else None
        begin = firsts[i] if firsts else 0

        own = (means[i] if means else None, moments[i] if moments else None)
        for first, w, grad, mean, second_moment in _pieces(param, grads[i], *own):
            held: Tensor | moment8.Piece | None = second_moment
            if second_moment is not None and phase is not None and exponents:
                held = moment8.Piece(second_moment, exponents[i][first // moment8.GROUP :], phase, begin + first)
            average = None if mean is None or phase is None else Mean(mean, phase, begin + first)
            u, usable, new_mean, _ = direction_(
                grad, average, held, corrections, nonfinite[i], momentum=momentum, beta=beta, max_step=max_step,
                maximize=maximize,
            )  # fmt: skip
            if average is not None and new_mean is not None:
                average.store_(new_mean)
            old = w.float() if narrow else w
            new = moved(old, u.to(old.dtype).mul_(lr).clamp_(-MAX_LOG_STEP, MAX_LOG_STEP), width)
            if factor is not None:
                new = new * factor.to(new.dtype)
            # A weight without a step to take is left alone; the clamp does not touch it either: from 0 to infinity.
            moves = (new - old).ne_(0.0)  # 1 or 0, since a CPU multiplies ten times as fast as it selects
            new = clamped(new, old, moves * least, most / moves, frozen=width is None)
            if usable is not None:
                new = torch.where(usable, new, old)
            if narrow and rounding != "nearest":
                bits = noise.random_bits_like(w, streams[i], steps[i], begin + first)
                new = noise.round_stochastic(new, w.dtype, bits)
            w.copy_(new)


def extremes(dtype: torch.dtype, limit: Tensor | None) -> tuple[float, float | Tensor]:
    """The smallest size of a weight of this dtype that a step can still change, and the largest within ``limit``."""
    least = 2.0**-24 if dtype == torch.float16 else torch.finfo(dtype).tiny
    if limit is None:
        return least, torch.finfo(dtype).max
    most = noise.largest_below(limit, dtype) if dtype in (torch.bfloat16, torch.float16) else limit
    return least, most.clamp(min=least)  # a tensor of zeros may have a limit of zero


def clamped(new: Tensor, old: Tensor, least: Tensor, most: Tensor, *, frozen: bool) -> Tensor:
    """Weights within +-most. ``frozen``: with their old signs, and none shrinks to zero, where it would stick."""
    if frozen:
        return new.abs().clamp_(max=most).clamp_(min=least).copysign_(old)
    return torch.maximum(new, -most).clamp_(max=most)


@dataclass(frozen=True)
class Pace:
    """The sizes of a step of codes, rounded to float32 where kernels round them.

    Attributes:
        mean: lr, which means have in them, and then u as well; None: there are none.
        most: the largest u.
        rate: rungs for each of u.
        pull: rungs by which a weight far from zero decays.
        returned: what a mean gets, in units of gbar, of each rung that rounding dropped.
    """

    mean: Tensor | None
    most: float | Tensor
    rate: float | Tensor
    pull: float | Tensor
    returned: float

    @classmethod
    def of(
        cls, lr: float | Tensor, spacing: float, *, momentum: float, max_step: float, weight_decay: float, feeds: bool
    ) -> "Pace":
        """Of a ladder with this spacing. ``feeds``: what rounding drops goes into the mean."""
        if isinstance(lr, Tensor) and lr.is_cpu:
            lr = float(lr)  # a number, as it is for kernels
        rate = torch.as_tensor(lr / spacing, dtype=torch.float32)
        pull = rate * weight_decay if weight_decay else 0.0
        if not momentum:
            return cls(None, max_step, rate, pull, 0.0)
        mean = rate * spacing
        # With room for a rung that is owed: else a whole one would come back in part, a small part of one wholly, and
        # roundings would not cancel.
        most = torch.where(rate > 0, mean * max_step + (room(momentum) * spacing if feeds else 0.0), 0.0)
        return cls(mean, most, 1 / spacing, pull, returned(momentum) * spacing if feeds else 0.0)


def madam_coded_(
    planes: Sequence[Sequence[Tensor]],
    codings: Sequence[CodeLayout],
    grads: Sequence[Tensor],
    means: Sequence[Tensor],
    moments: Sequence[Tensor],
    exponents: Sequence[Tensor],
    steps: Sequence[Tensor],
    nonfinite: Sequence[Tensor],
    *,
    streams: Sequence[int],
    lr: float | Tensor,
    momentum: float,
    beta: float,
    max_step: float,
    weight_decay: float,
    bias_correction: bool,
    rounding: str | None,
    maximize: bool,
) -> None:
    """Step coded tensors in place: k <- k + round(s u lr / spacing), kept on the ladder. No float weight appears.

    With momentum, ``means`` are of steps, lr g, and what stochastic rounding drops of a step goes into them, to come
    with the next ones. So codes stay near where floats would be, instead of walking away at random.

    ``means`` and ``moments`` have their parameter's shape and strides; the other arguments are those of :func:`madam_`.
    """
    for i, coding in enumerate(codings):
        steps[i].add_(1)
        ladder = coding.format
        stochastic = (rounding or ladder.default_rounding) == "stochastic"
        feeds = stochastic and bool(means) and bool(moments)
        pace = Pace.of(
            lr, ladder.spacing, momentum=momentum if means else 0.0, max_step=max_step, weight_decay=weight_decay,
            feeds=feeds,
        )  # fmt: skip
        corrections = _corrections(steps[i], momentum, beta, bias_correction)
        share = pace.returned if corrections[0] is None else corrections[0] * pace.returned
        gradient = coding.matrix(grads[i])
        mean = coding.matrix(means[i]) if means else None
        second_moment = coding.matrix(moments[i]) if moments else None
        phase = moment8.phase(streams[i], steps[i]) if exponents or means else None

        # In sixteens: so many rows are whole groups of an 8-bit moment.
        each = max(1, _span(gradient) // max(1, 16 * coding.columns)) * 16
        for first in range(0, coding.rows, each):
            rows = slice(first, first + each)
            place = coding.first + first * coding.columns
            held: Tensor | moment8.Piece | None = None if second_moment is None else second_moment[rows]
            if isinstance(held, Tensor) and phase is not None and exponents:
                own = exponents[i][moment8.count_groups((first, coding.columns)) :]
                held = moment8.Piece(held, own, phase, place, is_matrix=True)
            average = None if mean is None or phase is None else Mean(mean[rows], phase, place)
            u, usable, new_mean, usual = direction_(
                gradient[rows], average, held, corrections, nonfinite[i], momentum=momentum, beta=beta,
                max_step=pace.most, maximize=maximize, pace=pace.mean,
            )  # fmt: skip
            bits = noise.shared_bits(u.shape, streams[i], steps[i], place) if stochastic else None
            own_planes = [plane[rows] for plane in planes[i]]
            old = coding.unpack(own_planes, first)
            codes, dropped = ladder.climbed(old, u, pace.rate, pace.pull, bits)
            if usable is not None:
                codes = torch.where(usable, codes, old)
            if average is not None and new_mean is not None:
                if feeds and usual is not None:
                    back = (dropped * (usual * share)).nan_to_num_(0.0, 0.0, 0.0)
                    new_mean = new_mean + (back if usable is None else torch.where(usable, back, 0.0))
                average.store_(new_mean)
            # The plane of signs comes last, and signs are frozen.
            for plane, new in zip(own_planes, coding.pack_k(codes), strict=False):
                plane.copy_(new)


def _corrections(step: Tensor, momentum: float, beta: float, wanted: bool) -> tuple[Tensor | None, Tensor | None]:
    """Of the first moment and of the second, each None where there is nothing to correct."""
    if not wanted:
        return None, None
    return moment.correction(step, beta=momentum) if momentum else None, moment.correction(step, beta=beta)


def direction_(
    grad: Tensor,
    mean: Mean | None,
    second_moment: Tensor | moment8.Piece | None,
    corrections: tuple[Tensor | None, Tensor | None],
    nonfinite: Tensor,
    *,
    momentum: float,
    beta: float,
    max_step: float | Tensor,
    maximize: bool,
    pace: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Fold a gradient into its second moment; return u, in float32, and where it means something; None: everywhere.

    And the first moment, which is not stored yet, and gbar. With a ``pace``, lr, the mean and u are those of steps.
    Without a second moment u = sign g, or the sign of the mean, where there is one.
    """
    # Float32 is where the second moment lives, whatever the parameter and its gradient are.
    grad = -grad.float() if maximize else grad.float()
    square = grad * grad
    usable = moment.usable(square)
    if usable is not None:
        nonfinite.add_((~usable).sum())
    new = None
    if mean is not None:
        new = grad = mean.folded(grad, usable, momentum=momentum, pace=pace)
    if second_moment is None:
        return torch.sign(grad) * (1.0 if pace is None else pace), usable, new, None
    value = second_moment.decoded() if isinstance(second_moment, moment8.Piece) else second_moment
    moment.fold_(value, square, usable, beta=beta)
    if isinstance(second_moment, moment8.Piece):
        second_moment.encode_(value)
    of_mean, of_square = corrections
    if of_mean is not None:
        grad = grad / of_mean
    usual = None if pace is None else moment.rms(value, of_square)
    return moment.normalised(grad, value, of_square, max_step=max_step), usable, new, usual


def _pieces(
    param: Tensor, grad: Tensor, mean: Tensor | None, second_moment: Tensor | None
) -> list[tuple[int, Tensor, Tensor, Tensor | None, Tensor | None]]:
    """A parameter, its gradient and moments, a span at a time in memory order, each after the position of its start.

    Tensors that have gaps in memory, or lie there in different orders, come whole.
    """
    size = _span(param)
    order = noise.memory_order(param)
    flat = [None if t is None else t.permute(order) for t in (param, grad, mean, second_moment)]
    if param.numel() <= size or not all(t is None or t.is_contiguous() for t in flat):
        return [(0, param, grad, mean, second_moment)]
    count = -(-param.numel() // size)
    w, g, m, v = ([None] * count if t is None else t.view(-1).split(size) for t in flat)
    return [(i * size, *part) for i, part in enumerate(zip(w, g, m, v, strict=True))]


def _span(tensor: Tensor) -> int:
    """How many weights to step at a time: a GPU takes all, and so does a compiler, which needs no such help."""
    whole = not tensor.is_cpu or torch.compiler.is_compiling()
    return tensor.numel() if whole else _CHUNK * torch.get_num_threads()
