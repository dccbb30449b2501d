"""The schema of a PostgreSQL store: its tables, its steps, and which release wrote them (S11).

The texts are `version_*.sql` and `steps.sql`; here they are given their names. Nothing here runs
SQL.
"""

import re
from importlib.resources import files
from typing import Final

from stillfresh.errors import ConfigError, shown
from stillfresh.freshness import LONGEST_LEASE, MAX_SKEW
from stillfresh.stores.contract import REMEMBERED

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
