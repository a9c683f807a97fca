"""The demo: the paper's learning-rate figure on handwritten digits, in about a minute."""

import itertools
import statistics
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path

import torch

from madam_lab.report.chart import Series, line_chart
from madam_lab.tasks import digits
from torchmadam import Madam

LEARNING_RATES = (1.0, 0.1, 0.01, 0.001, 0.0001)
SEEDS = (0, 1, 2)
EPOCHS = 60
OPTIMISERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": torch.optim.SGD,
    "Adam": torch.optim.Adam,
    "Madam": Madam,
}


def error_at(name: str, lr: float, seed: int, epochs: int = EPOCHS) -> float:
    """The test error after training with this optimiser at this constant learning rate."""
    torch.set_num_threads(1)
    data = digits.load()
    torch.manual_seed(seed)
    net = digits.model()
    digits.train(net, OPTIMISERS[name](net.parameters(), lr=lr), data, epochs=epochs, seed=seed)
    return digits.test_error(net, data)


def grid() -> dict[str, dict[float, float]]:
    """Mean test error over the seeds, for every optimiser and learning rate."""
    from tqdm import tqdm

    cells = list(itertools.product(OPTIMISERS, LEARNING_RATES, SEEDS))
    errors: dict[tuple[str, float], list[float]] = {}
    with ProcessPoolExecutor(max_workers=2, mp_context=get_context("spawn")) as pool:
        jobs = {pool.submit(error_at, *cell): cell for cell in cells}
        for job in tqdm(as_completed(jobs), total=len(jobs), desc="training", unit="run"):
            name, lr, _ = jobs[job]
            errors.setdefault((name, lr), []).append(job.result())
    return {
        name: {lr: statistics.fmean(errors[name, lr]) for lr in LEARNING_RATES} for name in OPTIMISERS
    }  # fmt: skip


def figure(errors: dict[str, dict[float, float]]) -> str:
    """The paper's picture: best error over error, so that 1 is each optimiser's best learning rate."""
    series = []
    for name, by_lr in errors.items():
        best = min(by_lr.values())
        points = [(lr, best / error) for lr, error in sorted(by_lr.items())]
        series.append(Series(name, points, frozenset(i for i, (_, y) in enumerate(points) if y == 1.0)))
    return line_chart(
        series,
        title="Which learning rate? Handwritten digits",
        note=f"Best test error of an optimiser / its error at this learning rate; {len(SEEDS)} seeds, {EPOCHS} epochs",
        x_label="learning rate",
        y_label="best error / error",
        x_log=True,
        y_range=(0.0, 1.0),
    )


def run(folder: Path) -> None:
    """Train the grid, write the picture, say what was learned."""
    errors = grid()
    folder.mkdir(parents=True, exist_ok=True)
    picture = folder / "learning-rate.svg"
    picture.write_text(figure(errors), encoding="utf-8")
    print(f"\n{'test error, %':14}" + "".join(f"{lr:>9g}" for lr in LEARNING_RATES))
    for name, by_lr in errors.items():
        print(f"{name:14}" + "".join(f"{100 * by_lr[lr]:9.1f}" for lr in LEARNING_RATES))
    best = {name: min(by_lr, key=by_lr.__getitem__) for name, by_lr in errors.items()}
    print("\nbest learning rate: " + ", ".join(f"{name} {lr:g}" for name, lr in best.items()))
    print(f"Madam at its default 0.01: {100 * errors['Madam'][0.01]:.1f} % test error")
    print(f"picture: {picture}")
