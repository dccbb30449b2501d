"""Codecs: what compressing, encrypting and Arrow cost, beside what people use instead (D3)."""

import pickle
import zlib
from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec
import pandas as pd
import polars as pl
from cryptography.fernet import Fernet

from benchmarks.harness import Contender, Progress, Row, Section, race
from stillfresh import arrow, encrypted, new_key, zstd
from stillfresh.engine import Codec, MsgpackCodec

__all__ = ["section"]

SIZES: Final = {"1 KB": (1_000, 31), "100 KB": (100_000, 15), "10 MB": (10_000_000, 5)}
"""Bytes as msgpack, and rounds."""
KEY: Final = new_key()
ZLIB_LEVEL: Final = 6
"""zlib's own default."""


class PickledZlib:
    """Pickle, compressed by zlib."""

    def encode(self, value: object) -> bytes:
        return zlib.compress(pickle.dumps(value), ZLIB_LEVEL)

    def decode(self, data: bytes) -> object:
        return pickle.loads(zlib.decompress(data))  # noqa: S301 (what others do)


class Pickled:
    """Pickle alone."""

    def encode(self, value: object) -> bytes:
        return pickle.dumps(value)

    def decode(self, data: bytes) -> object:
        return pickle.loads(data)  # noqa: S301 (what others do)


class FernetCodec:
    """Msgpack, encrypted by Fernet."""

    def __init__(self) -> None:
        self._fernet = Fernet(KEY)

    def encode(self, value: object) -> bytes:
        return self._fernet.encrypt(msgspec.msgpack.encode(value))

    def decode(self, data: bytes) -> object:
        return msgspec.msgpack.decode(self._fernet.decrypt(data))


def records(size: int) -> list[dict[str, object]]:
    """Rows of a shop, of about so many bytes."""
    return [
        {"id": number, "name": f"item {number}", "price": number * 1.01, "tags": ["new", "red"]}
        for number in range(size // 52)
    ]


def plain() -> Codec[Any]:
    return MsgpackCodec(Any, "benchmark")


def codecs() -> dict[str, Codec[Any]]:
    makers = {
        "zstd()": zstd(above=0),
        "encrypted()": encrypted(KEY),
        "encrypted(zstd())": encrypted(KEY, zstd(above=0)),
    }
    ours = {name: maker.make("benchmark", plain) for name, maker in makers.items()}
    return {"msgpack": plain(), **ours, "pickle, zlib": PickledZlib(), "Fernet": FernetCodec()}


def tables(value: list[dict[str, object]]) -> dict[str, tuple[Codec[Any], object]]:
    pandas_frame = pd.DataFrame(value).drop(columns="tags")
    polars_frame = pl.DataFrame(value).drop("tags")
    return {
        "Arrow, pandas": (arrow(pd.DataFrame), pandas_frame),
        "Arrow, polars": (arrow(pl.DataFrame), polars_frame),
        "pickle, pandas": (Pickled(), pandas_frame),
        "pickle, polars": (Pickled(), polars_frame),
    }


def contender(name: str, codec: Codec[Any], value: object, what: str) -> Contender:
    """Encoding, or decoding bytes that another process stored."""
    data = codec.encode(value)
    statement = "codec.encode(value)" if what == "encode" else "codec.decode(key)"
    copies = [bytes(bytearray(data))]  # not the object that was just encoded
    return Contender(name, statement, {"codec": codec, "value": value}, copies)


def measured(
    pairs: Mapping[str, tuple[Codec[Any], object]], rounds: int
) -> dict[str, dict[str, float]]:
    return {
        what: race([contender(name, *pair, what) for name, pair in pairs.items()], rounds=rounds)
        for what in ("encode", "decode")
    }


def section(progress: Progress) -> Section:
    rows: list[Row] = []
    figures: dict[str, dict[str, float]] = {}

    def note(what: str, taken: dict[str, float], against: Callable[[str], str]) -> None:
        figures[f"{what}, µs"] = {name: ns / 1000 for name, ns in taken.items()}
        for name, other in ((name, against(name)) for name in taken):
            if other:
                ratio = taken[name] / taken[other]
                rows.append(Row("D3", f"{what}: `{name}`, against {other}", ratio))

    others = {"zstd()": "pickle, zlib", "encrypted()": "Fernet"}
    frames = {"Arrow, pandas": "pickle, pandas", "Arrow, polars": "pickle, polars"}
    for size, (length, rounds) in SIZES.items():
        progress(f"codecs: {size}")
        value = records(length)
        pairs = {name: (codec, value) for name, codec in codecs().items()}
        figures[f"{size}, bytes stored"] = {
            name: float(len(codec.encode(value))) for name, (codec, _) in pairs.items()
        }
        for what, taken in measured(pairs, rounds).items():
            note(f"{what} {size}", taken, lambda name: others.get(name, ""))
        for what, taken in measured(tables(value), rounds).items():
            note(f"{what} a table of {size}", taken, lambda name: frames.get(name, ""))
    return Section(
        "Codecs (D3)",
        rows,
        figures,
        "A list of records, and the same as a table. Encoding and decoding alone, without a store. "
        "`zstd()` has level 1, zlib level 6; both are the defaults.",
    )
