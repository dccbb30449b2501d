"""Who hears of what: the news of a user on all of their connections, a game's to who watches it.

A connection that does not keep up is ended, not waited for: its client reconnects and asks (W9).
"""

import asyncio
from typing import Final

from stillfresh.waiting.backend.steps import Happened
from stillfresh.waiting.messages import GameStateNews, News

__all__ = ["Hub", "Listener"]

MAX_UNSENT: Final = 256
"""Messages that wait for one slow connection."""


class Listener:
    """One connection of one user."""

    def __init__(self, user_id: str) -> None:
        self.user_id = user_id
        self.watches: str | None = None
        self.is_lagging = asyncio.Event()
        self._unsent = asyncio.Queue[News](MAX_UNSENT)

    def tell(self, news: News) -> None:
        try:
            self._unsent.put_nowait(news)
        except asyncio.QueueFull:
            self.is_lagging.set()

    async def next(self) -> News:
        return await self._unsent.get()


class Hub:
    """The connections that are open."""

    def __init__(self) -> None:
        self._listeners = set[Listener]()

    def join(self, user_id: str) -> Listener:
        listener = Listener(user_id)
        self._listeners.add(listener)
        return listener

    def leave(self, listener: Listener) -> None:
        self._listeners.discard(listener)

    def publish(self, happened: Happened) -> None:
        """A turn's message before its state: the cache then knows that the turn came anew."""
        game = happened.game
        for user_id, news in happened.news:
            for listener in self._listeners:
                if listener.user_id == user_id:
                    listener.tell(news)
        for listener in self._listeners:
            if listener.watches == game.game_id:
                my_turn = game.actor == listener.user_id
                listener.tell(GameStateNews(game.game_id, my_turn, game.version))
