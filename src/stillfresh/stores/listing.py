"""What a listing asks for, checked and applied the same way in every store (S1).

Pure: names in, whether they are listed out.
"""

from typing import Final

from stillfresh.checks import checked_whole

MOST_LISTED: Final = 10_000
"""Entries in one answer: a listing is turned page by page."""


def checked_limit(limit: int) -> int:
    return checked_whole("limit", limit, 1, MOST_LISTED)


def is_listed(
    name: tuple[str, str], kind: str | None, search: str, after: tuple[str, str] | None
) -> bool:
    """Of that kind, with that in its id, behind that one."""
    return (
        (kind is None or name[0] == kind) and (after is None or name > after) and search in name[1]
    )
