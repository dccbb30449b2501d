"""A stored value as an operator can read it: JSON, a page's text, or how many bytes (G6).

Pure, and bounded: nobody reads a megabyte in a panel.
"""

from typing import Any, Final

import msgspec

from stillfresh.isr.codec import PageCodec
from stillfresh.isr.model import Stored

__all__ = ["shown_value"]

MOST_DECODED: Final = 1_000_000
"""Bytes; more is only counted."""
MOST_SHOWN: Final = 20_000
"""Characters of a value."""


def shown_value(value: object, *, is_page: bool = False) -> dict[str, Any]:
    """`kind` is json, page, bytes or absent; `text` at most 20,000 characters of it."""
    if value is None:
        return {"kind": "absent"}
    if isinstance(value, Stored):
        return _page(value)
    if not isinstance(value, bytes):
        return {"kind": "unread"}
    if len(value) > MOST_DECODED:
        return _counted(value)
    try:
        return _page(PageCodec().decode(value)) if is_page else _json(value)
    except (msgspec.MsgspecError, TypeError, ValueError, RecursionError):
        return _counted(value)


def _json(value: bytes) -> dict[str, Any]:
    plain = msgspec.json.encode(msgspec.msgpack.decode(value))
    return {"kind": "json", "size": len(value), **_cut(msgspec.json.format(plain).decode())}


def _page(page: Stored) -> dict[str, Any]:
    body = bytes(page.body[: MOST_SHOWN * 4])
    headers = [
        [name.decode("latin-1"), field.decode("latin-1")] for name, field in page.head.headers
    ]
    told = {"kind": "page", "size": len(page.body), "status": page.head.status, "headers": headers}
    try:
        return {**told, **_cut(body.decode(), of=len(page.body))}
    except UnicodeDecodeError:
        return {**told, "text": None, "is_cut": False}


def _cut(text: str, of: int | None = None) -> dict[str, Any]:
    shown = text[:MOST_SHOWN]
    return {"text": shown, "is_cut": len(shown) < (len(text) if of is None else max(of, len(text)))}


def _counted(value: bytes) -> dict[str, Any]:
    return {"kind": "bytes", "size": len(value)}
