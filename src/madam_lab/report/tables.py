"""The paper's three tables, with its numbers beside ours, as Markdown and as cells."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from madam_lab.recipes import PAPER
from madam_lab.recipes.paper import BITS_TABLE
from madam_lab.report.numbers import Results, is_by_an_earlier_rule, paper_cell

# Rows of the paper's tables: task, what is measured, and how its recipes are called.
ROWS = [
    ("CIFAR-10, ResNet-18", "error %", "cifar10"),
    ("CIFAR-100, ResNet-18", "error %", "cifar100"),
    ("ImageNet, ResNet-50", "error %", "imagenet"),
    ("CIFAR-10, cGAN", "FID", "cgan"),
    ("WikiText-2, transformer", "perplexity", "wikitext2"),
]
# Tables whose note is made from records too.
_NOTED = (
    "ours", "small", "small_rates", "small_unscheduled", "small_untuned", "small_unbounded", "plateau", "fid", "speed",
    "speed_brief", "cpu", "conversion", "throughput", "imagenette", "gpt_quality", "gpt_memory", "effort",
)  # fmt: skip
# Rows of the benchmark that the README shows.
BRIEF = (
    "torch AdamW fused, float32", "torch AdamW fused, bfloat16", "bitsandbytes AdamW8bit, bfloat16",
    "torchao AdamW8bit, bfloat16", "Madam float32", "Madam bfloat16", "Madam signed 12-bit", "Madam signed 8-bit",
    "Madam signed 8-bit, 8-bit moment",
)  # fmt: skip
_MARK = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


@dataclass(frozen=True)
class Table:
    """A table: its title, what to know about it, its head and its rows."""

    title: str
    about: str
    head: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    measured: Sequence[object]  # what of ours is in it

    @property
    def has_results(self) -> bool:
        """Whether any of its cells is measured by us."""
        return any(self.measured)

    @property
    def note(self) -> str:
        """What to know about it, and how much of it is from before the library's rule changed."""
        runs = [each for each in self.measured if isinstance(each, dict) and "settings" in each]
        earlier = {(run["recipe"], run["seed"]) for run in runs if is_by_an_earlier_rule(run)}
        said = f" Runs by torchmadam 0.1, which clamped biases: {len(earlier)}." if earlier else ""
        return (self.about + said).lstrip()

    def markdown(self) -> str:
        """As Markdown."""
        lines = ["| " + " | ".join(self.head) + " |", "|" + "---|" * len(self.head)]
        lines += ["| " + " | ".join(row) + " |" for row in self.rows]
        return "\n".join(lines) + "\n"


def main_table(results: Results) -> Table:
    """The better of SGD and Adam, tuned, against Madam at 0.01."""
    rows, ours = [], []
    for label, unit, task in ROWS:
        best = min(("sgd", "adam"), key=lambda kind: PAPER[f"{task}_{kind}"].test)
        cells = [label, unit, best.upper() if best == "sgd" else "Adam"]
        for name in (f"{task}_{best}", f"{task}_madam"):
            ours += results.of(name)
            cells += [paper_cell(PAPER[name]), results.ours(name)]
        rows.append(tuple(cells))
    head = ("", "", "best baseline", "baseline, paper", "baseline, ours", "Madam, paper", "Madam, ours")
    return Table("Madam without tuning against tuned baselines", "Test set, lower is better.", head, rows, ours)


def bits_table(results: Results) -> Table:
    """B-bit Madam: the paper's number, then ours."""
    rows, ours = [], []
    for label, unit, task in ROWS:
        names = [f"{task}_{kind}" for kind in ("madam", "madam_12bit", "madam_10bit", "madam_8bit")]
        # The paper measured some of its FP32 cells anew for this table.
        papers = [BITS_TABLE.get(name, PAPER[name]) for name in names]
        cells = [f"{paper_cell(p)} / {results.ours(name)}" for p, name in zip(papers, names, strict=True)]
        rows.append((label, unit, *cells))
        ours += [record for name in names for record in results.of(name)]
    note = "Test set, the paper / ours. A sign is stored beside the bits: 12-bit is 13 bits a weight."
    return Table("B-bit Madam", note, ("", "", "FP32", "12-bit", "10-bit", "8-bit"), rows, ours)


def full_table(results: Results) -> Table:
    """All three optimisers, training and test."""
    rows, ours = [], []
    for label, unit, task in ROWS:
        for kind, shown in (("adam", "Adam"), ("sgd", "SGD"), ("madam", "Madam")):
            name = f"{task}_{kind}"
            paper = PAPER[name]
            cells = (paper_cell(paper, "train"), results.ours(name, "train"), paper_cell(paper), results.ours(name))
            rows.append((label, unit, shown, *cells))
            ours += results.of(name)
    head = ("", "", "", "train, paper", "train, ours", "test, paper", "test, ours")
    return Table("Complete results in FP32", "Train is the last epoch, in training mode.", head, rows, ours)


