"""G4: a thousand viewers of two hundred ids on one process, over real sockets (WebSocket).

Server and load are processes of their own. The load counts what comes on every connection, and
reads it, as a browser would, on some of them.
"""

import asyncio
import base64
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any

from benchmarks import tried
from benchmarks.harness import Progress, Row, Section

__all__ = ["section"]

VIEWERS = 1_000
READERS = 20
"""Of them, those whose messages are read and timed."""
IDS = [f"p{number}" for number in range(200)]
MANY_IDS = [f"p{number}" for number in range(2_000)]
WATCHED = 100
"""Of these, each viewer watches so many, others than the viewers beside it (G24)."""
FRESH_FOR = 2.0
SECONDS = 8.0
UPDATE = b'"type":"update"'


class Server:
    """The other process."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process
        self.port = int(self._line())

    def figures(self, ask: str = "figures") -> dict[str, Any]:
        """Or `watch SECONDS`: after its turns were watched for so long."""
        assert self._process.stdin is not None  # noqa: S101 (it was started with one)
        self._process.stdin.write(f"{ask}\n")
        self._process.stdin.flush()
        found: dict[str, Any] = json.loads(self._line())
        return found

    def _line(self) -> str:
        assert self._process.stdout is not None  # noqa: S101 (it was started with one)
        return self._process.stdout.readline()


@contextmanager
def serving() -> Iterator[Server]:
    command = [sys.executable, "-m", "benchmarks.live_server", str(FRESH_FOR)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            yield Server(process)
        finally:
            process.stdin.close()  # type: ignore[union-attr]
            process.wait(20)


@dataclass
class Load:
    """What came, on all connections together."""

    updates: int = 0
    bytes: int = 0
    from_change: list[float] = field(default_factory=list)
    """Seconds from an upstream's change to the viewer who sees it for the first time."""
    from_answer: list[float] = field(default_factory=list)
    """Seconds from an upstream's answer to the viewer."""
    is_timed: bool = False

    async def all_came(self, updates: int) -> None:
        """So many at least."""
        while self.updates < updates:  # noqa: ASYNC110 (an event for each would cost too much)
            await asyncio.sleep(0.05)


class Viewer(asyncio.Protocol):
    """As little of a WebSocket client as can be: a load must cost less than what it measures."""

    def __init__(self, load: Load, ids: list[str], *, reads: bool) -> None:
        self._load = load
        self._ids = ids
        self._reads = reads
        self._buffer = bytearray()
        self._is_open = False
        self.ready = asyncio.get_running_loop().create_future()
        self.transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]
        key = base64.b64encode(os.urandom(16)).decode()
        self.transport.write(
            f"GET /v1/live?batch=1 HTTP/1.1\r\nHost: 127.0.0.1\r\nUpgrade: websocket\r\n"
            f"Connection: Upgrade\r\nSec-WebSocket-Key: {key}\r\n"
            f"Sec-WebSocket-Version: 13\r\n\r\n".encode()
        )

    def data_received(self, data: bytes) -> None:
        if not self._is_open:
            self._is_open = True
            self._say({"type": "subscribe", "items": [["post", id_] for id_ in self._ids]})
            data = data.partition(b"\r\n\r\n")[2]
            self.ready.set_result(None)
        self._load.updates += data.count(UPDATE)
        self._load.bytes += len(data)
        if self._reads:
            self._buffer += data
            self._read(time.time())

    def _say(self, message: dict[str, Any]) -> None:
        body, mask = json.dumps(message).encode(), b"\0\0\0\0"
        head = b"\x81" + bytes([0x80 | 126]) + len(body).to_bytes(2, "big") + mask
        self.transport.write(head + body)

    def _read(self, now: float) -> None:
        while len(self._buffer) >= 2:
            size, at = self._buffer[1] & 127, 2
            if size >= 126:
                at = 4 if size == 126 else 10
                size = int.from_bytes(self._buffer[2:at], "big")
            if len(self._buffer) < at + size:
                return
            is_text = self._buffer[0] & 15 == 1
            frame = bytes(self._buffer[at : at + size])
            del self._buffer[: at + size]
            if is_text and self._load.is_timed:
                self._time(json.loads(frame), now)

    def _time(self, messages: list[dict[str, Any]], now: float) -> None:
        for message in messages:
            if message["type"] == "update":
                value = message["value"]
                self._load.from_change.append(now - value["changed"])
                self._load.from_answer.append(now - value["answered"])


