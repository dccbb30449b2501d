"""Mistakes that raise no error, and would show only much later. Each is logged once.

- A value without an annotated type comes back as another one: a dataclass as a dict.
- A value is so large that encoding and storing it takes seconds.
- In Python's development mode (`python -X dev`): a key is invalidated that is not stored. In that
  mode `shared_values` and `sources` look for two more mistakes.
"""

import logging
from dataclasses import is_dataclass
from typing import Any, Final

from msgspec import Struct

from stillfresh.engine.codecs import is_unannotated, is_untyped
from stillfresh.engine.rules import odd_part
from stillfresh.errors import shown

LARGE_VALUE: Final = 10_000_000  # bytes

logger = logging.getLogger(__name__)


class SilentMistakes:
    """What was logged of one resource."""

    def __init__(self, kind: str, codec: object) -> None:
        self._kind = kind
        self._is_unannotated = is_unannotated(codec)
        self.is_untyped = is_untyped(codec)
        """True until a value was reported that callers get as another type."""
        self._is_large_reported = False
        self._is_missing_reported = False

    def look_at_value(self, key: object, value: object, data: object) -> None:
        """Look at a value that a loader returned or a caller put, and at its bytes."""
        if self.is_untyped:
            self._look_at_type(value)
        if self._is_large_reported or not isinstance(data, bytes):
            return
        if len(data) > LARGE_VALUE:
            self._is_large_reported = True
            logger.warning(
                "%s %s: its value takes %.0f MB. Encoding and storing so much holds up the event "
                "loop. Cache a part of it, or keep it in a file and cache the file's name.",
                self._kind,
                shown(key),
                len(data) / 1_000_000,
            )

    def _look_at_type(self, value: object) -> None:
        odd = odd_part(value)
        if odd is None:
            return
        self.is_untyped = False
        name = type(odd).__name__
        becomes = "text"
        if isinstance(odd, tuple | set | frozenset):
            becomes = "list"
        elif is_dataclass(odd) or isinstance(odd, Struct):
            becomes = "dict"
        why = "does not name it"
        if self._is_unannotated:
            why = "is not annotated"
        logger.warning(
            "%s: the function's values are of the type %s, and callers get %s, because its return "
            "type %s. Annotate it with %s, or give codec=.",
            self._kind,
            name,
            becomes,
            why,
            name,
        )

    def note_missing(self, keys: list[Any]) -> None:
        """These keys were invalidated, and the store had no copy of any of them."""
        if self._is_missing_reported:
            return
        self._is_missing_reported = True
        logger.warning(
            "%s: invalidate(%s): no copy is stored for this key. If you expected one, compare the "
            "key with those that you read: `stillfresh inspect` lists them.",
            self._kind,
            shown(keys[0]),
        )
