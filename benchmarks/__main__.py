"""`python -m benchmarks [--write]`: run everything, print the tables, write docs/benchmarks.md."""

import argparse
import platform
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

from rich.console import Console
from rich.progress import Progress as Bar
from rich.progress import SpinnerColumn, TextColumn, TimeElapsedColumn

from benchmarks import (
    behaviours,
    coordinator,
    dynamodb,
    engine,
    feed,
    live,
    pages,
    redis_store,
    ttl_cache,
    waiting,
)
from benchmarks.harness import Progress, Row, Section

SECTIONS: dict[str, Callable[[Progress], Section]] = {
    "ttl_cache": ttl_cache.section,
    "engine": engine.section,
    "redis": redis_store.section,
    "dynamodb": dynamodb.section,
    "coordinator": coordinator.section,
    "feed": feed.section,
    "waiting": waiting.section,
    "pages": pages.section,
    "live": live.section,
    "behaviours": behaviours.section,
}
PEERS = [
    "aiocache",
    "async-lru",
    "cachebox",
    "cachetools",
    "cashews",
    "diskcache",
    "dogpile.cache",
    "moka-py",
    "theine",
]
ABOUT = """\
Written by `make bench`; do not edit. Every figure is a ratio of medians of interleaved rounds in
one run, so that it holds on other machines too; milliseconds, and the plain figures below each
table, are this machine's. How they are taken: `benchmarks/harness.py`."""
PAGE = Path(__file__).parent.parent / "docs" / "benchmarks.md"


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def promises(rows: list[Row]) -> str:
    return table(["rule", "what", "measured", "target", "kept"], [row.cells() for row in rows])


def figures(section: Section) -> str:
    """Plain numbers: of use to compare within this run, not with another machine's."""
    parts = []
    for title, values in section.figures.items():
        ranked = sorted(values.items(), key=lambda item: item[1])
        parts += [f"- {title}:", *(f"  - {name}: {value:.4g}" for name, value in ranked)]
    return "\n".join(parts)


def cpu() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def page(sections: list[Section]) -> str:
    missed = [row for section in sections for row in section.rows if not row.kept]
    machine = f"{cpu()}, {platform.system()}, Python {platform.python_version()}"
    peers = ", ".join(f"{name} {version(name)}" for name in PEERS)
    parts = [
        "# Benchmarks",
        ABOUT,
        f"Measured on {machine}. Peers: {peers}.",
        "## Targets missed",
        promises(missed) if missed else "None in this run.",
    ]
    for section in sections:
        parts += [f"## {section.title}"]
        parts += [promises(section.rows)] if section.rows else []
        parts += [table(section.words[0], section.words[1:])] if section.words else []
        parts += [text for text in (figures(section), section.notes) if text]
    return "\n\n".join(parts) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--write", action="store_true", help="write docs/benchmarks.md")
    parser.add_argument(
        "--only", choices=sorted(SECTIONS), help="run one section (not with --write)"
    )
    options = parser.parse_args()
    if options.only and options.write:
        parser.error("--write needs a whole run: leave out --only")
    chosen = [SECTIONS[options.only]] if options.only else list(SECTIONS.values())
    columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
    with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("starting", total=None)
        sections = [section(lambda text: bar.update(task, description=text)) for section in chosen]
    text = page(sections)
    print(text)
    if options.write:
        PAGE.write_text(text)
        print(f"written: {PAGE.name}", file=sys.stderr)


if __name__ == "__main__":
    main()
