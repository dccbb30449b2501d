"""A stored value as an operator can read it: JSON, a page's text, or how many bytes (G6).

Pure, and bounded: nobody reads a megabyte in a panel.
"""

import codecs
from typing import Any, Final

import msgspec

from stillfresh.isr import Page, page_in

MOST_DECODED: Final = 1_000_000
"""Bytes; more is only counted."""
MOST_SHOWN: Final = 20_000
"""Characters of a value."""


def shown_value(value: object, *, is_page: bool = False) -> dict[str, Any]:
    """`kind` is json, page, bytes or absent; `text` at most 20,000 characters of it."""
    if value is None:
        return {"kind": "absent"}
    if not isinstance(value, bytes):
        return {"kind": "unread"}
    if len(value) > MOST_DECODED:
        return _counted(value)
    try:
        return _page(page_in(value)) if is_page else _json(value)
    except (msgspec.MsgspecError, TypeError, ValueError, RecursionError):
        return _counted(value)


def _json(value: bytes) -> dict[str, Any]:
    plain = msgspec.json.encode(msgspec.msgpack.decode(value))
    text = msgspec.json.format(plain).decode()
    is_cut = len(text) > MOST_SHOWN
    return {"kind": "json", "size": len(value), "text": text[:MOST_SHOWN], "is_cut": is_cut}


def _page(page: Page) -> dict[str, Any]:
    headers = [[name.decode("latin-1"), it.decode("latin-1")] for name, it in page.headers.raw]
    told = {"kind": "page", "size": len(page.body), "status": page.status, "headers": headers}
    body = page.body[: MOST_SHOWN * 4]
    is_whole = len(body) == len(page.body)
    try:
        text = codecs.getincrementaldecoder("utf-8")().decode(body, final=is_whole)
    except UnicodeDecodeError:
        return {**told, "text": None, "is_cut": False}
    is_cut = len(text) > MOST_SHOWN or not is_whole
    return {**told, "text": text[:MOST_SHOWN], "is_cut": is_cut}


def _counted(value: bytes) -> dict[str, Any]:
    return {"kind": "bytes", "size": len(value)}
