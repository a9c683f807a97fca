"""The paper's figures, and some of our own, as SVG."""

import math
from html import escape
from typing import Any

from madam_lab.recipes.paper import LEARNING_RATES
from madam_lab.report.chart import Series, bars, figure, line_chart
from madam_lab.report.numbers import Results
from torchmadam import LadderFormat

KINDS = {
    "sgd": "SGD",
    "adam": "Adam",
    "madam": "Madam",
    "madam_12bit": "12-bit Madam",
    "madam_signed8": "signed 8-bit Madam",
}
# In the learning-rate figure: all of these by the paper's rule, and the library's default.
COMPARED = {**KINDS, "ours": "Madam, ours"}
# How the rates of the learning-rate figure go on, by what their recipes are called: the paper's are constant.
SCHEDULES = {"": "constant", "cosine": "cosine", "recent": "constant, weights averaged"}
TASK_TITLES = {
    "digits": "Digits", "cifar10": "CIFAR-10", "cifar100": "CIFAR-100", "wikitext2": "WikiText-2",
    "cgan": "CIFAR-10 GAN", "imagenet": "ImageNet", "imagenette": "Imagenette (not ImageNet)",
}  # fmt: skip
# What is plotted over epochs, where it is not the test error.
_PLOTTED = {"wikitext2": ("validation perplexity", "perplexity"), "cgan": ("FID against the test set", "FID")}


def learning_rates(results: Results, task: str, schedule: str = "") -> str | None:
    """The paper's learning-rate figure for one task: best error over error, so that 1 marks the best learning rate.

    ``schedule``: one of the ``SCHEDULES``.
    """
    series = []
    for kind, title in COMPARED.items():
        ran = by_rate(results, task, kind, schedule)
        if not ran:
            continue
        best = min(ran.values())
        points = [(lr, best / max(e, 1e-12)) for lr, e in ran.items()]
        tips = [("diverged" if math.isinf(ran[lr]) else f"{ran[lr]:.4g}") + f" at {lr:g}" for lr, _ in points]
        series.append(Series(title, points, frozenset(i for i, (_, y) in enumerate(points) if y == 1.0), tips=tips))
    if not series:
        return None
    return line_chart(
        series,
        title=f"Which learning rate? {TASK_TITLES[task]}{f', {SCHEDULES[schedule]}' if schedule else ''}",
        note="Best result of an optimiser over all learning rates / its result at this one; red crosses mark the best",
        x_label="learning rate",
        y_label="best / result",
        x_log=True,
        x_range=(LEARNING_RATES[-1], LEARNING_RATES[0]),
        y_range=(0.0, 1.0),
    )


def by_rate(results: Results, task: str, kind: str, schedule: str = "") -> dict[float, float]:
    """An optimiser's result at each learning rate, in their order; empty if not all were run, or none was finite.

    Of a part of them nobody knows the best.
    """
    name = f"{task}_lr_{kind}_{schedule}_" if schedule else f"{task}_lr_{kind}_"
    means = [(lr, results.mean(f"{name}{lr:g}")) for lr in sorted(LEARNING_RATES)]
    found = {lr: mean for lr, mean in means if mean is not None}
    complete = len(found) == len(LEARNING_RATES) and math.isfinite(min(found.values()))
    return found if complete else {}


def clipping(results: Results) -> str | None:
    """The paper's figure of convergence and weight clipping on CIFAR-10: test error against epoch."""
    curves = {"SGD": "cifar10_sgd", **{f"bound {b}": f"cifar10_bound_{b}" for b in (1, 2)}, "bound 3": "cifar10_madam"}
    curves["bound 5"] = "cifar10_bound_5"
    series = [Series(title, _curve(results.of(name)[0])) for title, name in curves.items() if results.of(name)]
    if not series:
        return None
    return line_chart(
        series,
        title="Convergence and weight clipping, CIFAR-10",
        note="Test error of Madam under different bounds on its weights, and of SGD; one seed",
        x_label="epoch",
        y_label="test error %",
        y_range=(5.0, 25.0),
    )


def convergence(results: Results, task: str) -> str | None:
    """Test (or validation) metric of a task's table cells against epoch."""
    kinds = {**KINDS, "madam_10bit": "10-bit Madam", "madam_8bit": "8-bit Madam"}
    named = {title: results.of(f"{task}_{kind}") for kind, title in kinds.items()}
    series = [Series(title, _curve(found[0])) for title, found in named.items() if found]
    series = [s for s in series if s.points]
    if not series:
        return None
    last = [s.points[-1][1] for s in series]
    return line_chart(
        series,
        title=f"Convergence, {TASK_TITLES[task]}",
        note=f"One seed; {_PLOTTED.get(task, ('test error in per cent', ''))[0]}",
        x_label="epoch",
        y_label=_PLOTTED.get(task, ("", "error %"))[1],
        y_range=(0.9 * min(last), max(min(4 * max(last), max(y for s in series for _, y in s.points)), 1e-3)),
    )


def _curve(record: dict[str, Any]) -> list[tuple[float, float]]:
    name = "valid" if record["curve"] and "valid" in record["curve"][0] else "test"
    return [(p["epoch"], p[name]) for p in record["curve"] if p.get(name) is not None]


