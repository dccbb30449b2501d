"""What goes in and out: a `Page`, what is stored of it, its key, what a visit is served, and why.

Pure data, and the names of ASGI's types.
"""

from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple, TypeAlias

from msgspec import Struct

from stillfresh.engine import Answer, Private
from stillfresh.errors import ConfigError, LoadFailed, StillfreshError, StoreError, shown
from stillfresh.freshness import Verdict
from stillfresh.http.fields import BAD, NAME, Raw
from stillfresh.http.freshness import Wish

Scope: TypeAlias = Mapping[str, Any]
Message: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]
App: TypeAlias = Callable[[Any, Any, Any], Awaitable[None]]


class Reason(StrEnum):
    """Why a request passed uncached (I28); docs/isr.md says what each word means."""

    AUTHORIZATION = "authorization"
    BODY = "body"
    BUSY = "busy"
    CHANGED = "changed"
    CONDITION = "condition"
    COOKIE = "cookie"
    ENCODED = "encoded"
    FAILED = "failed"
    FULL = "full"
    HEADERS = "headers"
    HOST = "host"
    METHOD = "method"
    NO_FRESHNESS = "no-freshness"
    NO_STORE = "no-store"
    PATH = "path"
    PRIVATE = "private"
    RANGE = "range"
    ROUTE = "route"
    SET_COOKIE = "set-cookie"
    SIZE = "size"
    STATUS = "status"
    STORE = "store"
    STREAM = "stream"
    TAGS = "tags"
    VARY = "vary"


HeadersLike: TypeAlias = Mapping[str, str] | Iterable[tuple[str | bytes, str | bytes]]


class Headers(Mapping[str, str]):
    """Header fields by name, in any case. `raw` has them in their order, as in ASGI."""

    __slots__ = ("raw",)

    def __init__(self, fields: HeadersLike = ()) -> None:
        pairs = fields.items() if isinstance(fields, Mapping) else fields
        self.raw: Raw = tuple((_bytes(name).lower(), _bytes(value)) for name, value in pairs)
        for name, value in self.raw:
            if not NAME.fullmatch(name) or BAD.search(value):
                raise ConfigError(f"header {shown(name)}: {shown(value)}: not a header field")

    @classmethod
    def of(cls, raw: Raw) -> "Headers":
        """Fields that were checked already."""
        headers = cls.__new__(cls)
        headers.raw = raw
        return headers

    def __getitem__(self, name: str) -> str:
        wanted = name.lower().encode("latin-1", "replace")
        found = [value for field, value in self.raw if field == wanted]
        if not found:
            raise KeyError(name)
        return b", ".join(found).decode("latin-1")

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys(name.decode("latin-1") for name, _ in self.raw))

    def __len__(self) -> int:
        return len({name for name, _ in self.raw})

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Mapping):
            return NotImplemented
        return dict(self) == {str(name).lower(): value for name, value in other.items()}

    __hash__ = None  # type: ignore[assignment]  # equal to dicts, which have none

    def __repr__(self) -> str:
        return f"Headers({dict(self)!r})"


def _bytes(text: str | bytes) -> bytes:
    if isinstance(text, bytes):
        return text
    try:
        return text.encode("latin-1")
    except (AttributeError, UnicodeEncodeError):
        raise ConfigError(f"header {shown(text)}: cannot be written as a header field") from None


class Page:
    """A page: a body with its status and headers."""

    __slots__ = ("body", "headers", "status")

    def __init__(
        self, body: bytes | str = b"", status: int = 200, headers: HeadersLike = ()
    ) -> None:
        if not isinstance(body, bytes | str):
            raise ConfigError(f"a page's body is bytes or str, not {shown(body)}")
        if not isinstance(status, int) or not 200 <= status <= 599:
            raise ConfigError(f"a page's status is a number from 200 to 599, not {shown(status)}")
        self.body = body.encode() if isinstance(body, str) else body
        self.status = status
        self.headers = headers if isinstance(headers, Headers) else Headers(headers)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Page):
            return NotImplemented
        return (self.body, self.status, self.headers) == (other.body, other.status, other.headers)

    __hash__ = None  # type: ignore[assignment]  # as its headers

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.status}, {len(self.body):,} bytes>"


class ServedPage(Page):
    """A page, and how fresh it is."""

    __slots__ = ("age", "error", "etag", "stored", "verdict")

    def __init__(
        self,
        page: Page,
        *,
        verdict: Verdict,
        age: float,
        etag: str | None = None,
        stored: bool = True,
        error: LoadFailed | None = None,
    ) -> None:
        super().__init__(page.body, page.status, page.headers)
        self.verdict = verdict
        """At the moment of serving; GONE if there was no page to serve."""
        self.age = age
        """Seconds since its render began."""
        self.etag = etag
        self.stored = stored
        """False: the page is for this caller only."""
        self.error = error
        """Why this is not newer: the last render failed."""


