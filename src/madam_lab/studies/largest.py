"""How large a step helps? The largest lr that still decreased the loss in one full-batch step, beside the bound."""

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from madam_lab.models.mlp import deep_mlp
from madam_lab.studies.breakdown import DEPTHS, digits_for
from madam_lab.studies.study import Point, register
from torchmadam import Madam, theory

RULES: dict[str, Callable[[list[nn.Parameter], float], torch.optim.Optimizer]] = {
    "sign rule": lambda params, lr: Madam.paper(params, lr, second_moment="none", bound=None),
    "layer-wise": lambda params, lr: theory.LayerWise(params, lr),
    "gradient descent": lambda params, lr: torch.optim.SGD(params, lr),
}
# Where to begin and end, in units of the bound, and how to proceed.
_FIRST, _LAST, _FACTOR, _HALVINGS = 1e-3, 1e3, 1.25, 8


def largest_lr(*, seed: int, network: Any, depths: Sequence[int], width: int, examples: int) -> list[Point]:
    """At the initial weights of perceptrons on digits, in float64: for every depth and rule the largest lr that helps.

    It is where the loss first stops falling as lr grows from a thousandth of the bound, to 0.1 %; beyond it some lr may
    help again. The bound is the theorem's for the angles and relative sizes of this step, and ``size`` is the largest
    |dW| / |W| of any layer at the largest lr, in which rules with different units of lr compare.
    """
    points: list[Point] = []
    for depth in depths:
        torch.manual_seed(seed)
        model = deep_mlp(depth, width, network).double()
        x, y = digits_for(model, examples)

        def loss_of(model: nn.Module, x: Tensor = x, y: Tensor = y) -> Tensor:
            return F.cross_entropy(model(x), y)

        loss = loss_of(model)
        loss.backward()
        for rule, make in RULES.items():
            bound = bound_of(rule, model)
            lr = _largest(model, make, loss_of, loss.item(), bound)
            moved = _moved(model, make, lr)
            pairs = zip(moved.parameters(), model.parameters(), strict=True)
            size = max(float((a - b).detach().norm() / b.detach().norm()) for a, b in pairs)
            points.append({"depth": depth, "rule": rule, "lr": lr, "bound": bound, "size": size})
    return points


def bound_of(rule: str, model: nn.Module) -> float:
    """The lr below which the theorem promises descent, from the gradients that the parameters hold.

    All rules but the sign rule step straight against the gradient, so that their cosine is 1. A layer's relative step
    is lr under the layer-wise rule and lr |g_l| / |W_l| under gradient descent, so prod_l (1 + lr |g_l| / |W_l|) < 2.
    """
    pairs = [(p.detach(), p.grad) for p in model.parameters() if p.grad is not None]
    if rule == "sign rule":
        cosines = [math.cos(gamma) for gamma in theory.layer_angles(model).values()]
        return theory.descent_bound(cosines, len(cosines), exponential=True)
    if rule == "layer-wise":
        return theory.descent_bound(1.0, len(pairs))
    rates = [float(g.norm() / w.norm()) for w, g in pairs]
    return theory.descent_bound(1.0, len(rates), stretches=[r / min(rates) for r in rates]) / min(rates)


def _moved(model: nn.Module, make: Callable[..., torch.optim.Optimizer], lr: float) -> nn.Module:
    double = copy.deepcopy(model)
    for a, b in zip(double.parameters(), model.parameters(), strict=True):
        a.grad = b.grad
    make(list(double.parameters()), lr).step()
    return double


@torch.no_grad()
def _largest(
    model: nn.Module,
    make: Callable[..., torch.optim.Optimizer],
    loss_of: Callable[[nn.Module], Tensor],
    before: float,
    bound: float,
) -> float:
    """Where the loss first stops falling; a thousand times the bound if it never does."""

    def falls(lr: float) -> bool:
        return float(loss_of(_moved(model, make, lr))) < before  # NaN does not fall

    low, high = 0.0, _FIRST * bound
    while falls(high):
        if high >= _LAST * bound:
            return high
        low, high = high, high * _FACTOR
    for _ in range(_HALVINGS):
        middle = math.sqrt(low * high) if low else high / 2
        low, high = (middle, high) if falls(middle) else (low, middle)
    return low


def _options(network: str) -> Mapping[str, object]:
    return {"network": network, "depths": DEPTHS, "width": 64, "examples": 512}


for _kind in ("tanh", "leaky_relu"):
    register(f"largest_lr_{_kind}", largest_lr, _options(_kind), {"depths": (2, 3), "width": 8, "examples": 20})
