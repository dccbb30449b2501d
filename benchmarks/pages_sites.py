"""The servers that `benchmarks/pages.py` compares: `python -m benchmarks.pages_sites NAME`.

Each is one process on uvicorn (uvloop, httptools), set up as `stillfresh serve` does it: nobody
looks for a proxy's headers, or says a server's name. The same ten kilobytes from each. Prints its
port when it listens.
"""

import asyncio
import socket
import sys
from collections.abc import Callable
from typing import Any

import uvicorn

__all__ = ["BODY", "SITES"]

BODY = b"<html>" + b"x" * 10_230 + b"</html>\n"
HEADERS = [
    (b"content-type", b"text/html; charset=utf-8"),
    (b"content-length", b"%d" % len(BODY)),
    (b"cache-control", b"public, max-age=0, s-maxage=3600"),
    (b"etag", b'"0123456789abcdef0123456789abcdef"'),
    (b"age", b"0"),
    (b"cache-status", b"stillfresh; hit; ttl=3599"),
]


async def bare(scope: Any, receive: Any, send: Any) -> None:
    """The least that an ASGI app can do: the same header fields, the same bytes."""
    await send({"type": "http.response.start", "status": 200, "headers": list(HEADERS)})
    await send({"type": "http.response.body", "body": BODY})


def starlette() -> Any:
    from starlette.applications import Starlette  # noqa: PLC0415 (only the measured one)
    from starlette.requests import Request  # noqa: PLC0415
    from starlette.responses import Response  # noqa: PLC0415
    from starlette.routing import Route  # noqa: PLC0415

    told = {name.decode(): value.decode() for name, value in HEADERS[2:]}

    async def page(_: Request) -> Response:
        return Response(BODY, media_type="text/html", headers=told)

    return Starlette(routes=[Route("/{path:path}", page)])


def cached(store: str, *more: tuple[bytes, bytes]) -> Callable[[], Any]:
    """`more`: header fields of the page."""

    def make() -> Any:
        from stillfresh.pages import IsrMiddleware, PageCache  # noqa: PLC0415

        async def site(scope: Any, receive: Any, send: Any) -> None:
            headers = [(b"content-type", b"text/html; charset=utf-8"), *more]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send({"type": "http.response.body", "body": BODY})

        return IsrMiddleware(site, PageCache(store), routes={"/*": "1h"})

    return make


def expiring() -> Any:
    """An upstream for nginx: pages that may be kept for an hour, and one that may not."""

    private = [field for field in HEADERS if field[0] != b"cache-control"]
    private.append((b"cache-control", b"private, no-store"))

    async def site(scope: Any, receive: Any, send: Any) -> None:
        headers = private if scope["path"] == "/private" else HEADERS
        await send({"type": "http.response.start", "status": 200, "headers": list(headers)})
        await send({"type": "http.response.body", "body": BODY})

    return site


SITES: dict[str, Callable[[], Any]] = {
    "bare": lambda: bare,
    "starlette": starlette,
    "memory": cached("memory://"),
    "varied": cached("memory://", (b"vary", b"accept-encoding")),
    "expiring": expiring,
}


def main(name: str) -> None:
    make = cached(name) if "://" in name else SITES[name]
    listener = socket.create_server(("127.0.0.1", 0))

    class Server(uvicorn.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            print(listener.getsockname()[1], flush=True)

    config = uvicorn.Config(
        make(),
        log_level="critical",
        access_log=False,
        http="httptools",
        proxy_headers=False,
        server_header=False,
    )
    import uvloop  # noqa: PLC0415

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(Server(config).serve(sockets=[listener]))


if __name__ == "__main__":
    main(sys.argv[1])
