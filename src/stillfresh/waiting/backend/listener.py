"""One connection of one user: the user's news, and the states of the game that it watches (W12).

A connection that does not keep up is ended, not waited for: its client reconnects and asks (W9).
"""

import asyncio
from typing import Final

from stillfresh.waiting.backend.steps import Happened
from stillfresh.waiting.messages import GameStateNews, News

MAX_UNSENT: Final = 256
"""Messages that wait for one slow connection."""


class Listener:
    """Told of every step by `hear`; what concerns it waits to be sent."""

    def __init__(self, user_id: str) -> None:
        self.user_id = user_id
        self.watches: str | None = None
        self.is_lagging = asyncio.Event()
        self._unsent = asyncio.Queue[News](MAX_UNSENT)

    def hear(self, happened: Happened) -> None:
        """A turn's message before its state: the cache then knows that the turn came anew."""
        for user_id, news in happened.news:
            if user_id == self.user_id:
                self.tell(news)
        game = happened.game
        if game.game_id == self.watches:
            self.tell(GameStateNews(game.game_id, game.actor == self.user_id, game.version))

    def tell(self, news: News) -> None:
        try:
            self._unsent.put_nowait(news)
        except asyncio.QueueFull:
            self.is_lagging.set()

    async def next(self) -> News:
        return await self._unsent.get()
