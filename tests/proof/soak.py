"""Half an hour of ordinary work under an upstream that fails now and then: `make soak`.

Memory that grows slowly, waits that get longer, and log lines that no operator wants do not show
in a minute. Each soak prints a row for each minute. It fails if the memory of a process is more
than a tenth larger at the end than it was after a third of the time.
"""

import argparse
import asyncio
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import IO, Any, Final, NamedTuple

from rich.console import Console
from rich.table import Table
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake

from tests.kit.processes import ROOT, command
from tests.kit.servers.valkey import binary_of, serving

CYCLE: Final = 120.0
"""Seconds between two failures of the site."""
OUTAGE: Final = 20.0
"""Seconds that each failure takes."""
PATHS: Final = 10_000
VISITORS: Final = 16
PAUSE: Final = 0.05
"""Seconds between two requests of a visitor."""
VIEWERS: Final = 100
VIEWED: Final = 20
"""Ids on a viewer's screen."""
IDS: Final = 2_000
VISIT: Final = 30.0
"""Seconds until a viewer leaves, and comes back with other ids."""
KEYS: Final = 100_000
MAY_GROW: Final = 1.1
SETTINGS: Final = """\
[store]
url = "{store}"

[server]
port = 0

[pages]
upstream = "{site}"
ignore_cookies = ["_ga*"]

[kinds.post]
batch_url = "{site}/views"
ids_field = "ids"
id = "{{id}}"
fresh_for = "5s"
stale_for = "1m"
error_for = "1h"
max_batch = 50
"""


class Minute(NamedTuple):
    """What one minute of a soak was like."""

    resident: int
    """Bytes, of all processes that are watched."""
    requests: int
    p50: float
    p99: float
    """Seconds."""


class ProcessEnded(Exception):
    """Its log, which is printed, says why."""


