"""What the page cache's tests share: an app held in the hand, and a client in front of it."""

from collections.abc import Mapping
from typing import Any

import httpx

from stillfresh.pages import IsrMiddleware, Page, PageCache
from stillfresh.testing import ManualClock
from tests.kit.gates import Gated


class Site(Gated):
    """An ASGI app, and a render: answers with the number of the answer, as it is told to."""

    def __init__(self, clock: ManualClock) -> None:
        super().__init__()
        self.clock = clock
        self.scopes: list[dict[str, Any]] = []
        self.headers: list[tuple[bytes, bytes]] = [(b"content-type", b"text/html")]
        self.status = 200
        self.body: bytes | None = None
        self.validates = False

    @property
    def renders(self) -> int:
        return len(self.scopes)

    def says(self, *lines: str, status: int = 200) -> None:
        """From now on answers carry these header fields."""
        pairs = (line.partition(": ") for line in lines)
        self.headers = [(name.lower().encode(), value.encode()) for name, _, value in pairs]
        self.status = status

    async def render(self) -> Page:
        self.scopes.append({})
        text = f"page {self.renders}"
        await self.called()
        return Page(text if self.body is None else self.body, self.status, self.headers)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        assert scope["type"] == "http"
        self.scopes.append(scope)
        text = f"page {self.renders}"
        while (await receive()).get("more_body"):
            pass
        await self.called()
        request_headers = dict(scope["headers"])
        status = self.status
        body = text.encode() if self.body is None else self.body
        own = dict(self.headers)
        if self.validates and own.get(b"etag", b"-") == request_headers.get(b"if-none-match"):
            status = 304
            body = b""
        await send({"type": "http.response.start", "status": status, "headers": self.headers})
        await send({"type": "http.response.body", "body": body})

    def seen(self, name: str, render: int = -1) -> list[str]:
        """A request header, as the app got it."""
        wanted = name.lower().encode()
        headers = self.scopes[render]["headers"]
        return [value.decode("latin-1") for field, value in headers if field == wanted]


class Visitor:
    """A client of the site behind its cache; headers it does not name it does not send."""

    def __init__(self, app: Any, base: str = "http://example.com") -> None:
        self.app = app
        self.client = httpx.AsyncClient(
            transport=httpx.ASGITransport(app=app), base_url=base, headers={}
        )
        for name in ("accept", "accept-encoding", "connection", "user-agent"):
            del self.client.headers[name]

    async def __call__(
        self,
        url: str = "/pricing",
        headers: Mapping[str, str] | None = None,
        *,
        method: str = "GET",
    ) -> httpx.Response:
        return await self.client.request(method, url, headers=dict(headers or {}))


def in_front(site: Any, pages: PageCache, **options: Any) -> Visitor:
    """`/pricing` for a minute, `/blog/…` for ten."""
    chosen: dict[str, Any] = {"routes": {"/blog/*": "10m", "/pricing": "60s"}, **options}
    return Visitor(IsrMiddleware(site, pages, **chosen))


def as_it_says(site: Any, pages: PageCache, **options: Any) -> Visitor:
    """As the responses say themselves."""
    return Visitor(IsrMiddleware(site, pages, **options))
