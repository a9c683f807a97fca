"""The theory's quantities, measured on a live network. Weights, codes, buffers and random state are left as they were.

A *closure* is a function without arguments that returns the loss of the model, with its graph; it does not call
backward.
"""

import copy
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from torchmadam import groups
from torchmadam.ladder.tensor import LadderTensor
from torchmadam.madam import Madam
from torchmadam.theory.bounds import descent_bound, stretch

Closure = Callable[[], Tensor]
# Which layer a parameter belongs to, by its name and itself; None: to none.
Layers = Callable[[str, Tensor], str | None]


def matrices(name: str, parameter: Tensor) -> str | None:
    """Every tensor of two or more dimensions is a layer: what is taken for one unless you say otherwise."""
    return name if parameter.dim() >= 2 else None


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
        """Whether the measured breakdown is below cos theta in every layer, so that the step must help."""
        return all(row.breakdown < math.cos(row.theta) for row in self.layers)

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
            _add(sums[layer], *_gamma_sums(_float(p), p.grad, widths[name]))
    if not sums:
        raise ValueError("no layer has a gradient; call backward first, or choose other layers=")
    return {layer: _angle(*parts) for layer, parts in sums.items()}


def deep_relative_trust(model: nn.Module, step: Mapping[str, Tensor], layers: Layers = matrices) -> float:
    """prod_l (1 + |dW_l| / |W_l|) - 1 for a step given by parameter name: how far gradients may break down."""
    sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for name, p in model.named_parameters():
        layer = layers(name, p)
        if layer is not None:
            _add(sums[layer], _square(step[name]) if name in step else 0.0, _square(_float(p)))
    return math.expm1(math.fsum(math.log1p(_ratio(*parts)) for parts in sums.values()))


def gradient_breakdown(
    model: nn.Module, closure: Closure, step: Mapping[str, Tensor], layers: Layers = matrices, points: int = 5
) -> dict[str, float]:
    """max over t in (0, 1] of |g_k(W + t dW) - g_k(W)| / |g_k(W)| for every layer, over so many values of t.

    What is found is a lower bound of the maximum over all t. A parameter of no layer is reported under its own name.
    """
    with _trial(model) as trial:
        start = trial.gradients(closure)[1]
        changes, _ = _changes(trial, closure, step, start, layers, points)
        sizes: dict[str, float] = defaultdict(float)
        for name, p in trial.originals.items():
            sizes[layers(name, p) or name] += _square(start[name])
        return {layer: _ratio(square, sizes[layer]) for layer, square in changes.items()}


def descent_report(
    model: nn.Module, closure: Closure, optimizer: Optimizer, layers: Layers = matrices, points: int = 5
) -> DescentReport:
    """What the optimiser's next step would do to the loss, and what the theory says of it. Nothing is changed.

    Besides the model it holds the step, the gradient and trial weights: three copies of the parameters.
    """
    widths = _widths(model, optimizer)
    with _trial(model) as trial:
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
                weight, g, move = _float(trial.originals[name]), start[name], step[name]
                _add(gamma, *_gamma_sums(weight, g, widths[name]))
                _add(theta, -_dot(g, move), _square(g), _square(move))
                _add(sizes, _square(move), _square(weight))
            predicted = -theta[0]
            bound += predicted + math.sqrt(changes[layer] * theta[2])
            is_layer = layers(own[0], trial.originals[own[0]]) is not None
            broken, size = _ratio(changes[layer], theta[1]), _ratio(*sizes)
            rows.append(LayerReport(layer, is_layer, _angle(*gamma), _angle(*theta), size, broken, predicted))
    rows.sort(key=lambda row: not row.is_layer)
    trust = math.expm1(math.fsum(math.log1p(row.relative_size) for row in rows if row.is_layer))
    return DescentReport(tuple(rows), trust, loss, math.fsum(row.predicted for row in rows), final - loss, bound)


