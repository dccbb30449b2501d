"""Values as a PostgreSQL server takes and sends them; nothing here talks to a server.

The server finds out the types of parameters by itself: each is given to a function, or compared
with a column. So numbers go as text, which suits every type of number. Names, values and their
arrays go as they are, since escaping them would cost more than all the rest.
"""

import struct
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

from psycopg.pq.abc import PGresult

TEXT: Final = 0
BINARY: Final = 1
BYTEA_TYPE: Final = 17
TEXT_TYPE: Final = 25
ARRAY_HEAD: Final = struct.Struct("!iiiii")
"""Dimensions, whether there are nulls, the type of the elements, their number, the first index."""
LENGTH: Final = struct.Struct("!i")
NULL: Final = LENGTH.pack(-1)


class Parameters(NamedTuple):
    """The parameters of one statement."""

    values: list[bytes | None]
    formats: list[int]


def parameters_of(arguments: Sequence[Any]) -> Parameters:
    """Encode the arguments of a statement."""
    values: list[bytes | None] = []
    formats: list[int] = []
    for argument in arguments:
        if argument is None:
            values.append(None)
            formats.append(BINARY)
        elif isinstance(argument, bytes):
            values.append(argument)
            formats.append(BINARY)
        elif isinstance(argument, list | tuple):
            value, value_format = _array(argument)
            values.append(value)
            formats.append(value_format)
        else:
            values.append(_text(argument))
            formats.append(TEXT)
    return Parameters(values, formats)


def _text(value: object) -> bytes:
    if isinstance(value, str):
        return value.encode()
    if isinstance(value, bool):
        return b"t" if value else b"f"
    if isinstance(value, int | float):
        return b"%d" % value if isinstance(value, int) else repr(float(value)).encode()
    raise TypeError(f"{type(value).__name__} is no type that a statement takes")


def _array(elements: Sequence[Any]) -> tuple[bytes, int]:
    """An array of one dimension; of text and bytes in the server's binary form."""
    first = next((element for element in elements if element is not None), None)
    if not isinstance(first, bytes | str):
        texts = (b"NULL" if element is None else _text(element) for element in elements)
        return b"{" + b",".join(texts) + b"}", TEXT
    element_type = BYTEA_TYPE if isinstance(first, bytes) else TEXT_TYPE
    parts = [ARRAY_HEAD.pack(1, None in elements, element_type, len(elements), 1)]
    for element in elements:
        if element is None:
            parts.append(NULL)
            continue
        data = element if isinstance(element, bytes) else element.encode()
        parts.append(LENGTH.pack(len(data)))
        parts.append(data)
    return b"".join(parts), BINARY


def rows_of(result: PGresult) -> list[tuple[Any, ...]]:
    """Decode the rows of a result, which was asked for in binary form."""
    columns = [(column, _decoder(result.ftype(column))) for column in range(result.nfields)]
    rows = []
    for row in range(result.ntuples):
        fields = []
        for column, decode in columns:
            data = result.get_value(row, column)
            fields.append(data if data is None or decode is None else decode(data))
        rows.append(tuple(fields))
    return rows


def _decoder(type_: int) -> Callable[[bytes], Any] | None:
    """What makes a value of a column's bytes; None if they are the value."""
    try:
        return DECODERS[type_]
    except KeyError:
        raise TypeError(f"type {type_} is no type that a step returns") from None


def _unpacking(form: str) -> Callable[[bytes], Any]:
    unpack = struct.Struct(form).unpack
    return lambda data: unpack(data)[0]


def _elements(decode: Callable[[bytes], Any] | None) -> Callable[[bytes], list[Any]]:
    def elements(data: bytes) -> list[Any]:
        if not LENGTH.unpack_from(data)[0]:  # no dimensions: it is empty
            return []
        number = ARRAY_HEAD.unpack_from(data)[3]
        at = ARRAY_HEAD.size
        values: list[Any] = []
        for _ in range(number):
            (length,) = LENGTH.unpack_from(data, at)
            at += LENGTH.size
            if length < 0:
                values.append(None)
                continue
            element = data[at : at + length]
            values.append(element if decode is None else decode(element))
            at += length
        return values

    return elements


DECODERS: Final[dict[int, Callable[[bytes], Any] | None]] = {
    16: lambda data: data == b"\1",  # bool
    BYTEA_TYPE: None,
    19: bytes.decode,  # name
    20: _unpacking("!q"),
    21: _unpacking("!h"),
    23: _unpacking("!i"),
    TEXT_TYPE: bytes.decode,
    26: _unpacking("!I"),  # oid
    701: _unpacking("!d"),
    1001: _elements(None),  # bytea[]
    1009: _elements(bytes.decode),  # text[]
    1043: bytes.decode,  # varchar
    2278: bytes.decode,  # void
}
