"""From `postgresql://user:password@host/database?schema=shop` to a store; mistakes are named.

Options behind `?` that are not ours are libpq's: `sslmode`, `target_session_attrs` and others.
"""

from collections.abc import Callable
from typing import Any, Final
from urllib.parse import SplitResult, parse_qsl, quote, unquote, urlencode, urlsplit

from psycopg import ProgrammingError
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from stillfresh.checks import checked_whole
from stillfresh.clock import Clock
from stillfresh.durations import seconds
from stillfresh.errors import ConfigError, shown_place
from stillfresh.stores.postgres.store import PostgresStore

PLACE: Final = ("host", "hostaddr", "port")
OWN: Final[dict[str, Callable[[str], Any]]] = {
    "schema": str,
    "timeout": lambda text: seconds(text, name="timeout", positive=True),
    "max_connections": lambda text: checked_whole(
        "max_connections", int(text) if text.isdecimal() else text
    ),
}


def options_of(url: str) -> tuple[list[str], dict[str, Any]]:
    """libpq's options for each host of the address, and our own options behind `?`."""
    parts = urlsplit(url)
    given = parse_qsl(parts.query, keep_blank_values=True)
    try:
        return _parse(parts, given)
    except (ConfigError, ProgrammingError) as exc:
        mistake = _without_password(" ".join(str(exc).split()), parts.password)
    # Raised out here, without its cause: that may show the password.
    raise ConfigError(
        f"store {shown_place(url)}: {mistake}; write "
        f"postgresql://user:password@host:5432/database, several hosts with commas between them, "
        f"and behind ? any of {', '.join(OWN)} and what "
        f"libpq takes there (sslmode, target_session_attrs, …)"
    )


def _parse(parts: SplitResult, given: list[tuple[str, str]]) -> tuple[list[str], dict[str, Any]]:
    if len(dict(given)) < len(given):
        raise ConfigError("names an option twice")
    if parts.fragment or "@" in parts.netloc.rpartition("@")[0] + parts.path + "".join(dict(given)):
        raise ConfigError("has a #, @, / or ? in a name or a password; write %23, %40, %2F or %3F")
    options = {name: OWN[name](text) for name, text in given if name in OWN}
    libpq_options = [(name, text) for name, text in given if name not in OWN]
    bare = f"postgresql://{parts.netloc}{parts.path}?{urlencode(libpq_options, quote_via=quote)}"
    return hosts_of(conninfo_to_dict(bare)), options


def hosts_of(options: dict[str, Any]) -> list[str]:
    """One connection string for each host, so that a time-out applies to one of them."""
    places = [str(options.pop(name, None) or "").split(",") for name in PLACE]
    number = max(map(len, places))
    places = [each * number if len(each) == 1 else each for each in places]
    if {len(each) for each in places} != {number}:
        raise ConfigError("must name one port, or one for each host")
    return [
        make_conninfo(
            **{"application_name": "stillfresh", **options, "client_encoding": "UTF8"},
            **{name: value for name, value in zip(PLACE, place, strict=True) if value},
        )
        for place in zip(*places, strict=True)
    ]


def store_at(url: str, clock: Clock | None) -> PostgresStore:
    """Return the store that an address names. It connects when it is opened."""
    hosts, options = options_of(url)
    return PostgresStore(*hosts, clock=clock, **options)


def _without_password(message: str, password: str | None) -> str:
    if not password:
        return message
    for secret in {password, unquote(password)}:
        message = message.replace(secret, "***")
    return message
