"""How names and records are written in PostgreSQL, as bytes and rows (S11). Pure.

An index takes no long names: the key of a long name is its beginning and its hash, and another
column has the whole name.
"""

from collections.abc import Sequence
from hashlib import sha256
from typing import Any, Final, TypeAlias

from stillfresh.stores.contract import UNREAD, Copy, Failure, Mark, Record, Unread, policy_of

Row: TypeAlias = tuple[Any, ...]

LONGEST_KEY: Final = 500
"""Bytes. Three of them, with hashes, fit into a third of a page: as much as an index takes."""
MARKS: Final = tuple(Mark)


def name_of(text: str) -> bytes:
    return text.encode(errors="surrogatepass")


def text_of(name: bytes) -> str:
    return bytes(name).decode(errors="surrogatepass")


def key_of(name: bytes) -> bytes:
    """The key of a name, the same for every reader; 532 bytes for a long name."""
    if len(name) <= LONGEST_KEY:
        return name
    return name[:LONGEST_KEY] + sha256(name).digest()


class SortedIds:
    """Some ids, without repeats, in the order in which every step locks them."""

    def __init__(self, ids: Sequence[str]) -> None:
        names = {id_: name_of(id_) for id_ in ids}
        found = sorted((key_of(name), id_) for id_, name in names.items())
        self.ids = [id_ for _, id_ in found]
        self.keys = [key for key, _ in found]
        self.by_key = dict(found)
        self.long = [names[id_] if len(names[id_]) > LONGEST_KEY else None for id_ in self.ids]
        """The whole names of ids whose key is not their name."""


def record_of(row: Row, known: str | None = None) -> Record:
    """A record from a row of `functions.FIELDS` and the value, if it was sent."""
    generation, fetched_at, fresh_for, stale_for, error_for, mark, held_until = row[1:8]
    failures, retry_at, error, is_absent, value = row[8:13]
    copy = failure = None
    if generation is not None:
        kept: bytes | Unread | None = None
        if not is_absent:
            kept = UNREAD if generation == known else bytes(value)
        policy = policy_of(fresh_for, stale_for, error_for)
        copy = Copy(generation, fetched_at, policy, kept, MARKS[mark])
    if failures is not None:
        failure = Failure(failures, retry_at, text_of(error))
    return Record(copy, held_until, failure)
