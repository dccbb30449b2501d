"""The HTTP responses of a gateway, by its part and their status, and their bytes (G14).

Counted around an app, so that a gateway that is mounted counts too. A page that the server sends
again by itself (I29) is counted when the app says that it still holds.
"""

from collections import Counter
from collections.abc import Awaitable, Callable
from functools import partial
from http import HTTPStatus
from typing import Final

from starlette.types import Message, Scope, Send

from stillfresh.isr.routes import KEEP

PARTS: Final = ("pages", "kinds", "own")
"""The site behind, `/v1/`, and everything else: the dashboard, health, metrics."""
KNOWN: Final = frozenset(HTTPStatus)
BROKEN: Final = 500
"""What the server says when an app raised before it said anything."""


class Responses:
    """Of one part: how many of each status, and the bytes of their bodies."""

    def __init__(self) -> None:
        self.counted = Counter[int]()
        self.bytes = 0

    def statuses(self) -> dict[str, int]:
        """Numbers that no registry knows are `other`: a site may make up hundreds."""
        found = Counter[str]()
        for status, number in self.counted.items():
            found[str(status) if status in KNOWN else "other"] += number
        return dict(found)


class CountedResponse:
    """One response, while it is sent; and how it is counted when it is sent again."""

    __slots__ = ("_has_body", "_keep", "_send", "_to", "size", "status")

    def __init__(self, to: Responses, scope: Scope, send: Send) -> None:
        self._to = to
        self._send = send
        self._has_body = scope["method"] != "HEAD"
        self.status = self.size = 0
        if KEEP in scope:
            self._keep, scope[KEEP] = scope[KEEP], self.keep

    def send(self, message: Message) -> Awaitable[None]:
        """No coroutine of its own: a page hit would pay for it twice."""
        kind = message["type"]
        if kind == "http.response.start":
            self.status = status = message["status"]
            self._to.counted[status] += 1
        elif kind == "http.response.body" and self._has_body:
            size = len(message.get("body", b""))
            self.size += size
            self._to.bytes += size
        return self._send(message)

    def broke(self) -> None:
        """The app raised; the server says so, if nothing was said before."""
        if not self.status:
            self._to.counted[BROKEN] += 1

    def keep(self, holds: Callable[[], bool]) -> None:
        self._keep(partial(self._again, holds))

    def _again(self, holds: Callable[[], bool]) -> bool:
        if not holds():
            return False
        self._to.counted[self.status] += 1
        self._to.bytes += self.size
        return True
