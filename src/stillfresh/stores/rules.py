"""What all stores decide alike: what is gone, and what is listed (S1). Pure."""

from stillfresh.checks import checked_whole
from stillfresh.stores.contract import MOST_LISTED, After, Record


def is_gone(record: Record, before: float) -> bool:
    """True if nothing could be served from it, and no load ran, before then."""
    copy, failure, served = record.copy, record.failure, 0.0
    if copy is not None:
        served = copy.fetched_at + copy.policy.lasts
    elif failure is not None:
        served = failure.retry_at
    return max(served, record.held_until or 0.0) < before


def checked_limit(limit: int) -> int:
    return checked_whole("limit", limit, 1, MOST_LISTED)


def is_listed(name: tuple[str, str], kind: str | None, search: str, after: After) -> bool:
    """True for an entry of that kind, with that text in its id, after that one."""
    return (
        (kind is None or name[0] == kind) and (after is None or name > after) and search in name[1]
    )
