"""Data of the client cache: requests, stored responses, and what a caller receives.

Pure data. A stored response has its body as the site sent it, still compressed.
"""

from collections.abc import Mapping
from struct import Struct as Layout
from typing import Any, Final, Protocol, TypeAlias

import msgspec
from msgspec import Struct

from stillfresh.durations import seconds
from stillfresh.engine import Dropped, Origin, RetryAfter, checked_tags
from stillfresh.errors import ConfigError, UnreadableValue, error_text, shown, without_secrets
from stillfresh.freshness import Verdict
from stillfresh.http import Reason, Wish
from stillfresh.http.fields import Raw

FLAGS: Final = ("force_cache", "no_cache", "no_store", "only_if_cached", "by_body")
TIMES: Final = ("fresh_for", "stale_for", "error_for")


class HttpRequest(Struct, frozen=True):
    """A request as a client is about to send it; names of fields in lower case."""

    method: str
    url: str
    headers: Raw
    body: bytes | None = None
    """Only if it is part of the key."""
    certificate: str = ""
    """What identifies the client's certificate, if this request has one."""
    trust: str = ""
    """How the site's certificate is checked, if not as usual."""

    def __repr__(self) -> str:
        """Without what may be secret: error reports show the variables of a function."""
        return f"HttpRequest({self.method!r})"


class Controls(Struct, frozen=True):
    """What one request asks of the cache, beyond its `Cache-Control`."""

    force_cache: bool = False
    """Any stored response will do, however old, unless it was invalidated."""
    no_cache: bool = False
    """Ask the site, and store the answer."""
    no_store: bool = False
    """Neither read nor store."""
    only_if_cached: bool = False
    """Never ask the site: 504 if there is no stored response that may be served."""
    by_body: bool = False
    """The body is part of the key, so that a POST can be stored."""
    fresh_for: float | None = None
    stale_for: float | None = None
    error_for: float | None = None
    """Times in place of the cache's."""
    tags: tuple[str, ...] = ()
    """Tags for `invalidate_tag`, besides those of the response."""


NO_CONTROLS: Final = Controls()


def controls_from(given: object) -> Controls:
    """Return the controls of a mapping. Raises ConfigError for one that cannot be used."""
    if isinstance(given, Controls):
        return given
    if not isinstance(given, Mapping):
        raise ConfigError(f"stillfresh: must map names to values, not {shown(given)}")
    known: dict[str, Any] = {}
    for name, value in given.items():
        if name in FLAGS:
            if not isinstance(value, bool):
                raise ConfigError(f"stillfresh: {name} is True or False, not {shown(value)}")
            known[name] = value
        elif name in TIMES:
            known[name] = seconds(value, name=f"stillfresh: {name}")
        elif name == "tags":
            known[name] = checked_tags("stillfresh", value)
        else:
            allowed = ", ".join((*FLAGS, *TIMES, "tags"))
            raise ConfigError(f"stillfresh: there is no control {shown(name)}; there are {allowed}")
    return Controls(**known)


class ResponseKey(Struct, frozen=True, eq=False):
    """The key of a response. The tags travel with it, and are not part of its identity."""

    id: str
    tags: tuple[str, ...] = ()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ResponseKey) and self.id == other.id

    def __hash__(self) -> int:
        return hash(self.id)

    def __repr__(self) -> str:
        return self.id


class Lookup(Struct, frozen=True):
    """What one request looks for in the cache."""

    request: HttpRequest
    key: ResponseKey
    url: str
    """The address without secrets, by which it is invalidated."""
    wish: Wish
    controls: Controls = NO_CONTROLS
    carried: frozenset[bytes] = frozenset()
    """The fields of the request that identify its sender."""
    reason: Reason | None = None
    """Why its own answer is not stored: HEAD, a condition, a range. A stored one may answer it."""


class ResponseHead(Struct, frozen=True, array_like=True):
    """The stored parts of a response besides its body."""

    status: int = 200
    headers: tuple[tuple[bytes, bytes], ...] = ()
    initial_age: float = 0.0
    """Its age when it was requested (RFC 9111 §4.2.3)."""
    fresh_for: float = 0.0
    stale_for: float = 0.0
    error_for: float = 0.0
    """How long it may be served. The store keeps it for longer, to be validated."""
    vary: tuple[str, ...] = ()
    variant: str = ""
    """A digest of the request's values of these fields."""
    stated_for: float = 0.0
    """How long it is fresh by its own fields, whatever the cache's `fresh_for` says."""
    has_sender: bool = False
    """True if it was asked for with credentials."""
    stale_by: float = 0.0
    """Seconds past its lifetime when it came; 0 if it came fresh."""


