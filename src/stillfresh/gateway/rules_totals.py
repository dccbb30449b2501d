"""The numbers of several workers as those of one gateway. Pure.

Everything is added up, except the fields in `NOT_ADDED`. Counts of a worker that has ended stay;
its current figures are dropped.
"""

import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, replace
from functools import reduce
from typing import Any, Final, TypeAlias

import msgspec

from stillfresh.engine import GAUGES, ResourceStats, Timing, TruthStats

Resources: TypeAlias = dict[str, dict[str, ResourceStats]]
"""By cache, by kind."""


class Totals(msgspec.Struct):
    """Counts since `started_at`, and current figures."""

    started_at: float
    resources: Resources
    live: dict[str, Any]
    """Viewers and their subscriptions, now."""
    bypassed: dict[str, int]
    responses: dict[str, dict[str, int]] = {}
    """Responses, by part of the gateway and by status."""
    sent: dict[str, int] = {}
    """Bytes, by part."""
    store_seconds: dict[str, Timing] = {}
    """The times of all stores, by step."""
    site_connections: dict[str, int] = {}
    """Connections to the site that are in use now."""
    max_site_connections: dict[str, int] = {}
    """How many may be in use at once."""
    site_addresses: dict[str, int] = {}
    """In how many processes each address of the site is asked."""


NOT_ADDED: Final[Mapping[str, Callable[[Any, Any], Any]]] = {
    "started_at": min,
    "largest_batch": max,
    "max_batch": max,
    "retry_at": lambda one, other: min(one, other) if one and other else one or other,
    "error": lambda one, other: other or one,
    "objective": lambda one, other: other or one,
    "truth": lambda one, other: one + other if one and other else one or other,
}
STATS: Final = [field.name for field in fields(ResourceStats)]
NOTHING_HELD: Final[Mapping[str, Any]] = {
    **dict.fromkeys((name for name, _ in GAUGES), 0),
    "retry_at": None,
    "error": None,
    "objective": None,
}


def summed(parts: Iterable[tuple[bytes, bool]]) -> Totals | None:
    """The sum of encoded totals, each with whether its worker lives; empty: no worker yet."""
    totals = [
        (msgspec.json.decode(text, type=Totals), is_alive) for text, is_alive in parts if text
    ]
    lasting = (part if is_alive else _without_gauges(part) for part, is_alive in totals)
    total: Totals | None = reduce(added, lasting, None)
    return total


def _without_gauges(totals: Totals) -> Totals:
    resources = {
        cache: {
            kind: replace(stats, **NOTHING_HELD, truth=_ended(stats.truth))
            for kind, stats in kinds.items()
        }
        for cache, kinds in totals.resources.items()
    }
    return msgspec.structs.replace(
        totals,
        resources=resources,
        live={},
        site_connections={},
        max_site_connections={},
        site_addresses={},
    )


def _ended(truth: TruthStats | None) -> TruthStats | None:
    """The checks of a worker that has ended: none is under way."""
    return None if truth is None else replace(truth, pending=0)


def added(one: Any, other: Any) -> Any:  # noqa: ANN401 (numbers, and what is made of them)
    """Add two of the same shape; a key in only one of them is taken from it."""
    if isinstance(one, int | float | Timing):
        return one + other
    if isinstance(one, dict):
        both = {key: added(one[key], other[key]) for key in one.keys() & other.keys()}
        return {**one, **other, **both}
    if isinstance(one, tuple):
        return tuple(map(operator.add, one, other))
    if isinstance(one, ResourceStats):
        return ResourceStats(**_by_name(one, other, STATS))
    return Totals(**_by_name(one, other, Totals.__struct_fields__)) if one is not None else other


def _by_name(one: object, other: object, names: Iterable[str]) -> dict[str, Any]:
    return {
        name: NOT_ADDED.get(name, added)(getattr(one, name), getattr(other, name)) for name in names
    }
