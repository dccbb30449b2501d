"""What a run comes to, as a page: targets missed first, the machine, every section."""

from collections.abc import Sequence

from benchmarks.harness import Row, Section
from benchmarks.machine import machine

__all__ = ["page", "sections_text", "summary"]

ABOUT = """\
Written by `make bench`; do not edit. A figure with × is a ratio of two medians that were measured
in turns in one run, so expect a similar one on your machine. Times, bytes and counts are this
machine's. Each section ran in a process of its own, alone. The letters and numbers of a
rule are those of [Rules and tests](seeds.md). How to run it and how to read it:
[testing](testing.md#the-benchmarks). How cost grows: [scale](scale.md)."""


def table(head: list[str], rows: Sequence[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def promises(rows: list[Row]) -> str:
    return table(["rule", "what", "measured", "target", "kept"], [row.cells() for row in rows])


def missed(rows: list[Row]) -> str:
    lines = [[*row.cells()[:4], row.tried or "nothing yet"] for row in rows]
    return table(["rule", "what", "measured", "target", "what was tried"], lines)


def figures(section: Section) -> str:
    """Plain numbers: of use to compare within this run, not with another machine's."""
    parts = []
    for title, values in section.figures.items():
        ranked = sorted(values.items(), key=lambda item: item[1])
        parts += [f"- {title}:", *(f"  - {name}: {value:.4g}" for name, value in ranked)]
    return "\n".join(parts)


def section_text(section: Section) -> str:
    parts = [f"## {section.title}"]
    why = section.failed or section.missing
    parts += [f"**Not measured**: {why}."] if why else []
    parts += [promises(section.rows)] if section.rows else []
    parts += [table(section.words[0], section.words[1:])] if section.words else []
    parts += [text for text in (figures(section), section.notes) if text]
    return "\n\n".join(parts)


def summary(sections: Sequence[Section]) -> str:
    """Targets missed, and what could not be measured."""
    rows = [row for section in sections for row in section.rows if not row.kept]
    whys = {section.title: section.failed or section.missing for section in sections}
    absent = [f"- {title}: {why}." for title, why in whys.items() if why]
    parts = ["## Targets missed", missed(rows) if rows else "None in this run."]
    parts += ["Not measured:", "\n".join(absent)] if absent else []
    return "\n\n".join(parts)


def sections_text(sections: Sequence[Section]) -> str:
    return "\n\n".join(section_text(section) for section in sections)


def page(sections: Sequence[Section]) -> str:
    parts = ["# Benchmarks", ABOUT, summary(sections), "## The machine"]
    parts += [table(["what", "which"], machine()), sections_text(sections)]
    return "\n\n".join(parts) + "\n"
