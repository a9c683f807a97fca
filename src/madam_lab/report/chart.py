"""Charts as SVG text: no library, values on hover, light and dark."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

# Okabe and Ito's colours, told apart by colour-blind readers.
COLOURS = {
    "SGD": "#009e73",
    "Adam": "#e69f00",
    "Madam": "#0072b2",
    "12-bit Madam": "#56b4e9",
    "10-bit Madam": "#d55e00",
    "8-bit Madam": "#999999",
    "signed 8-bit Madam": "#cc79a7",
    "Madam, ours": "#d55e00",
    "sign rule": "#0072b2",
    "layer-wise": "#e69f00",
    "gradient descent": "#009e73",
    "random signs": "#999999",
    "assumed at most": "#d55e00",
    "2/π": "#d55e00",
    "weights": "#0072b2",
    "optimiser state": "#e69f00",
    "gradients": "#009e73",
}
_SPARE = ("#56b4e9", "#0072b2", "#cc79a7", "#d55e00", "#e69f00", "#999999")

STYLE = """
.chart{--ink:#1f2328;--mid:#6e7781;--faint:#d0d7de;--paper:#ffffff;font:13px system-ui,sans-serif}
@media(prefers-color-scheme:dark){.chart{--ink:#e6edf3;--mid:#8b949e;--faint:#3d444d;--paper:#0d1117}}
.chart text{fill:var(--ink)}.chart .title{font-size:15px;font-weight:600}.chart .note{font-size:12px;opacity:.75}
.chart .grid{stroke:var(--faint);stroke-width:1}.chart .line{fill:none;stroke-width:2.2}
.chart .dot{stroke:var(--paper);stroke-width:1.2}.chart .cross{stroke:#d1242f;stroke-width:2.6;stroke-linecap:round}
.chart .hit{fill:transparent;stroke:none}
""".strip()


@dataclass(frozen=True)
class Series:
    """One line: its points, the positions of those marked with a red cross, and what hovering shows instead of y.

    ``shade`` draws it in ink of this strength instead of a colour, for lines that are one thing over time. A ``dashed``
    line has no dots: what was measured is compared with it. It stays out of the legend if a line of its name is there.
    """

    name: str
    points: Sequence[tuple[float, float]]
    crosses: frozenset[int] = frozenset()
    tips: Sequence[str] | None = None
    shade: float | None = None
    dashed: bool = False


def figure(parts: Sequence[str], *, title: str, note: str, width: int, height: int) -> str:
    """An SVG document with a title and a note above its parts."""
    head = [
        f'<svg class="chart" xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
        f'aria-label="{escape(title)}"><style>{STYLE}</style>',
        f'<rect width="{width}" height="{height}" fill="var(--paper)"/>',
        f'<text class="title" x="18" y="24">{escape(title)}</text>',
        f'<text class="note" x="18" y="44">{escape(note)}</text>' if note else "",
    ]
    return "\n".join(line for line in [*head, *parts, "</svg>"] if line)


def line_chart(
    series: Sequence[Series],
    *,
    title: str,
    note: str = "",
    x_label: str,
    y_label: str,
    x_log: bool = False,
    y_log: bool = False,
    x_range: tuple[float, float] | None = None,
    y_range: tuple[float, float] | None = None,
    dots: bool = True,
    width: int = 640,
    height: int = 400,
) -> str:
    """Lines over two axes. Points that are not finite, not positive on a log axis or out of range are left out."""
    shown = [
        (s, [(i, x, y) for i, (x, y) in enumerate(s.points) if _shown(x, x_log) and _shown(y, y_log)]) for s in series
    ]
    xs = x_range or _extent([x for _, points in shown for _, x, _ in points])
    ys = y_range or _extent([y for _, points in shown for _, _, y in points])
    shown = [(s, [p for p in points if xs[0] <= p[1] <= xs[1] and ys[0] <= p[2] <= ys[1]]) for s, points in shown]
    left, right, top, bottom = 62, width - 18, 84 if note else 66, height - 48
    place_x, x_ticks = _axis(xs, x_log, left, right)
    place_y, y_ticks = _axis(ys, y_log, bottom, top)

    out: list[str] = []
    for x in x_ticks:
        out.append(f'<line class="grid" x1="{place_x(x):.1f}" x2="{place_x(x):.1f}" y1="{top}" y2="{bottom}"/>')
        out.append(f'<text x="{place_x(x):.1f}" y="{bottom + 19}" text-anchor="middle">{_number(x)}</text>')
    for y in y_ticks:
        out.append(f'<line class="grid" x1="{left}" x2="{right}" y1="{place_y(y):.1f}" y2="{place_y(y):.1f}"/>')
        out.append(f'<text x="{left - 8}" y="{place_y(y) + 4:.1f}" text-anchor="end">{_number(y)}</text>')
    middle = (top + bottom) / 2
    out.append(f'<text x="{(left + right) / 2}" y="{height - 10}" text-anchor="middle">{escape(x_label)}</text>')
    out.append(f'<text transform="translate(16 {middle}) rotate(-90)" text-anchor="middle">{escape(y_label)}</text>')

    taken = {COLOURS.get(s.name) for s, _ in shown}
    spare = iter(([colour for colour in _SPARE if colour not in taken] or list(_SPARE)) * 4)
    legend: list[tuple[str, str]] = []
    for s, points in shown:
        colour = COLOURS.get(s.name) or ("var(--ink)" if s.shade is not None else next(spare))
        strength = f' opacity="{0.25 + 0.75 * s.shade:.2f}"' if s.shade is not None else ""
        path = " ".join(f"{place_x(x):.1f},{place_y(y):.1f}" for _, x, y in points)
        dashes = ' stroke-dasharray="6 5"' if s.dashed else ""
        out.append(f'<polyline class="line" stroke="{colour}"{strength}{dashes} points="{path}"/>')
        for i, x, y in points:
            said = s.tips[i] if s.tips is not None else f"{_number(x)}, {y:.4g}"
            tip = f"<title>{escape(s.name)}: {escape(said)}</title>"
            cx, cy = place_x(x), place_y(y)
            if i in s.crosses:
                strokes = f"M{cx - 6:.1f} {cy - 6:.1f}l12 12M{cx - 6:.1f} {cy + 6:.1f}l12 -12"
                out.append(f'<path class="cross" d="{strokes}">{tip}</path>')
            elif dots and not s.dashed and len(points) <= 30:
                out.append(f'<circle class="dot" cx="{cx:.1f}" cy="{cy:.1f}" r="4" fill="{colour}">{tip}</circle>')
            else:
                out.append(f'<circle class="hit" cx="{cx:.1f}" cy="{cy:.1f}" r="5">{tip}</circle>')
        if (s.name, f'fill="{colour}"{strength}') not in legend:
            legend.append((s.name, f'fill="{colour}"{strength}'))
    out += _legend(legend, left, top - 20)
    return figure(out, title=title, note=note, width=width, height=height)


def bars(
    rows: Sequence[tuple[str, Sequence[tuple[str, float]]]], *, title: str, note: str, unit: str, width: int = 640
) -> str:
    """A horizontal bar for each row, stacked from named parts."""
    left, right, top, pitch = 170, width - 60, 84, 30
    most = max(sum(value for _, value in parts) for _, parts in rows)
    out: list[str] = []
    names = list(dict.fromkeys(name for _, parts in rows for name, _ in parts))
    for i, (label, parts) in enumerate(rows):
        y, x = top + pitch * i, float(left)
        out.append(f'<text x="{left - 10}" y="{y + 15}" text-anchor="end">{escape(label)}</text>')
        for name, value in parts:
            length = value / most * (right - left)
            tip = f"<title>{escape(label)}, {escape(name)}: {value:.3g} {escape(unit)}</title>"
            place = f'x="{x:.1f}" y="{y}" width="{length:.1f}" height="20"'
            out.append(f'<rect class="bar" {place} fill="{COLOURS[name]}">{tip}</rect>')
            x += length
        out.append(f'<text x="{x + 6:.1f}" y="{y + 15}">{sum(value for _, value in parts):.3g}</text>')
    out += _legend([(name, f'fill="{COLOURS[name]}"') for name in names], left, top - 20)
    return figure(out, title=title, note=note, width=width, height=top + pitch * len(rows) + 16)


def _legend(entries: Sequence[tuple[str, str]], left: float, y: float) -> list[str]:
    out, x = [], float(left)
    for name, paint in entries:
        out.append(f'<circle cx="{x + 5:.1f}" cy="{y}" r="5" {paint}/>')
        out.append(f'<text x="{x + 15:.1f}" y="{y + 4}">{escape(name)}</text>')
        x += 27 + _text_width(name)
    return out


def _text_width(text: str) -> float:
    """In pixels, about, in a wide font such as DejaVu Sans: no browser is there to ask."""
    return sum(11 if c in "mwMW" else 8.5 if c.isupper() else 4.6 if c in "fijlrt.,:- " else 7.7 for c in text)


def _shown(value: float, log: bool) -> bool:
    return math.isfinite(value) and (value > 0 or not log)


def _extent(values: Sequence[float]) -> tuple[float, float]:
    if not values:
        return 0.1, 1.0
    low, high = min(values), max(values)
    return (low, high) if high > low else (low - (abs(low) or 1.0) / 2, high + (abs(high) or 1.0) / 2)


def _axis(
    ends: tuple[float, float], log: bool, start: float, stop: float
) -> tuple[Callable[[float], float], list[float]]:
    """A function from values to pixels, with a little room at both ends, and the values that get a tick."""
    low, high = (math.log10(v) for v in ends) if log else ends
    room = 0.04 * (high - low)
    low, high = low - room, high + room

    def place(value: float) -> float:
        position = math.log10(value) if log else value
        return start + (position - low) / (high - low) * (stop - start)

    if log and high - low >= 1:
        parts = (1,) if high - low > 2 else (1, 2, 5)  # of a decade
        ticks = [m * 10.0**e for e in range(math.floor(low), math.floor(high) + 1) for m in parts]
        return place, [tick for tick in ticks if 10**low <= tick <= 10**high]
    low, high = (10**low, 10**high) if log else (low, high)
    raw = (high - low) / 6
    unit = 10.0 ** math.floor(math.log10(raw))
    step = next(unit * m for m in (1, 2, 5, 10) if unit * m >= raw)
    return place, [k * step for k in range(math.ceil(low / step), math.floor(high / step) + 1)]


def _number(value: float) -> str:
    return f"{value:.6g}" if abs(value) < 1e4 else f"{value:.0e}"
