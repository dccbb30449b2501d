"""What a run comes to, as a page: targets missed first, the machine, every section."""

from collections.abc import Sequence

from benchmarks.harness import Row, Section
from benchmarks.machine import machine

__all__ = ["page", "page_with", "sections_text", "summary"]

ABOUT = """\
Written by `make bench`; do not edit. A figure with × is a ratio of two medians that were measured
in turns in one run, so expect a similar one on your machine. Times, bytes and counts are this
machine's. Each section ran in a process of its own, alone; one that was measured again later
says when. The letters and numbers of a
rule are those of [Rules and tests](seeds.md). How to run it and how to read it:
[testing](testing.md#the-benchmarks). How cost grows: [scale](scale.md)."""


HEADING = "\n\n## "
MISSED = "Targets missed"
MACHINE = "The machine"


def table(head: list[str], rows: Sequence[list[str]]) -> str:
    return "\n".join(map(line_of, [head, ["---"] * len(head), *rows]))


def line_of(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def promises(rows: list[Row]) -> str:
    return table(["rule", "what", "measured", "target", "kept"], [row.cells() for row in rows])


def missed_lines(section: Section) -> list[str]:
    """The table's lines of the targets that this section misses."""
    rows = [row for row in section.rows if not row.kept]
    return [line_of([*row.cells()[:4], row.tried or "nothing yet"]) for row in rows]


def absent_lines(section: Section) -> list[str]:
    """What the section could not measure, in one line."""
    why = section.failed or section.missing
    return [f"- {section.title}: {why}."] if why else []


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
    rows = [line for section in sections for line in missed_lines(section)]
    absent = [line for section in sections for line in absent_lines(section)]
    return summary_text(rows, absent)


def summary_text(rows: Sequence[str], absent: Sequence[str]) -> str:
    head = table(["rule", "what", "measured", "target", "what was tried"], [])
    parts = [f"## {MISSED}", "\n".join([head, *rows]) if rows else "None in this run."]
    parts += ["Not measured:", "\n".join(absent)] if absent else []
    return "\n\n".join(parts)


def sections_text(sections: Sequence[Section]) -> str:
    return "\n\n".join(section_text(section) for section in sections)


def page(sections: Sequence[Section]) -> str:
    parts = ["# Benchmarks", ABOUT, summary(sections), f"## {MACHINE}"]
    parts += [table(["what", "which"], machine()), sections_text(sections)]
    return "\n\n".join(parts) + "\n"


def page_with(before: str, sections: Sequence[Section], day: str) -> str:
    """The page from before with these sections, measured anew; the others stay as they are."""
    about, *parts = before.rstrip("\n").split(HEADING)
    texts = {part.partition("\n")[0]: part for part in parts}
    missed_before = texts.pop(MISSED).splitlines()
    machine_before = texts.pop(MACHINE)
    measured = {section.title: section for section in sections}
    for title, section in measured.items():
        text = section_text(section).removeprefix("## ")
        texts[title] = f"{text}\n\nMeasured again on {day}."
    rows: list[str] = []
    absent: list[str] = []
    for title, text in texts.items():
        if title in measured:
            rows += missed_lines(measured[title])
            absent += absent_lines(measured[title])
        else:
            rows += [line for line in missed_before if is_row_of(line, text)]
            absent += [line for line in missed_before if line.startswith(f"- {title}: ")]
    first = summary_text(rows, absent).removeprefix("## ")
    return HEADING.join([about, first, machine_before, *texts.values()]) + "\n"


def is_row_of(line: str, section: str) -> bool:
    """True if this line of the missed targets is about a row of the section."""
    if not line.startswith("| ") or line.startswith(("| rule ", "| --- ")):
        return False
    rule_and_what = " | ".join(line.split(" | ")[:2])
    return f"\n{rule_and_what} | " in section
