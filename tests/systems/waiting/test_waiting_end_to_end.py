"""The real service, real HTTP and WebSockets, the cache, three users, a wire cut (W9, W12)."""

import asyncio
import gc
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from websockets.asyncio.client import connect
from websockets.asyncio.server import ServerConnection, serve
from websockets.exceptions import ConnectionClosed

from game_service import Player
from stillfresh import ConfigError, NotOpen, StillfreshError
from stillfresh.systems.waiting import Proof
from stillfresh.systems.waiting.client import WaitingClient
from stillfresh.systems.waiting.messages import EVENTS
from tests.kit.servers.games import Served, Wire, served, wired
from tests.kit.waiting import Sleeper, until

ANN, BEN, EVE = Player("ann"), Player("ben"), Player("eve")
BOT = Player("bot", is_human=False)


@pytest.fixture
async def service(tmp_path: Path) -> AsyncIterator[Served]:
    async with served(tmp_path) as service:
        yield service


@pytest.fixture
async def wire(service: Served) -> AsyncIterator[Wire]:
    async with wired(service.port) as wire:
        yield wire


def client_of(
    user: str, url: str, sleep: Callable[[float], object] = asyncio.sleep
) -> WaitingClient:
    return WaitingClient(url, headers={"Authorization": f"Bearer {user}"}, sleep=sleep)  # type: ignore[arg-type]


def shows(client: WaitingClient, *games: str) -> Callable[[], bool]:
    """Settled on these games."""
    return lambda: (client.cache.state.pool, client.cache.navigation().pending) == (games, False)


def saw(client: WaitingClient, version: int) -> Callable[[], bool]:
    """The state of the game on screen has come."""

    def has_come() -> bool:
        screen = client.cache.state.screen
        return screen is not None and screen.version == version

    return has_come


