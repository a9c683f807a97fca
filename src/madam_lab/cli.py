"""The command `madam`."""

import argparse
import ast
import functools
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from madam_lab import records

# Pages with tables that are made from records.
PAGES = ("reproduction", "migration", "theory", "bits", "huggingface", "imagenet", "memory", "speed")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    options = _parser().parse_args(arguments)
    from madam_lab.errors import EXPECTED, told

    try:
        return int(options.act(options) or 0)
    except KeyboardInterrupt:
        print("madam: stopped", file=sys.stderr)
        return 130
    except BrokenPipeError:  # of `madam list | head`; what is left to flush goes nowhere
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] in ("torchmadam", "madam_lab"):
            raise
        print(
            f"madam: this needs {error.name}; pip install 'torchmadam[lab]' brings what the experiments need",
            file=sys.stderr,
        )
        return 1
    except EXPECTED as error:
        print(f"madam: {told(error)}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="madam", description="The paper's experiments, by command.")
    commands = parser.add_subparsers(dest="command", required=True)

    def command(name: str, act: Any, help: str) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=help, description=help[0].upper() + help[1:] + ".")
        added.set_defaults(act=act)
        return added

    demo = command("demo", _demo, "train the learning-rate figure on handwritten digits, and write the report")
    demo.add_argument("--out", type=Path, default=Path("demo"), help="folder for records and page (default: demo)")

    listing = command("list", _list, "list the recipes and studies, with the paper's number and ours")
    listing.add_argument("patterns", nargs="*", default=["*"], help="such as 'cifar10_*'")
    _results(listing)

    run = command("run", _run, "train recipes, make studies; what is done is skipped, what was stopped goes on")
    run.add_argument(
        "patterns", nargs="*", default=["digits_madam"],
        help="names of recipes or studies, or patterns such as 'cifar10_*' (default: digits_madam)",
    )  # fmt: skip
    run.add_argument("--seed", "--seeds", type=_seeds, default=[0], help="one or several, such as 0,1,2 (default: 0)")
    run.add_argument("--budget", type=_seconds, help="stop in time, such as 9m, 90s or 1h")
    run.add_argument("--data", type=Path, help="folder with the data sets (default: MADAM_DATA, then ./data)")
    run.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE", help="override, such as epochs=10")
    run.add_argument("--smoke", action="store_true", help="a tiny run that only shows that the recipe works")
    run.add_argument("--device", help="cpu or cuda (default: cuda where there is one)")
    run.add_argument("--save-every", type=_seconds, default=30.0, help="how often to save (default: 30s)")
    run.add_argument("--runs", type=Path, default=Path("runs"), help="folder for unfinished runs (default: runs)")
    run.add_argument(
        "--scales", type=Path, help="a safetensors file or state dict whose tensors lend Madam their scales"
    )
    run.add_argument("--keep", type=Path, help="folder for the trained weights, as safetensors files (default: none)")
    run.add_argument("--at-once", type=_count, default=1, help="how many runs side by side, in processes (default: 1)")
    run.add_argument(
        "--ahead", type=_seconds, default=0.0,
        help="begin the next run when one needs no more than this, such as 16s, in a process of its own (default: 0s)",
    )  # fmt: skip
    run.add_argument(
        "--compile", action="store_true",
        help="on a CPU, what a GPU does anyway: compile network and optimiser, and compute in the recipe's precision; "
        "needs a C++ compiler",
    )  # fmt: skip
    run.add_argument("--quiet", action="store_true", help="no progress, only results")
    _results(run)

    data = command("data", _data, "download a data set from its makers")
    data.add_argument("names", nargs="+", help="cifar10, cifar100, wikitext2, imagenette, or inception, for FID")
    data.add_argument("--data", type=Path, help="folder to put it in (default: MADAM_DATA, then ./data)")

    cache = command(
        "cache", _cache, "decode a data set of photographs once, to train without Pillow and without workers"
    )
    cache.add_argument("name", choices=["imagenet", "imagenette"])
    cache.add_argument("--data", type=Path, help="folder with the data sets (default: MADAM_DATA, then ./data)")
    cache.add_argument("--short", type=int, help="the shorter side, in pixels (default: what its task crops from)")

    verify = command("verify", _verify, "check all records against the schema and the recipes")
    _results(verify)

    report = command("report", _report, "make the tables and the page from the records")
    report.add_argument("--page", type=Path, default=Path("docs/report.html"), help="the HTML page to write")
    report.add_argument(
        "--tables", type=Path, nargs="*",
        default=[Path("README.md"), *(Path("docs") / f"{name}.md" for name in PAGES)],
        help="Markdown files whose marked tables are filled in; files that are not there are left out",
    )  # fmt: skip
    report.add_argument(
        "--picture", type=Path, default=Path("docs/learning-rate.svg"), help="the learning-rate figure to write"
    )
    report.add_argument(
        "--theory-picture", type=Path, default=Path("docs/largest-lr.svg"), help="the theory's figure to write"
    )
    _results(report)

    inspect = command("inspect", _inspect, "print what a coded file holds")
    inspect.add_argument("file", type=Path)

    export = command("export", _export, "write a coded file's weights as ordinary floats")
    export.add_argument("file", type=Path)
    export.add_argument("target", type=Path, help="a .safetensors file")
    return parser


