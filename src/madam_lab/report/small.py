"""The default on small tasks, beside tuned baselines; and which learning rates are the best on each."""

import statistics
from collections.abc import Callable, Sequence

from madam_lab.recipes import small
from madam_lab.report.numbers import MISSING, Results
from madam_lab.report.tables import Table

TITLES = {
    "small_lstm": "letters, LSTM, bits",
    "small_gpt": "letters, transformer, bits",
    "small_cnn": "10,000 pictures, CNN without norms, error %",
    "small_siren": "a picture by its places, SIREN, unexplained %",
    "small_vae": "digits, variational autoencoder, nats",
    "small_diffusion": "digits, diffusion, unexplained %",
    "small_halves": "half a digit from the other, raw levels, unexplained %",
    "small_autoencoder": "digits, autoencoder of 8 layers, unexplained %",
}
_OURS = {
    "paper": "the paper's Madam",
    "ours": "Madam",
    "ours_12bit": "… 12 bits",
    "ours_8bit": "… 8 bits",
    "ours_no_decay": "Madam, weight_decay=0",
    "ours_no_decay_12bit": "… 12 bits",
    "ours_no_decay_8bit": "… 8 bits",
}
# Columns of what there is without a schedule.
_UNSCHEDULED = {
    small.USUAL: "AdamW as it comes, cosine",
    f"{small.USUAL}_constant": "… constant",
    f"{small.USUAL}_recent": "… averaged",
    "paper_recent": "the paper's Madam, averaged",
    "ours": "Madam, cosine",
    "ours_constant": "… constant",
    "ours_recent": "… averaged",
    "ours_no_decay": "Madam, weight_decay=0, cosine",
    "ours_no_decay_constant": "… constant",
    "ours_no_decay_recent": "… averaged",
    "ours_no_decay_8bit_recent": "… averaged, 8 bits",
}
# Columns of those that say they need no tuning, and of ours.
_UNTUNED = {
    "prodigy": "Prodigy",
    "schedule_free_adamw": "Schedule-Free AdamW",
    "schedule_free_radam": "Schedule-Free RAdam",
    small.USUAL: "AdamW as it comes",
    "ours": "Madam",
    "ours_no_decay": "Madam, weight_decay=0",
    "ours_no_decay_recent": "… constant and averaged",
}
_ENDS: dict[str, Callable[[Sequence[float]], float]] = {
    "of the best of each row, geometric mean": statistics.geometric_mean,
    "… at the worst": max,
}
_UNBOUNDED = {
    "ours": "Madam",
    "ours_no_bound": "… no bound",
    "ours_no_decay": "Madam, weight_decay=0",
    "ours_no_decay_no_bound": "… no bound",
}


def small_table(results: Results) -> Table:
    """A row a task: the best of each baseline's grid, AdamW as it comes, and Madam as it comes."""
    rows, measured = [], []
    for task, title in TITLES.items():
        cells = [_best(results, names) for names in (_grid(task, "sgd"), _grid(task, "adamw"))]
        cells += [_cell(results, f"{task}_{kind}") for kind in (small.USUAL, *_OURS)]
        rows.append((title, *cells))
        measured += [record for kind in _OURS for record in results.of(f"{task}_{kind}")]
    points = len(small.ADAMW_RATES) * len(small.ADAMW_DECAYS)
    note = (
        f"Means of as many seeds as there are. Tuned: the best of {len(small.SGD_RATES)} points of SGD with momentum "
        f"and of {points} of AdamW, with its lr and, for AdamW, its decay, by the first seed on the test set itself. "
        "AdamW as it comes has 0.001 and 0.01, Madam 0.01. All with a cosine schedule, 1,000 to 3,000 steps. Lower is "
        "better."
    )
    head = ("", "SGD, tuned", "AdamW, tuned", "AdamW as it comes", *_OURS.values())
    return Table("Small tasks that the default was not chosen on", note, head, rows, measured)


def unscheduled_table(results: Results) -> Table:
    """A row a task: a constant rate, and an average of the weights, beside a schedule."""
    rows, measured = [], []
    for task, title in TITLES.items():
        averaged = [f"{task}_adamw_{lr:g}_{small.ADAMW_DECAYS[0]:g}_recent" for lr in small.ADAMW_RATES]
        rows.append((title, _best(results, averaged), *(_cell(results, f"{task}_{kind}") for kind in _UNSCHEDULED)))
        measured += [r for kind in _UNSCHEDULED if small.USUAL not in kind for r in results.of(f"{task}_{kind}")]
    note = (
        "The same tasks at rates that stay constant, with and without an average of the weights "
        "(`torchmadam.average(model)`), beside a cosine schedule. Tuned: the best of six rates of AdamW with such an "
        "average and a decay of 0.01. Means of as many seeds as there are. Lower is better."
    )
    head = ("", "AdamW, tuned, averaged", *_UNSCHEDULED.values())
    return Table("Without a schedule, on small tasks", note, head, rows, measured)