def ladder_table(results: Results) -> Table:
    """Bytes that the weights of finished runs were held in."""
    rows = []
    for name in sorted(results.by_recipe):
        record = results.of(name)[0]
        if record["settings"]["ladder"] is None or name not in PAPER:
            continue
        held, floats = record["bytes"]["weights"], record["bytes"]["float32"]
        rows.append((name, f"{record['seed']}", f"{record['weights']:,}", f"{held:,}", f"{held / floats:.3f}"))
    note = "Bytes held by the weights during training, scales included; there is no float copy."
    return Table("Bytes", note, ("run", "seed", "weights", "bytes", "of float32"), rows, rows)


def speed_table(results: Results) -> Table:
    """A step on a GPU beside the peers', from results/bench."""
    head = ("", "large, ms", "of its floor", "of AdamW's time", "small, ms", "small, captured", "bytes")
    bench = _steps_of_a_gpu(results)
    if bench is None:
        return Table("Speed", "", head, [], [])
    large, small = bench["steps"]["gpt"], bench["steps"]["resnet18"]
    peer = large["rows"][0]["ms"]
    rows = []
    for row, other in zip(large["rows"], small["rows"], strict=False):
        if "missing" in row:
            rows.append((row["name"], row["missing"], *[""] * 5))
            continue
        ms, floor = row["ms"], row.get("floor_ms")
        rows.append(
            (
                row["name"], f"{ms:.2f}", f"{ms / floor:.2f}" if floor else "", f"{ms / peer:.2f}",
                f"{other['ms']:.3f}", f"{other['captured_ms']:.3f}" if "captured_ms" in other else "",
                f"{row['bytes']:.1f}",
            )
        )  # fmt: skip
    note = (
        f"{_measured_on(bench)}. Large: {large['weights'] / 1e9:.2f} billion weights in {large['tensors']} tensors; "
        f"small: ResNet-18's {small['tensors']}. The floor is the bytes that a step must move, at the speed of a copy "
        f"({bench['copy'] / 1e12:.2f} TB/s). Bytes a weight: weight, gradient and state."
    )
    return Table("A step, beside the peers", note, head, rows, rows)


def speed_brief_table(results: Results) -> Table:
    """The rows and columns of it that a newcomer asks for first."""
    head = ("", "ms", "of AdamW's time", "bytes a weight")
    bench = _steps_of_a_gpu(results)
    if bench is None:
        return Table("Speed", "", head, [], [])
    found = {row[0]: row for row in speed_table(results).rows}
    rows = [(name, found[name][1], found[name][3], found[name][6]) for name in BRIEF if name in found]
    large = bench["steps"]["gpt"]
    note = (
        f"A step of {large['weights'] / 1e9:.2f} billion weights in {large['tensors']} tensors on an "
        f"{_measured_on(bench)}. Bytes: weight, gradient and state."
    )
    return Table("A step, beside the peers", note, head, rows, rows)


def _steps_of_a_gpu(results: Results) -> dict[str, Any] | None:
    found = [bench for bench in results.benchmarks if bench["device"] != "CPU" and "steps" in bench]
    return found[0] if found else None


def _measured_on(bench: Mapping[str, Any]) -> str:
    return f"{bench['device']}, torch {bench['versions']['torch']}, commit {bench['commit'][:7]}"


def cpu_table(results: Results) -> Table:
    """A step of ResNet-18's tensors on a CPU, from results/bench."""
    head = ("", "ms", "of AdamW's time")
    found = [bench for bench in results.benchmarks if bench["device"] == "CPU" and "steps" in bench]
    if not found:
        return Table("On a CPU", "", head, [], [])
    bench = found[0]
    small = bench["steps"]["resnet18"]
    peer = small["rows"][0]["ms"]
    rows = [
        (row["name"], row["missing"], "") if "missing" in row else
        (row["name"], f"{row['ms']:.1f}", f"{row['ms'] / peer:.2f}")
        for row in small["rows"]
    ]  # fmt: skip
    note = (
        f"{bench['threads']} threads, torch {bench['versions']['torch']}, commit {bench['commit'][:7]}: ResNet-18's "
        f"{small['weights'] / 1e6:.1f} million weights in {small['tensors']} tensors."
    )
    if each := small["rows"][0].get("each_ms"):
        note += f" Medians of {len(each)} rounds; AdamW took {min(each):.1f} to {max(each):.1f} ms in them."
    return Table("A step on a CPU", note, head, rows, rows)


TABLES = {
    "main": main_table, "bits": bits_table, "full": full_table, "bytes": ladder_table, "speed": speed_table,
    "cpu": cpu_table,
}  # fmt: skip
# Not on the page, which has the whole of it.
PARTS = {"speed_brief": speed_brief_table}


def fill_in(path: Path, results: Results, known: Mapping[str, Callable[[Results], Table]] = TABLES) -> None:
    """Replace the marked tables of a Markdown file by what the records say."""

    def replaced(match: re.Match[str]) -> str:
        table = known[match[2]](results)
        note = f"{table.note}\n\n" if match[2] in _NOTED else ""
        return match[1] + note + table.markdown() + match[3]

    text = path.read_text(encoding="utf-8")
    path.write_text(_MARK.sub(replaced, text), encoding="utf-8")
