"""The bodies and header fields of reads over HTTP.

Pure: an answer and a time in, data out. RFC 9111 (Age, Cache-Control), RFC 9211 (Cache-Status), RFC
9110 §10.2.3 (Retry-After).
"""

from typing import Annotated, Any, Final, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

from stillfresh.engine import Answer
from stillfresh.freshness import Policy, Verdict
from stillfresh.gateway.live.messages import ID, MAX_ID
from stillfresh.http import cache_control, freshness_fields, initial_age_of, pause_after
from stillfresh.systems.coordinator import Kind

MAX_IDS: Final = 200
FAILED: Final = "the upstream failed"
"""The error itself is for operators, not for every reader."""

Id = Annotated[
    str,
    Meta(extra_json_schema={"minLength": 1, "maxLength": MAX_ID, "pattern": ID.pattern}),
]
"""Described here; checked as everywhere, by `is_id`."""


class Ids(Struct, forbid_unknown_fields=True):
    ids: Annotated[list[Id], Meta(min_length=1, max_length=MAX_IDS)]


class Item(Struct, omit_defaults=True):
    """One item of a batch: found, absent, or failed without a copy."""

    id: str
    status: Literal["found", "absent", "failed"]
    value: Annotated[Any, Meta(description="As the upstream sent it; with `found` only.")] = UNSET
    fetched_at: (
        Annotated[float, Meta(description="When the upstream was asked, in seconds since 1970.")]
        | UnsetType
    ) = UNSET
    age: Annotated[float, Meta(ge=0)] | UnsetType = UNSET
    verdict: Verdict | UnsetType = UNSET
    error: Annotated[str, Meta(description="Why it is not newer, or not there.")] | UnsetType = (
        UNSET
    )
    retry_after: Annotated[int, Meta(ge=1)] | UnsetType = UNSET


class Items(Struct):
    items: list[Item]


def item_of(id_: str, answer: Answer[Any], now: float) -> Item:
    if is_failed(answer) and answer.error is not None:
        pause = pause_after(answer.error, now)
        return Item(id_, "failed", error=FAILED, retry_after=pause)
    return Item(
        id_,
        "found" if answer.found else "absent",
        value=answer.value if answer.found else UNSET,
        fetched_at=answer.fetched_at,
        age=answer.age + initial_age_of(answer.value),
        verdict=answer.verdict,
        error=UNSET if answer.error is None else FAILED,
    )


def freshness_headers(kind: Kind, answer: Answer[Any], terms: Policy) -> dict[str, str]:
    """The fields of one view; a personal view is for its viewer only. `terms`: this copy's."""
    initial_age = initial_age_of(answer.value)
    fields = freshness_fields(answer, terms.fresh_for, initial_age)
    if kind.per_viewer:
        return {**fields, "cache-control": "private, no-cache", "vary": "authorization"}
    # Caches behind this one subtract the whole Age, so the lifetime is that of the upstream.
    lifetime = initial_age + terms.fresh_for if answer.verdict is Verdict.FRESH else 0.0
    return {**fields, "cache-control": cache_control(lifetime, terms.stale_for)[1].decode()}


def is_failed(answer: Answer[Any]) -> bool:
    """True if the load failed and there is no copy; an absence is not a failure."""
    return answer.verdict is Verdict.GONE and answer.error is not None
