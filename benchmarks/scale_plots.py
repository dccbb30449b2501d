"""Small line plots as SVG, without a library: logarithmic axes, one line for each series.

Text and lines have colours that can be read on white and on black.
"""

from collections.abc import Iterable, Mapping
from html import escape
from math import ceil, floor, log10

__all__ = ["plot"]

WIDTH, LEGEND = 460, 14
LEFT, RIGHT, TOP, BOTTOM, INSIDE = 62, 34, 30, 46, 158
"""Around the axes, and the height of what they enclose; the legend comes below."""
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#8a6d00", "#56b4e9", "#8250df", "#57606a")
STORES = ("memory", "SQLite", "Valkey", "Valkey cluster", "PostgreSQL")
"""Each has the same colour in every plot."""
STYLE = (
    "text{font:11px system-ui,sans-serif;fill:#6e7781}.t{font-weight:600;font-size:12px}"
    ".g{stroke:#8b949e;stroke-opacity:.3}"
)


def plot(
    title: str, x: str, lines: Mapping[str, Mapping[float, float]], limit: float | None = None
) -> str:
    """`limit` is drawn as a dashed line, and named: what may not be exceeded."""
    is_stores = set(lines) <= set(STORES)
    floor_, across_legend = TOP + INSIDE, 3 if is_stores else 2
    height = floor_ + BOTTOM + LEGEND * ceil(len(lines) / across_legend)
    xs = _span(size for line in lines.values() for size in line)
    ys = _span([value for line in lines.values() for value in line.values()] + [limit or 0.0])
    parts = [f'<text class="t" x="{LEFT}" y="16">{escape(title)}</text>']

    def at(size: float, value: float) -> tuple[float, float]:
        across = (log10(size) - xs[0]) / (xs[1] - xs[0])
        up = (log10(max(value, 10 ** ys[0])) - ys[0]) / (ys[1] - ys[0])
        return round(LEFT + across * (WIDTH - LEFT - RIGHT), 1), round(floor_ - up * INSIDE, 1)

    for power in range(xs[0], xs[1] + 1):
        across, down = at(10**power, 10 ** ys[0])
        parts.append(f'<path class="g" d="M{across} {TOP}V{down}"/>')
        parts.append(
            f'<text x="{across}" y="{down + 14}" text-anchor="middle">{10**power:,}</text>'
        )
    for power in range(ys[0], ys[1] + 1):
        _, down = at(10 ** xs[0], 10.0**power)
        parts.append(f'<path class="g" d="M{LEFT} {down}H{WIDTH - RIGHT}"/>')
        parts.append(
            f'<text x="{LEFT - 6}" y="{down + 4}" text-anchor="end">{10.0**power:,g}</text>'
        )
    middle, below = (LEFT + WIDTH - RIGHT) / 2, floor_ + 28
    parts.append(f'<text x="{middle}" y="{below}" text-anchor="middle">{escape(x)}</text>')
    if limit is not None:
        _, down = at(10 ** xs[0], limit)
        parts.append(
            f'<path d="M{LEFT} {down}H{WIDTH - RIGHT}" stroke="#cf222e" stroke-dasharray="5 4"/>'
            f'<text x="{WIDTH - RIGHT + 4}" y="{down + 4}">{limit:g}</text>'
        )
    for number, (name, line) in enumerate(lines.items()):
        place = STORES.index(name) if is_stores else number
        colour, points = COLOURS[place % len(COLOURS)], [at(*it) for it in sorted(line.items())]
        path = " ".join(f"{across},{down}" for across, down in points)
        parts.append(f'<polyline fill="none" stroke="{colour}" stroke-width="2" points="{path}"/>')
        parts += [f'<circle cx="{it[0]}" cy="{it[1]}" r="2.5" fill="{colour}"/>' for it in points]
        across = LEFT + number % across_legend * (WIDTH - LEFT) / across_legend
        down = floor_ + BOTTOM + number // across_legend * LEGEND
        parts.append(f'<circle cx="{across - 8}" cy="{down - 4}" r="4" fill="{colour}"/>')
        parts.append(f'<text x="{across}" y="{down}">{escape(name)}</text>')
    body = "\n".join(parts)
    size = f'viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="{escape(title)}">\n'
        f"<style>{STYLE}</style>\n{body}\n</svg>\n"
    )


def _span(values: Iterable[float]) -> tuple[int, int]:
    """Powers of ten around them all."""
    found = [value for value in values if value > 0]
    first, last = floor(log10(min(found)) + 1e-9), ceil(log10(max(found)) - 1e-9)
    return first, max(last, first + 1)