def resident_of(processes: list["subprocess.Popen[str]"]) -> int:
    pages = 0
    for process in processes:
        pages += int(Path(f"/proc/{process.pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def start(stack: ExitStack, words: list[str], log: IO[bytes]) -> "subprocess.Popen[str]":
    process = subprocess.Popen(
        words, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True
    )

    def end() -> None:
        process.kill()
        process.communicate(timeout=30)

    stack.callback(end)
    return process


def line_of(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    line = process.stdout.readline().strip()
    if not line:
        raise ProcessEnded(f"{process.args!r} ended with {process.wait(30)}")
    return line


class Visitors:
    """Browsers that ask for pages, each with a request head of its own, and live viewers."""

    def __init__(self, address: str) -> None:
        host, _, port = address.removeprefix("http://").partition(":")
        self._host = host
        self._port = int(port)
        self._waits: list[float] = []

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            for _ in range(VISITORS):
                tasks.create_task(self._visit())
            for _ in range(VIEWERS):
                tasks.create_task(self._view())

    def last_minute(self, processes: list["subprocess.Popen[str]"]) -> Minute:
        waits = sorted(self._waits)
        self._waits.clear()
        p50 = waits[len(waits) // 2]
        p99 = waits[len(waits) * 99 // 100]
        return Minute(resident_of(processes), len(waits), p50, p99)

    async def _visit(self) -> None:
        reader, writer = await asyncio.open_connection(self._host, self._port)
        while True:
            began = time.perf_counter()
            writer.write(self._request())
            head = await reader.readuntil(b"\r\n\r\n")
            length = re.search(rb"(?i)content-length: (\d+)", head)
            assert length is not None, head.decode()
            await reader.readexactly(int(length[1]))
            self._waits.append(time.perf_counter() - began)
            await asyncio.sleep(PAUSE * random.uniform(0.5, 1.5))

    def _request(self) -> bytes:
        path = int(PATHS ** random.random())
        number = random.randrange(1_000_000)
        return (
            f"GET /page/{path} HTTP/1.1\r\nHost: {self._host}:{self._port}\r\n"
            f"User-Agent: Mozilla/5.0 (X11; Linux x86_64) Chrome/{number}\r\n"
            f"Accept-Language: de-DE,de;q=0.9\r\nCookie: _ga=GA1.1.{number}\r\n\r\n"
        ).encode()

    async def _view(self) -> None:
        address = f"ws://{self._host}:{self._port}/v1/live"
        while True:
            ids = random.sample(range(IDS), VIEWED)
            with suppress(TimeoutError, ConnectionClosed, InvalidHandshake):
                async with asyncio.timeout(VISIT * random.uniform(0.5, 1.5)):
                    async with connect(address) as viewer:
                        items = [["post", str(id_)] for id_ in ids]
                        await viewer.send(json.dumps({"type": "subscribe", "items": items}))
                        async for _ in viewer:
                            pass


def soak_gateway(store: str, minutes: int, folder: Path, log: IO[bytes]) -> Iterator[Minute]:
    """`stillfresh serve` in front of a site that fails for a sixth of the time."""
    with ExitStack() as stack:
        site = start(stack, command("soak_site", CYCLE, OUTAGE), log)
        settings = folder / "soak.toml"
        settings.write_text(SETTINGS.format(store=store, site=line_of(site)))
        serve = [sys.executable, "-m", "stillfresh.cli", "serve", str(settings)]
        gateway = start(stack, serve, log)
        address = re.search(r"http://\S+", line_of(gateway))
        assert address is not None
        visitors = Visitors(address[0].rstrip("/"))
        with asyncio.Runner() as runner:
            running = runner.get_loop().create_task(visitors.run())
            stack.callback(running.cancel)
            for _ in range(minutes):
                runner.run(asyncio.wait([running], timeout=60))
                assert not running.done(), running.exception()
                yield visitors.last_minute([gateway])


def soak_library(minutes: int, folder: Path, log: IO[bytes]) -> Iterator[Minute]:
    """Two processes on one Valkey server, which tell each other of every change."""
    with ExitStack() as stack:
        binary = binary_of("valkey")
        assert binary is not None
        server = stack.enter_context(serving(binary, folder))
        store = server.url()
        workers = [start(stack, command("soak_library", store, KEYS), log) for _ in range(2)]
        for worker in workers:
            assert line_of(worker) == "ready"
        for _ in range(minutes):
            time.sleep(60)
            yield library_minute(workers)


def library_minute(workers: list["subprocess.Popen[str]"]) -> Minute:
    figures: list[dict[str, Any]] = []
    for worker in workers:
        assert worker.stdin is not None
        worker.stdin.write("figures\n")
        worker.stdin.flush()
        figures.append(json.loads(line_of(worker)))
    return Minute(
        resident_of(workers),
        sum(figure["requests"] for figure in figures),
        max(figure["p50"] for figure in figures),
        max(figure["p99"] for figure in figures),
    )


Soak = Callable[[int, Path, IO[bytes]], Iterator[Minute]]


def soak_gateway_on_memory(minutes: int, folder: Path, log: IO[bytes]) -> Iterator[Minute]:
    return soak_gateway("memory://", minutes, folder, log)


def soak_gateway_on_sqlite(minutes: int, folder: Path, log: IO[bytes]) -> Iterator[Minute]:
    return soak_gateway(f"sqlite:///{folder}/soak.db", minutes, folder, log)


SOAKS: Final[dict[str, Soak]] = {
    "gateway-memory": soak_gateway_on_memory,
    "gateway-sqlite": soak_gateway_on_sqlite,
    "library": soak_library,
}


def shapes_of(log: str) -> Counter[str]:
    """How often each line of the log came, whatever its numbers."""
    return Counter(re.sub(r"\d+(\.\d+)?", "N", line) for line in log.splitlines())


def is_flat(history: list[Minute]) -> bool:
    """True if memory stayed as it was after a third of the time."""
    settled = history[(len(history) - 1) // 3].resident
    return history[-1].resident <= MAY_GROW * settled


def run(name: str, minutes: int, console: Console) -> bool:
    """True if memory stayed as it was after a third of the time."""
    table = Table("minute", "resident, MB", "requests", "p50, ms", "p99, ms", title=name)
    history: list[Minute] = []
    with tempfile.TemporaryDirectory(prefix="soak-") as folder, tempfile.TemporaryFile() as log:
        try:
            for minute in SOAKS[name](minutes, Path(folder), log):
                history.append(minute)
                row = (
                    f"{minute.resident / 2**20:.0f}",
                    f"{minute.requests:,}",
                    f"{minute.p50 * 1000:.1f}",
                    f"{minute.p99 * 1000:.1f}",
                )
                table.add_row(str(len(history)), *row)
                sys.stderr.write(f"{name}, minute {len(history)}: {' '.join(row)}\n")
        finally:
            log.seek(0)
            shapes = shapes_of(log.read().decode())
            for shape, count in shapes.most_common(20):
                console.print(f"{count} × {shape}", markup=False, highlight=False)
    console.print(table)
    return is_flat(history)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("soaks", nargs="*", metavar="soak", help=f"of {', '.join(SOAKS)}")
    parser.add_argument("--minutes", type=int, default=30, help="for each")
    options = parser.parse_args()
    names = options.soaks or list(SOAKS)
    if unknown := set(names) - set(SOAKS):
        parser.error(f"no soak: {', '.join(sorted(unknown))}; there are {', '.join(SOAKS)}")
    console = Console(width=200)
    grown = [name for name in names if not run(name, options.minutes, console)]
    for name in grown:
        console.print(f"{name}: memory grew by more than a tenth after the first third")
    return int(bool(grown))


if __name__ == "__main__":
    sys.exit(main())
