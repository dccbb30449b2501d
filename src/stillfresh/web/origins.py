"""Origins as browsers tell them, and our own names: which pages may ask (G2, G3)."""

import re
from collections.abc import Iterable
from typing import Final
from urllib.parse import urlsplit

from stillfresh.errors import ConfigError, shown

NAME: Final = re.compile(r"(\*\.)?[\w.-]+|\[?[\da-fA-F:.]+(%\w+)?\]?")


def checked_origins(origins: Iterable[str]) -> tuple[str, ...]:
    """As a browser's Origin header has them: scheme, host, perhaps a port; nothing behind."""
    if isinstance(origins, str):
        raise ConfigError(f"origins: takes a list of origins; write [{origins!r}]")
    found = tuple(origins)
    for origin in found:
        if not isinstance(origin, str) or not _is_origin(origin):
            raise ConfigError(f"origins: write 'https://host' or with a port, not {shown(origin)}")
    return found


def checked_hosts(hosts: Iterable[str] | None) -> tuple[str, ...] | None:
    """Names without a port: example.com, or *.example.com for all below it."""
    if isinstance(hosts, str):
        raise ConfigError(f"hosts: takes a list of names; write [{hosts!r}]")
    found = None if hosts is None else tuple(hosts)
    for host in found or ():
        if not isinstance(host, str) or not NAME.fullmatch(host):
            raise ConfigError(f"hosts: write example.com or *.example.com, not {shown(host)}")
    return found


def _is_origin(text: str) -> bool:
    try:
        parts = urlsplit(text)
        is_site = parts.scheme in {"http", "https"} and parts.hostname and parts.username is None
        return bool(is_site) and text == f"{parts.scheme}://{parts.netloc}".lower()
    except ValueError:
        return False
