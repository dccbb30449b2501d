"""Runs what proves more than a change needs, part by part: `make proof`, before a release (T13).

Each part that was run gets its date and its result in docs/reliability.md. Names of parts as
arguments run only these: scripts/proof.py tests torture. The status is 1 if a part failed.
"""

import argparse
import re
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, NamedTuple

ROOT: Final = Path(__file__).parents[1]
PAGE: Final = ROOT / "docs" / "reliability.md"
ROW: Final = re.compile(r"^\| `(\w+)` \| ([^|]+) \| ([^|]+) \| ([^|]+) \|$", re.MULTILINE)
"""A part's name, what it runs, the date of its last run, and how that run ended."""


LONGEST_TEST: Final = 1800
"""Seconds for one test with ten times as many examples, on cores that may be busy."""


class Part(NamedTuple):
    name: str
    arguments: tuple[str, ...]
    """What Python is started with."""


PARTS: Final = (
    Part(
        "tests",
        (
            *("-m", "pytest", "-m", "proof or hypothesis"),
            *("--hypothesis-profile=proof", "-n", "auto"),
            f"--timeout={LONGEST_TEST}",
        ),
    ),
    Part("simulate", ("-m", "tests.simulation.simulate_all", "--seeds", "10000")),
    Part("explore", ("-m", "tests.systems.waiting.waiting_explorations", "--deeper", "1")),
    Part("torture", ("-m", "tests.proof.torture", "--minutes", "2")),
    Part("soak", ("-m", "tests.proof.soak", "--minutes", "30")),
    Part("peers", ("-m", "tests.proof.peers")),
    Part("pythons", ("scripts/pythons.py",)),
)


def run(part: Part) -> str:
    """How the part ended, and how long it took."""
    began = time.monotonic()
    command = [sys.executable, *part.arguments]
    code = subprocess.run(command, cwd=ROOT, check=False).returncode
    minutes = (time.monotonic() - began) / 60
    ended = "failed" if code else "passed"
    return f"{ended}, {minutes:.0f} min"


def written(page: str, results: dict[str, str], day: str) -> str:
    """The page with the results of the parts that were run."""

    def row(match: re.Match[str]) -> str:
        name, what = match[1], match[2]
        if name not in results:
            return match[0]
        return f"| `{name}` | {what} | {day} | {results[name]} |"

    return ROW.sub(row, page)


def main() -> int:
    names = [part.name for part in PARTS]
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="part", help=f"of {', '.join(names)}")
    chosen = parser.parse_args().parts or names
    if unknown := set(chosen) - set(names):
        parser.error(f"no part of the proof: {', '.join(sorted(unknown))}")
    results: dict[str, str] = {}
    for part in PARTS:
        if part.name in chosen:
            sys.stdout.write(f"proof: {part.name}\n")
            sys.stdout.flush()
            results[part.name] = run(part)
            # After each part: what was proved stays written if a later part is stopped.
            day = datetime.now(UTC).date().isoformat()
            PAGE.write_text(written(PAGE.read_text(), results, day))
    for name, result in results.items():
        sys.stdout.write(f"{name}: {result}\n")
    return int(any(result.startswith("failed") for result in results.values()))


if __name__ == "__main__":
    sys.exit(main())
