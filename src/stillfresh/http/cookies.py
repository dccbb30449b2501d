"""Cookies that say nothing about a page: patterns of their names, and a request without them.

Everything here is pure. A cookie is what stands between two semicolons (RFC 6265 §4.2.1), and its
name ends at the first `=`. Cookies are removed from the request itself: a site that reads fields in
another way, for example with commas between cookies, does not see an ignored one either.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from stillfresh.errors import ConfigError, shown
from stillfresh.http.fields import Raw

PATTERN: Final = re.compile(r"[!#$%&'+.^_`|~0-9A-Za-z-]*\*?")
"""A cookie's name, or its beginning and an asterisk."""


@dataclass(frozen=True, slots=True)
class CookieNames:
    """Names of cookies, and beginnings of names."""

    whole: frozenset[bytes] = frozenset()
    beginnings: tuple[bytes, ...] = ()

    @classmethod
    def of(cls, patterns: Iterable[str]) -> "CookieNames":
        """Of patterns such as `consent` and `_ga*`. Raises ConfigError for a bad one."""
        checked = checked_cookies(patterns)
        return cls(
            frozenset(name.encode() for name in checked if not name.endswith("*")),
            tuple(name[:-1].encode() for name in checked if name.endswith("*")),
        )

    def __bool__(self) -> bool:
        return bool(self.whole or self.beginnings)

    def have(self, cookie: bytes) -> bool:
        """True if this `name=value` has one of the names. A cookie without a name has none."""
        name, equals, _ = cookie.partition(b"=")
        name = name.strip()
        return bool(equals) and (name in self.whole or name.startswith(self.beginnings))

    def removed_from(self, headers: Raw) -> Raw:
        """The fields without these cookies; a `Cookie` that has no others is left out."""
        remaining: list[tuple[bytes, bytes]] = []
        for name, value in headers:
            if name != b"cookie":
                remaining.append((name, value))
                continue
            cookies = value.split(b";")
            others = [cookie for cookie in cookies if not self.have(cookie)]
            if len(others) == len(cookies):
                remaining.append((name, value))
            elif any(cookie.strip() for cookie in others):
                remaining.append((name, b"; ".join(cookie.strip() for cookie in others)))
        return tuple(remaining)


def checked_cookies(patterns: Iterable[str]) -> tuple[str, ...]:
    """Return the patterns. Raises ConfigError for one that no cookie's name can match."""
    like = "write a cookie's name, or its beginning and *, such as _ga*"
    if isinstance(patterns, str):
        raise ConfigError(f"ignore_cookies: must be a list such as ['_ga*'], not {shown(patterns)}")
    checked = tuple(patterns)
    for pattern in checked:
        if not isinstance(pattern, str) or not pattern or not PATTERN.fullmatch(pattern):
            raise ConfigError(f"ignore_cookies: {shown(pattern)} cannot match a name; {like}")
    return checked
