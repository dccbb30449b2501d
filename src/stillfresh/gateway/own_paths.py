"""The gateway's own paths, and whether a path is one of them or the site's.

They hide those of the site. A prefix moves all of them below one path; then every other path is the
site's, and nothing below the prefix is. Paths are compared as the server decoded them, once: so a
path that is read as one of ours here never reaches the site.
"""

import re
from collections.abc import Collection
from typing import Final

from stillfresh.errors import ConfigError, shown

DASHBOARD: Final = "/_stillfresh"
BELOW: Final = f"{DASHBOARD}/"
LIVE: Final = "/v1/live"
PREFIX: Final = re.compile(r"(?:/(?!\.{1,2}(?:/|\Z))[A-Za-z0-9._~-]+)+")
LONGEST_PREFIX: Final = 200


def checked_prefix(prefix: object, name: str = "own_prefix") -> str:
    """Return the prefix; empty: none. Raises ConfigError."""
    if prefix == "":
        return ""
    is_path = isinstance(prefix, str) and PREFIX.fullmatch(prefix) is not None
    if not is_path or len(str(prefix)) > LONGEST_PREFIX:
        raise ConfigError(
            f"{name}: must be a path such as '/_cache', of letters, digits, '-', '.', '_' and '~', "
            f"without a / at its end, not {shown(prefix)}"
        )
    return str(prefix)


class OwnPaths:
    """Tells the gateway's paths from those of the site.

    `paths`: the gateway's own, besides the dashboard's and `/v1/live`.
    """

    def __init__(self, prefix: str, paths: Collection[str], *, has_v1: bool) -> None:
        self.prefix = checked_prefix(prefix)
        self._below_prefix = f"{self.prefix}/"
        self._paths = frozenset(paths)
        self._has_v1 = has_v1

    def inside(self, path: str) -> str | None:
        """The path without the prefix; None if it is not below it."""
        if not self.prefix:
            return path
        if path == self.prefix:
            return "/"
        return path[len(self.prefix) :] if path.startswith(self._below_prefix) else None

    def belongs_to_site(self, path: str) -> bool:
        """True if the path is the site's, if there is a site."""
        if self.prefix:
            return self.inside(path) is None
        is_own = path in self._paths or path.startswith(BELOW) or path == LIVE
        return not (is_own or self.is_v1(path))

    def is_v1(self, inside: str) -> bool:
        return self._has_v1 and inside.startswith("/v1/")