class PageFailed(Exception):
    """The site answered with an error. It is never stored; without an old page, visitors get it.

    `own`: the answer for the visitor that started the render, if it is private (I13).
    """

    _plain = True

    def __init__(self, page: Page, own: Page | None = None) -> None:
        self.page = page
        self.own = page if own is None else own
        super().__init__(f"the site answered with status {page.status}")


class Busy(StillfreshError):
    """I8: another caller's render of this page took longer than `wait`."""


class Full(StoreError):
    """The limit of simultaneous renders is reached."""


class Head(Struct, frozen=True, array_like=True):
    """What is stored of a page beside its body."""

    status: int = 200
    headers: tuple[tuple[bytes, bytes], ...] = ()
    etag: bytes | None = None
    """Ours, of the body; where upstream gave its own it is among the headers."""
    initial_age: float = 0.0
    fresh_for: float = 0.0
    stale_for: float = 0.0
    error_for: float = 0.0
    is_own: bool = False
    """By a route's own duration, not by what the response said."""
    vary: tuple[str, ...] = ()
    """Request headers that it depends on."""
    variant: tuple[tuple[str, str], ...] = ()
    """What these were, where they were not empty."""
    is_targeted: bool = False
    """RFC 9213: its terms are those of `CDN-Cache-Control`."""
    spans: tuple[tuple[int, int], ...] = ()
    """Of a part (206): the bytes that the body has, first and one past the last of each."""
    total: int = 0
    """Of a part: the length of the whole."""
    shows_tags: bool = False
    """I26: clients are told the site's tags."""


class Stored:
    """A page as it lies in a store: its head, and its body without a second copy of the bytes."""

    __slots__ = ("body", "head", "ready")

    def __init__(self, head: Head, body: bytes | memoryview = b"") -> None:
        self.head = head
        self.body = body
        self.ready: Any = None
        """What a front end has prepared to serve it fast."""

    def __len__(self) -> int:
        return len(self.body)


class Rendered(Struct, frozen=True):
    """What came of a render."""

    page: Stored | None
    """None: given up as soon as it was known not to be shared."""
    reason: Reason | None = None
    """Why it is for the caller that asked, and nobody else; None: it is shared."""


Offer: TypeAlias = Callable[[Any], None]
"""Takes a page whose head has come, to be read while its body grows (I15)."""
Render: TypeAlias = Callable[[Stored | None, Offer], Awaitable[Rendered]]
"""Given the copy there is, if any, so that upstream can be asked whether it still holds."""


class PageKey(Struct, frozen=True, eq=False):
    """A page's name; its tags come along, and say nothing of which page it is."""

    id: str
    tags: tuple[str, ...] | None = None
    """None: of a page that is only named, nobody can say (E8)."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PageKey) and self.id == other.id

    def __hash__(self) -> int:
        return hash(self.id)

    def __repr__(self) -> str:
        return self.id


ReadOutcome: TypeAlias = Answer[Stored] | Private[Rendered] | LoadFailed


class PageCaller(NamedTuple):
    """How a page is read."""

    wish: Wish = Wish()
    is_noted: bool = True
    """The store keeps that it is not to be shared, if so."""
    reads_along: bool = False
    """I15: its head is enough, the body may still be on its way."""


class PageRead(NamedTuple):
    """What one caller's read of a page came to."""

    outcome: ReadOutcome
    is_own: bool = False
    """The caller's own render gave it."""
    before: str = "miss"
    """RFC 9211 §2.2: why that was asked for: no copy, a stale one, or one not good enough."""
    growing: Any = None
    """The page's body, which is still being fetched; the outcome has only its head."""
    over: Any = None  # a future
    """Done when that has been kept; the caller whose own render it is ends it when he leaves."""


@dataclass(frozen=True, slots=True)
class FoundPage:
    """A stored page, and the header fields that say what it is."""

    keys: tuple[PageKey, ...]
    """Its own, last; before it the one under which another variant was found."""
    stored: Stored
    fields: Raw
    is_new: bool = field(default=False, kw_only=True)
    """It was fetched for this very visit."""


@dataclass(frozen=True, slots=True)
class Unavailable:
    """Nothing to serve but this page."""

    page: Page
    what: str
    reason: Reason | None = None
    """Why it passed uncached; None: it did not."""