def codes_over_training(record: dict[str, Any]) -> str:
    """Where the codes of a run live on the ladder, from the first step to the last."""
    ladder = LadderFormat(**record["settings"]["ladder"])
    bins = len(record["codes"][0]["histogram"])
    series = []
    for i, snapshot in enumerate(record["codes"]):
        points = [
            ((b + 0.5) / bins * (ladder.levels - 1), 100 * share) for b, share in enumerate(snapshot["histogram"])
        ]
        series.append(Series(f"epoch {snapshot['epoch']}", points, shade=(i + 1) / len(record["codes"])))
    last = record["codes"][-1]
    small = "zero" if ladder.is_signed else "the smallest"
    ends = f"At the end {100 * last['upper']:.1f} % sit at the largest weight, {100 * last['lower']:.1f} % at {small}"
    axis = "code (the middle is zero)" if ladder.is_signed else "code k (0 is the largest weight)"
    return line_chart(
        series,
        title=f"Where the codes live: {record['recipe']}",
        note=ends,
        x_label=axis,
        y_label="% of weights",
        x_range=(0, ladder.levels - 1),
        dots=False,
    )


def bytes_held(results: Results) -> str | None:
    """Bytes a weight, during training, of the runs that there are records of."""
    rows = []
    for kind, title in {**KINDS, "madam_10bit": "10-bit Madam", "madam_8bit": "8-bit Madam"}.items():
        found = [r for task in TASK_TITLES for r in results.of(f"{task}_{kind}")]
        found += [r for task in TASK_TITLES for r in results.of(f"{task}_lr_{kind}_0.01")]
        if found:
            record = max(found, key=lambda r: r["weights"])
            parts = [("weights", record["bytes"]["weights"] / record["weights"])]
            parts.append(("optimiser state", record["bytes"]["optimiser"] / record["weights"]))
            rows.append((title, parts))
    if not rows:
        return None
    return bars(
        rows,
        title="Bytes a weight",
        note="Held during training; float32 weights are 4, and gradients and activations are not counted",
        unit="bytes",
    )


def number_systems() -> str:
    """The paper's figure of number systems: bits of a weight, and where the representable weights lie."""
    systems = [
        ("bfloat16", ["S"] + ["E"] * 8 + ["M"] * 7),
        ("12-bit ladder and sign", ["S"] + ["E"] * 12),
        ("8-bit ladder and sign", ["S"] + ["E"] * 8),
        ("signed ladder, 8 bits", ["E"] * 8),
        ("synapse, 26 levels", ["E"] * 5),
    ]
    parts: list[str] = []
    fills = {"S": "var(--ink)", "E": "var(--mid)", "M": "none"}
    texts = {"S": "var(--paper)", "E": "var(--paper)", "M": "var(--ink)"}
    meanings = {"S": "sign", "E": "exponent", "M": "mantissa"}
    for row, (name, bits) in enumerate(systems):
        y = 64 + 34 * row
        parts.append(f'<text x="18" y="{y + 17}">{escape(name)}</text>')
        for i, bit in enumerate(bits):
            x = 190 + 26 * i
            parts.append(
                f'<rect class="bit" x="{x}" y="{y}" width="24" height="24" fill="{fills[bit]}" stroke="var(--ink)">'
                f"<title>{meanings[bit]}</title></rect>"
                f'<text x="{x + 12}" y="{y + 17}" text-anchor="middle" style="fill:{texts[bit]}">{bit}</text>'
            )
    top = 64 + 34 * len(systems) + 40
    parts.append(
        f'<text class="note" x="18" y="{top - 10}">Positive weights from sigma* / 60 to sigma*, on a log axis</text>'
    )
    left, right = 190, 620
    for row, (name, rungs) in enumerate(_rungs()):
        y = top + 10 + 30 * row
        parts.append(f'<text x="18" y="{y + 15}">{escape(name)}</text>')
        marks = "".join(f"M{left + (right - left) * (1 + math.log(w) / math.log(60)):.1f} {y}v20" for w in rungs)
        tip = f"<title>{escape(name)}: {len(rungs)} weights</title>"
        parts.append(f'<path class="rung" d="{marks}" stroke="var(--ink)" stroke-width=".8" fill="none">{tip}</path>')
    below = top + 10 + 30 * 4
    for part, label in ((60, "sigma*/60"), (30, "/30"), (10, "/10"), (3, "/3"), (1, "sigma*")):
        at = left + (right - left) * (1 - math.log(part) / math.log(60))
        parts.append(f'<path d="M{at:.1f} {below - 6}v5" stroke="var(--ink)" stroke-width=".8"/>')
        parts.append(f'<text class="note" x="{at:.1f}" y="{below + 12}" text-anchor="middle">{label}</text>')
    note = "S is the sign, E an exponent (the code), M a mantissa, which a ladder does without"
    return figure(parts, title="Number systems", note=note, width=650, height=below + 24)


def _rungs() -> list[tuple[str, list[float]]]:
    """The representable weights between 1/60 and 1 of each system."""
    least = 1 / 60.1
    bfloat = [m / 128 * 2.0**e for e in range(-6, 0) for m in range(128, 256)]
    eight = LadderFormat.preset("paper8")
    signed = LadderFormat.preset("signed8")
    synapse = LadderFormat.preset("synapse")
    return [
        ("bfloat16", [w for w in bfloat if w >= least]),
        ("8-bit ladder", [math.exp(-k * eight.spacing) for k in range(eight.levels)]),
        ("signed, 8 bits", [w for k in range(1, 128) if (w := math.sinh(k * signed.spacing)) >= least]),
        ("synapse", [math.exp(-k * synapse.spacing) for k in range(26)]),
    ]