@dataclass(frozen=True)
class Held:
    """What so many viewers cost."""

    requests: float
    """Upstream, a second."""
    updates: float
    """A second, to all viewers together."""
    resident: int
    cpu: float
    """Of one core, in hundredths."""
    hold: float
    """Milliseconds of CPU that the longest turn of its event loop took."""
    load: Load


def own_ids(number: int) -> list[str]:
    """What this viewer watches, if viewers watch different ids; the same in each run."""
    return random.Random(number).sample(MANY_IDS, WATCHED)


async def held(server: Server, viewers: int, *, is_different: bool = False) -> Held:
    """Connected, settled, then watched for a while. `is_different`: viewers have their own ids."""
    loop, load = asyncio.get_running_loop(), Load()
    connected = []
    expected = 0
    for number in range(viewers):
        ids = own_ids(number) if is_different else IDS
        expected += len(ids)
        made = await loop.create_connection(
            partial(Viewer, load, ids, reads=number % (viewers // READERS or 1) == 0),
            "127.0.0.1",
            server.port,
        )
        connected.append(made[1])
        await made[1].ready
    await load.all_came(expected)
    await asyncio.sleep(FRESH_FOR)
    before, began, seen = server.figures(), time.monotonic(), load.updates
    load.is_timed = True
    await asyncio.sleep(SECONDS)
    after, took, load.is_timed = server.figures(), time.monotonic() - began, False
    updates = load.updates - seen
    hold = (await asyncio.to_thread(server.figures, "watch 2"))["hold"]
    for viewer in connected:
        viewer.transport.abort()
    return Held(
        requests=(after["requests"] - before["requests"]) / took,
        updates=updates / took,
        resident=after["resident"],
        cpu=100 * (after["cpu"] - before["cpu"]) / took,
        hold=hold,
        load=load,
    )


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(len(values) * share))]


def section(progress: Progress) -> Section:
    progress("live: one viewer")
    with serving() as server:
        idle = server.figures()["resident"]
        one = asyncio.run(held(server, 1))
    progress(f"live: {VIEWERS:,} viewers")
    with serving() as server:
        idle = server.figures()["resident"]
        many = asyncio.run(held(server, VIEWERS))
    progress(f"live: {VIEWERS:,} viewers of different ids")
    with serving() as server:
        different = asyncio.run(held(server, VIEWERS, is_different=True))
    per_connection = (many.resident - idle) / VIEWERS / 1024
    answer = many.load.from_answer
    change = many.load.from_change
    return Section(
        "Live updates (G4)",
        rows=[
            Row(
                "G4",
                f"upstream requests of {VIEWERS:,} viewers of {len(IDS)} ids, against one viewer's",
                many.requests / one.requests,
                1.1,
            ),
            Row("G4", "connections held", VIEWERS, unit=""),
            Row("G4", "updates a second, to all of them together", many.updates, unit="/ s"),
            Row("G20", "memory for each connection", per_connection, 60, unit="KiB"),
            Row(
                "G20",
                "p99 from the upstream's answer to the viewer",
                1000 * percentile(answer, 0.99),
                100,
                unit="ms",
                tried=tried.LIVE_P99,
            ),
            Row(
                "G24",
                f"the same p99 if each watches {WATCHED} of {len(MANY_IDS):,} ids, against that",
                percentile(different.load.from_answer, 0.99) / percentile(answer, 0.99),
                1.5,
                tried=tried.LIVE_DIFFERENT,
            ),
            Row("G24", "longest turn of the loop then", different.hold, 20, unit="ms"),
            Row(
                "G4",
                f"p99 from a change upstream to the viewer ({FRESH_FOR:g} s of freshness)",
                1000 * percentile(change, 0.99),
                unit="ms",
            ),
        ],
        figures={
            f"{VIEWERS:,} viewers": {
                "updates a second": many.updates,
                "upstream requests a second": many.requests,
                "CPU of the server, % of a core": many.cpu,
                "median from the upstream's answer, ms": 1000 * median(answer),
            },
            f"{VIEWERS:,} viewers of different ids": {
                "updates a second": different.updates,
                "upstream requests a second": different.requests,
                "CPU of the server, % of a core": different.cpu,
                "median from the upstream's answer, ms": 1000 * median(different.load.from_answer),
            },
            "one viewer": {
                "updates a second": one.updates,
                "upstream requests a second": one.requests,
                "CPU of the server, % of a core": one.cpu,
            },
        },
        notes=(
            f"One process serves {VIEWERS:,} WebSocket viewers who all look at the same "
            f"{len(IDS)} ids, fresh for {FRESH_FOR:g} s; the load is another process. "
            f"{READERS} of the viewers, evenly among them, read and time every message, the others "
            "count them."
        ),
    )
