"""W16: a client that forwards every state of every game, through random histories."""

import asyncio
import random
from collections import deque
from collections.abc import Callable

from stillfresh.systems.waiting import WaitingCache
from tests.kit.waiting import Backend

GAMES = ("chess", "go", "poker", "dice", "hex", "uno")
HISTORIES = 300
STEPS = 40
LONGEST_REST = 500
"""Rounds until everything must have arrived."""


async def no_pause(_seconds: float) -> None:
    """A retry comes with the next round."""
    await asyncio.sleep(0)


class Table:
    """A backend with six games, and a player whose client forwards all that it receives.

    Messages arrive in order, and moves too. Everything else may overtake everything else.
    """

    def __init__(self, seed: int) -> None:
        self._dice = random.Random(seed)
        self._backend = Backend()
        self._backend.slow = True
        self._versions = dict.fromkeys(GAMES, 1)
        self._messages = deque[Callable[[], None]]()
        self._moves = deque[tuple[str, int]]()
        self._answer: list[str] | None = None
        self._screen = GAMES[0]
        self.ours = list(GAMES[: self._dice.randint(2, len(GAMES))])
        self.cache = WaitingCache(self._backend.fetch, sleep=no_pause)

    async def play(self) -> None:
        """A random history, and then the rest of what is under way."""
        self.cache.start()
        self._open_game()
        steps = [
            self._open_game,
            self._send_move,
            self._receive_move,
            self._opponent_moves,
            self._deliver,
            self._answer_refetch,
        ]
        for _ in range(STEPS):
            self._dice.choice(steps)()
            await asyncio.sleep(0)
        await self.rest()

    async def rest(self) -> None:
        """Let everything arrive."""
        for _ in range(LONGEST_REST):
            if not (self._moves or self._messages or self.cache.navigation().pending):
                break
            self._receive_move()
            self._deliver()
            self._answer_refetch()
            await asyncio.sleep(0)

    def faults(self) -> list[str]:
        """What is wrong now that nothing is under way."""
        state = self.cache.state
        if state.is_busy:
            return ["never at rest"]
        faults = [f"{game} is not ours" for game in state.pool if game not in self.ours]
        if state.pending:
            faults.append(f"unconfirmed: {state.pending}")
        if state.is_complete_from_server and set(state.pool) != set(self.ours):
            faults.append(f"complete, but {state.pool} and not {self.ours}")
        if len(state.pool) > 2 and not faults:
            expected = [game for game in self.ours if game in state.pool]
            if list(state.pool) != expected:
                faults.append(f"in the order {state.pool}, not {expected}")
        return faults

    def _open_game(self) -> None:
        self._screen = self._dice.choice(GAMES)
        version = self._versions[self._screen]
        self.cache.opened(self._screen, self._screen in self.ours, version)

    def _send_move(self) -> None:
        screen = self.cache.state.screen
        assert screen is not None
        if screen.my_turn:
            version = screen.opened_at if screen.version is None else screen.version
            assert version is not None
            self.cache.move_sent(self._screen)
            self._moves.append((self._screen, version))

    def _receive_move(self) -> None:
        """The backend makes the move, which may leave the turn with the player, or refuses it."""
        if not self._moves:
            return
        game, version = self._moves.popleft()
        if game not in self.ours or version != self._versions[game]:
            self._messages.append(lambda: self.cache.move_failed(game, version))
            return
        self._versions[game] += 1
        goes_on = self._dice.random() < 0.5
        if not goes_on:
            self.ours.remove(game)
        self._send_state(game)

    def _opponent_moves(self) -> None:
        theirs = [game for game in GAMES if game not in self.ours]
        if not theirs:
            return
        game = self._dice.choice(theirs)
        self._versions[game] += 1
        self.ours.append(game)
        version = self._versions[game]
        is_state_first = self._dice.random() < 0.5
        if is_state_first:
            self._send_state(game)
        self._messages.append(lambda: self.cache.your_turn(game, version))
        if not is_state_first:
            self._send_state(game)

    def _send_state(self, game: str) -> None:
        """To a client that passes every state on, whichever game is on screen."""
        my_turn = game in self.ours
        version = self._versions[game]
        self._messages.append(lambda: self.cache.game_state(game, my_turn, version))

    def _deliver(self) -> None:
        if self._messages:
            self._messages.popleft()()

    def _answer_refetch(self) -> None:
        """First the backend reads its list; the answer arrives later."""
        if not self._backend.in_flight:
            return
        if self._answer is None:
            self._answer = self.ours[:5]
        else:
            self._backend.answer(*self._answer)
            self._answer = None


class TestW16Forwarded:
    """W16: a state of any game confirms the player's move in it."""

    async def test_every_random_history_ends_with_the_games_of_the_backend(self) -> None:
        """At rest, and after one more refetch, which shows all that the backend names."""
        wrong = dict[int, list[str]]()
        for seed in range(HISTORIES):
            table = Table(seed)
            async with table.cache:
                await table.play()
                faults = table.faults()
                table.cache.invalidated()
                await table.rest()
                if list(table.cache.state.pool) != table.ours[:5]:
                    faults.append(f"{table.cache.state.pool} and not {table.ours[:5]}")
            if faults:
                wrong[seed] = faults
        assert wrong == {}, f"{len(wrong)} of {HISTORIES} histories ended wrong"
