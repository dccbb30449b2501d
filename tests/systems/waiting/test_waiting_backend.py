"""The service: its order, its index, its events, its endpoint (W12)."""

import asyncio
import gc
import os
import random
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import apsw
import pytest

from game_service import GameError, Games, GameView, Player
from game_service.app import MAX_UNSENT, GameListener
from game_service.steps import WAITING_LONGEST, Happened
from stillfresh import ConfigError, NotOpen, StoreError
from stillfresh.systems.waiting.messages import InvalidatedNews, YourTurnNews
from stillfresh.testing import ManualClock
from tests.kit.servers.games import Served, served

ME, YOU, BOT = Player("me"), Player("you"), Player("bot", is_human=False)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "games.db"


@pytest.fixture
def connections() -> Iterator[list[apsw.Connection]]:
    """Every connection that is opened from now on."""
    opened: list[apsw.Connection] = []
    apsw.connection_hooks.append(opened.append)
    yield opened
    apsw.connection_hooks.remove(opened.append)


@pytest.fixture
async def games(
    path: Path, clock: ManualClock, connections: list[apsw.Connection]
) -> AsyncIterator[Games]:
    assert connections == []
    async with Games(path, clock=clock) as games:
        yield games


def writer_of(connections: list[apsw.Connection]) -> apsw.Connection:
    """The connection of the games that may write."""
    (writer,) = (each for each in connections if not each.pragma("query_only"))
    return writer


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(1_000)


def heard(games: Games) -> list[Happened]:
    told: list[Happened] = []
    games.on_happened(told.append)
    return told


def kinds(told: list[Happened]) -> list[tuple[str, type]]:
    return [(user, type(news)) for happened in told for user, news in happened.news]


class TestW12Order:
    """W12: humans first, then longest waiting, then id; at most five; ours only."""

    async def test_waiting_games_are_ordered_by_humans_then_time_then_id(
        self, games: Games, clock: ManualClock
    ) -> None:
        """Each criterion decides where those before it do not."""
        await games.start("z-bots", [ME, BOT])
        clock.advance(1)
        await games.start("y-late", [ME, YOU])
        await games.start("x-late", [ME, YOU, BOT])
        clock.advance(-0.5)
        await games.start("w-early", [ME, YOU])
        assert games.waiting_longest("me") == ["w-early", "x-late", "y-late", "z-bots"]

    async def test_at_most_five_waiting_games_are_listed(self, games: Games) -> None:
        """Those that wait longest."""
        for name in "gfedcba":
            await games.start(name, [ME, YOU])
        assert games.waiting_longest("me") == list("abcde")

    async def test_games_that_do_not_wait_for_the_user_are_left_out(self, games: Games) -> None:
        """Another's turn, a game that is over, one that we left; and a bot has no list."""
        await games.start("theirs", [YOU, ME])
        await games.start("over", [ME, YOU])
        await games.start("left", [ME, YOU])
        await games.start("bots", [BOT, ME])
        await games.end("over")
        await games.leave("left", "me")
        assert games.waiting_longest("me") == []
        assert games.waiting_longest("you") == ["theirs", "left"]
        assert games.waiting_longest("bot") == []

    async def test_a_turn_that_goes_on_keeps_its_place(
        self, games: Games, clock: ManualClock
    ) -> None:
        """A turn that comes back is the newest."""
        for name in "ab":
            await games.start(name, [ME, YOU])
            clock.advance(1)
        await games.move("a", "me", keeps_turn=True)
        assert games.waiting_longest("me") == ["a", "b"]
        await games.move("a", "me")
        await games.move("a", "you")
        assert games.waiting_longest("me") == ["b", "a"]

    async def test_a_game_whose_other_human_leaves_counts_as_one_against_bots(
        self, games: Games
    ) -> None:
        """Until they rejoin: the number of humans is always true."""
        await games.start("a", [ME, YOU, BOT])
        await games.start("b", [ME, YOU])
        await games.leave("a", "you")
        assert games.waiting_longest("me") == ["b", "a"]
        await games.rejoin("a", "you")
        assert games.waiting_longest("me") == ["a", "b"]

    @pytest.mark.parametrize("seed", range(3))
    async def test_the_list_agrees_with_a_plain_sort_of_all_games(
        self, games: Games, path: Path, clock: ManualClock, seed: int
    ) -> None:
        """Whatever was played, by whomever."""
        dice = random.Random(seed)
        players = [ME, YOU, Player("she"), BOT]
        for number, size in product(range(12), [2, 3]):
            clock.advance(dice.randrange(3))
            await games.start(f"g{number}-{size}", dice.sample(players, size))
        for _ in range(120):
            clock.advance(dice.randrange(2))
            await self.any_step(games, dice)
        for user in ("me", "you", "she"):
            assert games.waiting_longest(user, 100) == sorted_by_hand(path, user)
            assert games.waiting_longest(user) == sorted_by_hand(path, user)[:5]

    async def any_step(self, games: Games, dice: random.Random) -> None:
        game = games.view(f"g{dice.randrange(12)}-{dice.choice([2, 3])}")
        user = dice.choice(["me", "you", "she", "bot"])
        try:
            match dice.randrange(10):
                case 0:
                    await games.leave(game.game_id, user)
                case 1:
                    await games.rejoin(game.game_id, user)
                case 2 if dice.random() < 0.3:
                    await games.end(game.game_id)
                case _:
                    await games.move(game.game_id, game.actor or user)
        except GameError:
            pass


