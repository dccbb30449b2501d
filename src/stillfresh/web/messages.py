"""What goes over `WS /v1/live`, field by field, and what is refused (G3).

Pure: text in, a message or a `Refused` out. Every message is a JSON object told apart by `type`;
docs/live.md and stillfresh.d.ts list the same fields.
"""

from collections.abc import Sequence
from typing import Annotated, Any, Final, Literal, TypeAlias

import msgspec
from msgspec import Meta, Struct

from stillfresh.errors import StillfreshError
from stillfresh.waiting.messages import GameStateNews, InvalidatedNews, YourTurnNews

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
"""Messages in one frame."""
LONGEST_PATH: Final = 2_000
LONGEST_TOKEN: Final = 8_000
LONGEST: Final = 200
"""Characters of why something was refused."""
UNREADABLE: Final = (msgspec.DecodeError, RecursionError, UnicodeError)
"""The last for half a character, which JSON cannot say and a server may still hand over."""

Item: TypeAlias = tuple[str, str] | tuple[str, str, float | None]
"""A kind, an id and, if the viewer has a copy already, that copy's `fetched_at`."""


class Subscribe(Struct, frozen=True, tag="subscribe", forbid_unknown_fields=True):
    """These are on screen from now on; the view that there is of each comes at once."""

    items: tuple[tuple[Any, ...], ...]


class Unsubscribe(Struct, frozen=True, tag="unsubscribe", forbid_unknown_fields=True):
    """These are not on screen any more."""

    items: tuple[tuple[Any, ...], ...]


class Visible(Struct, frozen=True, tag="visible", forbid_unknown_fields=True):
    """The page is looked at, or it is hidden: then nothing is refreshed for it."""

    visible: bool


class Route(Struct, frozen=True, tag="route", forbid_unknown_fields=True):
    """The page's path; another one than before ends all subscriptions (C8)."""

    path: Annotated[str, Meta(min_length=1, max_length=LONGEST_PATH)]


class SignIn(Struct, frozen=True, tag="sign_in", forbid_unknown_fields=True):
    """Answered by `welcome` with the viewer's id, or by an error."""

    token: Annotated[str, Meta(min_length=1, max_length=LONGEST_TOKEN)]


class SignOut(Struct, frozen=True, tag="sign_out", forbid_unknown_fields=True):
    """A guest again: what differs by viewer is not subscribed any more."""


class Stats(Struct, frozen=True, tag="stats", forbid_unknown_fields=True):
    """The operator's figures, now and then every second."""

    token: Annotated[str, Meta(max_length=LONGEST_TOKEN)] | None = None


class Ping(Struct, frozen=True, tag="ping", forbid_unknown_fields=True):
    """Answered by `pong`, by either side."""


class Pong(Struct, frozen=True, tag="pong", forbid_unknown_fields=True):
    """Still here."""


class Welcome(Struct, frozen=True, tag="welcome"):
    """Who the viewer is now: first of all, and after each change."""

    viewer_id: str | None
    kinds: tuple[str, ...]
    per_viewer: tuple[str, ...]
    """Those of the kinds whose views differ by viewer."""
    heartbeat: float
    """Seconds of silence after which either side asks whether the other is there."""
    max_subscriptions: int


class Update(Struct, frozen=True, tag="update", omit_defaults=True):
    """The newest view of something on screen; `age` comes last, written by who sends."""

    kind: str
    id: str
    value: Any
    fetched_at: float
    verdict: str
    error: str | None = None


class Absent(Struct, frozen=True, tag="absent"):
    """It does not exist, or not any more."""

    kind: str
    id: str
    fetched_at: float


class Error(Struct, frozen=True, tag="error", omit_defaults=True):
    """Something was refused or went wrong."""

    code: Code
    message: str
    kind: str | None = None
    id: str | None = None
    items: tuple[tuple[str, str], ...] | None = None
    """All items that were not subscribed: too many, or the viewer could not be confirmed."""


ClientMessage: TypeAlias = (
    Subscribe | Unsubscribe | Visible | Route | SignIn | SignOut | Stats | Ping | Pong
)
Notice: TypeAlias = YourTurnNews | InvalidatedNews | GameStateNews
"""What an application sends to a viewer (contract W)."""

encode: Final = msgspec.json.Encoder().encode
_decode: Final = msgspec.json.Decoder(
    ClientMessage | Annotated[list[ClientMessage], Meta(min_length=1, max_length=MOST_TOGETHER)]
).decode
_decode_one: Final = msgspec.json.Decoder(ClientMessage).decode
_apart: Final = msgspec.json.Decoder(
    Annotated[list[msgspec.Raw], Meta(min_length=1, max_length=MOST_TOGETHER)]
).decode


class Refused(StillfreshError):
    """A message that is none of ours: says why."""


def read(text: str | None) -> Sequence[ClientMessage | Refused]:
    """What the viewer says, in one message or in an array; None is what came as binary data.

    Of an array each is refused by itself, unless all are: one mistake does not undo the rest.
    """
    if text is None:
        raise Refused("not a message: send text, not binary data")
    try:
        decoded: ClientMessage | list[ClientMessage] = _decode(text)
        return [_checked(it) for it in (decoded if isinstance(decoded, list) else [decoded])]
    except (*UNREADABLE, Refused) as exc:
        messages = _read_apart(text)
        if all(isinstance(it, Refused) for it in messages):
            raise _refused(exc) from None
        return messages


def _read_apart(text: str) -> list[ClientMessage | Refused]:
    try:
        return [_read_one(part) for part in _apart(text)]
    except UNREADABLE:
        return []


def _read_one(part: msgspec.Raw) -> ClientMessage | Refused:
    try:
        return _checked(_decode_one(part))
    except (*UNREADABLE, Refused) as exc:
        return _refused(exc)


def _refused(error: Exception) -> Refused:
    """What is repeated of a message is cut: it may be as long as one."""
    return (
        error if isinstance(error, Refused) else Refused(f"not a message: {str(error)[:LONGEST]}")
    )


def _checked(message: ClientMessage) -> ClientMessage:
    if isinstance(message, Subscribe | Unsubscribe):
        for item in message.items:
            _check(item)
    return message


def items_of(messages: Sequence[ClientMessage | Refused]) -> int:
    """How much is asked for."""
    listing = (it for it in messages if isinstance(it, Subscribe | Unsubscribe))
    return len(messages) - 1 + sum(len(it.items) for it in listing)


def _check(item: tuple[Any, ...]) -> None:
    """Here and not by type: an unknown kind is another error than a list of numbers."""
    match item:
        case (str(), str()) | (str(), str(), None | float() | int()):
            return
        case _:
            raise Refused(
                "not a message: an item is [kind, id] or [kind, id, fetched_at], "
                "text, text and a number"
            )
