"""The theory's quantities, measured on a live network. Weights, codes, buffers and random state are left as they were.

A *closure* is a function without arguments that returns the loss of the model, with its graph; it does not call
backward.
"""

import copy
import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from torchmadam.ladder.tensor import LadderTensor
from torchmadam.theory.bounds import descent_bound, stretch
from torchmadam.theory.sums import (
    Layers,
    add,
    angle,
    as_float,
    dot,
    gamma_sums,
    matrices,
    ratio,
    squared_length,
    trust_product,
    width_of,
)
from torchmadam.theory.trial import Closure, Trial, trial_of


@dataclass(frozen=True)
class LayerReport:
    """What one step does to one layer (or to a tensor that belongs to none, such as a bias).

    Attributes:
        name: of the layer.
        is_layer: whether it counts in the product of deep relative trust.
        gamma: the angle between |g| and |W| [gamma_k], in radians; with ``crossing``, sqrt(W^2 + beta_w^2) for |W|.
        theta: the angle between the step and the negative gradient [theta_k].
        relative_size: |dW| / |W|.
        breakdown: max over t of |g(W + t dW) - g(W)| / |g(W)|, over the points that were tried.
        predicted: the change of the loss to first order, g . dW.
    """

    name: str
    is_layer: bool
    gamma: float
    theta: float
    relative_size: float
    breakdown: float
    predicted: float


@dataclass(frozen=True)
class DescentReport:
    """One proposed step: layer by layer, and what it does to the loss. ``print`` it for a table.

    Attributes:
        layers: a row for each layer, then one for each tensor that belongs to none.
        trust: the product of deep relative trust, prod (1 + |dW_l| / |W_l|) - 1, which should exceed every breakdown.
        loss: before the step.
        predicted: the change to first order.
        actual: the change.
        bound: the right-hand side of Lemma 1, which the change cannot exceed.
    """

    layers: tuple[LayerReport, ...]
    trust: float
    loss: float
    predicted: float
    actual: float
    bound: float

    @property
    def lemma_held(self) -> bool:
        """Whether Lemma 1's inequality held, but for rounding; it must, if enough points t were tried."""
        return self.actual <= self.bound + 1e-6 * (abs(self.loss) + abs(self.bound))

    @property
    def trust_held(self) -> bool:
        """Whether deep relative trust, the theory's assumption, held for this step."""
        return all(row.breakdown <= self.trust for row in self.layers if row.is_layer)

    @property
    def promises_descent(self) -> bool:
        """Whether the measured breakdown is below cos theta in every layer that moves, so that the step must help."""
        moving = [row for row in self.layers if row.relative_size > 0]
        return bool(moving) and all(row.breakdown < math.cos(row.theta) for row in moving)

    def __str__(self) -> str:
        head = f"{'':32} {'cos gamma':>10} {'cos theta':>10} {'|dW|/|W|':>10} {'breakdown':>10} {'g . dW':>11}"
        rows = [
            f"{row.name[-32:]:32} {math.cos(row.gamma):>10.3f} {math.cos(row.theta):>10.3f} {row.relative_size:>10.4g} "
            f"{row.breakdown:>10.4g} {row.predicted:>11.4g}"
            for row in self.layers
        ]
        last = (
            f"deep relative trust allows a breakdown of {self.trust:.4g}; loss {self.loss:.6g}, predicted change "
            f"{self.predicted:.4g}, actual {self.actual:.4g}, Lemma 1 allows at most {self.bound:.4g}"
        )
        return "\n".join([head, *rows, last])


