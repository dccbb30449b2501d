"""The HTTP responses of a gateway, by its part and their status, and their bytes.

Counted around an app, so that a gateway that is mounted counts too. A page that the server sends
again by itself is counted when the app confirms that it is still right.
"""

from collections import Counter, defaultdict
from collections.abc import Awaitable
from functools import partial
from http import HTTPStatus
from typing import Final

from starlette.types import Message, Scope, Send

from stillfresh.pages.edge import KEEP, Repeat, Repeatable, Response

PARTS: Final = ("pages", "kinds", "own")
"""The site behind, `/v1/`, and everything else: the dashboard, health, metrics."""
KNOWN: Final = frozenset(HTTPStatus)
BROKEN: Final = 500
"""The server's status if an app raised before its response."""


class Responses:
    """Of one part: responses by status, and the bytes of their bodies."""

    def __init__(self) -> None:
        self.seen = defaultdict[int, list[int]](lambda: [0, 0])

    def statuses(self) -> dict[str, int]:
        """Unregistered numbers count as `other`: a site may invent hundreds."""
        counts = Counter[str]()
        for status, (number, _) in self.seen.items():
            counts[str(status) if status in KNOWN else "other"] += number
        return dict(counts)

    def sent(self) -> int:
        return sum(size for _, size in self.seen.values())


class CountedResponse:
    """One response while it is sent; and its count when it is sent again."""

    __slots__ = ("_has_body", "_keep", "_seen", "_send", "_size", "_to")

    def __init__(self, to: Responses, scope: Scope, send: Send) -> None:
        self._to = to
        self._send = send
        self._size = 0
        self._seen: list[int] | None = None
        self._has_body = scope["method"] != "HEAD"
        if KEEP in scope:
            self._keep = scope[KEEP]
            scope[KEEP] = self.keep

    def send(self, message: Message) -> Awaitable[None]:
        """Not a coroutine: a page hit would pay for it twice."""
        if (seen := self._seen) is None:
            if message["type"] == "http.response.start":
                seen = self._seen = self._to.seen[message["status"]]
                seen[0] += 1
        elif self._has_body and "body" in message:
            size = len(message["body"])
            self._size += size
            seen[1] += size
        return self._send(message)

    def broke(self) -> None:
        """The app raised; the server answers if nothing was sent yet."""
        if self._seen is None:
            self._to.seen[BROKEN][0] += 1

    def keep(self, repeatable: Repeatable) -> None:
        """The server may give it again; then it counts again."""
        seen = self._to.seen[repeatable.response.status]
        self._keep(repeatable._replace(repeat=partial(_counted, repeatable.repeat, seen)))


def _counted(repeat: Repeat, seen: list[int]) -> Response | None:
    """It holds nothing of the first response, which it outlives."""
    response = repeat()
    if response is not None:
        seen[0] += 1
        seen[1] += len(response.body)
    return response