class TestW12EndToEnd:
    """W9, W12: backend, events, client and cache together; moves that fail, lost connections."""

    async def test_three_players_see_the_order_of_the_backend_at_every_rest(
        self, service: Served
    ) -> None:
        """What each sees is the backend's order, at every rest, and most turns ask nobody."""
        games = service.games
        async with AsyncExitStack() as stack:
            ann, ben, eve = [
                await stack.enter_async_context(client_of(name, service.url))
                for name in ("ann", "ben", "eve")
            ]
            await games.start("g1", [ANN, BEN])
            await games.start("g2", [ANN, BEN, EVE])
            await games.start("g3", [EVE, ANN])
            await games.start("solo", [ANN, BOT])
            await until(ann.cache, shows(ann, "g1", "g2", "solo"))
            await until(eve.cache, shows(eve, "g3"))
            assert await ann.look("g1")
            await ann.move("g1")
            await until(ann.cache, shows(ann, "g2", "solo"))
            await until(ben.cache, shows(ben, "g1"))
            assert await eve.look("g3")
            await eve.move("g3")
            await until(ann.cache, shows(ann, "g2", "g3", "solo"))
            assert ann.cache.navigation("g2").games == ("g3", "solo")
            assert ann.cache.navigation().proof is Proof.SERVER
            for client, user in ((ann, "ann"), (ben, "ben"), (eve, "eve")):
                assert list(client.cache.state.pool) == games.waiting_longest(user)

    async def test_a_loop_against_bots_asks_nobody(self, service: Served) -> None:
        """One refetch for the first turn that comes back; then the snapshot serves."""
        games = service.games
        for name in ("g1", "g2"):
            await games.start(name, [ANN, BEN])
        await games.start("solo", [ANN, BOT])
        async with client_of("ann", service.url) as ann:
            await until(ann.cache, shows(ann, "g1", "g2", "solo"))
            await ann.look("solo")
            proofs = []
            for _ in range(5):
                await ann.move("solo")
                await until(ann.cache, lambda: not ann.cache.state.pending)
                version = (await games.move("solo", "bot")).version
                await until(ann.cache, saw(ann, version))  # its state comes after the message
                await until(ann.cache, shows(ann, "g1", "g2", "solo"))
                proofs.append(ann.cache.navigation("solo").proof)
            assert proofs == [Proof.SERVER, *[Proof.SNAPSHOT] * 4]

    async def test_structural_news_reaches_everybody(self, service: Served) -> None:
        """A game that ends, is left, is rejoined: all of its humans ask again."""
        games = service.games
        await games.start("g1", [ANN, BEN])
        await games.start("g2", [ANN, BEN])
        async with client_of("ann", service.url) as ann:
            await until(ann.cache, shows(ann, "g1", "g2"))
            await games.leave("g1", "ben")
            await until(ann.cache, shows(ann, "g2", "g1"))
            await games.rejoin("g1", "ben")
            await until(ann.cache, shows(ann, "g1", "g2"))
            await games.end("g1")
            await until(ann.cache, shows(ann, "g2"))

    async def test_a_game_that_is_played_on_a_second_device_leaves_the_pool(
        self, service: Served
    ) -> None:
        """A game that is on screen here and played there leaves the pool."""
        await service.games.start("g1", [ANN, BEN])
        await service.games.start("g2", [ANN, BEN])
        async with client_of("ann", service.url) as here, client_of("ann", service.url) as there:
            for client in (here, there):
                await until(client.cache, shows(client, "g1", "g2"))
                await client.look("g1")
            await there.move("g1")
            await until(here.cache, shows(here, "g2"))
            await service.games.move("g1", "ben")
            for client in (here, there):
                await until(client.cache, shows(client, "g2", "g1"))

    async def test_a_refused_move_brings_the_game_back(self, service: Served) -> None:
        """It had been taken out on trust."""
        for name in ("g1", "g2", "g3"):
            await service.games.start(name, [ANN, BEN])
        async with client_of("ann", service.url) as ann:
            await until(ann.cache, shows(ann, "g1", "g2", "g3"))
            await ann.look("g1")
            ann.cache.opened("g1", version=99)  # as if the game had moved on
            await ann.move("g1")
            await until(ann.cache, lambda: "g1" not in ann.cache.state.pool)
            await until(ann.cache, shows(ann, "g1", "g2", "g3"))

    @pytest.mark.parametrize("stays", [True, False])
    async def test_a_turn_that_goes_on_brings_the_game_back(
        self, service: Served, stays: bool
    ) -> None:
        """On screen by its state; in a game that was left by the answer to the move."""
        for name in ("g1", "g2", "g3"):
            await service.games.start(name, [ANN, BEN])
        async with client_of("ann", service.url) as ann:
            await until(ann.cache, shows(ann, "g1", "g2", "g3"))
            await ann.look("g1")
            await ann.move("g1", keeps_turn=True)
            if not stays:
                await ann.look("g2")
            await until(ann.cache, shows(ann, "g1", "g2", "g3"))
            assert ann.cache.state.pending == ()

    async def test_changes_during_a_lost_connection_are_caught_up_with(
        self, service: Served, wire: Wire
    ) -> None:
        """Growing pauses until the service is there again; then everything is asked anew."""
        games, sleeper = service.games, Sleeper()
        for name in ("g1", "g2", "g3"):
            await games.start(name, [ANN, BEN])
        async with client_of("ann", wire.url, sleeper) as ann:
            await until(ann.cache, shows(ann, "g1", "g2", "g3"))
            await ann.look("g1")
            wire.cut()
            await slept(sleeper, 1)
            with pytest.raises(NotOpen, match="not connected"):
                await ann.move("g1")
            sleeper.wake()
            await slept(sleeper, 2)
            assert wire.refused.is_set()
            await games.move("g1", "ann")
            await games.end("g2")
            await games.start("g4", [ANN, BEN])
            assert ann.cache.state.pool == ("g1", "g2", "g3")
            wire.mend()
            sleeper.wake()
            await until(ann.cache, shows(ann, "g3", "g4"))
            assert sleeper.slept[0] < sleeper.slept[1]
            await games.move("g1", "ben")
            await until(ann.cache, shows(ann, "g3", "g4", "g1"))
            assert ann.cache.state.screen is not None
            assert ann.cache.state.screen.my_turn

    async def test_looking_at_an_unknown_game_is_refused(self, service: Served) -> None:
        """Refused with the reason; what was looked at still is."""
        await service.games.start("g1", [ANN, BEN])
        async with client_of("ann", service.url) as ann:
            await until(ann.cache, shows(ann, "g1"))
            await ann.look("g1")
            with pytest.raises(StillfreshError, match="no game 'nowhere'"):
                await ann.look("nowhere")
            first, second = await asyncio.gather(
                ann.look("g1"), ann.look("g1"), return_exceptions=True
            )
            assert isinstance(first, StillfreshError)
            assert second is True
            assert ann.cache.state.screen is not None
            assert ann.cache.state.screen.game_id == "g1"

    async def test_looking_waits_for_the_connection(self, service: Served) -> None:
        """Right after entering, nobody has been welcomed yet."""
        await service.games.start("g1", [ANN, BEN])
        async with client_of("ann", service.url) as ann:
            assert await ann.look("g1")
            await ann.move("g1")
            assert ann.cache.navigation(current="g1").games == ()

    async def test_looking_does_not_wait_for_ever(
        self, wire: Wire, caplog: pytest.LogCaptureFixture
    ) -> None:
        """And leaves nothing behind that nobody awaits."""
        wire.cut()
        async with WaitingClient(wire.url, timeout="50ms", sleep=Sleeper()) as client:
            with pytest.raises(NotOpen, match="the client keeps trying"):
                await client.look("g1")
        gc.collect()
        assert "never retrieved" not in caplog.text

    async def test_looking_over_a_lost_connection_leaves_nothing_behind(
        self, service: Served, caplog: pytest.LogCaptureFixture
    ) -> None:
        """The loss is raised, and told to nobody else."""
        await service.games.start("g1", [ANN, BEN])
        sleeper = Sleeper()
        async with client_of("ann", service.url, sleeper) as ann:
            await ann.look("g1")
            lost = ann._socket
            assert lost is not None
            await lost.close()
            await slept(sleeper, 1)
            ann._socket = lost  # as if nobody had noticed yet
            ann._joined.set()
            with pytest.raises(NotOpen, match="lost"):
                await ann.look("g1")
        gc.collect()
        assert "never retrieved" not in caplog.text

    async def test_a_client_that_is_not_open_raises(self, service: Served) -> None:
        """Before and after: nothing is being tried. Who waits is let go."""
        client = client_of("ann", service.url)
        with pytest.raises(NotOpen, match="not open"):
            await client.look("g1")
        async with WaitingClient("http://127.0.0.1:9", sleep=Sleeper()) as away:
            waiting = asyncio.create_task(away.look("g1"))
            await asyncio.sleep(0)
        with pytest.raises(NotOpen, match="not open"):
            await waiting
        async with client:
            pass
        for act in (client.look, client.move):
            with pytest.raises(NotOpen, match="not open"):
                await act("g1")

    async def test_a_client_that_is_not_signed_in_receives_nothing(
        self, service: Served, caplog: pytest.LogCaptureFixture
    ) -> None:
        """The client keeps trying, slower and slower, and says so."""
        sleeper = Sleeper()
        async with WaitingClient(service.url, sleep=sleeper) as stranger:
            for tries in range(1, 4):
                await slept(sleeper, tries)
                sleeper.wake()
            assert stranger.cache.state.pool == ()
        warned = [one.message for one in caplog.records if one.levelname == "WARNING"]
        assert any("refuses the connection" in one and "403" in one for one in warned)

    async def test_closing_in_the_middle_leaves_nothing_running(self, service: Served) -> None:
        """While connecting, while asking, while connected."""
        await service.games.start("g1", [ANN, BEN])
        async with client_of("ben", service.url):
            pass
        before = asyncio.all_tasks()
        async with client_of("ann", service.url) as ann:
            await asyncio.sleep(0)
        async with client_of("ann", service.url) as ann:
            await until(ann.cache, shows(ann, "g1"))
        ours = {task for task in asyncio.all_tasks() - before if "waiting" in task.get_name()}
        assert ours == set()


