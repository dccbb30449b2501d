"""Measure stillfresh side by side with its peers, and show what each does under trouble.

Prints the tables as Markdown. `make bench` is a whole run, written to docs/benchmarks.md;
`python -m benchmarks --only behaviours` is the table of T6.
"""

import argparse
import signal
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from benchmarks.harness import Section
from benchmarks.plan import PARTS, Part
from benchmarks.report import page, page_with, sections_text, summary
from benchmarks.runner import run
from benchmarks.watching import watching

PAGE = Path(__file__).parent.parent / "docs" / "benchmarks.md"
INTERRUPTED = 130


def parser() -> argparse.ArgumentParser:
    about, _, more = (__doc__ or "").partition("\n\n")
    parts = "\n".join(f"  {part.name:12} {part.title}, about {part.seconds:g} s" for part in PARTS)
    total = sum(part.seconds for part in PARTS) / 60
    made = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description=f"{about}\n\n{more}",
        epilog=f"parts:\n{parts}\n\nA whole run takes about {total:.0f} minutes on two cores.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument(
        "--write",
        action="store_true",
        help="write docs/benchmarks.md; with --only, only these sections of it",
    )
    made.add_argument(
        "--only",
        action="append",
        metavar="PART",
        choices=[part.name for part in PARTS],
        help="run this part, and print it; may be given several times",
    )
    return made


def measured(parts: Sequence[Part]) -> tuple[list[Section], bool]:
    """The sections, and whether they are all: Ctrl-C leaves those that were done."""
    sections: list[Section] = []
    try:
        with watching(parts) as watch:
            for part in parts:
                sections.append(run(part, watch.doing))
                watch.ended(sections[-1])
    except KeyboardInterrupt:
        return sections, False
    return sections, True


def said(text: str) -> None:
    print(text, file=sys.stderr)


def main() -> int:
    options = parser().parse_args()
    parts = [part for part in PARTS if not options.only or part.name in options.only]
    sections, whole = measured(parts)
    if not whole:
        print(sections_text(sections))
        said("interrupted: nothing was written")
        return INTERRUPTED
    told = f"{summary(sections)}\n\n{sections_text(sections)}" if options.only else page(sections)
    print(told)
    if options.write:
        today = datetime.now(UTC).date().isoformat()
        text = page_with(PAGE.read_text(), sections, today) if options.only else told
        PAGE.write_text(text)
        said(f"written: docs/{PAGE.name}")
    return 1 if any(section.failed for section in sections) else 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(main())
