"""The site of a soak: pages, and views in batches; it fails for a part of every cycle.

Prints its address. `python -m tests.kit.workers.soak_site CYCLE OUTAGE`: seconds.
"""

import asyncio
import json
import sys
import time
from typing import Any

from tests.kit.serving import served

PAGE_SIZE = 10_000
"""Bytes."""


class Site:
    def __init__(self, cycle: float, outage: float) -> None:
        self._cycle = cycle
        self._outage = outage
        self._began = time.monotonic()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await self._live(receive, send)
            return
        body = b""
        while True:
            message = await receive()
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        if self._is_failing():
            await self._answer(send, 503, b"text/plain", b"down", b"no-store")
        elif scope["path"] == "/views":
            ids = json.loads(body)["ids"]
            views = [{"id": id_, "at": time.time(), "text": "x" * 100} for id_ in ids]
            await self._answer(send, 200, b"application/json", json.dumps(views).encode(), b"")
        else:
            page = scope["path"].encode().ljust(PAGE_SIZE, b".")
            terms = b"max-age=20, stale-while-revalidate=20, stale-if-error=600"
            await self._answer(send, 200, b"text/html", page, terms)

    def _is_failing(self) -> bool:
        """In the last part of each cycle."""
        passed = (time.monotonic() - self._began) % self._cycle
        return passed > self._cycle - self._outage

    @staticmethod
    async def _live(receive: Any, send: Any) -> None:
        for stage in ("startup", "shutdown"):
            await receive()
            await send({"type": f"lifespan.{stage}.complete"})

    @staticmethod
    async def _answer(
        send: Any, status: int, content_type: bytes, body: bytes, cache_control: bytes
    ) -> None:
        fields = [
            (b"content-type", content_type),
            (b"content-length", str(len(body)).encode()),
            (b"cache-control", cache_control),
        ]
        await send({"type": "http.response.start", "status": status, "headers": fields})
        await send({"type": "http.response.body", "body": body})


async def main() -> None:
    cycle, outage = map(float, sys.argv[1:])
    async with served(Site(cycle, outage)) as address:
        print(address, flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