def sorted_by_hand(path: Path, user: str) -> list[str]:
    """The contract's sentence, game by game."""
    connection = apsw.Connection(str(path), flags=apsw.SQLITE_OPEN_READONLY)
    members = connection.execute(
        "SELECT game_id, user_id FROM memberships WHERE is_human AND is_active"
    ).fetchall()
    rows: list[tuple[Any, ...]] = connection.execute(
        "SELECT waiting_since, game_id FROM games WHERE status = 'active' AND actor = ?", (user,)
    ).fetchall()
    connection.close()

    def order(row: tuple[Any, ...]) -> tuple[bool, int, str]:
        others = [one for game, one in members if game == row[1] and one != user]
        return not others, row[0], row[1]

    return [row[1] for row in sorted(rows, key=order) if (row[1], user) in members]


class TestW12Index:
    """W12: one walk along an index."""

    async def test_the_list_is_one_walk_along_an_index(self, games: Games, path: Path) -> None:
        """The plan: the index in its order, and each game's membership by its key."""
        assert games.waiting_longest("me") == []
        connection = apsw.Connection(str(path), flags=apsw.SQLITE_OPEN_READONLY)
        plan = connection.execute(f"EXPLAIN QUERY PLAN {WAITING_LONGEST}", ("me", 5)).fetchall()
        connection.close()
        steps = [str(step) for *_, step in plan]
        assert len(steps) == 2
        assert steps[0].startswith("SEARCH g USING INDEX games_waiting (actor=?")
        assert steps[1].startswith("SEARCH m USING PRIMARY KEY (game_id=? AND user_id=?")

    async def test_the_list_costs_the_same_among_two_hundred_games_as_among_ten(
        self, games: Games, connections: list[apsw.Connection]
    ) -> None:
        """One statement, and SQLite's steps are as many among two hundred games as among ten."""
        costs: list[int] = []

        def note_cost(event: dict[str, Any]) -> None:
            costs.append(event["stmt_status"]["SQLITE_STMTSTATUS_VM_STEP"])

        for connection in connections:
            if connection.pragma("query_only"):
                connection.trace_v2(apsw.SQLITE_TRACE_PROFILE, note_cost)
        for count in (10, 200):
            for number in range(count):
                await games.start(f"g{count}-{number}", [ME, YOU])
            assert len(games.waiting_longest("me")) == 5
        few, many = costs
        assert few == many