def layer_angles(model: nn.Module, optimizer: Optimizer | None = None, layers: Layers = matrices) -> dict[str, float]:
    """Gamma_k of every layer, from the gradients that the parameters hold now, in radians.

    With an optimiser (or coded weights) whose rule has ``crossing``, sqrt(W^2 + beta_w^2) takes the place of |W|.
    """
    widths = _widths(model, optimizer)
    sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    for name, p in model.named_parameters():
        layer = layers(name, p)
        if layer is not None and p.grad is not None:
            add(sums[layer], *gamma_sums(as_float(p), p.grad, widths[name]))
    if not sums:
        raise ValueError("no layer has a gradient; call backward first, or choose other layers=")
    return {layer: angle(*parts) for layer, parts in sums.items()}


def deep_relative_trust(model: nn.Module, step: Mapping[str, Tensor], layers: Layers = matrices) -> float:
    """prod_l (1 + |dW_l| / |W_l|) - 1 for a step given by parameter name: how far gradients may break down."""
    sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for name, p in model.named_parameters():
        layer = layers(name, p)
        if layer is not None:
            add(sums[layer], squared_length(step[name]) if name in step else 0.0, squared_length(as_float(p)))
    return trust_product(ratio(*parts) for parts in sums.values())


def gradient_breakdown(
    model: nn.Module, closure: Closure, step: Mapping[str, Tensor], layers: Layers = matrices, points: int = 5
) -> dict[str, float]:
    """max over t in (0, 1] of |g_k(W + t dW) - g_k(W)| / |g_k(W)| for every layer, over so many values of t.

    What is found is a lower bound of the maximum over all t. A parameter of no layer is reported under its own name.
    """
    with trial_of(model) as trial:
        start = trial.gradients(closure)[1]
        changes, _ = _changes(trial, closure, step, start, layers, points)
        sizes: dict[str, float] = defaultdict(float)
        for name, p in trial.originals.items():
            sizes[layers(name, p) or name] += squared_length(start[name])
        return {layer: ratio(square, sizes[layer]) for layer, square in changes.items()}


def descent_report(
    model: nn.Module, closure: Closure, optimizer: Optimizer, layers: Layers = matrices, points: int = 5
) -> DescentReport:
    """What the optimiser's next step would do to the loss, and what the theory says of it. Nothing is changed.

    Besides the model it holds the gradient, trial weights, and first a copy of the optimiser's state, then the step:
    three copies of the parameters, or as many more as the optimiser holds numbers a weight.
    """
    widths = _widths(model, optimizer)
    with trial_of(model) as trial:
        loss, start = trial.gradients(closure)
        step = _proposed(trial, optimizer, start)
        changes, final = _changes(trial, closure, step, start, layers, points)
        members: dict[str, list[str]] = defaultdict(list)
        for name, p in trial.originals.items():
            members[layers(name, p) or name].append(name)
        rows, bound = [], 0.0
        for layer, own in members.items():
            gamma, theta, sizes = [0.0] * 3, [0.0] * 3, [0.0] * 2
            for name in own:
                weight, g, move = as_float(trial.originals[name]), start[name], step[name]
                add(gamma, *gamma_sums(weight, g, widths[name]))
                add(theta, -dot(g, move), squared_length(g), squared_length(move))
                add(sizes, squared_length(move), squared_length(weight))
            predicted = -theta[0]
            bound += predicted + math.sqrt(changes[layer] * theta[2])
            is_layer = layers(own[0], trial.originals[own[0]]) is not None
            broken, size = ratio(changes[layer], theta[1]), ratio(*sizes)
            rows.append(LayerReport(layer, is_layer, angle(*gamma), angle(*theta), size, broken, predicted))
    rows.sort(key=lambda row: not row.is_layer)
    trust = trust_product(row.relative_size for row in rows if row.is_layer)
    return DescentReport(tuple(rows), trust, loss, math.fsum(row.predicted for row in rows), final - loss, bound)


