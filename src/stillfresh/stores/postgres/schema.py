"""The schema of a PostgreSQL store: its tables, its steps, and what a row means.

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
    When,
    policy_of,
)
from stillfresh.stores.versions import NO_VERSION

Row: TypeAlias = tuple[Any, ...]

LONGEST_KEY: Final = 500
"""Bytes. Three of them, with hashes, fit into a third of a page: as much as an index takes."""
MARKS: Final = tuple(Mark)

VERSION: Final = 2
OLDEST_SERVER: Final = 14_00_00
SCHEMA: Final = "stillfresh"
NAME: Final = re.compile(r"(?!pg_)[a-z_][a-z0-9_]{0,62}")
ASKER: Final = 16
"""Characters of a token that the caller draws; the server adds as many."""

GOOD_FOR: Final = 30.0
"""Seconds after which a put is no longer done where there is no row."""
TRACE: Final = 60.0
"""Seconds that an empty row stays at least. A message that is accepted without a row is younger."""
SHORT_ID: Final = 16
"""The beginning of a generation, by which a put recognises itself among replaced ones."""
REMEMBERED_IDS: Final = 4
"""Replaced generations that an entry remembers."""
ENDLESS: Final = 1e300
"""Seconds. Sums of times up to this have no overflow, which the server would refuse."""

SETTINGS: Final = """SELECT version, is_unlogged, pushes, pg_backend_pid(),
    current_setting('transaction_isolation') FROM {schema}.setting"""
HELLO: Final = """SELECT s.version, s.is_unlogged, s.pushes, pg_backend_pid(),
    current_setting('transaction_isolation'), l.number,
    coalesce(pg_sequence_last_value('{schema}.stamps'), 0),
    extract(epoch FROM clock_timestamp())::float8
    FROM {schema}.setting s LEFT JOIN {schema}.life l ON l.is_only"""
"""The settings, and what a put must know: the life, the newest stamp, and the server's time."""
TUNING: Final = """SELECT set_config('lock_timeout', '5s', false),
    set_config('enable_seqscan', 'off', false), set_config('jit', 'off', false),
    set_config('plan_cache_mode', 'force_generic_plan', false)"""
"""For statements outside functions, as `settings` is for those inside."""
FIELDS: Final = """e.key, e.generation, e.fetched_at, e.fresh_for, e.stale_for, e.error_for, e.mark,
    e.held_until, e.failures, e.retry_at, e.error, e.version, e.changed, e.token,
    e.value IS NULL"""
"""The fields of a record without its value."""
RECORD: Final = """key bytea, generation text, fetched_at float8, fresh_for float8,
    stale_for float8, error_for float8, mark int2, held_until float8, failures int8,
    retry_at float8, error bytea, version bytea, changed int8, token text, is_absent boolean,
    value bytea"""
HELD_UNTIL: Final = 7
CHANGED: Final = 12
TOKEN: Final = 13
"""Where the end of the lease, the stamp and the token are in a record's row."""
WIDTH: Final = 16
"""The fields of a record and its value."""
REPLACED: Final = (
    f"left(coalesce(rpad(left(e.generation, {SHORT_ID}), {SHORT_ID}), '') || e.replaced, "
    f"{SHORT_ID * REMEMBERED_IDS})"
)
"""The replaced generations of a row whose copy is replaced now."""
WHOLE: Final = """(e.generation IS NOT NULL AND e.fresh_for >= 0 AND e.fresh_for < 'infinity'
    AND e.stale_for >= 0 AND e.stale_for < 'infinity'
    AND e.error_for >= 0 AND e.error_for < 'infinity')"""
"""A row has a copy, and its durations are possible. To PostgreSQL, NaN is above infinity."""
NAME_OF_ROW: Final = (
    f"CASE WHEN octet_length(e.key) > {LONGEST_KEY} THEN coalesce(e.id, e.key) ELSE e.key END"
)
"""The id of a row, as bytes. Beside a short key, `id` counts for nothing."""
EMPTIED: Final = (
    "generation = NULL, fetched_at = NULL, fresh_for = NULL, stale_for = NULL, "
    "error_for = NULL, mark = 0, value = NULL, version = NULL, token = NULL, held_until = NULL, "
    f"failures = NULL, retry_at = NULL, error = NULL, replaced = {REPLACED}"
)
"""What an update sets to leave a row for its stamp alone."""
EMPTY: Final = "(e.generation IS NULL AND e.token IS NULL AND e.failures IS NULL)"
"""A row that is there for its stamp alone."""
TEXTS: Final = {
    "fields": FIELDS,
    "record": RECORD,
    "longest_lease": LONGEST_LEASE,
    "max_skew": MAX_SKEW,
    "remembered": REMEMBERED,
    "token": f"g.asker || left(replace(gen_random_uuid()::text, '-', ''), {32 - ASKER})",
    "settings": "SET lock_timeout = '5s' SET enable_seqscan = off SET jit = off "
    "SET plan_cache_mode = force_generic_plan",
    "empty": EMPTY,
    "whole": WHOLE,
    "name": NAME_OF_ROW,
    "longest_key": LONGEST_KEY,
    "served_until": f"(least(e.fetched_at, {ENDLESS}) + least(e.fresh_for, {ENDLESS})"
    f" + least(greatest(e.stale_for, e.error_for), {ENDLESS}))",
    "emptied": EMPTIED,
    "replaced": REPLACED,
    "short_id": f"rpad(left(g.generation, {SHORT_ID}), {SHORT_ID})",
    "trace": TRACE,
    "good_for": GOOD_FOR,
    "no_live_copy": When.NO_LIVE_COPY.value,
    "live_copy": When.LIVE_COPY.value,
    "unchanged": When.UNCHANGED.value,
}


def checked_schema(name: str) -> str:
    """Check the name, which is also that of the channel for pushes."""
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
        pairs = sorted((key_of(name), id_) for id_, name in names.items())
        self.ids = [id_ for _, id_ in pairs]
        self.keys = [key for key, _ in pairs]
        self.by_key = dict(pairs)
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


def record_of(row: Row, known: str | None = None) -> Record | None:
    """A record from a row of `FIELDS` and the value, if it was sent.

    None if the row has nothing to read. A copy with an impossible duration does not count.
    """
    generation, fetched_at, fresh_for, stale_for, error_for, mark, held_until = row[1:8]
    failures, retry_at, error, version, _, _, is_absent, value = row[8:WIDTH]
    copy = failure = None
    if generation is not None:
        try:
            policy = policy_of(fresh_for, stale_for, error_for)
        except ConfigError:
            pass
        else:
            stored: bytes | Unread | None = None
            if not is_absent:
                stored = UNREAD if generation == known else bytes(value)
            form = NO_VERSION if version is None else bytes(version)
            copy = Copy(generation, fetched_at, policy, stored, MARKS[mark], form)
    if failures is not None:
        failure = Failure(failures, retry_at, error_of(error))
    if copy is None and held_until is None and failure is None:
        return None
    return Record(copy, held_until, failure)


def id_of(key: bytes, name: bytes | None) -> str | None:
    """The id of a row; None if its name is damaged."""
    whole = key if len(key) <= LONGEST_KEY else name
    if whole is None or key_of(whole) != key:
        return None
    try:
        return text_of(whole)
    except UnicodeDecodeError:
        return None


def error_of(name: bytes) -> str:
    """The text of an error. It is only shown, so bytes that are no text are replaced."""
    try:
        return text_of(name)
    except UnicodeDecodeError:
        return bytes(name).decode(errors="replace")
