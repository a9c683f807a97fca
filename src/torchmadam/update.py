"""The rule, on plain tensors. This is the slow truth: the CPU path, and what every kernel is tested against.

Per weight w with gradient g, each step:

    v  <-  beta v + (1 - beta) g^2                                    second moment, gbar = sqrt(v / (1 - beta^t))
    u  <-  clamp(g / gbar, -max_step, +max_step)
    w  <-  w exp(-lr u sign w)                                        crossing = 0: the paper's Madam, Algorithm 1
    w  <-  clamp(w, -sigma*, +sigma*)                                 sigma* = bound x the tensor's first RMS

With crossing > 0 the third line gets a second term, which lets small weights pass through zero. Weights that are codes
take the same step in whole rungs of their ladder.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from torchmadam import moment, noise
from torchmadam.ladder.layout import CodeLayout

# exp(80) = 5.5e34 is finite in float32, with room for a weight in front of it.
_MAX_LOG_STEP = 80.0


def moved(w: Tensor, a: Tensor, width: Tensor | None) -> Tensor:
    """One step of log-size ``a`` = lr u.

        w exp(-a sign w)  -  width^2 / (sqrt(w^2 + width^2) + |w|) sinh a

    ``width`` is beta_w = crossing x sigma*, the zone around zero where steps become additive; None (crossing = 0) is
    the paper's rule, under which signs are frozen. In the variable x = asinh(w / width) the rule is x <- x - a. The
    textbook form of that, w cosh a - sqrt(w^2 + width^2) sinh a, loses all digits at large a; this one does not.
    """
    multiplied = w * torch.exp(-a * torch.sign(w))
    if width is None:
        return multiplied
    # Divided by width, so that neither w^2 nor width^2 can underflow.
    x = (w / width).abs()
    return multiplied - width / (torch.sqrt(1 + x * x) + x) * torch.sinh(a)


def madam_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    moments: Sequence[Tensor],
    steps: Sequence[Tensor],
    scales: Sequence[Tensor],
    nonfinite: Sequence[Tensor],
    *,
    streams: Sequence[int],
    crossings: Sequence[float],
    lr: float | Tensor,
    beta: float,
    max_step: float,
    bound: float | None,
    weight_decay: float,
    bias_correction: bool,
    rounding: str | None,
    maximize: bool,
) -> None:
    """Step real float tensors of any dtype, shape, stride and device in place.

    ``moments`` (float32, like the parameters) may be empty: then u = sign g, the rule of the paper's theory section.
    ``steps``, ``scales`` (sigma, the RMS at the first step) and ``nonfinite`` are 0-d tensors, one a parameter, on its
    device; ``streams`` and ``crossings`` are numbers, one a parameter.
    """
    for i, param in enumerate(params):
        steps[i].add_(1)
        u, usable = direction_(
            grads[i],
            moments[i] if moments else None,
            steps[i],
            nonfinite[i],
            beta=beta,
            max_step=max_step,
            bias_correction=bias_correction,
            maximize=maximize,
        )
        narrow = param.dtype in (torch.bfloat16, torch.float16)
        old = param.float() if narrow else param
        limit = scales[i] if bound is None else scales[i] * bound  # sigma*
        width = limit * crossings[i] if crossings[i] > 0 else None

        a = (u.to(old.dtype) * lr).clamp(-_MAX_LOG_STEP, _MAX_LOG_STEP)
        new = moved(old, a, width)
        if weight_decay:
            # From float64: as exact as the weights are, whatever PyTorch's default dtype is.
            factor = torch.exp(torch.full((), -weight_decay, dtype=torch.float64, device=param.device) * lr)
            new = new * factor.to(new.dtype)
        # A weight without a step to take is left alone; the clamp does not touch it either.
        moves = usable & (new != old)
        new = clamped(new, old, param.dtype, None if bound is None else limit, frozen=width is None)
        new = torch.where(moves, new, old)
        if narrow and rounding != "nearest":
            new = noise.round_stochastic(new, param.dtype, noise.random_bits_like(param, streams[i], steps[i]))
        param.copy_(new)


def clamped(new: Tensor, old: Tensor, dtype: torch.dtype, limit: Tensor | None, *, frozen: bool) -> Tensor:
    """Weights within +-limit, or the range of ``dtype``. ``frozen``: none shrinks to zero, where it would stick."""
    if limit is None:
        top = torch.finfo(dtype).max
        new = new.clamp(-top, top)
    else:
        limit = noise.largest_below(limit, dtype) if dtype in (torch.bfloat16, torch.float16) else limit
        new = new.clamp(-limit, limit)
    if frozen:
        least = 2.0**-24 if dtype == torch.float16 else torch.finfo(dtype).tiny
        new = torch.where((new.abs() < least) & (old != 0), torch.copysign(torch.full_like(old, least), old), new)
    return new


def madam_coded_(
    planes: Sequence[Sequence[Tensor]],
    codings: Sequence[CodeLayout],
    grads: Sequence[Tensor],
    moments: Sequence[Tensor],
    steps: Sequence[Tensor],
    nonfinite: Sequence[Tensor],
    *,
    streams: Sequence[int],
    lr: float | Tensor,
    beta: float,
    max_step: float,
    weight_decay: float,
    bias_correction: bool,
    rounding: str | None,
    maximize: bool,
) -> None:
    """Step coded tensors in place: k <- k + round(s u lr / spacing), kept on the ladder. No float weight appears.

    ``moments`` have their parameter's shape and strides; the other arguments are those of :func:`madam_`.
    """
    for i, coding in enumerate(codings):
        steps[i].add_(1)
        u, usable = direction_(
            coding.matrix(grads[i]),
            coding.matrix(moments[i]) if moments else None,
            steps[i],
            nonfinite[i],
            beta=beta,
            max_step=max_step,
            bias_correction=bias_correction,
            maximize=maximize,
        )
        ladder = coding.format
        rate = lr / ladder.spacing
        stochastic = (rounding or ladder.default_rounding) == "stochastic"
        bits = noise.random_bits(u.shape, streams[i], steps[i]) if stochastic else None
        old = coding.unpack(planes[i])
        codes = torch.where(usable, ladder.climbed(old, u, rate, rate * weight_decay, bits), old)
        # The plane of signs comes last, and signs are frozen.
        for plane, new in zip(planes[i], coding.pack_k(codes), strict=False):
            plane.copy_(new)


def direction_(
    grad: Tensor,
    second_moment: Tensor | None,
    step: Tensor,
    nonfinite: Tensor,
    *,
    beta: float,
    max_step: float,
    bias_correction: bool,
    maximize: bool,
) -> tuple[Tensor, Tensor]:
    """Fold a gradient into its second moment; return u, in float32, and where the gradient could be used at all.

    Without a second moment u = sign g.
    """
    # Float32 is where the second moment lives, whatever the parameter and its gradient are.
    grad = -grad.float() if maximize else grad.float()
    usable = moment.usable(grad)
    nonfinite.add_((~usable).sum())
    if second_moment is None:
        u = torch.sign(grad)
    else:
        moment.fold_(second_moment, grad, usable, beta=beta)
        rms = moment.root(second_moment, step, beta=beta, bias_correction=bias_correction)
        u = moment.normalised(grad, rms, max_step=max_step)
    return torch.where(usable, u, 0.0), usable
