"""Small bar charts as SVG, without a library: a bar for each contender, with its figure beside it.

Bars begin at zero, and their lengths are to scale. Text has a colour that can be read on white
and on black.
"""

from collections.abc import Collection, Mapping
from html import escape
from typing import Final

__all__ = ["bars"]

WIDTH: Final = 560
TOP: Final = 44
ROW: Final = 22
NAMES: Final = 230
"""The place for names, left of the bars."""
FIGURES: Final = 70
"""The place for figures, right of the longest bar."""
THICK: Final = 14
SHORTEST: Final = 1.0
"""Pixels: a bar that would be shorter is still seen."""
OURS: Final = "#0072b2"
THEIRS: Final = "#8b949e"
STYLE: Final = "text{font:11px system-ui,sans-serif;fill:#6e7781}.t{font-weight:600;font-size:12px}"


def bars(title: str, note: str, figures: Mapping[str, float], ours: Collection[str]) -> str:
    """`note`: the unit, and whether less or more is better. The bars of `ours` have a colour."""
    most = max(figures.values())
    parts = [
        f'<text class="t" x="0" y="14">{escape(title)}</text>',
        f'<text x="0" y="31">{escape(note)}</text>',
    ]
    for number, (name, figure) in enumerate(figures.items()):
        top = TOP + number * ROW
        length = max(SHORTEST, figure / most * (WIDTH - NAMES - FIGURES))
        colour = OURS if name in ours else THEIRS
        base = top + THICK - 3
        parts.append(f'<text x="{NAMES - 8}" y="{base}" text-anchor="end">{escape(name)}</text>')
        parts.append(
            f'<rect x="{NAMES}" y="{top}" width="{length:.1f}" height="{THICK}" fill="{colour}"/>'
        )
        parts.append(f'<text x="{NAMES + length + 6:.1f}" y="{base}">{_two_digits(figure)}</text>')
    height = TOP + len(figures) * ROW
    told = "; ".join(f"{name}: {_two_digits(figure)}" for name, figure in figures.items())
    label = escape(f"{title}, {note}. {told}", quote=True)
    body = "\n".join(parts)
    size = f'viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="{label}">\n'
        f"<style>{STYLE}</style>\n{body}\n</svg>\n"
    )


def _two_digits(figure: float) -> str:
    """The next run differs in the third digit."""
    rounded = float(f"{figure:.2g}")
    return f"{rounded:,.0f}" if rounded >= 10 else f"{rounded:g}"
