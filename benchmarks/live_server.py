"""The server of benchmarks/live.py, a process of its own: a gateway over an upstream that counts.

Prints its port; then, for each line that it reads, its figures as JSON. Ends with its input.
"""

import asyncio
import json
import math
import resource
import socket
import sys
import time
from pathlib import Path
from typing import Any

import uvicorn

from stillfresh.gateway import gateway
from stillfresh.gateway.server.listening import server_config
from stillfresh.systems.coordinator import Kind

__all__: list[str] = []

CHANGES_EVERY = 1.0
"""Seconds after which each entity upstream is another."""
TAKES = 0.02


class Upstream:
    """Entities that change by the clock, each at a moment of its own."""

    def __init__(self) -> None:
        self.requests = 0

    async def fetch(self, ids: list[str]) -> dict[str, Any]:
        self.requests += 1
        await asyncio.sleep(TAKES)
        now = time.time()
        return {id_: self._entity(id_, now) for id_ in ids}

    def _entity(self, id_: str, now: float) -> dict[str, Any]:
        offset = int(id_[1:]) / 200 * CHANGES_EVERY
        version = math.floor((now - offset) / CHANGES_EVERY)
        changed = version * CHANGES_EVERY + offset
        return {"id": id_, "n": version, "changed": changed, "answered": now, "text": "x" * 100}


def resident() -> int:
    """Bytes, now; the most there ever was where the system does not say."""
    statm = Path("/proc/self/statm")
    if statm.exists():
        return int(statm.read_text().split()[1]) * resource.getpagesize()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class Turns:
    """The longest turn of the loop since it was last asked for; to watch for it takes CPU."""

    longest = 0.0

    async def watch(self, seconds: float) -> None:
        self.longest, until = 0.0, time.monotonic() + seconds
        while time.monotonic() < until:
            began = time.thread_time()
            await asyncio.sleep(0.001)
            self.longest = max(self.longest, time.thread_time() - began)


def figures(upstream: Upstream, turns: Turns) -> str:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return json.dumps(
        {
            "requests": upstream.requests,
            "resident": resident(),
            "cpu": used.ru_utime + used.ru_stime,
            "hold": 1000 * turns.longest,
        }
    )


async def main(fresh_for: float) -> None:
    upstream = Upstream()
    kind = Kind("post", fetch=upstream.fetch, fresh_for=fresh_for, max_batch=50)
    app = gateway("memory://", kinds=[kind])
    listening = socket.create_server(("127.0.0.1", 0), backlog=4096)
    server = uvicorn.Server(server_config(app))
    serving = asyncio.create_task(server.serve(sockets=[listening]))
    print(listening.getsockname()[1], flush=True)
    loop, turns = asyncio.get_running_loop(), Turns()
    while said := await loop.run_in_executor(None, sys.stdin.readline):
        if said.startswith("watch"):
            await turns.watch(float(said.split()[1]))
        print(figures(upstream, turns), flush=True)
    server.should_exit = True
    await serving


if __name__ == "__main__":
    import uvloop

    uvloop.run(main(float(sys.argv[1])))
