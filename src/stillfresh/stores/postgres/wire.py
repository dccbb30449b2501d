"""Values as a PostgreSQL server takes and sends them; nothing here talks to a server.

The server finds out the types of parameters by itself: each is given to a function, or compared
with a column. So numbers go as text, which suits every type of number. Names, values and their
arrays go as they are, since escaping them would cost more than all the rest.
"""

import struct
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, NamedTuple, TypeAlias

from psycopg.pq.abc import PGresult

TEXT: Final = 0
BINARY: Final = 1
BYTEA_TYPE: Final = 17
TEXT_TYPE: Final = 25
ARRAY_HEAD: Final = struct.Struct("!iiiii")
"""Dimensions, whether there are nulls, the type of the elements, their number, the first index."""
LENGTH: Final = struct.Struct("!i")
FLOAT: Final = struct.Struct("!d")
NULL: Final = LENGTH.pack(-1)

Decoder: TypeAlias = Callable[[bytes], Any]


class Parameters(NamedTuple):
    """The parameters of one statement."""

    values: list[bytes | None]
    formats: list[int]


def parameters_of(arguments: Sequence[Any]) -> Parameters:
    """Encode the arguments of a statement."""
    values: list[bytes | None] = []
    formats: list[int] = []
    for argument in arguments:
        form = BINARY
        if argument is None or isinstance(argument, bytes):
            value: bytes | None = argument
        elif isinstance(argument, list | tuple):
            value, form = _array(argument)
        else:
            value = _text(argument)
            form = TEXT
        values.append(value)
        formats.append(form)
    return Parameters(values, formats)


def _text(value: object) -> bytes:
    text_of = TEXTS.get(type(value))
    if text_of is not None:
        return text_of(value)
    for base, text_of_base in TEXTS.items():
        if isinstance(value, base):
            return text_of_base(value)
    raise TypeError(f"{type(value).__name__} is no type that a statement takes")


TEXTS: Final[dict[type, Callable[[Any], bytes]]] = {
    str: str.encode,
    bool: lambda value: b"t" if value else b"f",
    int: lambda value: b"%d" % value,
    float: lambda value: repr(float(value)).encode(),
}
"""How a value of a type is written; those of a class below one of them are written like it."""


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


def decoders_of(result: PGresult) -> list[Decoder | None]:
    """What makes a value of the bytes of each column; None if they are the value."""
    return [_decoder(result.ftype(column)) for column in range(result.nfields)]


def rows_of(result: PGresult, decoders: Sequence[Decoder | None]) -> list[tuple[Any, ...]]:
    """Decode the rows of a result, which was asked for in binary form."""
    get = result.get_value
    rows = []
    for row in range(result.ntuples):
        fields = []
        for column, decode in enumerate(decoders):
            data = get(row, column)
            fields.append(data if data is None or decode is None else decode(data))
        rows.append(tuple(fields))
    return rows


def _decoder(type_: int) -> Decoder | None:
    try:
        return DECODERS[type_]
    except KeyError:
        raise TypeError(f"type {type_} is no type that a step returns") from None


def _float(data: bytes) -> float:
    number: float = FLOAT.unpack(data)[0]
    return number


def _elements(decode: Decoder | None) -> Callable[[bytes], list[Any]]:
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


_integer: Final = partial(int.from_bytes, byteorder="big", signed=True)
DECODERS: Final[dict[int, Decoder | None]] = {
    16: lambda data: data == b"\1",  # bool
    BYTEA_TYPE: None,
    19: bytes.decode,  # name
    20: _integer,
    21: _integer,
    23: _integer,
    TEXT_TYPE: bytes.decode,
    26: partial(int.from_bytes, byteorder="big"),  # oid
    701: _float,
    1001: _elements(None),  # bytea[]
    1009: _elements(bytes.decode),  # text[]
    1043: bytes.decode,  # varchar
    2278: bytes.decode,  # void
}
