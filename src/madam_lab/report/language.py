"""The language model of examples/gpt: its quality beside AdamW's, and the memory that training it takes."""

import math
from typing import Any

from madam_lab.report.chart import Series, line_chart
from madam_lab.report.numbers import Results, is_traceable
from madam_lab.report.tables import Table

_NAMES = {
    "adamw": "AdamW, float32",
    "adamw-bf16": "AdamW, bfloat16",
    "madam": "Madam, float32",
    "madam-12bit": "Madam, 12-bit codes",
    "madam-signed8": "Madam, signed 8-bit codes",
}


def quality_table(results: Results) -> Table:
    """One row a run, on equal tokens; AdamW's learning rates one by one."""
    runs = _of_kind(results, "train")
    rows = [
        (
            _title(run), f"{run['settings']['method']['lr']:g}", f"{run['curve'][-1]['train']:.3f}",
            f"{run['curve'][-1]['valid']:.3f}", f"{run['perplexity']:.1f}" if run["perplexity"] else "diverged",
            f"{(run['bytes']['total'] - run['bytes']['buffers']) / run['bytes']['weights']:.2f}",
        )
        for run in runs
    ]  # fmt: skip
    head = ("", "lr", "training loss", "validation loss", "perplexity", "bytes a weight")
    note = ""
    if runs:
        shape, tokens = runs[0]["settings"]["shape"], runs[0]["tokens"]
        note = (
            f"{runs[0]['bytes']['weights'] / 1e6:.1f} million weights, {shape['layers']} layers {shape['width']} wide, "
            f"{tokens / 1e6:.1f} million tokens of WikiText-2 ({runs[0]['settings']['tokens']}), one seed, "
            f"{runs[0]['device']}. Bytes: weights, gradients and optimiser state after a step, as counted."
        )
    return Table("A language model: quality", note, head, rows, runs)


def memory_table(results: Results) -> Table:
    """A step of one model, and the largest model that fits, by method."""
    runs = _of_kind(results, "memory") + _of_kind(results, "largest")
    rows = [
        (
            ("largest: " if run["kind"] == "largest" else "") + f"{run['parameters'] / 1e9:.2f} billion", _title(run),
            f"{run['bytes']['total'] / run['parameters']:.3f}", f"{run['peak'] / 1e9:.1f}",
            f"{run['tokens'] / run['seconds']:,.0f}",
        )
        for run in runs
    ]  # fmt: skip
    head = ("weights", "", "bytes a weight", "peak, GB", "tokens a second")
    note = ""
    if runs:
        settings = runs[0]["settings"]
        note = (
            f"{runs[0]['device']}, torch {runs[0]['versions']['torch']}, batch {settings['batch']}, sequence "
            f"{settings['shape']['length']}, activations checkpointed. Bytes a weight: weights, gradients and state; "
            f"the peak has activations and decoded weights, too."
        )
    return Table("A language model: memory", note, head, rows, runs)


def loss_curves(results: Results) -> str | None:
    """Validation loss against tokens; of a method's learning rates the best."""
    best: dict[str, dict[str, Any]] = {}
    for run in _of_kind(results, "train"):
        name = _short(_method(run))
        if name not in best or (run["perplexity"] or math.inf) < (best[name]["perplexity"] or math.inf):
            best[name] = run
    if not best:
        return None
    series = [
        Series(
            name + (f" {_method(run)['lr']:g}" if name == "AdamW" else ""),
            [(point["tokens"] / 1e6, point["valid"]) for point in run["curve"] if point["valid"] is not None],
        )
        for name, run in best.items()
    ]
    return line_chart(
        series,
        title="A language model: validation loss",
        note="Equal tokens of WikiText-2, one seed; AdamW at its best rate, Madam at 0.01; m8: 8-bit moment",
        x_label="million tokens",
        y_label="loss",
    )


def _of_kind(results: Results, kind: str) -> list[dict[str, Any]]:
    found = [run for run in results.language if run["kind"] == kind]
    return sorted(found, key=lambda run: (list(_NAMES).index(_method(run)["name"]), _held(run), _method(run)["lr"]))


def _held(run: dict[str, Any]) -> float:
    """Fewer bytes come later, among runs of one method."""
    weights = run["parameters"] if "parameters" in run else run["bytes"]["weights"]
    return -float(run["bytes"]["total"]) / float(weights)


def _method(run: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = run["settings"]["method"]
    return found


def _short(method: dict[str, Any]) -> str:
    name = {"madam": "Madam float32", "madam-12bit": "12-bit", "madam-signed8": "signed 8"}.get(
        method["name"], _NAMES[method["name"]].split(",")[0]
    )
    return name + (" m8" if method["moment"] == "8bit" else "")


def _title(run: dict[str, Any]) -> str:
    method = _method(run)
    more = [", 8-bit moment" if method["moment"] == "8bit" else "", ", gradients released" if method["release"] else ""]
    return _NAMES[method["name"]] + "".join(more) + ("" if is_traceable(run) else "*")


TABLES = {"gpt_quality": quality_table, "gpt_memory": memory_table}
