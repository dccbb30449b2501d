"""Topics and comments as the page is given them: from the feed's file, at once (G8; seed 001)."""

import secrets
import time
from collections.abc import Callable
from typing import Any, Final

from stillfresh.feed import Comment, CommentsAnswer, Feed, FeedEngine
from stillfresh.feed.model import Dated

DAYS: Final = 7


class Topics:
    """`tell` hears of each revalidation that brought something new."""

    def __init__(self, engine: FeedEngine, tell: Callable[[], None]) -> None:
        self._engine = engine
        self._tell = tell
        self.news = 0
        """Counts up with each: a page that shows an older number reads again."""
        engine.on_updated(lambda _: self._hear())

    async def topics(self) -> dict[str, Any]:
        feed: Feed = await self._engine.get_all(days_back=DAYS)
        rows = [
            {"id": it.topic_uuid, "title": it.title, "author": it.author, "at": it.created_at}
            for it in feed.topics
        ]
        return {"topics": rows, **_freshness(feed)}

    async def comments(self, uuid: str) -> dict[str, Any]:
        answer: CommentsAnswer = await self._engine.get_comments(uuid)
        rows = [
            {"id": it.comment_uuid, "author": it.author, "body": it.body, "at": it.created_at}
            for it in answer.comments
        ]
        return {"comments": rows, **_freshness(answer)}

    async def say(self, uuid: str, body: str) -> dict[str, Any]:
        """In the file at once, then upstream; taken back if upstream does not take it."""
        comment = Comment(secrets.token_hex(8), uuid, "a visitor", int(time.time()), body)
        await self._engine.add_comment(uuid, comment)
        return await self.comments(uuid)

    def _hear(self) -> None:
        self.news += 1
        self._tell()


def _freshness(answer: Dated) -> dict[str, Any]:
    error = answer.error
    return {
        "verdict": str(answer.verdict),
        "age": round(answer.age, 1),
        "error": None if error is None else str(error),
    }
