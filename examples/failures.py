"""The ways in which multiplicative training fails, each made on purpose on digits, drawn, and its warnings kept.

python -m examples.failures        # writes docs/failures/*.svg and fills in what the library said in docs/migration.md
"""

import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from madam_lab.report.chart import Series, line_chart
from madam_lab.tasks.digits import DigitsData, load
from torchmadam import Madam, to_ladder_

PAGE = Path("docs/migration.md")
PICTURES = Path("docs/failures")
POINTS = 40  # of a curve


@dataclass
class Run:
    """One line of a picture: what it did every few steps, and what the library said meanwhile."""

    name: str
    loss: list[tuple[float, float]] = field(default_factory=list)
    error: list[tuple[float, float]] = field(default_factory=list)
    at_the_top: list[tuple[float, float]] = field(default_factory=list)
    said: list[str] = field(default_factory=list)


def perceptron(seed: int = 0) -> nn.Sequential:
    """64 pixels, two hidden layers, ten classes."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def run(
    name: str,
    *,
    steps: int,
    prepare: Callable[[nn.Sequential], Any] = lambda model: None,
    standardised: bool = True,
    seeds: int = 1,
    make: Callable[..., Madam] = Madam,
    **madam: Any,
) -> Run:
    """Train with Madam, and keep the mean over seeds of the loss, of the test error and of codes at the upper end."""
    made = partial(make, **madam)
    runs = [_run_once(name, seed, steps, prepare, load(standardised=standardised), made) for seed in range(seeds)]
    mean = Run(name, said=runs[0].said)
    for curve in ("loss", "error", "at_the_top"):
        together = zip(*(getattr(r, curve) for r in runs), strict=True)
        setattr(mean, curve, [(points[0][0], sum(y for _, y in points) / seeds) for points in together])
    return mean


def _run_once(
    name: str,
    seed: int,
    steps: int,
    prepare: Callable[[nn.Sequential], Any],
    data: DigitsData,
    make: Callable[..., Madam],
) -> Run:
    found, model, order = Run(name), perceptron(seed), torch.Generator().manual_seed(seed)
    prepare(model)
    weight: Any = model[2].weight
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer = make(model.named_parameters())
        for step in range(1, steps + 1):
            chosen = torch.randint(len(data.train_x), (64,), generator=order)
            optimizer.zero_grad()
            loss = F.cross_entropy(model(data.train_x[chosen]), data.train_y[chosen])
            loss.backward()
            optimizer.step()
            if step % max(steps // POINTS, 1) == 0:
                with torch.no_grad():
                    logits = model(data.test_x)
                    wrong = float((logits.argmax(1) != data.test_y).float().mean())
                    found.loss.append((step, float(F.cross_entropy(logits, data.test_y))))
                    found.error.append((step, 100 * wrong))
                    if hasattr(weight, "coding"):
                        top = weight.coding.format.at_upper_end(weight.codes())
                        found.at_the_top.append((step, 100 * float(top.float().mean())))
    found.said = [str(w.message) for w in caught]
    return found


def _zero_last(model: nn.Sequential) -> None:
    nn.init.zeros_(model[4].weight)  # type: ignore[arg-type]


def zeros(steps: int = 400) -> tuple[str, list[Run]]:
    """A last layer that starts as zeros, as in many residual networks."""
    runs = [
        run("paper, zero_scale=0", steps=steps, prepare=_zero_last, zero_scale=0.0, make=Madam.paper),
        run("paper, zero_scale=0.01", steps=steps, prepare=_zero_last, make=Madam.paper),
        run("paper, zero_scale=0.1", steps=steps, prepare=_zero_last, zero_scale=0.1, make=Madam.paper),
        run("Madam", steps=steps, prepare=_zero_last),
    ]
    return _drawn(runs, "loss", "Zeros do not move when multiplied", "A last layer that starts as zeros, digits"), runs


def signs(steps: int = 1500, seeds: int = 5) -> tuple[str, list[Run]]:
    """Inputs that are never negative, under signs that never change."""
    runs = [
        run("0 to 1, Madam.paper", steps=steps, standardised=False, seeds=seeds, make=Madam.paper),
        run("standardised, Madam.paper", steps=steps, seeds=seeds, make=Madam.paper),
        run("0 to 1, Madam", steps=steps, standardised=False, seeds=seeds),
    ]
    note = f"Pixels of digits from 0 to 1, or standardised; test error, mean of {seeds} seeds, lr = 0.01"
    return _drawn(runs, "error", "Frozen signs and inputs that are never negative", note, y_max=20), runs


def spacing(steps: int = 400) -> tuple[str, list[Run]]:
    """A learning rate below half of the ladder's spacing."""

    def coded(model: nn.Sequential) -> None:
        to_ladder_(model, "paper8")  # spacing 0.016

    runs = [
        run("rounded to nearest", steps=steps, prepare=coded, lr=0.003, make=Madam.paper),
        run('rounding="stochastic"', steps=steps, prepare=coded, lr=0.003, rounding="stochastic", make=Madam.paper),
    ]
    title = "A learning rate below the ladder's spacing"
    return _drawn(runs, "loss", title, "The paper's 8-bit codes, spacing 0.016, lr = 0.003, digits"), runs


def bound(steps: int = 400) -> tuple[str, list[Run]]:
    """A ladder that ends too early."""
    runs = [
        run(f"bound={b:g}", steps=steps, prepare=lambda model, b=b: to_ladder_(model, 12, bound=b), lr=0.03)
        for b in (0.5, 1.0, 5.0)
    ]
    note = "Share of the second layer's codes at the upper end of their ladder, 12 bits, digits"
    return _drawn(runs, "at_the_top", "Codes piling up at the bound", note), runs


def _drawn(runs: list[Run], what: str, title: str, note: str, y_max: float | None = None) -> str:
    label = {"loss": "test loss", "error": "test error %", "at_the_top": "codes at the upper end, %"}[what]
    series = [Series(r.name, getattr(r, what)) for r in runs]
    most = y_max or 1.05 * max(y for s in series for _, y in s.points)
    return line_chart(
        series, title=title, note=note, x_label="step", y_label=label, y_range=(0, most), dots=False, height=340
    )


MODES = {"zeros": zeros, "signs": signs, "spacing": spacing, "bound": bound}


def quoted(runs: list[Run]) -> str:
    """What the library said first in the runs of a picture, for the page."""
    said = "\n>\n".join(f"> `{r.name}`: {r.said[0]}" for r in runs if r.said)
    return f"{said or '> Nothing.'}\n"


def main(page: Path = PAGE, pictures: Path = PICTURES, **options: int) -> None:
    """Draw all pictures, and put the warnings into the page, between its marks."""
    torch.set_num_threads(1)
    pictures.mkdir(parents=True, exist_ok=True)
    text = page.read_text(encoding="utf-8")
    for name, mode in MODES.items():
        svg, runs = mode(**options)
        (pictures / f"{name}.svg").write_text(svg, encoding="utf-8")
        marked = re.compile(rf"(<!-- said: {name} -->\n).*?(<!-- end -->)", re.DOTALL)
        text = marked.sub(lambda match: match[1] + quoted(runs) + match[2], text)  # noqa: B023 (used at once)
        for r in runs:
            print(f"{name}, {r.name}: loss {r.loss[-1][1]:.3f}, error {r.error[-1][1]:.1f} %, said {r.said}")
    page.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
