"""A page as bytes and back (E11): four bytes of length, the head in msgpack, the body as it is.

Decoding copies nothing: the body is a view of what was read, so that memory holds a page once
(I16). Where values lie in the open (I2) the body is the object, and the head stands in the row.
"""

from typing import Final

import msgspec

from stillfresh.isr.model import Head, Stored

__all__ = ["PageCodec", "packed", "parts"]

_encode: Final = msgspec.msgpack.Encoder().encode
_decoder: Final = msgspec.msgpack.Decoder(Head)


def packed(head: bytes, body: bytes | memoryview) -> bytes:
    return b"".join([len(head).to_bytes(4, "big"), head, body])


def parts(data: bytes) -> tuple[memoryview, memoryview]:
    view = memoryview(data)
    end = 4 + int.from_bytes(view[:4], "big")
    if len(view) < end:
        raise ValueError("cut short")
    return view[4:end], view[end:]


class PageCodec:
    """What the engine stores pages with."""

    def encode(self, page: Stored, /) -> bytes:
        return packed(_encode(page.head), page.body)

    def decode(self, data: bytes, /) -> Stored:
        head, body = parts(data)
        return Stored(_decoder.decode(head), body)