def _results(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--results", type=Path, default=records.RESULTS, help="folder with the records")


def _seconds(text: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smh]?)", text)
    if not match:
        raise argparse.ArgumentTypeError(f"{text!r} is no time; use 90s, 9m or 1h")
    return float(match[1]) * {"": 1, "s": 1, "m": 60, "h": 3600}[match[2]]


def _seeds(text: str) -> list[int]:
    if not re.fullmatch(r"\d+(,\d+)*", text):
        raise argparse.ArgumentTypeError(f"{text!r} are no seeds; use 0, or several such as 0,1,2")
    return [int(seed) for seed in text.split(",")]


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of runs; use 1 or more")
    return int(text)


def _override(text: str) -> tuple[str, Any]:
    key, found, value = text.partition("=")
    if not found:
        raise ValueError(f"--set {text}: use FIELD=VALUE, such as epochs=10 or arguments.bound=2")
    try:
        return key, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return key, value


def _demo(options: argparse.Namespace) -> int:
    from madam_lab import demo

    demo.run(options.out)
    return 0


def _list(options: argparse.Namespace) -> int:
    from madam_lab.recipes import Recipe
    from madam_lab.report.numbers import Results

    found = Results(options.results)
    rows = [("recipe", "the paper's", "ours")]
    for item in _chosen(options.patterns):
        if isinstance(item, Recipe):
            rows.append((item.name, found.paper(item), found.ours(item.name)))
        else:
            rows.append((item.name, "", found.studied(item.name)))
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    for row in rows:
        print(f"{row[0]:<{widths[0]}}  {row[1]:>{widths[1]}}  {row[2]:>{widths[2]}}")
    return 0


def _chosen(patterns: Sequence[str]) -> list[Any]:
    """The recipes and studies whose names match."""
    from madam_lab import recipes, studies

    ours = set(studies.names())
    found = recipes.matching(patterns, [*recipes.names(), *studies.names()])
    return [studies.get(name) if name in ours else recipes.get(name) for name in found]


