"""What a loader said, key by key: a value, an exception, or nothing (E4).

Pure: the loader's answer in, one result for each key out.
"""

from collections.abc import Hashable, Mapping, Sequence
from enum import Enum
from typing import Final, TypeVar

from stillfresh.durations import seconds
from stillfresh.engine.model import RetryAfter
from stillfresh.errors import LoadFailed, shown

K = TypeVar("K", bound=Hashable)


class Absent(Enum):
    """The upstream answered, and it has no such thing."""

    ABSENT = 0


ABSENT: Final = Absent.ABSENT


def results_of(kind: str, keys: Sequence[K], answer: object) -> dict[K, object]:
    """An id missing from the mapping is absent; one mapped to an exception failed alone.

    Ids that nobody asked for, while some that were asked for are missing, are no absence but a
    mistake: the loader names its keys in another way.
    """
    if not isinstance(answer, Mapping):
        error = LoadFailed(
            f"{kind}: the loader returned {type(answer).__name__}, not a mapping from key to value"
        )
        return dict.fromkeys(keys, error)
    results: dict[K, object] = {key: answer.get(key, ABSENT) for key in keys}
    missing = [key for key, result in results.items() if result is ABSENT]
    if missing and len(answer) > len(keys) - len(missing):
        extra = next(key for key in answer if key not in results)
        for key in missing:
            results[key] = LoadFailed(
                f"{kind} {key!r}: the loader left it out and answered for {shown(extra)}, "
                f"which nobody asked for"
            )
    return results


def pause_of(error: object) -> float | None:
    """E7: the seconds that a loader asked for, if it did, and if they are any."""
    try:
        return seconds(error.seconds) if isinstance(error, RetryAfter) else None
    except Exception:  # noqa: BLE001 (a user's exception may be anything)
        return None