async def slept(sleeper: Sleeper, times: int) -> None:
    async with asyncio.timeout(30):
        while len(sleeper.slept) < times:
            await asyncio.sleep(0)


class TestW12Rude:
    """W12: what a client may do to the service, and a service to its client."""

    @pytest.mark.parametrize(
        "said", [b"\x00\xff", "not json", '{"type": "rob"}', '{"type": "move", "game_id": 5}']
    )
    async def test_an_invalid_message_ends_only_its_own_connection(
        self, service: Served, said: str | bytes
    ) -> None:
        """Others go on as if nothing had happened."""
        await service.games.start("g1", [BEN, ANN])
        address = service.url.replace("http", "ws") + EVENTS
        async with client_of("ann", service.url) as ann:
            await until(ann.cache, lambda: not ann.cache.navigation().pending)
            async with connect(address, additional_headers={"Authorization": "Bearer eve"}) as rude:
                assert b"welcome" in encoded(await rude.recv())
                await rude.send(said)
                with pytest.raises(ConnectionClosed):
                    async with asyncio.timeout(30):
                        await rude.recv()
            await service.games.move("g1", "ben")
            await until(ann.cache, shows(ann, "g1"))

    async def test_a_service_that_sends_invalid_messages_is_left_and_tried_again(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        """After a pause; nothing of it reaches the cache."""
        sleeper = Sleeper()

        async def talk(socket: ServerConnection) -> None:
            await socket.send('{"type": "your_turn", "game_id": null}')

        async with serve(talk, "127.0.0.1", 0) as server:
            port = next(iter(server.sockets)).getsockname()[1]
            async with client_of("ann", f"http://127.0.0.1:{port}", sleeper) as ann:
                await slept(sleeper, 1)
                sleeper.wake()
                await slept(sleeper, 2)
                assert ann.cache.state.pool == ()
        assert "sent an invalid message" in caplog.text

    def test_a_bad_address_is_refused_at_construction(self) -> None:
        """Refused where it is declared."""
        with pytest.raises(ConfigError, match="http://"):
            WaitingClient("ws://somewhere")


def encoded(text: str | bytes) -> bytes:
    return text.encode() if isinstance(text, str) else text