class TestW12Events:
    """W12: who is told what, in the order of the commits."""

    async def test_your_turn_goes_to_the_human_who_becomes_the_actor(self, games: Games) -> None:
        """With the version; a bot is told nothing."""
        await games.start("g", [ME, YOU, BOT])
        told = heard(games)
        for user in ("me", "you", "bot"):
            await games.move("g", user)
        expected = [("you", YourTurnNews("g", 2)), ("me", YourTurnNews("g", 4))]
        assert [news for happened in told for news in happened.news] == expected

    async def test_a_turn_that_goes_on_tells_nobody(self, games: Games) -> None:
        """Nobody became the actor."""
        await games.start("g", [ME, YOU])
        told = heard(games)
        await games.move("g", "me", keeps_turn=True)
        assert kinds(told) == []

    @pytest.mark.parametrize("what", ["start", "end", "abandon", "leave", "rejoin"])
    async def test_structural_changes_invalidate_for_all_humans(
        self, games: Games, what: str
    ) -> None:
        """Started, ended, abandoned, left, rejoined: also who has left is told."""
        if what != "start":
            await games.start("g", [YOU, ME, BOT])
        if what == "rejoin":
            await games.leave("g", "me")
        told = heard(games)
        match what:
            case "start":
                await games.start("g", [YOU, ME, BOT])
            case "leave":
                await games.leave("g", "me")
            case "rejoin":
                await games.rejoin("g", "me")
            case _:
                await getattr(games, what)("g")
        invalidated = [user for user, kind in kinds(told) if kind is InvalidatedNews]
        assert invalidated == ["you", "me"]

    async def test_the_turn_of_a_player_who_leaves_passes_on(self, games: Games) -> None:
        """Who becomes the actor is told; when nobody is left, nobody is the actor."""
        await games.start("g", [ME, YOU])
        told = heard(games)
        await games.leave("g", "me")
        assert ("you", YourTurnNews) in kinds(told)
        await games.leave("g", "you")
        assert games.view("g").actor is None
        await games.rejoin("g", "me")
        assert games.view("g").actor == "me"

    async def test_a_move_is_made_and_told_though_its_caller_is_gone(self, games: Games) -> None:
        """What is on disk has been told."""
        await games.start("g", [ME, YOU])
        told, happened = heard(games), asyncio.Event()
        games.on_happened(lambda _: happened.set())
        move = asyncio.create_task(games.move("g", "me"))
        await asyncio.sleep(0)
        move.cancel()
        async with asyncio.timeout(30):
            await happened.wait()
        assert kinds(told) == [("you", YourTurnNews)]

    async def test_a_connection_that_does_not_keep_up_is_ended(self) -> None:
        """News is never dropped in silence: the client reconnects and asks."""
        slow = GameListener("me")
        happened = Happened(GameView("g", "active", "me", 1), (("me", InvalidatedNews()),))
        for _ in range(MAX_UNSENT):
            slow.hear(happened)
        assert not slow.is_lagging.is_set()
        slow.hear(happened)
        assert slow.is_lagging.is_set()


