"""The rules that all stores share: what is gone, what is listed, what a put may replace. Pure."""

from msgspec.structs import replace

from stillfresh.checks import checked_whole
from stillfresh.freshness import is_fresh
from stillfresh.stores.contract import (
    MOST_LISTED,
    UNREAD,
    After,
    Copy,
    Mark,
    Put,
    PutOutcome,
    PutResult,
    Record,
    When,
)
from stillfresh.stores.versions import are_comparable


def is_gone(record: Record, before: float) -> bool:
    """True if nothing could be served from it, and no load ran, before then."""
    used_until = 0.0
    if record.copy is not None:
        used_until = record.copy.fetched_at + record.copy.policy.lasts
    elif record.failure is not None:
        used_until = record.failure.retry_at
    return max(used_until, record.held_until or 0.0) < before


def checked_limit(limit: int) -> int:
    """Return the limit of a listing. Raise ConfigError if it is not from 1 to 10,000."""
    return checked_whole("limit", limit, 1, MOST_LISTED)


def is_listed(name: tuple[str, str], kind: str | None, search: str, after: After) -> bool:
    """True for an entry of that kind, with that text in its id, after that one."""
    return (
        (kind is None or name[0] == kind) and (after is None or name > after) and search in name[1]
    )


def is_live(copy: Copy | None, now: float) -> bool:
    """True for a value that is fresh and was not invalidated."""
    if copy is None or copy.value is None or copy.mark is not Mark.NONE:
        return False
    return is_fresh(copy.fetched_at, copy.policy.fresh_for, now)


def has_ended_since(copy: Copy | None, since: float, now: float) -> bool:
    """True for a value that was live at some time after `since`, and by its age no longer is.

    It may have refused a put of NO_LIVE_COPY that was sent then, and has just arrived again.
    """
    if copy is None or copy.value is None or copy.mark is not Mark.NONE:
        return False
    fresh_for = copy.policy.fresh_for
    return fresh_for > 0 and since < copy.fetched_at + fresh_for <= now


def put_refusal(put: Put, stored: Copy | None, now: float) -> PutResult | None:
    """Why a put may not replace the stored copy; None if it may."""
    if not _holds(put, stored, now):
        return PutResult(PutOutcome.REFUSED, b"" if stored is None else stored.version)
    if stored is None:
        return None
    given = put.copy.version
    if not are_comparable(stored.version, given):
        return PutResult(PutOutcome.MIXED, stored.version)
    if given and stored.version > given:
        return PutResult(PutOutcome.KEPT, stored.version)
    return None


def may_be_refused(put: Put) -> bool:
    """False if `put_refusal` is None whatever is stored; only its version stays."""
    return put.when is not When.ALWAYS or bool(put.copy.version) or put.copy.value is UNREAD


def _holds(put: Put, stored: Copy | None, now: float) -> bool:
    """True if the put's condition holds."""
    if put.copy.value is UNREAD and stored is None:
        return False
    match put.when:
        case When.ALWAYS:
            return True
        case When.NO_LIVE_COPY:
            return not is_live(stored, now)
        case When.LIVE_COPY:
            return is_live(stored, now)
        case When.UNCHANGED:
            if stored is None:
                return put.seen is None
            return stored.generation == put.seen and stored.mark is put.seen_mark


def is_deletion(copy: Copy) -> bool:
    """True for an absence that lasts no time: an update that deletes puts it."""
    return copy.value is None and copy.policy.lasts == 0


def with_stored_parts(copy: Copy, stored: Copy | None) -> Copy:
    """The copy to store: an UNREAD value and a missing version are those of the stored copy.

    A deletion keeps no version.
    """
    if stored is None or is_deletion(copy):
        return copy
    if copy.value is UNREAD:
        copy = replace(copy, value=stored.value)
    if not copy.version and stored.version:
        copy = replace(copy, version=stored.version)
    return copy
