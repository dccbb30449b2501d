"""T1: the Longest-Waiting cache on a lossy connection: games that come and go, moves that fail."""

import asyncio
from collections import deque
from collections.abc import Callable

from stillfresh.systems.waiting import WaitingCache, rules
from stillfresh.testing import Process, Promise, World

GAMES = ("A", "B", "C", "D", "E", "F", "G")
LIMIT = 5


class Backend:
    """Whose turn it is, and who waits longest."""

    def __init__(self) -> None:
        self.ours = list(GAMES[:4])
        self.versions = dict.fromkeys(GAMES, 1)

    def came(self, game: str) -> None:
        self.ours.append(game)
        self.versions[game] += 1

    def played(self, game: str) -> None:
        self.ours.remove(game)
        self.versions[game] += 1


class Player:
    """One at the other end of a socket, which gives out messages in order, or breaks."""

    def __init__(self, process: Process, backend: Backend) -> None:
        self._process = process
        self._backend = backend
        self._wire: deque[Callable[[], None]] = deque()
        self._moves: deque[tuple[str, int]] = deque()
        self._fetches = 0
        self._is_connected = True
        self._screen = GAMES[0]
        self.cache = WaitingCache(self._fetch)

    def check(self) -> str | None:
        """W13: at rest, what is shown is ours to play, and in the backend's order."""
        if self._fetches > 1:
            return f"{self._fetches} refetches at once"
        if self._wire or self._moves or not self._is_connected or self.cache.state.is_busy:
            return None
        ours, games = self._backend.ours, self.cache.navigation(self._screen).games
        if not set(games) <= set(ours):
            return f"shown are {games}, ours are {ours}"
        places = [ours.index(str(game)) for game in games]
        if len(games) >= 3 and places != sorted(places):
            return f"shown are {games}, in the backend's order {ours}"
        return None

    async def play(self) -> None:
        world = self._process.world
        self._look(self._screen)
        self.cache.start()
        for _ in world.steps(40):
            await asyncio.sleep(world.dice.choice([0, 0.01, 0.1, 1.0]))
            self._step(world)
            if world.dice.random() < 0.5:
                await self._deliver()
        while not self._is_connected or self._wire or self._moves:
            await self._deliver()
            await asyncio.sleep(0.05)
        async with asyncio.timeout(200):
            while self.cache.state.is_busy:
                await self.cache.settled()
                await asyncio.sleep(0.05)

    async def _fetch(self) -> list[str]:
        dice = self._process.world.dice
        self._fetches += 1
        try:
            await asyncio.sleep(dice.random() * 0.3)
            answer = self._backend.ours[:LIMIT]
            await asyncio.sleep(dice.choice([0.01, 0.3, 2.0]) * dice.random())
            if dice.random() < self._process.failure_rate:
                raise ConnectionError("the backend failed")
            self._note(f"is answered {answer}")
            return answer
        finally:
            self._fetches -= 1

    def _step(self, world: World) -> None:
        game, backend = world.dice.choice(GAMES), self._backend
        match world.dice.randrange(10):
            case 0 | 1:
                self._look(game)
            case 2 | 3 | 4 if self._is_connected:
                self._move()
            case 5 | 6 if game not in backend.ours:
                backend.came(game)
                self._note(f"{game} becomes ours, version {backend.versions[game]}")
                self._tell_turn(game, backend.versions[game])
            case 7 if world.dice.random() < 0.3 and game in backend.ours:
                self._note(f"{game} ends")
                backend.ours.remove(game)
                self._tell(self.cache.invalidated)
            case 8 if world.dice.random() < 0.3:
                self._is_connected = not self._is_connected
                self._note("connected" if self._is_connected else "disconnected")
                self._wire.clear()
                self._moves.clear()
                if self._is_connected:
                    self._rejoin()
            case _:
                pass

    def _move(self) -> None:
        """In the game on screen, as it is shown there."""
        screen = self.cache.state.screen
        if screen is None or not screen.my_turn:
            return
        made_for = rules.version_on_screen(screen, self._screen)
        assert made_for is not None
        self._note(f"plays {self._screen} at {made_for}")
        self.cache.move_sent(self._screen)
        self._moves.append((self._screen, made_for))

    def _note(self, text: str) -> None:
        self._process.world.note(self._process, text)

    def _look(self, game: str) -> None:
        self._note(f"looks at {game}; ours are {self._backend.ours}")
        self._screen = game
        self.cache.opened(game, game in self._backend.ours, self._backend.versions[game])

    def _rejoin(self) -> None:
        self._look(self._screen)
        self.cache.reconnected()

    def _tell(self, message: Callable[[], None]) -> None:
        if self._is_connected:
            self._wire.append(message)

    def _tell_turn(self, game: str, version: int) -> None:
        self._tell(lambda: self.cache.your_turn(game, version))
        if game == self._screen:
            self._tell(lambda: self.cache.game_state(game, my_turn=True, version=version))

    async def _deliver(self) -> None:
        """The backend hears of a move, we of its news; a broken connection comes back."""
        await asyncio.sleep(self._process.world.dice.random() * 0.2)
        if not self._is_connected:
            self._is_connected = True
            self._rejoin()
        if self._moves:
            self._arrived(*self._moves.popleft())
        while self._wire:
            self._wire.popleft()()

    def _arrived(self, game: str, made_for: int) -> None:
        backend = self._backend
        if game not in backend.ours or backend.versions[game] != made_for:
            self._tell(lambda: self.cache.move_failed(game, made_for))
            return
        backend.played(game)
        version = backend.versions[game]
        self._tell(lambda: self.cache.game_state(game, my_turn=False, version=version))


async def of_games(world: World) -> None:
    """W1-W11: the real driver and rules, on a connection that is lost and comes back."""

    async def app(process: Process) -> None:
        player = Player(process, Backend())
        process.at_close(player.cache.close)

        def check() -> str | None:
            return player.check() if process.is_alive else None

        world.always(Promise.FRESH, check)
        await player.play()

    world.launch(app, 2)
