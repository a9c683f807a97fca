"""One self-contained page: figures and tables, no script, nothing to load."""

from collections.abc import Sequence
from html import escape

from madam_lab.report import controls, crossing, figures, gan, language, photographs, plateau, small, theory
from madam_lab.report.numbers import Results
from madam_lab.report.tables import TABLES, Table

_STYLE = """
:root{color-scheme:light dark;--ink:#1f2328;--faint:#d0d7de;--paper:#ffffff;--row:#f6f8fa}
@media(prefers-color-scheme:dark){:root{--ink:#e6edf3;--faint:#3d444d;--paper:#0d1117;--row:#151b23}}
body{margin:0 auto;max-width:76rem;padding:1rem;background:var(--paper);color:var(--ink)}
body{font:16px/1.5 system-ui,sans-serif}
h1{font-size:1.6rem;margin:.5rem 0}h2{font-size:1.2rem;margin:2.2rem 0 .6rem}p{max-width:46rem}
.figures{display:grid;gap:1rem;grid-template-columns:repeat(auto-fit,minmax(min(100%,30rem),1fr))}
figure{margin:0;max-width:44rem;border:1px solid var(--faint);border-radius:8px;overflow-x:auto}
img{display:block;width:100%;height:auto;image-rendering:pixelated}figcaption{padding:.3rem .7rem}
svg{display:block;width:100%;min-width:27rem;height:auto}
.scroll{overflow-x:auto}table{border-collapse:collapse;font-size:.9rem;white-space:nowrap}
th,td{padding:.35rem .7rem;border-bottom:1px solid var(--faint);text-align:left}
tbody tr:nth-child(odd){background:var(--row)}
td.missing{opacity:.45}.note{opacity:.75;font-size:.9rem}
""".strip()


def page(results: Results, *, title: str = "torchmadam: what was measured") -> str:
    """The whole report as HTML."""
    more = (
        plateau.TABLES,
        controls.TABLES,
        gan.TABLES,
        photographs.TABLES,
        crossing.TABLES,
        small.TABLES,
        language.TABLES,
    )
    tables = [*TABLES.values(), *(make for group in more for make in group.values())]
    tasks = list(figures.TASK_TITLES)
    rates = [figures.learning_rates(results, task, schedule) for task in tasks for schedule in figures.SCHEDULES]
    curves = [
        figures.clipping(results),
        *(figures.convergence(results, task) for task in tasks),
        language.loss_curves(results),
    ]
    coded = [r for name in sorted(results.by_recipe) for r in results.of(name)[:1] if r["codes"] and _is_main(name)]
    count = sum(len(found) for kind in (results.by_recipe, results.by_study) for found in kind.values())
    sections = [
        _section(
            "Which learning rate?",
            "Every optimiser was trained at five learning rates. The paper's claim is that Madam's red cross is at "
            "0.01 on every task, with rates that stay constant. Ours is for rates that fall, or for an average of the "
            "weights.",
            rates,
        ),
        _section("Convergence", "", curves),
        _section(
            "When does a step help?",
            "The paper's theorem promises that a relative step decreases the loss while it is small enough for the "
            "angle between weights and gradients, under an assumption about how gradients break down.",
            theory.figures(results),
        ),
        *(_table(table) for table in (make(results) for make in tables) if table.has_results),
        _section(
            "What the generators make",
            "Samples as they come, at the end of training: a column for each class of CIFAR-10, a row for each noise.",
            gan.sheets(results),
        ),
        _section(
            "Number systems",
            "A weight is a rung of a ladder: a sign and an exponent, and no mantissa. Training moves it up and down.",
            [figures.number_systems(), figures.bytes_held(results)],
        ),
        _section(
            "Where the codes live",
            "The share of weights on each part of the ladder, from pale (before training) to dark (at its end).",
            [figures.codes_over_training(record) for record in coded],
        ),
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body>\n<h1>{escape(title)}</h1>\n"
        f"<p>Made by <code>madam report</code> from {count} records. Hover over a point for its value. Lower is "
        "better; an asterisk marks a record whose code is in no commit.</p>\n"
        + "\n".join(filter(None, sections))
        + "\n</body></html>\n"
    )


def _is_main(name: str) -> bool:
    if name.startswith("small_") or "_trust" in name:
        return False
    return "_lr_" not in name or name.endswith("_0.01")


def _section(title: str, text: str, charts: Sequence[str | None]) -> str:
    drawn = [chart for chart in charts if chart]
    if not drawn:
        return ""
    shown = "\n".join(f"<figure>{chart}</figure>" for chart in drawn)
    words = f"<p>{escape(text)}</p>\n" if text else ""
    return f'<section><h2>{escape(title)}</h2>\n{words}<div class="figures">\n{shown}\n</div></section>'


def _table(table: Table) -> str:
    head = "".join(f"<th>{escape(cell)}</th>" for cell in table.head)
    rows = "\n".join("<tr>" + "".join(_cell(cell) for cell in row) + "</tr>" for row in table.rows)
    return (
        f'<section><h2>{escape(table.title)}</h2>\n<p class="note">{escape(table.note)}</p>\n'
        f'<div class="scroll"><table>'
        f"<thead><tr>{head}</tr></thead>\n<tbody>\n{rows}\n</tbody></table></div></section>"
    )


def _cell(text: str) -> str:
    return f'<td class="missing">{escape(text)}</td>' if text.endswith("missing") else f"<td>{escape(text)}</td>"