class TestW12Refused:
    """W12: what a game does not allow, and files that are not ours."""

    async def test_moves_out_of_turn_are_refused(self, games: Games) -> None:
        """With the reason; nothing changes and nobody is told."""
        await games.start("g", [ME, YOU])
        told, before = heard(games), games.view("g")
        for user, version in (("you", None), ("me", 7), ("stranger", None)):
            with pytest.raises(GameError):
                await games.move("g", user, version=version)
        with pytest.raises(GameError, match="no game 'nowhere'"):
            await games.move("nowhere", "me")
        assert (games.view("g"), told) == (before, [])

    async def test_a_refusal_that_nobody_waits_for_is_not_logged(
        self, games: Games, path: Path
    ) -> None:
        """Whoever had moved was cancelled before the refusal came."""
        complaints: list[object] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, it: complaints.append(it))
        other_writer = apsw.Connection(str(path))
        other_writer.execute("BEGIN IMMEDIATE")
        moving = asyncio.create_task(games.move("nowhere", "me"))
        await asyncio.sleep(0)
        moving.cancel()
        await asyncio.wait([moving])
        del moving
        other_writer.close()
        await games.start("g", [ME, YOU])
        await asyncio.sleep(0)
        gc.collect()
        assert complaints == []

    async def test_a_game_that_is_over_refuses_moves_and_a_second_end(self, games: Games) -> None:
        """No move, no second end."""
        await games.start("g", [ME, YOU])
        await games.abandon("g")
        for step in (games.move("g", "me"), games.end("g"), games.leave("g", "me")):
            with pytest.raises(GameError, match="abandoned"):
                await step

    async def test_a_game_with_a_used_id_a_doubled_player_or_no_players_is_refused(
        self, games: Games
    ) -> None:
        """One id, one game; one seat for each; somebody must play."""
        await games.start("g", [ME, YOU])
        with pytest.raises(GameError, match="exists"):
            await games.start("g", [ME])
        with pytest.raises(GameError, match="twice"):
            await games.start("h", [ME, ME])
        with pytest.raises(ConfigError, match="players"):
            await games.start("h", [])
        with pytest.raises(GameError, match="no such seat"):
            await games.rejoin("g", "me")
        assert games.waiting_longest("me") == ["g"]

    async def test_calls_before_opening_and_after_closing_raise(self, tmp_path: Path) -> None:
        """Before they are opened, and after."""
        games = Games(tmp_path / "games.db")
        with pytest.raises(NotOpen):
            games.waiting_longest("me")
        async with games:
            await games.start("g", [ME])
        with pytest.raises(NotOpen):
            await games.move("g", "me")
        async with games:
            assert games.waiting_longest("me") == ["g"]
            with pytest.raises(ConfigError, match="open already"):
                await games.__aenter__()

    async def test_a_file_of_another_application_is_left_alone(self, tmp_path: Path) -> None:
        """Refused, not overwritten."""
        path = tmp_path / "other.db"
        with apsw.Connection(str(path)) as other:
            other.execute("CREATE TABLE precious(a)")
        other.close()
        before = path.read_bytes()
        with pytest.raises(ConfigError, match="another application"):
            async with Games(path):
                pass
        assert path.read_bytes() == before

    async def test_a_path_that_cannot_be_opened_is_refused_with_what_to_do(
        self, tmp_path: Path
    ) -> None:
        """With what to do."""
        with pytest.raises(StoreError, match="there is no directory"):
            async with Games(tmp_path / "nowhere" / "games.db"):
                pass


EXAMPLES = Path(__file__).parents[3] / "examples"
MOVER = """
import asyncio, sys
from game_service import Games, Player

async def main() -> None:
    async with Games(sys.argv[1]) as games:
        games.on_happened(lambda it: print(it.game.version, flush=True))
        await games.start("g", [Player("me"), Player("you")])
        while True:
            for user in ("me", "you"):
                await games.move("g", user)

asyncio.run(main())
"""


