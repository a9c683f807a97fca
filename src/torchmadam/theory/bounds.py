"""The theorem's numbers: how large a relative step may be, how deep a network."""

import math
from collections.abc import Iterable, Sequence

# cos gamma between the absolute values of two long vectors of independent Gaussian numbers.
GAUSSIAN_COSINE = 2 / math.pi


def descent_bound(
    cosines: float | Iterable[float],
    depth: int,
    *,
    exponential: bool = False,
    stretches: Sequence[float] | None = None,
) -> float:
    """The largest lr at which the theorem promises that a multiplicative step decreases the loss.

        prod_l (1 + lr c_l)  <  1 + cos gamma_k      for every layer k

    which is lr < (1 + cos gamma_k)^(1/L) - 1 where all c_l are 1, as under the paper's rule. It holds as far as deep
    relative trust does, which is an assumption about the network.

    Args:
        cosines: cos gamma_k of every layer, or one number for all.
        depth: the number of layers [L].
        exponential: for w exp(+-lr) instead of w (1 +- lr): prod_l exp(lr c_l), so lr < ln(1 + cos gamma_k) / L.
        stretches: c_l of every layer, from :func:`stretch`, for a rule with ``crossing``; None: all 1.
    """
    least = min([cosines] if isinstance(cosines, int | float) else list(cosines))
    if depth < 1 or not 0 <= least <= 1:
        raise ValueError(f"a depth of {depth} and a cosine of {least:g}: layers are 1 or more, cosines between 0 and 1")
    if stretches is not None and (len(stretches) != depth or min(stretches) < 1):
        raise ValueError(f"{depth} layers have as many stretches, each 1 or more, and these are {list(stretches)}")
    c = [1.0] * depth if stretches is None else list(stretches)
    allowed = math.log1p(least)
    if exponential:
        return allowed / sum(c)
    if stretches is None:
        return math.expm1(allowed / depth)
    low, high = 0.0, allowed / sum(c) + allowed  # sum log(1 + lr c) grows with lr; bisect it
    while math.fsum(math.log1p(high * x) for x in c) < allowed:
        high *= 2
    for _ in range(100):
        middle = (low + high) / 2
        if math.fsum(math.log1p(middle * x) for x in c) < allowed:
            low = middle
        else:
            high = middle
    return low


def depth_for(lr: float, cosine: float = GAUSSIAN_COSINE, *, exponential: bool = False) -> int:
    """The deepest network for which the theorem allows this lr; 0 if it allows it for none."""
    if lr <= 0:
        raise ValueError(f"lr={lr:g} makes no step; it must be above 0")
    exact = math.log1p(cosine) / (lr if exponential else math.log1p(lr))
    whole = math.floor(exact)
    return whole - 1 if whole == exact else whole


def stretch(width: float, rms: float) -> float:
    """By how much ``crossing`` lengthens a layer's relative step: |dW| / |W| = lr sqrt(1 + beta_w^2 / RMS^2).

    ``width`` is beta_w, crossing times the clamp; ``rms`` the root mean square of the layer's weights.
    """
    return math.hypot(1.0, width / rms) if rms > 0 else math.inf
