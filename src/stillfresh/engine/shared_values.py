"""Did a caller change a value that others share?

Values in memory are shared. A codec sees each of them when it is decoded, so a `CheckedCodec`
remembers the last ones as they were, and compares. It encodes every value once more, so it is used
only in Python's development mode (`python -X dev`) and by `stillfresh.testing.unchanged_values`.
"""

import logging
from collections import deque
from typing import Any, Final, Generic, NamedTuple, TypeVar, cast

from stillfresh.engine.codec_makers import OuterCodec, innermost
from stillfresh.engine.model import Codec
from stillfresh.errors import shown

V = TypeVar("V")

MOST_VALUES: Final = 1_000
AT_ONCE: Final = 20  # values that are compared when another one is decoded

logger = logging.getLogger(__name__)


class SharedValue(NamedTuple):
    """A value that was decoded, and its bytes at that time."""

    value: Any
    data: bytes | None


class CheckedCodec(OuterCodec, Generic[V]):
    """A codec that notices when a value that it has decoded is changed."""

    def __init__(self, codec: Codec[V], kind: str) -> None:
        super().__init__(codec)
        self.encode = codec.encode
        # Encryption gives other bytes each time, so the values are compared without it.
        self._plain = cast("Codec[V]", innermost(codec))
        self._kind = kind
        self._values: deque[SharedValue] = deque(maxlen=MOST_VALUES)
        self._is_reported = False

    def decode(self, data: bytes, /) -> V:
        """Decode, and look at some of the values that were decoded earlier."""
        self.report(AT_ONCE)
        value: V = self.inner.decode(data)
        self.note(value)
        return value

    def note(self, value: V) -> None:
        """Look at this value, too."""
        data = self._encoded(value)
        if data == self._encoded(value):  # a codec of the caller's may write two texts of one value
            self._values.append(SharedValue(value, data))

    def report(self, most: int = MOST_VALUES) -> None:
        """Log, once for a resource, that a value was changed."""
        changed = self.changed(most)
        if changed and not self._is_reported:
            self._is_reported = True
            logger.warning("%s", changed[0])

    def changed(self, most: int = MOST_VALUES) -> list[str]:
        """What is wrong with each value that was changed. It is looked at no more."""
        problems: list[str] = []
        for _ in range(min(most, len(self._values))):
            shared = self._values.popleft()
            now = self._encoded(shared.value)
            if now == shared.data:
                self._values.append(shared)
                continue
            problems.append(
                f"{self._kind}: a caller changed a value that all callers share; it is "
                f"{shown(shared.value)} now. Do not change it: make a copy first, or declare the "
                f"resource with share=False"
            )
        return problems

    def _encoded(self, value: V) -> bytes | None:
        try:
            return self._plain.encode(value)
        except Exception:  # noqa: BLE001 (a changed value may be anything)
            return None
