"""The demo: the paper's learning-rate figure on handwritten digits, in a minute or two."""

import math
import warnings
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path

from madam_lab import queue, recipes, records, report
from madam_lab.recipes.paper import LEARNING_RATES
from madam_lab.report.figures import COMPARED, learning_rates
from madam_lab.report.numbers import Results

WORKERS = 2


def train(name: str, results: Path) -> str:
    """One recipe, seed 0, on one thread."""
    import torch

    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore"
        )  # bad learning rates pile weights up at the bound, which is what the figure shows
        queue.work(
            [recipes.get(name)], [0], results=results, folder=results / "unfinished", device=torch.device("cpu"),
            quiet=True, say=lambda line: None,
        )  # fmt: skip
    return name


def run(out: Path) -> None:
    """Train what has no record yet, write the page and the picture, say what was learned."""
    from tqdm import tqdm

    results = out / "results"
    # The slow ones first, so that both workers end together.
    points = [f"digits_lr_{kind}_{lr:g}" for kind in COMPARED for lr in LEARNING_RATES]
    names = sorted(points, key=lambda name: (recipes.get(name).ladder is None, name))
    todo = [name for name in names if not records.path_of(name, 0, results).exists()]
    with ProcessPoolExecutor(max_workers=WORKERS, mp_context=get_context("spawn")) as pool:
        jobs = [pool.submit(train, name, results) for name in todo]
        try:
            for job in tqdm(as_completed(jobs), total=len(jobs), desc="training", unit="run"):
                job.result()
        except KeyboardInterrupt:
            pool.shutdown(wait=False, cancel_futures=True)
            raise

    found = Results(results)
    page, picture = out / "report.html", out / "learning-rate.svg"
    report.write(results, page, [])
    picture.write_text(learning_rates(found, "digits") or "", encoding="utf-8")
    errors = {
        kind: {lr: e for lr in LEARNING_RATES if (e := found.mean(f"digits_lr_{kind}_{lr:g}")) is not None}
        for kind in COMPARED
    }
    print(f"\n{'test error, %':20}" + "".join(f"{lr:>9g}" for lr in LEARNING_RATES))
    for kind, by_lr in errors.items():
        cells = (f"{e:.1f}" if math.isfinite(e) else "diverged" for e in by_lr.values())
        print(f"{COMPARED[kind]:20}" + "".join(f"{cell:>9}" for cell in cells))
    best = {kind: min((e, lr) for lr, e in by_lr.items())[1] for kind, by_lr in errors.items()}
    print("\nbest learning rate: " + ", ".join(f"{COMPARED[kind]} {lr:g}" for kind, lr in best.items()))
    ours, floats, twelve, eight = (errors[kind][0.01] for kind in ("ours", "madam", "madam_12bit", "madam_signed8"))
    held = found.of("digits_lr_madam_signed8_0.01")[0]["bytes"]
    print(
        f"at lr = 0.01: {ours:.1f} % test error by Madam(params), our default; by Madam.paper(params) "
        f"{floats:.1f} %, {twelve:.1f} % with 12-bit weights and {eight:.1f} % with 8-bit ones "
        f"({held['weights'] / held['float32']:.2f} of the bytes)"
    )
    print(f"picture: {picture}\npage: {page}")
