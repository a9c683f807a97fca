"""The rule, on plain tensors. This is the slow truth: the CPU path, and what every kernel is tested against.

Per weight w with gradient g, each step:

    v  <-  beta v + (1 - beta) g^2                                    second moment, gbar = sqrt(v / (1 - beta^t))
    u  <-  clamp(g / gbar, -max_step, +max_step)
    w  <-  w exp(-lr u sign w)                                        crossing = 0: the paper's Madam, Algorithm 1
    w  <-  clamp(w, -sigma*, +sigma*)                                 sigma* = bound x the tensor's first RMS

With crossing > 0 the third line gets a second term, which lets small weights pass through zero.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from torchmadam import moment, noise

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
        # Float32 is where the second moment lives, whatever the parameter and its gradient are.
        grad = -grads[i].float() if maximize else grads[i].float()
        usable = moment.usable(grad)
        nonfinite[i].add_((~usable).sum())
        if moments:
            moment.fold_(moments[i], grad, usable, beta=beta)
            rms = moment.root(moments[i], steps[i], beta=beta, bias_correction=bias_correction)
            u = moment.normalised(grad, rms, max_step=max_step)
        else:
            u = torch.sign(grad)
        u = torch.where(usable, u, 0.0)

        narrow = param.dtype in (torch.bfloat16, torch.float16)
        w = param.float() if narrow else param
        limit = scales[i] if bound is None else scales[i] * bound  # sigma*
        width = limit * crossings[i] if crossings[i] > 0 else None

        a = (u.to(w.dtype) * lr).clamp(-_MAX_LOG_STEP, _MAX_LOG_STEP)
        w = moved(w, a, width)
        if weight_decay:
            w = w * _exp(-lr * weight_decay)
        if bound is not None:
            limit = noise.largest_below(limit, param.dtype) if narrow else limit
            w = w.clamp(-limit, limit)
        if narrow and rounding != "nearest":
            w = noise.round_stochastic(w, param.dtype, noise.random_bits(w.shape, streams[i], steps[i]))
        param.copy_(w)


def _exp(x: float | Tensor) -> Tensor:
    return torch.exp(torch.as_tensor(x))