def told_until_killed(path: Path) -> list[int]:
    """The versions that a process told of before it was killed among its moves."""
    command = [sys.executable, "-c", MOVER, str(path)]
    environment = {**os.environ, "PYTHONPATH": str(EXAMPLES)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as mover:
        assert mover.stdout is not None
        told = [mover.stdout.readline() for _ in range(25)]
        mover.kill()
        return [int(version) for version in (*told, *mover.stdout)]


class TestW12Kept:
    """W12: games are data, not a cache (decision 0323): no file ever takes the place of theirs."""

    async def test_a_corrupt_file_is_refused_and_left_as_it_is(self, tmp_path: Path) -> None:
        """Never set aside for an empty one."""
        path = tmp_path / "games.db"
        async with Games(path) as games:
            await games.start("g", [ME, YOU])
        path.write_bytes(b"\xffnot any more" * 1000)
        for _ in range(2):
            with pytest.raises(StoreError, match=r"corrupt.*restore"):
                async with Games(path):
                    pass
        assert path.read_bytes() == b"\xffnot any more" * 1000
        assert {found.name for found in tmp_path.iterdir()} <= {"games.db", "games.db.lock"}

    async def test_a_move_that_meets_corruption_raises_until_the_file_is_mended(
        self, games: Games, connections: list[apsw.Connection], tmp_path: Path
    ) -> None:
        """And goes on being told, until somebody has mended the file."""
        await games.start("g", [ME, YOU])
        writer = writer_of(connections)

        def find_damage(*_: object) -> bool:
            raise apsw.CorruptError("a page")

        writer.exec_trace = find_damage
        with pytest.raises(StoreError, match="corrupt"):
            await games.move("g", "me")
        writer.exec_trace = None
        with pytest.raises(StoreError, match=r"corrupt.*restore"):
            await games.move("g", "me")
        assert games.view("g").actor == "me"
        assert not list(tmp_path.glob("*.corrupt-*"))

    @pytest.mark.parametrize("is_replaced", [False, True])
    async def test_a_file_that_is_moved_away_is_not_begun_anew(
        self, tmp_path: Path, is_replaced: bool
    ) -> None:
        """Moves are refused until it is back and opened again; then it has every move."""
        path = tmp_path / "games.db"
        async with Games(path) as games:
            await games.start("g", [ME, YOU])
            await games.move("g", "me")
            path.rename(tmp_path / "away.db")
            if is_replaced:
                path.touch()
            with pytest.raises(StoreError, match=r"games\.db: was moved or replaced"):
                await games.move("g", "you")
            (tmp_path / "away.db").rename(path)
            with pytest.raises(StoreError, match=r"games\.db: was moved or replaced"):
                await games.move("g", "you")
        async with Games(path) as games:
            assert (await games.move("g", "you")).actor == "me"

    async def test_a_file_that_is_deleted_is_not_begun_anew(self, tmp_path: Path) -> None:
        """Nobody is told of moves in an empty file."""
        path = tmp_path / "games.db"
        async with Games(path) as games:
            await games.start("g", [ME, YOU])
            path.unlink()
            with pytest.raises(StoreError, match=r"games\.db: was deleted"):
                await games.move("g", "me")
            assert not path.exists()

    async def test_closing_lets_a_move_that_was_begun_be_made(self, games: Games) -> None:
        """And told."""
        await games.start("g", [ME, YOU])
        told = heard(games)
        move = asyncio.create_task(games.move("g", "me"))
        await asyncio.sleep(0)
        await games.close()
        assert (await move).actor == "you"
        assert kinds(told) == [("you", YourTurnNews)]

    async def test_a_commit_is_synced_to_the_disk(
        self, games: Games, connections: list[apsw.Connection]
    ) -> None:
        """Not only with the operating system: what was told outlives a power cut."""
        await games.start("g", [ME, YOU])
        assert writer_of(connections).pragma("synchronous") == 2

    async def test_a_move_that_was_told_survives_kill_9(self, tmp_path: Path) -> None:
        """The file has every version that anybody heard of."""
        path = tmp_path / "games.db"
        told = told_until_killed(path)
        async with Games(path) as games:
            assert games.view("g").version >= max(told)

    @pytest.mark.parametrize("is_there", [False, True])
    async def test_a_log_whose_file_is_missing_is_kept(
        self, tmp_path: Path, is_there: bool
    ) -> None:
        """SQLite would delete it, and the moves in it, for an empty file."""
        path, log = tmp_path / "games.db", tmp_path / "games.db-wal"
        told = told_until_killed(path)
        saved, moves = path.read_bytes(), log.read_bytes()
        path.unlink()
        if is_there:
            path.touch()
        with pytest.raises(StoreError, match=r"corrupt.*restore"):
            async with Games(path):
                pass
        assert log.read_bytes() == moves
        path.write_bytes(saved)
        async with Games(path) as games:
            assert games.view("g").version >= max(told)


class TestW12Endpoint:
    """W12: `GET /api/games/waiting-longest`, over real HTTP."""

    async def test_the_endpoint_answers_for_the_signed_in_user_only(self, tmp_path: Path) -> None:
        """One user's games are nobody else's, and no cache's."""
        async with served(tmp_path) as service:
            await service.games.start("g", [ME, YOU])
            await service.games.start("h", [ME, BOT])
            mine, yours = [await self.ask(service, user) for user in ("me", "you")]
        assert mine == (200, {"game_ids": ["g", "h"]}, "private, no-store")
        assert yours == (200, {"game_ids": []}, "private, no-store")

    async def test_the_endpoint_refuses_a_request_without_a_user(self, tmp_path: Path) -> None:
        """Sign in first."""
        async with served(tmp_path) as service:
            status, _, _ = await self.ask(service, None)
        assert status == 401

    async def ask(self, service: Served, user: str | None) -> tuple[int, object, str]:
        response = await service.get("/api/games/waiting-longest", user)
        return response.status_code, response.json(), response.headers["Cache-Control"]
