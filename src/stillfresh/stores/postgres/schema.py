"""The schema of a PostgreSQL store: its tables, its steps, and what a row means (S11).

The texts are `version_*.sql` and `steps.sql`; here they are given their names. An index takes no
long names: the key of a long name is its beginning and its hash, and another column has the whole
name. Nothing here runs SQL.
"""

import re
from collections.abc import Mapping, Sequence
from hashlib import sha256
from importlib.resources import files
from typing import Any, Final, TypeAlias

from stillfresh.errors import ConfigError, shown
from stillfresh.freshness import LONGEST_LEASE, MAX_SKEW
from stillfresh.stores.contract import (
    REMEMBERED,
    UNREAD,
    Copy,
    Failure,
    Mark,
    Record,
    Unread,
    policy_of,
)

Row: TypeAlias = tuple[Any, ...]

LONGEST_KEY: Final = 500
"""Bytes. Three of them, with hashes, fit into a third of a page: as much as an index takes."""
MARKS: Final = tuple(Mark)

VERSION: Final = 1
OLDEST_SERVER: Final = 14_00_00
SCHEMA: Final = "stillfresh"
NAME: Final = re.compile(r"(?!pg_)[a-z_][a-z0-9_]{0,62}")
ASKER: Final = 16
"""Characters of a token that the caller draws; the server adds as many."""

SETTINGS: Final = """SELECT version, is_unlogged, pushes, pg_backend_pid(),
    current_setting('transaction_isolation') FROM {schema}.setting"""
FIELDS: Final = """e.key, e.generation, e.fetched_at, e.fresh_for, e.stale_for, e.error_for, e.mark,
    e.held_until, e.failures, e.retry_at, e.error, e.value IS NULL"""
"""The fields of a record without its value."""
RECORD: Final = """key bytea, generation text, fetched_at float8, fresh_for float8,
    stale_for float8, error_for float8, mark int2, held_until float8, failures int8,
    retry_at float8, error bytea, is_absent boolean, value bytea"""
TEXTS: Final = {
    "fields": FIELDS,
    "record": RECORD,
    "longest_lease": LONGEST_LEASE,
    "max_skew": MAX_SKEW,
    "remembered": REMEMBERED,
    "token": f"in_asker || left(replace(gen_random_uuid()::text, '-', ''), {32 - ASKER})",
    "settings": "SET lock_timeout = '5s' SET enable_seqscan = off SET jit = off",
    "empty": "e.generation IS NULL AND e.token IS NULL AND e.failures IS NULL",
}


def checked_schema(name: str) -> str:
    """Check the name, which is also that of the channel of S10."""
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise ConfigError(
            f"schema: must be 1 to 63 lower-case letters, digits and _, not begin with a digit or "
            f"with pg_, not {shown(name)}"
        )
    return name


def quoted(schema: str) -> str:
    """A name in quotes, since it may be a word of SQL."""
    return f'"{schema}"'


def tables(version: int, schema: str, *, unlogged: bool) -> str:
    """The SQL from the version before to this one; the first begins with nothing."""
    given = {"schema": quoted(schema), "unlogged": "UNLOGGED" if unlogged else ""}
    return _text(f"version_{version}.sql").format(**given)


def steps(schema: str, *, pushes: bool) -> str:
    """All functions of this release."""
    given = {"schema": quoted(schema), "channel": schema, "pushes": str(pushes).lower()}
    return _text("steps.sql").format(**given, **TEXTS)


def _text(name: str) -> str:
    return (files(__package__) / name).read_text()


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

    def tagged(self, tags: Mapping[str, tuple[str, ...]]) -> tuple[list[bytes], list[bytes]]:
        """The keys of all their tags; and for each of these, the key of the id that has it."""
        pairs = [
            (key_of(name_of(tag)), key)
            for id_, key in zip(self.ids, self.keys, strict=True)
            for tag in dict.fromkeys(tags.get(id_, ()))
        ]
        return [tag for tag, _ in pairs], [key for _, key in pairs]


def record_of(row: Row, known: str | None = None) -> Record:
    """A record from a row of `FIELDS` and the value, if it was sent."""
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
