"""What may go over `WS /v1/live`: messages field by field, ids, origins, and how much.

Pure: text and times in, messages and decisions out. Every message is a JSON object told apart by
`type`; docs/live.md and stillfresh.d.ts list the same fields.
"""

import re
from collections.abc import Collection, Sequence
from enum import IntEnum
from typing import Annotated, Any, Final, Literal, TypeAlias

import msgspec
from msgspec import Meta, Struct

Code: TypeAlias = Literal[
    "bad_message",
    "unknown_kind",
    "bad_id",
    "sign_in_needed",
    "sign_in_failed",
    "sign_in_unavailable",
    "signed_out",
    "too_many_subscriptions",
    "load_failed",
    "forbidden",
    "flood",
]
"""What an `error` is about."""

MOST_TOGETHER: Final = 100
"""Messages of a viewer in one frame."""
LONGEST_PATH: Final = 2_000
LONGEST_TOKEN: Final = 8_000
"""Characters of a token for signing in."""
LONGEST_OWN: Final = 1_000
"""Characters of a token of changes; a valid one is shorter."""
OWN_FOR: Final = 60.0
"""Seconds for which a viewer's changes count: as long as a browser keeps the cookie."""
LONGEST_REASON: Final = 200
"""Characters of the reason why a message was refused."""
RATE: Final = 100.0
BURST: Final = 1_000.0
"""Messages a second, and at once: a page that scrolls sends one a frame, sixty a second, and a
network that held them up delivers those of several seconds together."""
MAX_ID: Final = 1_000
ID: Final = re.compile(r"^[^\x00-\x1f\x7f-\x9f\u2028\u2029]+$")
"""No control characters and no line ends: an id is written into logs, paths and pages. What emoji
and careful typing need (U+200D, U+00A0) may stand in it."""
NO_ID: Final = (
    f"an id is text of 1 to {MAX_ID:,} characters, none of them a control character or a line end"
)
PORTS: Final = {"http": ":80", "https": ":443"}
UNREADABLE: Final = (msgspec.DecodeError, RecursionError, UnicodeError)
"""The last for half a character, which JSON cannot say and a server may still hand over."""


