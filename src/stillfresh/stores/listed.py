"""What the listings of all stores share. Pure."""

from stillfresh.checks import checked_whole
from stillfresh.stores.contract import MOST_LISTED, After


def checked_limit(limit: int) -> int:
    return checked_whole("limit", limit, 1, MOST_LISTED)


def is_listed(name: tuple[str, str], kind: str | None, search: str, after: After) -> bool:
    """True for an entry of that kind, with that text in its id, after that one."""
    return (
        (kind is None or name[0] == kind) and (after is None or name > after) and search in name[1]
    )