def _run(options: argparse.Namespace) -> int:
    from madam_lab import data, pool, queue, ranks
    from madam_lab.studies import Study

    overrides = dict(_override(text) for text in options.set)
    if options.scales is not None:
        from madam_lab import scales

        overrides["scales"] = scales.digest(options.scales)
    chosen = [item.overridden(overrides) for item in _chosen(options.patterns)]
    if options.smoke:
        chosen = [item.as_smoke() for item in chosen]
    if options.compile and (apart := [item.name for item in chosen if isinstance(item, Study)]):
        raise ValueError(f"--compile is for training runs, and {apart[0]} is a study; run it without")
    with ranks.joined(_device(options.device)) as device:
        first = ranks.here().is_first
        if options.compile and ranks.here().are_many:
            raise ValueError("--compile is for runs of one process each, not under torchrun")
        work: Any = queue.work
        if options.at_once > 1 or options.ahead:
            if ranks.here().are_many:
                raise ValueError("--at-once and --ahead are for runs of one process each, not under torchrun")
            work = functools.partial(pool.work, at_once=options.at_once, ahead=options.ahead)
        outcome = work(
            chosen,
            options.seed,
            data=data.root(options.data),
            results=options.results,
            folder=options.runs,
            budget=options.budget if options.budget is not None else float("inf"),
            save_every=options.save_every,
            device=device,
            overrides=overrides,
            scales=options.scales,
            keep=options.keep,
            compiled=options.compile or None,
            quiet=options.quiet,
        )
    if first:
        failed = f", {len(outcome.failed)} failed" if outcome.failed else ""
        print(f"{len(outcome.done)} done, {len(outcome.skipped)} were done before, {len(outcome.left)} left{failed}")
    if outcome.left and first:
        print(f"next: {outcome.left[0]}; the same command goes on")
    return 130 if outcome.signalled else 1 if outcome.failed else 0


def _device(name: str | None) -> Any:
    import torch

    try:
        device = None if name is None else torch.device(name)
        torch.empty(0, device=device)
        return device
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"--device {name}: {str(error).partition(chr(10))[0]}") from error


def _data(options: argparse.Namespace) -> int:
    import torch

    from madam_lab import data, fid, pictures
    from madam_lab.tasks import TASKS

    root, cpu = data.root(options.data), torch.device("cpu")
    for name in options.names:
        try:
            if name in data.SOURCES:
                if name == "inception":
                    fid.Inception(root, cpu)
                else:
                    TASKS[name](root, cpu, batch=1, seed=0)
                print(f"{name} is there, and whole")
                continue
        except (data.DataError, pictures.TreeError) as error:
            print(str(error).partition(";")[0])
        data.download(name, root)
    return 0


def _cache(options: argparse.Namespace) -> int:
    from madam_lab import data, pictures
    from madam_lab.tasks.imagenet import ImageNet, Imagenette

    root = data.root(options.data)
    short = options.short or {task.name: task.short for task in (ImageNet, Imagenette)}[options.name]
    found = pictures.write_cache(root / options.name, root / f"{options.name}-cache", short)
    print(", ".join(f"{kind}: {count}" for kind, count in found.counts.items()))
    for line in found.broken:
        print(f"broken: {line}")
    return 0


def _verify(options: argparse.Namespace) -> int:
    from madam_lab.report.numbers import problems

    _require_folder(options.results)
    found, count = problems(options.results)
    for problem in found:
        print(problem)
    print(f"{count} records, {len(found)} problems")
    return 1 if found else 0


def _report(options: argparse.Namespace) -> int:
    from madam_lab import report

    _require_folder(options.results)
    written = report.write(options.results, options.page, options.tables, options.picture, options.theory_picture)
    for path in written:
        print(path)
    return 0


def _require_folder(results: Path) -> None:
    if not results.is_dir():
        raise ValueError(f"there is no folder {results} with records; `madam run` writes them, --results says where")


def _inspect(options: argparse.Namespace) -> int:
    from madam_lab.files import table

    print(table(options.file))
    return 0


def _export(options: argparse.Namespace) -> int:
    from madam_lab.files import export

    if options.target.resolve() == options.file.resolve():
        raise ValueError(f"{options.target} is the coded file itself; give another name for the floats")
    export(options.file, options.target)
    print(options.target)
    return 0
