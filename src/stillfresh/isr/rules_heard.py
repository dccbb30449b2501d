"""What was heard of pages that no route calls shareable: their answers alone say it (I13, I14).

Pure but for what it notes; the time is an argument. In one process's memory and bounded: whoever
makes up paths leaves nothing in the store. A render's word that a page is private stands a while,
whatever those are told who say who they are.
"""

from enum import Enum
from typing import Final

STANDS_FOR: Final = 30.0
"""Seconds."""


class Word(Enum):
    """What is known of a page."""

    NONE = "nothing"
    PRIVATE = "its render was not to be shared"
    STATED = "an answer stated freshness, and no privacy"


class Heard:
    """The last word on so many pages."""

    __slots__ = ("_most", "_private", "_stated")

    def __init__(self, most: int) -> None:
        self._most = most
        self._private: dict[str, float] = {}
        self._stated: dict[str, None] = {}

    def of(self, id_: str) -> Word:
        if id_ in self._private:
            return Word.PRIVATE
        return Word.STATED if id_ in self._stated else Word.NONE

    def rendered(self, id_: str, now: float, *, is_shared: bool) -> None:
        """What a render of it came to."""
        self._stated.pop(id_, None)
        self._private.pop(id_, None)
        if not is_shared:
            self._private[id_] = now
            _shrink(self._private, self._most)

    def stated(self, id_: str, now: float, *, is_personal: bool) -> None:
        """An answer to one visitor says that it may be shared; `is_personal`: it knew who asks."""
        since = now - self._private.get(id_, float("-inf"))
        if not is_personal or since >= STANDS_FOR:
            self._private.pop(id_, None)
            self._stated[id_] = None
            _shrink(self._stated, self._most)


def _shrink(known: dict[str, float] | dict[str, None], most: int) -> None:
    if len(known) > most:
        del known[next(iter(known))]
