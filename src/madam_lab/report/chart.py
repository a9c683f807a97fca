"""Line charts as SVG text: no library, values on hover, light and dark."""

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
    "signed 8-bit Madam": "#cc79a7",
}
_SPARE = ("#d55e00", "#999999", "#f0e442", "#000000")

STYLE = """
.chart{--ink:#1f2328;--faint:#d0d7de;--paper:#ffffff;font:13px system-ui,sans-serif}
@media(prefers-color-scheme:dark){.chart{--ink:#e6edf3;--faint:#3d444d;--paper:#0d1117}}
.chart text{fill:var(--ink)}.chart .title{font-size:15px;font-weight:600}.chart .note{font-size:12px;opacity:.75}
.chart .grid{stroke:var(--faint);stroke-width:1}.chart .line{fill:none;stroke-width:2.2}
.chart .dot{stroke:var(--paper);stroke-width:1.2}.chart .cross{stroke:#d1242f;stroke-width:2.6;stroke-linecap:round}
""".strip()


@dataclass(frozen=True)
class Series:
    """One line: its points, and the positions of those marked with a red cross."""

    name: str
    points: Sequence[tuple[float, float]]
    crosses: frozenset[int] = frozenset()
    dashed: bool = False


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
    width: int = 640,
    height: int = 400,
) -> str:
    """An SVG document. Points that are not finite, or not positive on a log axis, are left out of their line."""
    kept = [
        (s, [(i, x, y) for i, (x, y) in enumerate(s.points) if _shown(x, x_log) and _shown(y, y_log)]) for s in series
    ]
    xs = x_range or _extent([x for _, points in kept for _, x, _ in points])
    ys = y_range or _extent([y for _, points in kept for _, _, y in points])
    left, right, top, bottom = 62, width - 18, 84 if note else 66, height - 48
    place_x, x_ticks = _axis(xs, x_log, left, right)
    place_y, y_ticks = _axis(ys, y_log, bottom, top)

    out = [
        f'<svg class="chart" xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
        f'aria-label="{escape(title)}"><style>{STYLE}</style>',
        f'<rect width="{width}" height="{height}" fill="var(--paper)"/>',
        f'<text class="title" x="{left - 44}" y="24">{escape(title)}</text>',
        f'<text class="note" x="{left - 44}" y="44">{escape(note)}</text>' if note else "",
    ]
    for x in x_ticks:
        out.append(f'<line class="grid" x1="{place_x(x):.1f}" x2="{place_x(x):.1f}" y1="{top}" y2="{bottom}"/>')
        out.append(f'<text x="{place_x(x):.1f}" y="{bottom + 19}" text-anchor="middle">{_number(x)}</text>')
    for y in y_ticks:
        out.append(f'<line class="grid" x1="{left}" x2="{right}" y1="{place_y(y):.1f}" y2="{place_y(y):.1f}"/>')
        out.append(f'<text x="{left - 8}" y="{place_y(y) + 4:.1f}" text-anchor="end">{_number(y)}</text>')
    middle = (top + bottom) / 2
    out.append(f'<text x="{(left + right) / 2}" y="{height - 10}" text-anchor="middle">{escape(x_label)}</text>')
    out.append(f'<text transform="translate(16 {middle}) rotate(-90)" text-anchor="middle">{escape(y_label)}</text>')

    spare = iter(_SPARE)
    legend_x = float(left)
    for s, points in kept:
        colour = COLOURS.get(s.name) or next(spare, "#999999")
        dash = ' stroke-dasharray="6 4"' if s.dashed else ""
        path = " ".join(f"{place_x(x):.1f},{place_y(y):.1f}" for _, x, y in points)
        out.append(f'<polyline class="line" stroke="{colour}"{dash} points="{path}"/>')
        for i, x, y in points:
            tip = f"<title>{escape(s.name)}: {_number(x)}, {y:.4g}</title>"
            cx, cy = place_x(x), place_y(y)
            if i in s.crosses:
                strokes = f"M{cx - 6:.1f} {cy - 6:.1f}l12 12M{cx - 6:.1f} {cy + 6:.1f}l12 -12"
                out.append(f'<path class="cross" d="{strokes}">{tip}</path>')
            elif len(points) <= 40:
                out.append(f'<circle class="dot" cx="{cx:.1f}" cy="{cy:.1f}" r="4" fill="{colour}">{tip}</circle>')
        out.append(f'<circle cx="{legend_x + 5}" cy="{top - 20}" r="5" fill="{colour}"/>')
        out.append(f'<text x="{legend_x + 15}" y="{top - 16}">{escape(s.name)}</text>')
        legend_x += 32 + 7.2 * len(s.name)
    out.append("</svg>")
    return "\n".join(line for line in out if line)


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
        return place, [10.0**e for e in range(math.ceil(low), math.floor(high) + 1)]
    low, high = (10**low, 10**high) if log else (low, high)
    raw = (high - low) / 6
    unit = 10.0 ** math.floor(math.log10(raw))
    step = next(unit * m for m in (1, 2, 5, 10) if unit * m >= raw)
    return place, [k * step for k in range(math.ceil(low / step), math.floor(high / step) + 1)]


def _number(value: float) -> str:
    return f"{value:.6g}" if abs(value) < 1e4 else f"{value:.0e}"