class StoredResponse:
    """A response as a store holds it. Decoding makes no second copy of the body."""

    __slots__ = ("body", "head", "plain_fields")

    def __init__(self, head: ResponseHead, body: bytes | memoryview = b"") -> None:
        self.head = head
        self.body = body
        self.plain_fields: Raw | None = None
        """The fields of every answer from it, made when the first one is served."""

    def __len__(self) -> int:
        return len(self.body)


LENGTHS: Final = Layout(">IQ")
CUT_SHORT: Final = "it was changed or cut short"
encode_head: Final = msgspec.msgpack.Encoder().encode
decode_head: Final = msgspec.msgpack.Decoder(ResponseHead).decode


class ResponseCodec:
    """Bytes: the lengths of head and body, the head in msgpack, the body as it is."""

    def encode(self, response: StoredResponse, /) -> bytes:
        """Return the response as bytes."""
        head = encode_head(response.head)
        return b"".join([LENGTHS.pack(len(head), len(response.body)), head, response.body])

    def decode(self, data: bytes, /) -> StoredResponse:
        """Return the response of these bytes. Raises for bytes that are none."""
        view = memoryview(data)
        if len(view) < LENGTHS.size:
            raise UnreadableValue(CUT_SHORT)
        head_length, body_length = LENGTHS.unpack_from(view)
        body_at = LENGTHS.size + head_length
        if len(view) != body_at + body_length:
            raise UnreadableValue(CUT_SHORT)
        return StoredResponse(decode_head(view[LENGTHS.size : body_at]), view[body_at:])


class ResponseInfo(Struct, frozen=True):
    """Where a response came from, and how old it is: `response.extensions["stillfresh"]`."""

    from_cache: bool
    """True if it was stored before this call, and the site was not asked or did not answer."""
    is_stored: bool
    """True if the cache has it."""
    age: float | None = None
    """Seconds since the site made it, as far as that is known; None if it is not stored."""
    verdict: Verdict | None = None
    """How fresh it was when it was served; None if it is not stored."""
    origin: Origin | None = None
    """Memory, store, a load of this call, or a load of another; None if it is not stored."""
    fetched_at: float | None = None
    """When it was requested, in seconds since 1970."""
    reason: Reason | None = None
    """Why it is not stored."""
    error: Exception | None = None
    """Why the site could not be asked, if an old response was served instead."""


class LiveResponse(Protocol):
    """A response whose body still arrives. A client's library is behind it.

    Its methods return awaitables in async clients.
    """

    @property
    def status(self) -> int: ...
    @property
    def headers(self) -> Raw: ...

    prefix: list[bytes]
    """The part of the body that was read, if another reader reads the rest."""

    def read(self) -> Any:  # noqa: ANN401 (bytes, or an awaitable of them)
        """Return the next part of the body; nothing at its end."""

    def close(self) -> Any:  # noqa: ANN401 (None, or an awaitable)
        """Give the connection back."""


class FoundResponse(Struct, frozen=True):
    """A stored response for a caller, and the fields to send with it."""

    response: StoredResponse
    fields: Raw
    info: ResponseInfo


class PassedResponse(Struct, frozen=True):
    """The site's response to this request, which is not stored."""

    live: LiveResponse
    status: bytes
    """Its `Cache-Status`."""
    info: ResponseInfo


class Forward(Struct, frozen=True):
    """The client sends the request itself, as without a cache."""

    reason: Reason
    before: str = "bypass"
    """RFC 9211 §2.2: why the site is asked."""


Reply: TypeAlias = FoundResponse | PassedResponse | Forward


class UpstreamFailed(Exception):
    """The site did not answer, or answered with an error, and an old response may be served."""

    _plain = True

    def __init__(
        self, error: Exception | None = None, response: StoredResponse | None = None
    ) -> None:
        self.error = error
        """The client's own exception."""
        self.response = response
        """The error that the site answered with."""
        if error is not None:
            text = without_secrets(error_text(error))
        elif response is not None:
            text = f"the site answered with status {response.head.status}"
        else:
            text = "the site did not answer"
        Exception.__init__(self, text)


class UpstreamPaused(UpstreamFailed, RetryAfter):
    """The site asked for a pause, in which the old response is served."""

    _plain = True

    def __init__(self, pause: float, response: StoredResponse) -> None:
        UpstreamFailed.__init__(self, response=response)
        self.seconds = pause


class UpstreamDropped(UpstreamFailed, Dropped):
    """The same without an old response to serve: the next request asks the site again at once."""

    _plain = True
