"""News as text, written once for all who look at it (G4).

A view is encoded when the first viewer needs it and kept while it is the newest; `age` is added by
who sends. What is kept is bounded in number and in size.
"""

import logging
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

from stillfresh.coordinator import HubUpdate
from stillfresh.engine import Answer
from stillfresh.web.messages import Absent, Error, Update, encode

MOST: Final = 10_000
MOST_CHARACTERS: Final = 16_000_000
SAME_AGE: Final = 0.05
"""An age this much older is not written anew."""
MOST_TOGETHER: Final = 32
LARGEST_FRAME: Final = 256_000
"""Characters of one frame, unless a single view is larger."""
FAILED: Final = "the last refresh failed; it is tried again"
"""Why is for the operator: an upstream's error may name what visitors should not see."""

logger = logging.getLogger(__name__)


class Made:
    """One view as text."""

    __slots__ = ("answer", "at", "head", "text")

    def __init__(self, answer: Answer[Any], head: str) -> None:
        self.answer = answer
        self.head = head
        self.text = ""
        self.at = float("-inf")

    def aged(self, now: float) -> str:
        """Whole, with the age at this moment."""
        if not 0 <= now - self.at < SAME_AGE:
            self.at = now
            self.text = f'{self.head},"age":{self.answer.age:.3f}}}'
        return self.text


class Together:
    """What one viewer was sent at once, as frames: the next one is often sent the same."""

    __slots__ = ("answers", "at", "frames")

    def __init__(self, answers: list[Answer[Any]], frames: list[str], at: float) -> None:
        self.answers = answers
        self.frames = frames
        self.at = at


class Frames:
    """What was encoded of late."""

    def __init__(self) -> None:
        self._made: dict[tuple[str, str], Made] = {}
        self._characters = 0
        self._together: dict[tuple[object, ...], Together] = {}

    def of(self, news: Sequence[HubUpdate], now: float, *, together: bool) -> Sequence[str]:
        """The news as frames; the same news, at the same moment, are written once for all."""
        answers = [it.answer for it in news]
        key = (together, *map(id, answers))
        kept = self._together.get(key)
        if kept is not None and 0 <= now - kept.at < SAME_AGE:
            return kept.frames
        frames = list(batched([self.text(it, now) for it in news], together=together))
        self._together.pop(key, None)
        self._together[key] = Together(answers, frames, now)  # whose ids are taken while it is kept
        if len(self._together) > MOST_TOGETHER:
            del self._together[next(iter(self._together))]
        return frames

    def text(self, news: HubUpdate, now: float) -> str:
        """A message: `update`, `absent` or, where there is nothing to show, `error`."""
        answer = news.answer
        if not answer.found:
            return _without_view(news)
        made = self._made.get((news.kind, news.id))
        if made is None or not _is_same(made.answer, answer):
            made = self._make(news)
        return made.aged(now) if made is not None else _unshowable(news)

    def _make(self, news: HubUpdate) -> Made | None:
        key = (news.kind, news.id)
        if (old := self._made.pop(key, None)) is not None:
            self._characters -= len(old.head)
        if (head := _head(news)) is None:
            return None
        made = self._made[key] = Made(news.answer, head)
        self._characters += len(head)
        while len(self._made) > 1 and (
            len(self._made) > MOST or self._characters > MOST_CHARACTERS
        ):
            self._characters -= len(self._made.pop(next(iter(self._made))).head)
        return made


def batched(texts: Iterable[str], *, together: bool) -> Iterator[str]:
    """As frames: one message each, or as many as fit in an array."""
    if not together:
        yield from texts
        return
    frame: list[str] = []
    size = 0
    for text in texts:
        if frame and size + len(text) > LARGEST_FRAME:
            yield f"[{','.join(frame)}]"
            frame, size = [], 0
        frame.append(text)
        size += len(text)
    if frame:
        yield f"[{','.join(frame)}]"


def _head(news: HubUpdate) -> str | None:
    answer = news.answer
    error = None if answer.error is None else FAILED
    message = Update(
        news.kind, news.id, answer.value, answer.fetched_at, answer.verdict.value, error
    )
    try:
        return encode(message)[:-1].decode()
    except (TypeError, ValueError, RecursionError) as exc:
        logger.warning("%s %r cannot be shown: its value is no JSON: %s", news.kind, news.id, exc)
        return None


def _without_view(news: HubUpdate) -> str:
    if news.answer.error is not None:
        return encode(Error("load_failed", FAILED, news.kind, news.id)).decode()
    return encode(Absent(news.kind, news.id, news.answer.fetched_at)).decode()


def _unshowable(news: HubUpdate) -> str:
    return encode(Error("load_failed", "its value is no JSON", news.kind, news.id)).decode()


def _is_same(a: Answer[Any], b: Answer[Any]) -> bool:
    """Not by comparing values: the same copy is the same object, wherever it was served from."""
    return a is b or (
        a.value is b.value
        and a.fetched_at == b.fetched_at
        and a.verdict is b.verdict
        and (a.error is None) is (b.error is None)
    )
