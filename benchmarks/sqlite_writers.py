"""S4: eight processes write to one file: how long the unluckiest waits, with our busy handler.

`python -m benchmarks.sqlite_writers PATH WHOSE` is one of them: it says `ready`, waits for a line,
writes for a while, a row in each transaction, and says its longest wait in milliseconds and how
often it wrote. `WHOSE` is the busy handler: ours, or SQLite's.
"""

import json
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import IO, cast

import apsw

from benchmarks.harness import Figures, Progress, Row
from stillfresh.stores.sqlite.connection import Patience

__all__ = ["crowded"]

WRITERS = 8
SECONDS = 2.0
ROUNDS = 3
OURS, BUILT_IN = "our busy handler", "SQLite's own"


def opened(path: str, whose: str) -> apsw.Connection:
    connection = apsw.Connection(path)
    if whose == OURS:
        connection.set_busy_handler(Patience())
    else:
        connection.set_busy_timeout(60_000)
    connection.execute("PRAGMA journal_mode=WAL; PRAGMA synchronous=NORMAL").fetchall()
    connection.execute("CREATE TABLE IF NOT EXISTS written (at REAL)")
    return connection


def main(path: str, whose: str) -> None:
    connection = opened(path, whose)
    print("ready", flush=True)
    sys.stdin.readline()
    longest, count, deadline = 0.0, 0, time.monotonic() + SECONDS
    while (began := time.monotonic()) < deadline:
        connection.execute("BEGIN IMMEDIATE; INSERT INTO written VALUES (1); COMMIT")
        longest, count = max(longest, time.monotonic() - began), count + 1
    print(json.dumps([1000 * longest, count]), flush=True)


def crowd(path: Path, whose: str) -> tuple[float, int]:
    """The longest wait of all, in milliseconds; and how many rows were written."""
    command = [sys.executable, "-m", "benchmarks.sqlite_writers", str(path), whose]
    with ExitStack() as stack:
        writers = []
        for _ in range(WRITERS):
            writer = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
            )
            writers.append(stack.enter_context(writer))
            stack.callback(writer.kill)
        for writer in writers:
            cast("IO[str]", writer.stdout).readline()
        for writer in writers:
            cast("IO[str]", writer.stdin).write("go\n")
        told = [json.loads(cast("IO[str]", writer.stdout).readline()) for writer in writers]
    return max(longest for longest, _ in told), sum(count for _, count in told)


def crowded(folder: Path, progress: Progress) -> tuple[list[Row], dict[str, Figures]]:
    taken: dict[str, list[tuple[float, int]]] = {OURS: [], BUILT_IN: []}
    for turn in range(ROUNDS):
        for whose, found in taken.items():
            progress(f"eight processes write to one file: {whose}")
            found.append(crowd(folder / f"{whose}-{turn}.db", whose))
    waits = {whose: median(longest for longest, _ in found) for whose, found in taken.items()}
    rates = {whose: median(count for _, count in found) / SECONDS for whose, found in taken.items()}
    what = f"{WRITERS} processes write to one file"
    rows = [
        Row("S4", f"{what}: the longest wait, {OURS}", waits[OURS], unit="ms"),
        Row("S4", f"{what}: the longest wait, against {BUILT_IN}", waits[OURS] / waits[BUILT_IN]),
        Row("S4", f"{what}: rows written, against {BUILT_IN}", rates[OURS] / rates[BUILT_IN]),
    ]
    return rows, {f"{what}, longest wait, ms": waits, f"{what}, rows a second": rates}


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
