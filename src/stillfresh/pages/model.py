"""Data of pages: a `Page`, its stored form, its key, what a visit is served, and why.

Pure data, and the names of ASGI's types.
"""

from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from msgspec import Struct

from stillfresh.engine import Answer, Dropped, Private
from stillfresh.errors import ConfigError, LoadFailed, StillfreshError, StoreError, shown
from stillfresh.freshness import Verdict
from stillfresh.http import Reason, Wish
from stillfresh.http.fields import BAD, NAME, Raw

if TYPE_CHECKING:
    from stillfresh.pages.answers import AppAnswer

Scope: TypeAlias = Mapping[str, Any]
Message: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]
App: TypeAlias = Callable[[Any, Any, Any], Awaitable[None]]


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
        lines = [value for field, value in self.raw if field == wanted]
        if not lines:
            raise KeyError(name)
        return b", ".join(lines).decode("latin-1")

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

    __slots__ = ("age", "error", "etag", "stored", "unverified", "verdict")

    def __init__(
        self,
        page: Page,
        *,
        verdict: Verdict,
        age: float,
        etag: str | None = None,
        stored: bool = True,
        error: LoadFailed | None = None,
        unverified: bool = False,
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
        """The error of the last render, if it failed."""
        self.unverified = unverified
        """True if the store could not be asked about it: send it with no lifetime for caches."""


class PageFailed(Exception):
    """The site answered with an error. It is never stored; without an old page, visitors get it.

    `own`: the answer for the visitor that started the render, if it is private. `text`: what
    the site answered, if its status does not say it.
    """

    _plain = True

    def __init__(self, page: Page, own: Page | None = None, text: str = "") -> None:
        self.page = page
        self.own = page if own is None else own
        super().__init__(text or f"the site answered with status {page.status}")


class SiteCopy(PageFailed):
    """The site could not render, and answered with an old page of its own store."""

    _plain = True

    def __init__(self, rendered: "Rendered", page: Page) -> None:
        super().__init__(page, text="the site answered with an old page of its own store")
        self.rendered = rendered


class OnlySiteCopy(SiteCopy, Dropped):
    """An old page of the site where the cache has no page to serve.

    The site did answer, so this begins no cooldown. A cooldown would answer the next visits with
    503, although the site has a page for them.
    """

    _plain = True


class Busy(StillfreshError):
    """Another caller's render of this page took longer than `wait`."""


class Full(StoreError):
    """The limit of simultaneous renders is reached."""


class Head(Struct, frozen=True, array_like=True):
    """The stored parts of a page besides its body."""

    status: int = 200
    headers: tuple[tuple[bytes, bytes], ...] = ()
    etag: bytes | None = None
    """Our own, of the body; an ETag of the site is among the headers."""
    initial_age: float = 0.0
    fresh_for: float = 0.0
    stale_for: float = 0.0
    error_for: float = 0.0
    is_own: bool = False
    """True if a route's duration applies, not the response's own freshness."""
    vary: tuple[str, ...] = ()
    """Request fields that it varies by."""
    variant: tuple[tuple[str, str], ...] = ()
    """The values of these fields, where not empty."""
    is_targeted: bool = False
    """RFC 9213: its times come from `CDN-Cache-Control`."""
    spans: tuple[tuple[int, int], ...] = ()
    """For a part (206): the first byte, and the one after the last, of each piece."""
    total: int = 0
    """For a part: the length of the whole page."""
    shows_tags: bool = False
    """True if clients see the site's tags."""
    is_foreign: bool = False
    """True if another service stored it."""
    is_one_clients: bool = False
    """True if its key has a client's credentials: other caches must not keep it."""
    stale_by: float = 0.0
    """Seconds past its lifetime when it came; 0 if it came fresh."""


class StoredPage:
    """A page as a store holds it: its head, and its body without a second copy of the bytes."""

    __slots__ = ("body", "head", "ready")

    def __init__(self, head: Head, body: bytes | memoryview = b"") -> None:
        self.head = head
        self.body = body
        self.ready: Any = None
        """Prepared header fields for fast serving."""

    def __len__(self) -> int:
        return len(self.body)


class Rendered(Struct, frozen=True):
    """The result of a render."""

    page: StoredPage | None
    """None if it was given up, because it cannot be shared."""
    reason: Reason | None = None
    """Why it is only for the caller that asked; None if it is shared."""
    sent: Mapping[str, str] = {}
    """The request fields that the app received, of those that the page may vary by."""
    born_at: float | None = None
    """When it was made, by its `Age`; None if it has none."""


Offer: TypeAlias = Callable[["AppAnswer"], None]
"""Takes a page whose head has arrived, to be read while its body grows."""
Render: TypeAlias = Callable[[StoredPage | None, Offer], Awaitable[Rendered]]
"""Called with the stored copy, if any, so that the site can be asked whether it changed."""


class PageKey(Struct, frozen=True, eq=False):
    """A page's key. The tags travel with it, and are not part of its identity."""

    id: str
    tags: tuple[str, ...] | None = None
    """None if they are not known."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PageKey) and self.id == other.id

    def __hash__(self) -> int:
        return hash(self.id)

    def __repr__(self) -> str:
        return self.id


ReadOutcome: TypeAlias = Answer[StoredPage] | Private[Rendered] | LoadFailed


class PageCaller(NamedTuple):
    """How a page is read."""

    wish: Wish = Wish()
    is_noted: bool = True
    """The store keeps the fact that it cannot be shared."""
    reads_along: bool = False
    """Its head is enough; the body may still be arriving."""


class PageRead(NamedTuple):
    """The result of one caller's read of a page."""

    outcome: ReadOutcome
    is_own: bool = False
    """True if the caller's own render has begun. The outcome is what that brought, or a STALE copy
    that it refreshes in the background."""
    before: str = "miss"
    """RFC 9211 §2.2: why it was loaded: no copy, a stale one, or one that is not good enough."""
    growing: "AppAnswer | None" = None
    """The response whose body still arrives; the outcome has only its head."""
    over: Any = None  # a future
    """Done when the page is stored; the caller that renders it ends it when it leaves."""


@dataclass(frozen=True, slots=True)
class FoundPage:
    """A stored page, and the header fields of its response."""

    keys: tuple[PageKey, ...]
    """Its own key last; before it the key under which another variant was found."""
    stored: StoredPage
    fields: Raw
    is_new: bool = field(default=False, kw_only=True)
    """True if it was loaded for this visit."""
    read: PageRead | None = field(default=None, kw_only=True)
    """Of a page whose body still arrives; `stored` has none yet."""


@dataclass(frozen=True, slots=True)
class Unavailable:
    """There is nothing to serve but this error page."""

    page: Page
    what: str
    reason: Reason | None = None
    """Why it passed uncached; None if it did not."""