class OnScreen(Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """An item on screen: `[kind, id]`, or `[kind, id, fetched_at]` if the viewer has a copy."""

    kind: str
    id: str
    since: float | None = None


class SubscribeMessage(Struct, frozen=True, tag="subscribe", forbid_unknown_fields=True):
    """These items are on screen from now on; the present view of each is sent at once."""

    items: tuple[OnScreen, ...]


class UnsubscribeMessage(Struct, frozen=True, tag="unsubscribe", forbid_unknown_fields=True):
    """These items are no longer on screen."""

    items: tuple[OnScreen, ...]


class VisibleMessage(Struct, frozen=True, tag="visible", forbid_unknown_fields=True):
    """The page is visible or hidden; while hidden, nothing is refreshed for it."""

    visible: bool


class RouteMessage(Struct, frozen=True, tag="route", forbid_unknown_fields=True):
    """The page's path; a new path ends all subscriptions."""

    path: Annotated[str, Meta(min_length=1, max_length=LONGEST_PATH)]


class AtLeastMessage(Struct, frozen=True, tag="at_least", forbid_unknown_fields=True):
    """The viewer has seen these changes: what is on screen is read again."""

    token: Annotated[str, Meta(min_length=1, max_length=LONGEST_OWN)]


class SignInMessage(Struct, frozen=True, tag="sign_in", forbid_unknown_fields=True):
    """Answered by `welcome` with the viewer's id, or by an error."""

    token: Annotated[str, Meta(min_length=1, max_length=LONGEST_TOKEN)]


class SignOutMessage(Struct, frozen=True, tag="sign_out", forbid_unknown_fields=True):
    """A guest again: subscriptions to kinds that differ by viewer end."""


class AskStatsMessage(Struct, frozen=True, tag="stats", forbid_unknown_fields=True):
    """Send the operator's figures now, and then every second."""

    token: Annotated[str, Meta(max_length=LONGEST_TOKEN)] | None = None


class PingMessage(Struct, frozen=True, tag="ping", forbid_unknown_fields=True):
    """Answered by `pong`, by either side."""


class PongMessage(Struct, frozen=True, tag="pong", forbid_unknown_fields=True):
    """Answer to `ping`."""


class WelcomeMessage(Struct, frozen=True, tag="welcome"):
    """The viewer's id: sent first, and after each change."""

    viewer_id: str | None
    kinds: tuple[str, ...]
    per_viewer: tuple[str, ...]
    """Those of the kinds whose views differ by viewer."""
    heartbeat: float
    """Seconds of silence after which either side asks whether the other is there."""
    max_subscriptions: int


class UpdateMessage(Struct, frozen=True, tag="update", omit_defaults=True):
    """The newest view of something on screen; `age` comes last, written when it is sent."""

    kind: str
    id: str
    value: Any
    fetched_at: float
    verdict: str
    error: str | None = None


class AbsentMessage(Struct, frozen=True, tag="absent"):
    """The item does not exist, or no longer."""

    kind: str
    id: str
    fetched_at: float


class ErrorMessage(Struct, frozen=True, tag="error", omit_defaults=True):
    """Something was refused or went wrong."""

    code: Code
    message: str
    kind: str | None = None
    id: str | None = None
    items: tuple[tuple[str, str], ...] | None = None
    """All items that were not subscribed: too many, or the viewer could not be confirmed."""


ClientMessage: TypeAlias = (
    SubscribeMessage
    | UnsubscribeMessage
    | VisibleMessage
    | RouteMessage
    | AtLeastMessage
    | SignInMessage
    | SignOutMessage
    | AskStatsMessage
    | PingMessage
    | PongMessage
)
ServerMessage: TypeAlias = (
    WelcomeMessage | UpdateMessage | AbsentMessage | ErrorMessage | PingMessage | PongMessage
)
"""An application registers more types: its notices (`Live.register`)."""

encode: Final = msgspec.json.Encoder().encode
_decode: Final = msgspec.json.Decoder(ClientMessage).decode
_apart: Final = msgspec.json.Decoder(
    Annotated[list[msgspec.Raw], Meta(min_length=1, max_length=MOST_TOGETHER)]
).decode


class BadMessage(Struct, frozen=True):
    """A viewer sent something that is not a message."""

    why: str


def read(text: str | None) -> Sequence[ClientMessage | BadMessage]:
    """Return the viewer's message, or those of an array; None stands for binary data.

    Of an array each is refused by itself: one mistake does not undo the rest. If all are, they
    count as one.
    """
    if text is None:
        return [BadMessage("not a message: send text, not binary data")]
    is_array = text.lstrip(" \t\r\n").startswith("[")
    try:
        messages = [_read(part) for part in (_apart(text) if is_array else [text])]
    except UNREADABLE as exc:
        return [_bad(exc)]
    return (
        messages[:1] if all(isinstance(message, BadMessage) for message in messages) else messages
    )


def _read(text: str | msgspec.Raw) -> ClientMessage | BadMessage:
    try:
        message: ClientMessage = _decode(text)
    except UNREADABLE as exc:
        return _bad(exc)
    return message


def _bad(error: Exception) -> BadMessage:
    """Cut what is repeated of a message, which may be very long."""
    return BadMessage(f"not a message: {str(error)[:LONGEST_REASON]}")


def cost_of(messages: Sequence[ClientMessage | BadMessage]) -> int:
    """What a frame costs: twenty items, or further messages, count as one more message."""
    listing = (
        message
        for message in messages
        if isinstance(message, SubscribeMessage | UnsubscribeMessage)
    )
    return 1 + (len(messages) - 1 + sum(len(message.items) for message in listing)) // 20


def is_id(text: str) -> bool:
    """The same over HTTP and over the socket."""
    return len(text) <= MAX_ID and ID.fullmatch(text) is not None


class Close(IntEnum):
    """Why a connection was closed, as a client sees it."""

    POLICY = 1008
    """Ten bad messages, or a flood."""
    TOO_BIG = 1009
    BROKEN = 1011
    """An internal error."""
    RESTART = 1012
    """The server restarts: connect again later."""
    FULL = 1013
    SILENT = 4408
    """No message was received, or none was read, for too long."""


def pulse(
    since_heard: float,
    since_asked: float | None,
    unread_for: float | None,
    heartbeat: float,
    patience: float,
) -> Literal["fine", "ask", "gone"]:
    """Is a viewer there? Ask one that was silent for a heartbeat; after another one, it is gone.

    All are seconds: since it was heard last, since it was asked last (None: never), and how long
    the frame that is being sent is left unread (None: none is). A viewer that does not read for
    `patience` is gone, too.
    """
    if unread_for is not None and unread_for >= patience:
        return "gone"
    if since_heard < heartbeat:
        return "fine"
    # A question from before it was heard last has been answered: this silence needs another one.
    if since_asked is None or since_asked >= since_heard:
        return "ask"
    if unread_for is not None:  # a viewer that reads, however slowly, is there
        return "fine"
    return "gone" if since_asked >= heartbeat else "fine"


def is_allowed_origin(origin: str, host: str, origins: Collection[str]) -> bool:
    """True for a page of this host or of a named origin, and for clients without an Origin."""
    if not origin or origin in origins:
        return True
    scheme, _, origin_host = origin.lower().partition("://")
    port = PORTS.get(scheme)
    if port is None:
        return False
    return origin_host.removesuffix(port) == host.lower().removesuffix(port) != ""