def untuned_table(results: Results) -> Table:
    """A row a task: optimisers as they come; and how far each is from the best of them, at the worst."""
    rows = [(title, *(_cell(results, f"{task}_{kind}") for kind in _UNTUNED)) for task, title in TITLES.items()]
    rows += _from_the_best(results)
    measured = [r for task in TITLES for kind in _UNTUNED if kind != small.USUAL for r in results.of(f"{task}_{kind}")]
    note = (
        "Nothing is tuned in any column: rate, decay and schedule are what the optimiser's authors give or recommend. "
        "AdamW and Madam have a cosine schedule, and so has Prodigy; Schedule-Free has none, nor has Madam's last "
        "column, whose weights are averaged. Means of as many seeds as there are. Lower is better."
    )
    return Table("Small tasks, and nobody tunes", note, ("", *_UNTUNED.values()), rows, measured)


def _from_the_best(results: Results) -> list[tuple[str, ...]]:
    """How many times the best of its row each column has: on the whole, and where it is the most."""
    means = [[results.mean(f"{task}_{kind}") for kind in _UNTUNED] for task in TITLES]
    measured = [[mean for mean in row if mean is not None] for row in means]
    if any(len(row) < len(_UNTUNED) for row in measured):
        return [(title, *[MISSING] * len(_UNTUNED)) for title in _ENDS]
    columns = list(zip(*([mean / min(row) for mean in row] for row in measured), strict=True))
    return [(title, *(f"{end(column):.2f}" for column in columns)) for title, end in _ENDS.items()]


def unbounded_table(results: Results) -> Table:
    """A row a task: our setting with its bound, and without."""
    rows = [(title, *(_cell(results, f"{task}_{kind}") for kind in _UNBOUNDED)) for task, title in TITLES.items()]
    measured = [record for task in TITLES for kind in _UNBOUNDED for record in results.of(f"{task}_{kind}")]
    note = (
        "`bound=None` has the zone around zero that the default has, and nothing that weights are clamped "
        "at. Means of as many seeds as there are. Lower is better."
    )
    return Table("Without a bound, on small tasks", note, ("", *_UNBOUNDED.values()), rows, measured)


def rates_table(results: Results) -> Table:
    """The best learning rate of each optimiser on each task; and the one that loses the least on the worst of them."""
    kinds = [{task: {lr: f"{task}_sgd_{lr:g}" for lr in small.SGD_RATES} for task in TITLES}]
    for end in ("", "_recent"):
        kinds += [
            {task: {lr: f"{task}_adamw_{lr:g}_0.01{end}" for lr in small.ADAMW_RATES} for task in TITLES},
            *({task: _of_madam(f"{task}_{own}", end) for task in TITLES} for own in ("ours", "ours_no_decay")),
        ]
    rows = [(title, *(_best_rate(results, kind[task]) for kind in kinds)) for task, title in TITLES.items()]
    rows.append(("one rate for all", *(_one_rate(results, list(kind.values())) for kind in kinds)))
    measured = [
        record
        for kind in kinds
        for names in kind.values()
        for name in names.values()
        if "_ours" in name
        for record in results.of(name)
    ]
    note = (
        "The best learning rate of each grid, by the first seed; AdamW's with a decay of 0.01, Madam's with its own of "
        "0.2, and with none. With a cosine schedule; and at constant rates, with an average of the weights. Last, the "
        "one rate whose worst result, as a multiple of the best at any other, is the least."
    )
    kind = ("AdamW", "Madam", "Madam, weight_decay=0")
    head = ("", "SGD", *kind, *(f"{each}, averaged" for each in kind))
    return Table("Which learning rate, on small tasks?", note, head, rows, measured)


def _of_madam(name: str, end: str) -> dict[float, str]:
    return {0.01: f"{name}{end}", **{lr: f"{name}_lr_{lr:g}{end}" for lr in small.RATES}}


def _one_rate(results: Results, tasks: Sequence[dict[float, str]]) -> str:
    worst: dict[float, float] = {}
    for names in tasks:
        if not all(results.of(name) for name in names.values()):
            return MISSING
        best = min(results.first(name) for name in names.values())
        for lr, name in names.items():
            worst[lr] = max(worst.get(lr, 1.0), results.first(name) / best)
    lr = min(worst, key=lambda each: worst[each])
    return f"{lr:g}: up to {worst[lr]:.2f} times the best"


def _grid(task: str, kind: str) -> list[str]:
    if kind == "sgd":
        return [f"{task}_sgd_{lr:g}" for lr in small.SGD_RATES]
    return [f"{task}_adamw_{lr:g}_{decay:g}" for lr in small.ADAMW_RATES for decay in small.ADAMW_DECAYS]


def _best(results: Results, names: Sequence[str]) -> str:
    if not all(results.of(name) for name in names):
        return MISSING
    best = min(names, key=results.first)
    point = best.partition("_adamw_")[2] or best.partition("_sgd_")[2]
    point = point.removesuffix("_recent")
    return f"{_cell(results, best)} at {point.replace('_', ', ')}"


def _best_rate(results: Results, names: dict[float, str]) -> str:
    if not all(results.of(name) for name in names.values()):
        return MISSING
    return f"{min(names, key=lambda lr: results.first(names[lr])):g}"


def _cell(results: Results, name: str) -> str:
    """A number without its spread, which would make so many columns too wide."""
    mean = results.mean(name)
    return MISSING if mean is None else f"{mean:#.3g}" if mean < 10 else f"{mean:.1f}"


TABLES = {
    "small": small_table,
    "small_rates": rates_table,
    "small_unscheduled": unscheduled_table,
    "small_untuned": untuned_table,
    "small_unbounded": unbounded_table,
}
