"""Answers that are sent again, found by the bytes of a request's head.

The answer to a request depends on its head and on the state of the cache. So the bytes of an answer
are sent again for the same head, before anything is parsed, while the app says that the answer is
still right. Nothing here knows what a page is.
"""

import asyncio
from collections.abc import Callable
from typing import Final, NamedTuple, TypeAlias

from stillfresh.bounded import BoundedDict

ConfirmRepeat: TypeAlias = Callable[[], bool]
"""Asked before an answer is sent again: True if the app would give the same answer now.

It changes something: with True, the answer is counted and logged as given once more."""
MOST_HEADS: Final = 2_048
"""Request heads whose answers are kept."""
LONGEST_KEPT_HEAD: Final = 2_048
LONGEST_ANSWER: Final = 65_536
"""Bytes; longer ones take the normal path."""
MOST_BYTES: Final = 16_777_216
"""Bytes of all answers: each may be a copy of its page, and outlive it."""


class KeptAnswer(NamedTuple):
    """All bytes of an answer, and what confirms that it is still right."""

    text: bytes
    confirm_repeat: ConfirmRepeat


class Hits(BoundedDict[bytes, KeptAnswer]):
    """The kept answers of one server, by request head; the oldest make room."""

    def __init__(self) -> None:
        super().__init__(MOST_HEADS, MOST_BYTES, lambda answer: len(answer.text))


class Recorder:
    """The transport of one answer. It records the bytes written after the app called `keep`."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._parts: list[bytes] = []
        self._confirm_repeat: ConfirmRepeat | None = None
        self.write: Callable[[bytes], None] = transport.write
        self.close = transport.close
        self.is_closing = transport.is_closing

    def keep(self, confirm_repeat: ConfirmRepeat) -> None:
        """The answer that follows may be sent again whenever `confirm_repeat()` says so."""
        self._confirm_repeat = confirm_repeat
        self.write = self._note

    def kept(self) -> KeptAnswer | None:
        """The whole answer, if it may be sent again."""
        if self._confirm_repeat is None or sum(map(len, self._parts)) > LONGEST_ANSWER:
            return None
        return KeptAnswer(b"".join(self._parts), self._confirm_repeat)

    def _note(self, data: bytes) -> None:
        self._parts.append(data)
        self._transport.write(data)


def is_one_head(data: bytes) -> bool:
    """True if these are the bytes of one whole GET or HEAD request, and nothing else."""
    is_read = data.startswith((b"GET ", b"HEAD "))
    return is_read and len(data) <= LONGEST_KEPT_HEAD and data.find(b"\r\n\r\n") == len(data) - 4
