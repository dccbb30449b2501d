"""When to ask a failing upstream again: soon, since somebody is playing with its switch (G8).

Without this, failures double the pause up to a minute: right for an upstream that nobody switches.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from datetime import date
from typing import TypeVar

from stillfresh.engine import RetryAfter
from stillfresh.errors import StillfreshError
from stillfresh.feed import Comment, Topic
from stillfresh.feed.source import FeedSource

T = TypeVar("T")


async def soon(asked: Awaitable[T], pause: float) -> T:
    try:
        return await asked
    except StillfreshError as exc:
        raise RetryAfter(pause, str(exc)) from exc


def naps(longest: float) -> Callable[[float], Awaitable[None]]:
    """Sleeps no longer than that, however long it is told to."""

    async def nap(seconds: float) -> None:
        await asyncio.sleep(min(seconds, longest))

    return nap


class Patient:
    """A `FeedSource` whose lookups are tried again after the same pause each time."""

    def __init__(self, source: FeedSource, pause: float) -> None:
        self._source = source
        self._pause = pause
        self.create_topic = source.create_topic
        self.delete_topic = source.delete_topic
        self.add_comment = source.add_comment

    async def day_index(self, day: date, category: str | None) -> Sequence[Topic]:
        return await soon(self._source.day_index(day, category), self._pause)

    async def topic(self, uuid: str) -> Topic | None:
        return await soon(self._source.topic(uuid), self._pause)

    async def comments(self, uuid: str) -> Sequence[Comment]:
        return await soon(self._source.comments(uuid), self._pause)