def safe_lr(model: nn.Module, closure: Closure, optimizer: Optimizer | None = None, layers: Layers = matrices) -> float:
    """The largest lr that the theorem allows for this model and loss now, for Madam's exponential steps.

    An upper bound under an assumption: it is for steps of equal relative size (u = +-1), holds as far as deep relative
    trust does, and is about one step on the loss that the closure computes, not about a noisy run of many. Layers
    without a gradient, which will not move, do not count.
    """
    widths = _widths(model, optimizer)
    with trial_of(model) as trial:
        gradients = trial.gradients(closure)[1]
        angles: dict[str, list[float]] = defaultdict(lambda: [0.0] * 3)
        sizes: dict[str, list[float]] = defaultdict(lambda: [0.0] * 2)
        for name, p in trial.originals.items():
            layer = layers(name, p)
            if layer is not None:
                weight = as_float(p)
                add(angles[layer], *gamma_sums(weight, gradients[name], widths[name]))
                add(sizes[layer], widths[name] ** 2 * weight.numel(), squared_length(weight))
    if not angles:
        raise ValueError("the model has no layers; choose others with layers=")
    moving = [layer for layer, (_, _, gradient) in angles.items() if gradient != 0]
    if not moving:
        raise ValueError(
            "no layer has a gradient, so no lr would move anything; does the closure's loss depend on them?"
        )
    cosines = [math.cos(angle(*angles[layer])) for layer in moving]
    stretches = [stretch(*map(math.sqrt, sizes[layer])) for layer in moving]
    return descent_bound(cosines, len(cosines), exponential=True, stretches=stretches)


# ---- one step


def _changes(
    trial: Trial,
    closure: Closure,
    step: Mapping[str, Tensor],
    start: Mapping[str, Tensor],
    layers: Layers,
    points: int,
) -> tuple[dict[str, float], float]:
    """max over t of |g_k(W + t dW) - g_k(W)|^2 for every layer, and the loss after the whole step."""
    if points < 1:
        raise ValueError(f"points={points}: at least the whole step has to be looked at")
    worst: dict[str, float] = defaultdict(float)
    for i in range(1, points + 1):
        trial.move(step, i / points)
        changed: dict[str, float] = defaultdict(float)
        for name, square in trial.differences(closure, start).items():
            changed[layers(name, trial.originals[name]) or name] += square
        for layer, square in changed.items():
            worst[layer] = max(worst[layer], square)
    trial.reset()
    with torch.no_grad():
        return worst, float(closure())


def _proposed(trial: Trial, optimizer: Optimizer, gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What the optimiser's next step would add to each weight: made by a twin of it, on the trial weights.

    Codes are stepped as codes, on copies of their own.
    """
    names = {id(p): name for name, p in trial.originals.items()}
    doubles: dict[int, Tensor] = {}
    for p in (p for group in optimizer.param_groups for p in group["params"]):
        name = names.get(id(p))
        doubles[id(p)] = copy.deepcopy(p) if name is None or isinstance(p, LadderTensor) else trial.weights[name]
        if name is not None and p.requires_grad:
            doubles[id(p)].grad = gradients[name].to(p.dtype)
    twin = copy.copy(optimizer)
    twin.param_groups = [{**g, "params": [doubles[id(p)] for p in g["params"]]} for g in optimizer.param_groups]
    twin.state = defaultdict(dict)
    for p, held in optimizer.state.items():
        twin.state[doubles[id(p)]] = {k: v.clone() if isinstance(v, Tensor) else v for k, v in held.items()}
    with torch.no_grad():
        twin.step()
        del twin  # and the copy of the optimiser's state with it
        step = {}
        for name, p in trial.originals.items():
            double = doubles.get(id(p))
            step[name] = torch.zeros_like(trial.weights[name]) if double is None else as_float(double) - as_float(p)
            trial.weights[name].grad = None
    return step


def _widths(model: nn.Module, optimizer: Optimizer | None) -> dict[str, float]:
    """beta_w of every parameter: crossing times the clamp, where the rule has a crossing."""
    owners = {p: group for group in (optimizer.param_groups if optimizer else ()) for p in group["params"]}
    return {name: float(width_of(p, optimizer, owners.get(p), name)) for name, p in model.named_parameters()}
