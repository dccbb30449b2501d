"""The messages that wait for one viewer, as frames: bounded, whatever the viewer does.

Answers come first, in their order; then the newest of each of an application's notices, the last
figures, and the newest view of each id. A view is encoded when the first viewer needs it; viewers
that get the same at one moment share one frame.
"""

import asyncio
import logging
from collections.abc import Hashable, Iterable
from itertools import islice
from typing import Any, Final, Literal, TypeAlias

from stillfresh.bounded import BoundedDict
from stillfresh.engine import Answer
from stillfresh.gateway.live.connection import Connection
from stillfresh.gateway.live.hub import Viewed
from stillfresh.gateway.live.messages import AbsentMessage, ErrorMessage, UpdateMessage, encode
from stillfresh.http import initial_age_of

Queue: TypeAlias = Literal["replies", "beats", "notices", "figures"]

MOST: Final[dict[Queue, int]] = {"replies": 1_000, "beats": 100, "notices": 100, "figures": 1}
"""The most in each queue: welcomes and errors; pings and pongs; notices; statistics."""
MOST_FRAMES: Final = 32
"""Frames kept for the next viewer that gets the same."""
FULL_FRAME: Final = 256_000
"""Characters after which a frame is full."""
SAME_AGE: Final = 0.05
"""Seconds; a smaller difference of age is not written again."""
FAILED: Final = "the last refresh failed; it is tried again"
"""The error itself is for operators: it may name internals of the upstream."""

logger = logging.getLogger(__name__)


class Frames:
    """Recently encoded frames, for all viewers."""

    def __init__(self) -> None:
        self._frames: BoundedDict[tuple[object, ...], tuple[str, int, float]]
        self._frames = BoundedDict(MOST_FRAMES)
        self._shared_moment: dict[Viewed, Answer[Any]] = {}
        self._shared_frame = ("", 0, 0.0)
        """The frame of the moment, how many views it has, and when it was written."""

    def of(
        self, waiting: dict[Viewed, Answer[Any]], now: float, *, is_shared: bool = False
    ) -> tuple[str, int]:
        """An array of as many as fit, and how many that are.

        `is_shared`: it is not changed, so that its frame is found without looking into it.
        """
        if (
            is_shared
            and self._shared_moment is waiting
            and 0 <= now - self._shared_frame[2] < SAME_AGE
        ):
            return self._shared_frame[:2]
        key = (*waiting, *waiting.values())
        frame = self._frames.get(key)
        if frame is None or not 0 <= now - frame[2] < SAME_AGE:
            texts = (text_of(viewed, answer, now) for viewed, answer in waiting.items())
            frame = (*array_of(texts), now)
            self._frames.note(key, frame)
        if is_shared:
            self._shared_moment = waiting
            self._shared_frame = frame
        return frame[:2]


def array_of(texts: Iterable[str]) -> tuple[str, int]:
    """A frame of as many as fit, and how many those are."""
    taken: list[str] = []
    size = 0
    for text in texts:
        taken.append(text)
        size += len(text)
        if size >= FULL_FRAME:
            break
    return f"[{','.join(taken)}]", len(taken)


class Outbox:
    """Messages that wait for one viewer; the session sends them."""

    def __init__(self, frames: Frames, *, batches_frames: bool) -> None:
        self.wake = asyncio.Event()
        self.is_ending = False
        """True if only answers are still sent."""
        self._frames = frames
        self._batches_frames = batches_frames
        """True if several messages go into one frame, as an array."""
        self._queues: dict[Queue, dict[Hashable, str]] = {queue: {} for queue in MOST}
        """In the order of sending."""

    def put(self, queue: Queue, message: object, key: Hashable = None) -> bool:
        """Queue a message; of one key, only the newest is sent.

        False if too many wait: it is lost.
        """
        waiting = self._queues[queue]
        if key is not None:
            waiting.pop(key, None)
        if len(waiting) >= MOST[queue]:
            return False
        text = message if isinstance(message, str) else encode(message).decode()
        waiting[object() if key is None else key] = text
        self.wake.set()
        return True

    def forget_notices(self) -> None:
        """The viewer has changed: drop notices for the viewer before."""
        self._queues["notices"].clear()

    def frame(self, connection: Connection, now: float) -> str | None:
        """Take the next frame; None: nothing waits. News never hold up an answer, or the end.

        What is not taken yet can still be dropped, when the viewer becomes somebody else.
        """
        if any(self._queues.values()):
            return array_of(iter(self._answer, None))[0] if self._batches_frames else self._answer()
        waiting = connection.waiting
        if self.is_ending or not connection.is_open or not waiting:
            return None
        if self._batches_frames:
            text, count = self._frames.of(waiting, now, is_shared=connection.is_shared)
        else:
            [(viewed, answer)] = islice(waiting.items(), 1)
            text = text_of(viewed, answer, now)
            count = 1
        connection.mark_sent(count)
        return text

    def _answer(self) -> str | None:
        """The next message that is not news."""
        for waiting in self._queues.values():
            if waiting:
                return waiting.pop(next(iter(waiting)))
        return None


class ViewText:
    """The newest view of an id as text, shared by all that look at it."""

    def __init__(self, viewed: Viewed, answer: Answer[Any]) -> None:
        error = None if answer.error is None else FAILED
        verdict = answer.verdict.value
        kind = viewed.kind.name
        message = UpdateMessage(kind, viewed.id, answer.value, answer.fetched_at, verdict, error)
        self.answer = answer
        self.head = encode(message)[:-1].decode()
        self.text = ""
        self.at = float("-inf")

    def aged(self, now: float) -> str:
        """The whole message, with the age at this moment."""
        if not 0 <= now - self.at < SAME_AGE:
            self.at = now
            age = self.answer.age + initial_age_of(self.answer.value)
            self.text = f'{self.head},"age":{age:.3f}}}'
        return self.text


def text_of(viewed: Viewed, answer: Answer[Any], now: float) -> str:
    """A message: `update`, `absent` or, where there is nothing to show, `error`."""
    if not answer.found:
        if answer.error is not None:
            return _error_text(viewed, FAILED)
        return encode(AbsentMessage(viewed.kind.name, viewed.id, answer.fetched_at)).decode()
    if viewed.text is None or not _is_same(viewed.text.answer, answer):
        try:
            viewed.text = ViewText(viewed, answer)
        except (TypeError, ValueError, RecursionError) as exc:
            logger.warning(
                "%s %r: its value cannot be written as JSON: %s", viewed.kind.name, viewed.id, exc
            )
            return _error_text(viewed, "its value cannot be written as JSON")
    return viewed.text.aged(now)


def _error_text(viewed: Viewed, why: str) -> str:
    return encode(ErrorMessage("load_failed", why, viewed.kind.name, viewed.id)).decode()


def _is_same(a: Answer[Any], b: Answer[Any]) -> bool:
    """True for the same copy, which is the same object; values are not compared."""
    return a is b or (
        a.value is b.value
        and a.fetched_at == b.fetched_at
        and a.verdict is b.verdict
        and (a.error is None) is (b.error is None)
    )
