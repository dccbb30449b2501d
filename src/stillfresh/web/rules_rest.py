"""What a read over HTTP says of itself (G2).

Pure: an answer and a time in, header fields out. RFC 9111 (Age, Cache-Control), RFC 9211
(Cache-Status), RFC 9110 §10.2.3 (Retry-After).
"""

import math
from typing import Any, Final

from stillfresh.coordinator import Kind
from stillfresh.durations import seconds
from stillfresh.engine import HITS, Answer, Origin, RetryAfter
from stillfresh.engine.rules import absent_believed_for
from stillfresh.errors import LoadFailed
from stillfresh.freshness import Verdict
from stillfresh.http.freshness import PageTerms, cache_control, cache_status

MAX_IDS: Final = 200
RETRY_AFTER: Final = 5.0
"""Seconds, where nobody said when to come back."""
FAILED: Final = "the upstream could not say"
"""What exactly went wrong there is the operator's to know, not every reader's."""


def freshness_headers(kind: Kind, answer: Answer[Any], age: float) -> dict[str, str]:
    """Of one view; a viewer's own stays with that viewer."""
    fresh_for = fresh_for_of(kind, found=answer.found)
    status = cache_status([], status_of(answer, fresh_for - age)).decode()
    told = {"age": f"{int(age)}", "cache-control": control_of(kind, answer, fresh_for)}
    told["cache-status"] = status
    return told | ({"vary": "authorization"} if kind.per_viewer else {})


def fresh_for_of(kind: Kind, *, found: bool) -> float:
    """That something does not exist is believed for a shorter time."""
    if found:
        return seconds(kind.fresh_for)
    absent_for = None if kind.absent_for is None else seconds(kind.absent_for)
    return absent_believed_for(seconds(kind.fresh_for), absent_for)


def status_of(answer: Answer[Any], ttl: float) -> str:
    """A hit, or forwarded because there was none, for this one or for another as well."""
    what = "hit" if answer.origin in HITS else "fwd=miss; stored"
    if answer.origin is Origin.ANOTHER:
        what += "; collapsed"
    detail = answer.verdict.value if answer.error is None else "refresh-failed"
    return f"{what}; ttl={int(ttl)}; detail={detail}"


def control_of(kind: Kind, answer: Answer[Any], fresh_for: float) -> str:
    """Browsers ask each time, and are told 304."""
    if kind.per_viewer:
        return "private, no-cache"
    left = fresh_for if answer.verdict is Verdict.FRESH else 0.0
    return cache_control(PageTerms(left, seconds(kind.stale_for), 0.0)).decode()


def pause_after(error: LoadFailed, now: float) -> int:
    """Whole seconds, one at least: until the cooldown is over, or as the upstream said."""
    if error.retry_at is not None:
        return max(1, math.ceil(error.retry_at - now))
    cause = error.__cause__
    return max(1, math.ceil(cause.seconds if isinstance(cause, RetryAfter) else RETRY_AFTER))


def is_failed(answer: Answer[Any]) -> bool:
    """Nobody could say, and nothing is kept; that it does not exist may be kept, too."""
    return answer.verdict is Verdict.GONE and answer.error is not None


def item_of(id_: str, answer: Answer[Any], age: float, now: float) -> dict[str, Any]:
    """One of a batch: found, absent, or failed with nothing kept."""
    if is_failed(answer) and answer.error is not None:
        pause = pause_after(answer.error, now)
        return {"id": id_, "status": "failed", "error": FAILED, "retry_after": pause}
    told: dict[str, Any] = {"id": id_, "status": "found" if answer.found else "absent"}
    if answer.found:
        told["value"] = answer.value
    told |= {"fetched_at": answer.fetched_at, "age": age, "verdict": answer.verdict.value}
    return told if answer.error is None else {**told, "error": FAILED}