def safe_lr(model: nn.Module, closure: Closure, optimizer: Optimizer | None = None, layers: Layers = matrices) -> float:
    """The largest lr that the theorem allows for this model and loss now, for Madam's exponential steps.

    An upper bound under an assumption: it is for steps of equal relative size (u = +-1), holds as far as deep relative
    trust does, and is about one step on the loss that the closure computes, not about a noisy run of many.
    """
    widths = _widths(model, optimizer)
    with _trial(model) as trial:
        gradients = trial.gradients(closure)[1]
        angles: dict[str, list[float]] = defaultdict(lambda: [0.0] * 3)
        sizes: dict[str, list[float]] = defaultdict(lambda: [0.0] * 2)
        for name, p in trial.originals.items():
            layer = layers(name, p)
            if layer is not None:
                weight = _float(p)
                _add(angles[layer], *_gamma_sums(weight, gradients[name], widths[name]))
                _add(sizes[layer], widths[name] ** 2 * weight.numel(), _square(weight))
    if not angles:
        raise ValueError("the model has no layers; choose others with layers=")
    cosines = [math.cos(_angle(*parts)) for parts in angles.values()]
    stretches = [stretch(math.sqrt(width), math.sqrt(weight)) for width, weight in sizes.values()]
    return descent_bound(cosines, len(cosines), exponential=True, stretches=stretches)


# ---- trial weights


class _Trial:
    """A model whose parameters are float copies for a while; what it was is put back in the end."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.originals: dict[str, Tensor] = dict(model.named_parameters())
        self.buffers = {name: b.detach().clone() for name, b in model.named_buffers()}
        self.places = [
            (module, key, p)
            for module in model.modules()
            for key, p in module._parameters.items()
            if p is not None
        ]  # fmt: skip
        copies = {id(p): nn.Parameter(_float(p).clone()) for _, _, p in self.places}
        self.weights = {name: copies[id(p)] for name, p in self.originals.items()}
        for module, key, p in self.places:
            module._parameters[key] = copies[id(p)]
        self.random = torch.get_rng_state()
        self.random_cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []

    def restore(self) -> None:
        """Put the model's own parameters back."""
        for module, key, p in self.places:
            module._parameters[key] = p
        self.reset()

    def reset(self) -> None:
        """Buffers and random numbers as they were, so that every evaluation sees the same function."""
        with torch.no_grad():
            for name, b in self.model.named_buffers():
                b.copy_(self.buffers[name])
        torch.set_rng_state(self.random)
        for i, state in enumerate(self.random_cuda):
            torch.cuda.set_rng_state(state, i)

    def gradients(self, closure: Closure) -> tuple[float, dict[str, Tensor]]:
        """Loss and gradients at the trial weights."""
        self.reset()
        with torch.enable_grad():
            loss = closure()
            found = torch.autograd.grad(loss, list(self.weights.values()), allow_unused=True)
        named = zip(self.weights.items(), found, strict=True)
        return float(loss.detach()), {name: torch.zeros_like(w) if g is None else g.detach() for (name, w), g in named}

    def differences(self, closure: Closure, start: Mapping[str, Tensor]) -> dict[str, float]:
        """|g - start|^2 of every parameter; each gradient is dropped as soon as it has been looked at."""
        self.reset()
        found = {name: _square(start[name]) for name in self.weights}  # where no gradient comes, it is zero
        handles = []
        for name, w in self.weights.items():

            def look(p: Tensor, name: str = name) -> None:
                found[name] = _square(p.grad - start[name])  # type: ignore[operator]
                p.grad = None

            handles.append(w.register_post_accumulate_grad_hook(look))
        try:
            with torch.enable_grad():
                closure().backward()
        finally:
            for handle in handles:
                handle.remove()
        return found

    @torch.no_grad()
    def move(self, step: Mapping[str, Tensor], t: float) -> None:
        """To W + t dW."""
        for name, w in self.weights.items():
            w.copy_(_float(self.originals[name]))
            if name in step:
                w.add_(step[name], alpha=t)


