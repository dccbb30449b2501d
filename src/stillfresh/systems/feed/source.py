"""The slow network behind a feed, and how one key is fetched from it.

A cold list costs one slow lookup, not one for each day: days are looked up side by side.
"""

import asyncio
from collections.abc import Sequence
from datetime import date
from typing import Final, Protocol

from stillfresh.bounded import sliced
from stillfresh.engine import RetryAfter
from stillfresh.errors import LoadFailed, StillfreshError, error_text
from stillfresh.systems.feed.model import Comment, Index, Topic, comments_key, index_of, subject
from stillfresh.systems.feed.rules import (
    Fetched,
    buckets,
    checked_comments,
    checked_topic,
    checked_topics,
    covered,
    each_of,
)

SLICE: Final = 250
"""Topics, or comments, that are checked in one turn of the loop."""


class PartlyFailed(StillfreshError):
    """Some days failed; the others are stored without a meta row."""

    def __init__(self, fetched: Fetched) -> None:
        super().__init__(fetched.failed)
        self.fetched = fetched


def part_of(error: BaseException | None) -> Fetched | None:
    """The days that succeeded, if only some failed."""
    while error is not None:
        if isinstance(error, PartlyFailed):
            return error.fetched
        error = error.__cause__
    return None


class FeedSource(Protocol):
    """The upstream of a feed. Every method may be slow, and raises if it fails."""

    async def day_index(self, day: date, category: str | None) -> Sequence[Topic]:
        """Return all topics of one day (UTC) without bodies; of one category, or of all if None.

        Topics that it leaves out count as deleted. `category` is case-folded: compare it
        without regard to case.
        """

    async def topic(self, uuid: str) -> Topic | None:
        """Return the whole topic, or None."""

    async def comments(self, uuid: str) -> Sequence[Comment]:
        """Return all comments of a topic."""

    async def create_topic(self, topic: Topic) -> object:
        """Publish a topic. What it returns is ignored."""

    async def delete_topic(self, uuid: str) -> object:
        """Delete a topic."""

    async def add_comment(self, topic_uuid: str, comment: Comment) -> object:
        """Publish a comment."""


async def fetch(source: FeedSource, key: str, *, now: float, lookups: int) -> Fetched:
    """The upstream's answer for this key; raises if there is none at all."""
    if (index := index_of(key)) is not None:
        return await _fetch_list(source, index, now=now, lookups=lookups)
    uuid = subject(key)
    if key == comments_key(uuid):
        slices = sliced(each_of(await source.comments(uuid), Comment), SLICE)
        comments = [
            comment async for slice_ in slices for comment in checked_comments(uuid, slice_)
        ]
        return Fetched(comments=tuple(comments))
    response = await source.topic(uuid)
    if response is None:
        return Fetched()
    topic = checked_topic(response)
    if topic.topic_uuid != uuid:
        raise LoadFailed(f"asked for topic {uuid!r}, got {topic.topic_uuid!r}")
    return Fetched(topics=(topic,))


async def _fetch_list(source: FeedSource, index: Index, *, now: float, lookups: int) -> Fetched:
    """Look up all days side by side. Some may fail; it raises if all do."""
    days = buckets(index.days, now)
    places = asyncio.Semaphore(lookups)

    async def look_up(day: date) -> Sequence[Topic]:
        async with places:
            slices = sliced(each_of(await source.day_index(day, index.category), Topic), SLICE)
            return [topic async for slice_ in slices for topic in checked_topics(slice_)]

    answers = await asyncio.gather(*map(look_up, days), return_exceptions=True)
    errors = [answer for answer in answers if isinstance(answer, BaseException)]
    pauses = [error for error in errors if isinstance(error, RetryAfter)]
    longest = max(pauses, key=lambda error: error.seconds, default=None)
    if len(errors) == len(days):
        raise longest or errors[0]
    topics = [
        topic for answer in answers if not isinstance(answer, BaseException) for topic in answer
    ]
    if not errors:
        return Fetched(tuple(topics), covers=covered(days))
    failed = f"{len(errors)} of {len(days)} days failed; the first: {error_text(errors[0])}"
    pause = None if longest is None else longest.seconds
    return Fetched(tuple(topics), failed=failed, pause=pause)
