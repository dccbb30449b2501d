"""An evening of games: watch "next game" stay right while hardly anybody is asked.

Run it: `make examples`. A real service's tables in SQLite, its events straight into the cache, no
network. Ann plays one game again and again (nobody is asked), then two by turns (as often as they
come back), then the service fails for a moment.
"""

import asyncio
import logging
import tempfile
from collections.abc import Iterable
from pathlib import Path

from game_service import Games, Player
from game_service.steps import Happened
from stillfresh.systems.waiting import WaitingCache
from stillfresh.systems.waiting.messages import YourTurnNews

ANN = Player("ann")
BEN = Player("ben")
BOT = Player("bot", is_human=False)


class Evening:
    """Ann's device: the cache, fed by what the service tells her."""

    def __init__(self, games: Games) -> None:
        self.games = games
        self.asked = 0
        self.is_down = False
        self.waiting = WaitingCache(self.fetch)
        games.on_happened(self.hear)

    async def fetch(self) -> Iterable[str]:
        self.asked += 1
        if self.is_down:
            raise ConnectionError("the service is down")
        return self.games.waiting_longest("ann")

    def hear(self, happened: Happened) -> None:
        for user, news in happened.news:
            if user == "ann" and isinstance(news, YourTurnNews):
                self.waiting.your_turn(news.game_id, news.version)
            elif user == "ann":
                self.waiting.invalidated()

    async def play(self, game: str, opponent: str) -> None:
        """Ann moves, and her opponent answers."""
        self.waiting.opened(game, my_turn=True, version=self.games.view(game).version)
        self.waiting.move_sent(game)
        await self.games.move(game, "ann")
        await self.games.move(game, opponent)
        await self.waiting.settled()

    def show(self, title: str) -> None:
        navigation = self.waiting.navigation()
        games = " ".join(str(game) for game in navigation.games)
        proof = "pending" if navigation.pending else navigation.proof
        print(f"{title:36} next: {games:22} {proof:10} asked so far: {self.asked}")


async def main(games: Games) -> None:
    for name in ("chess", "go", "poker"):
        await games.start(name, [ANN, BEN])
    await games.start("dice", [ANN, BOT])
    evening = Evening(games)
    async with evening.waiting:
        evening.waiting.start()
        await evening.waiting.settled()
        evening.show("four games, dice against a bot")
        for times in (1, 9, 90):
            for _ in range(times):
                await evening.play("dice", "bot")
            evening.show(f"dice, {times} more turns")
        for _ in range(3):
            await evening.play("chess", "ben")
            await evening.play("go", "ben")
        evening.show("chess and go by turns, three times")
        evening.is_down = True
        await games.end("poker")
        await evening.waiting.settled()
        evening.show("poker ends, but the service is down")
        evening.is_down = False
        evening.waiting.reconnected()
        await evening.waiting.settled()
        evening.show("and is there again")


async def run() -> None:
    with tempfile.TemporaryDirectory() as folder:
        async with Games(Path(folder) / "games.db") as games:
            await main(games)


if __name__ == "__main__":
    logging.getLogger("stillfresh").setLevel(logging.ERROR)  # the example itself says what failed
    asyncio.run(run())