@contextmanager
def _trial(model: nn.Module) -> Iterator[_Trial]:
    trial = _Trial(model)
    try:
        yield trial
    finally:
        trial.restore()


def _changes(
    trial: _Trial,
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


def _proposed(trial: _Trial, optimizer: Optimizer, gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What the optimiser's next step would add to each weight: made by a twin of it, on copies."""
    names = {id(p): name for name, p in trial.originals.items()}
    doubles: dict[int, Tensor] = {}
    for p in (p for group in optimizer.param_groups for p in group["params"]):
        doubles[id(p)] = copy.deepcopy(p)
        if id(p) in names and p.requires_grad:
            doubles[id(p)].grad = gradients[names[id(p)]].to(p.dtype)
    twin = copy.copy(optimizer)
    twin.param_groups = [{**g, "params": [doubles[id(p)] for p in g["params"]]} for g in optimizer.param_groups]
    twin.state = defaultdict(dict)
    for p, held in optimizer.state.items():
        twin.state[doubles[id(p)]] = {k: v.clone() if isinstance(v, Tensor) else v for k, v in held.items()}
    with torch.no_grad():
        twin.step()
        step = {
            name: torch.zeros_like(w) for name, w in trial.weights.items() if id(trial.originals[name]) not in doubles
        }
        for name, p in trial.originals.items():
            if id(p) in doubles:
                step[name] = _float(doubles.pop(id(p))) - _float(p)
    return step


# ---- sums


def _widths(model: nn.Module, optimizer: Optimizer | None) -> dict[str, float]:
    """beta_w of every parameter: crossing times the clamp, where the rule has a crossing."""
    widths = dict.fromkeys((name for name, _ in model.named_parameters()), 0.0)
    names = {id(p): name for name, p in model.named_parameters()}
    for name, p in model.named_parameters():
        if isinstance(p, LadderTensor):
            widths[name] = p.coding.format.crossing * float(p.limit)
    for group in optimizer.param_groups if isinstance(optimizer, Madam) else ():
        for p in group["params"]:
            known = names.get(id(p))
            if known is None or isinstance(p, LadderTensor) or not p.requires_grad:
                continue
            held = optimizer.state.get(p)  # type: ignore[union-attr]
            if held:
                scale, crossing = float(held["scale"]), held.get("crossing")
            else:
                (scale,), (crossing,), _ = groups.starting_point(group, [known], [p])
            crossing = group["crossing"] if crossing is None else crossing
            widths[known] = crossing * scale * (1.0 if group["bound"] is None else group["bound"])
    return widths


def _float(p: Tensor) -> Tensor:
    return p.decode() if isinstance(p, LadderTensor) else p.detach()


def _gamma_sums(weight: Tensor, g: Tensor, width: float) -> tuple[float, float, float]:
    reach = weight.double().abs() if width == 0 else torch.sqrt(weight.double() ** 2 + width**2)
    return _dot(reach, g.abs()), _square(reach), _square(g)


def _add(sums: list[float], *parts: float) -> None:
    for i, part in enumerate(parts):
        sums[i] += part


def _dot(a: Tensor, b: Tensor) -> float:
    return float((a.double() * b.double()).sum())


def _square(a: Tensor) -> float:
    return float(a.double().square().sum())


def _ratio(square: float, other: float) -> float:
    """The ratio of two lengths, from their squares."""
    if other == 0:
        return 0.0 if square == 0 else math.inf
    return math.sqrt(square / other)


def _angle(dot: float, square: float, other: float) -> float:
    """The angle of two vectors, from their product and their squares; a right one where one of them is zero."""
    if square == 0 or other == 0:
        return math.pi / 2
    return math.acos(max(-1.0, min(1.0, dot / math.sqrt(square * other))))
