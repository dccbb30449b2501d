"""S5, S6, S10, I7: what the stores on a server share, without a server."""

import asyncio
from typing import Any

import pytest
from msgspec.structs import astuple

from stillfresh import ConfigError, NotOpen, StoreError
from stillfresh.stores import capabilities_of
from stillfresh.stores.breaker import FIRST_PAUSE, LONGEST_PAUSE, Breaker
from stillfresh.stores.channel import ServerChannel
from stillfresh.stores.contract import MOST_LISTED, Costs
from stillfresh.stores.memory import MemoryStore
from stillfresh.stores.meter import CostMeter
from stillfresh.stores.rules import checked_limit, is_listed
from stillfresh.stores.server import AnswerTimer, ServerLink, error_text
from stillfresh.stores.urls import running, store_for
from stillfresh.testing import ManualClock
from tests.kit.engine import turns
from tests.kit.full_store import full_store_for


class TestS5Breaker:
    def test_one_step_at_a_time_tries_a_server_that_failed(self) -> None:
        """After a pause that grows; the others fail at once, and the first success ends it."""
        breaker = Breaker()
        assert breaker.allows(0.0)
        assert breaker.allows(0.0)
        breaker.failed(0.0, 1.0)
        assert breaker.is_open
        assert not breaker.allows(1.0 + 0.9 * FIRST_PAUSE)
        assert breaker.allows(1.0 + FIRST_PAUSE)
        assert not breaker.allows(1.0 + FIRST_PAUSE)
        assert breaker.allows(1.0 + 3 * FIRST_PAUSE)
        breaker.failed(2.0, 3.0)
        assert not breaker.allows(3.0 + FIRST_PAUSE)
        breaker.succeeded()
        assert breaker.allows(3.0)
        breaker.failed(4.0, 4.0)
        assert breaker.allows(4.0 + FIRST_PAUSE)

    def test_steps_that_began_together_count_once(self) -> None:
        """They waited for the same failure; a later one finds out anew."""
        breaker = Breaker()
        assert not breaker.is_overtaken(0.0)
        for _ in range(50):
            breaker.failed(0.0, 1.0)
        assert breaker.is_overtaken(0.9)
        assert not breaker.is_overtaken(1.0)
        assert breaker.allows(1.0 + FIRST_PAUSE)
        for at in range(2, 20):
            breaker.failed(float(at), float(at))
        assert not breaker.allows(19.0 + 0.9 * LONGEST_PAUSE)
        assert breaker.allows(19.0 + LONGEST_PAUSE)


class TestI7Meter:
    def test_nothing_costs_nothing(self) -> None:
        """In no unit."""
        assert set(astuple(Costs())) == {0}
        assert CostMeter().costs() == Costs()

    def test_every_charged_request_is_counted(self) -> None:
        """Reads and writes in units, requests to S3 one by one, refused writes too."""
        meter = CostMeter()
        for operation in ("get_object", "put_object", "put_object", "list_objects_v2", "get_item"):
            meter.count_request(operation)
        meter.count_request("delete_objects")
        meter.count_response("query", {"ConsumedCapacity": {"CapacityUnits": 1.5}})
        both = [{"CapacityUnits": 2.0}, {"CapacityUnits": 0.5}, {}]
        meter.count_response("batch_get_item", {"ConsumedCapacity": both})
        meter.count_response("put_item", {"ConsumedCapacity": {"CapacityUnits": 3.0}})
        meter.count_response("put_item", {})
        meter.count_refusal("ConditionalCheckFailedException", {})
        meter.count_refusal("TransactionCanceledException", {"TransactItems": [1, 2, 3]})
        meter.count_refusal("ThrottlingException", {"TransactItems": [1, 2, 3]})
        expected = Costs(
            read_units=4.0, write_units=10.0, s3_gets=1, s3_puts=2, s3_deletes=1, s3_lists=1
        )
        assert meter.costs() == expected


class Beats(ServerChannel):
    """A channel whose server answers as the test says."""

    async def open(self) -> None:
        self._readers = [asyncio.create_task(asyncio.Event().wait())]  # type: ignore[arg-type]

    async def beat(self) -> None:
        await self._come_back("ab", asyncio.sleep(0), "; look at it")


class TestS10Channel:
    async def test_a_beat_waits_for_all_that_come_back(self) -> None:
        """One after the other; then nothing is left to wait for."""
        async with Beats("the server", lambda *_: None, 20) as channel:
            beating = asyncio.create_task(channel.beat())
            await asyncio.sleep(0)
            channel._hear_beat("a")
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert not beating.done()
            channel._hear_beat("b")
            await beating
        (reader,) = channel._readers
        assert reader.cancelled()

    async def test_a_silent_channel_is_an_error(self) -> None:
        """With what to do; and so is one whose reader has ended."""
        async with Beats("the server", lambda *_: None, 0.01) as channel:
            with pytest.raises(StoreError, match="the server has sent nothing for too long; look"):
                await channel.beat()
            channel._readers[0].cancel()
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            with pytest.raises(StoreError, match="the server ended the channel"):
                await channel.beat()

    async def test_a_channel_that_cannot_be_opened_is_closed(self) -> None:
        """So that no task is left."""

        class Failing(Beats):
            async def open(self) -> None:
                await super().open()
                raise StoreError("no")

        channel = Failing("the server", lambda *_: None, 1)
        with pytest.raises(StoreError, match="no"):
            await channel.__aenter__()
        assert channel._readers[0].cancelled()


class Connection:
    def __init__(self) -> None:
        self.closed: list[bool] = []

    async def disconnect(self, *, nowait: bool) -> None:
        self.closed.append(nowait)


class ScriptedLink(ServerLink):
    """Each request ends as the script says: an error, or a reply."""

    failures, lost = (OSError, ValueError), (OSError,)

    def __init__(self, *script: Any, most: int = 1) -> None:
        super().__init__("the server", most=most, timeout=20)
        self.script = list(script)
        self.made: list[Connection] = []

    async def _connect(self) -> Connection:
        self.made.append(Connection())
        return self.made[-1]

    async def _hello(self) -> None:
        await self.step()

    def _store_error(self, error: Exception) -> StoreError:
        return StoreError(f"refused: {error_text(error)}")

    async def step(self) -> Any:
        async def work(*_: object) -> Any:
            await asyncio.sleep(0)
            done = self.script.pop(0)
            if isinstance(done, BaseException):
                raise done
            return done

        return await self._once(work)

    async def run(self, *, urgent: bool = False) -> Any:
        return await self._try_twice(self.step, self.step, urgent=urgent)


class TestS5Link:
    async def test_a_connection_is_used_again(self) -> None:
        """One with an unread answer is not; closing closes those that are idle."""
        link = ScriptedLink(1, 2, OSError("gone"), 3)
        assert [await link.run() for _ in range(3)] == [1, 2, 3]
        first, second = link.made
        assert (first.closed, second.closed) == ([True], [])
        await link.close()
        assert second.closed == [False]
        link.script = [4]
        assert await link.run() == 4
        assert link.made[-1].closed == [False]

    async def test_a_lost_answer_is_asked_for_once_more(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        """A second loss is an error, logged once; then one step at a time tries it."""
        link = ScriptedLink(OSError("gone."), OSError("gone."), OSError("still"), 5)
        with pytest.raises(StoreError, match=r"refused: OSError: gone$"):
            await link.run()
        with pytest.raises(
            StoreError, match="the server is unavailable: OSError: gone; stillfresh"
        ):
            await link.run()
        assert len(link.script) == 2
        with pytest.raises(StoreError, match="refused: OSError: still"):
            await link.run(urgent=True)
        assert await link.run(urgent=True) == 5
        assert [record.getMessage() for record in caplog.records] == [
            "the server is unavailable: OSError: gone",
            "the server answers again",
        ]

    async def test_a_refusal_is_an_answer(self) -> None:
        """It is not asked again, and the server is there."""
        link = ScriptedLink(ValueError("no"), 5)
        with pytest.raises(StoreError, match="refused: ValueError: no"):
            await link.run()
        assert await link.run() == 5

    async def test_a_refused_greeting_is_raised_and_an_absent_server_is_tried_later(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        """A refusal is raised; a server that is away is tried again later."""
        with pytest.raises(StoreError, match="refused: ValueError"):
            await ScriptedLink(ValueError()).greet()
        away = ScriptedLink(OSError())
        await away.greet()
        with pytest.raises(StoreError, match="the server is unavailable: OSError;"):
            await away.run()
        assert len(caplog.records) == 1

    async def test_a_queue_learns_of_a_failure_at_once(self) -> None:
        """Those that wait for a connection do not find out one by one."""
        link = ScriptedLink(OSError("gone"), 5)
        outcomes = await asyncio.gather(*(link.step() for _ in range(3)), return_exceptions=True)
        assert [type(it) for it in outcomes] == [OSError, TimeoutError, TimeoutError]
        assert await link.step() == 5

    async def test_a_server_that_answered_since_is_believed(self) -> None:
        """One request fails and another succeeds: a third, which waited, is sent."""
        link, may_end = ScriptedLink(most=2), asyncio.Event()

        async def ended(outcome: object) -> object:
            async def work(*_: object) -> object:
                await may_end.wait()
                if isinstance(outcome, Exception):
                    raise outcome
                return outcome

            return await link._once(work)

        steps = [asyncio.create_task(ended(it)) for it in (OSError("gone"), 1, 2)]
        for _ in range(3):
            await asyncio.sleep(0)
        may_end.set()
        failed, *done = await asyncio.gather(*steps, return_exceptions=True)
        assert (type(failed), done) == (OSError, [1, 2])

    async def test_a_request_that_fails_gives_its_place_back(self) -> None:
        """Also if the connection could not be made."""

        class Unconnected(ScriptedLink):
            async def _connect(self) -> Connection:
                raise OSError("no way")

        link = Unconnected(5)
        for _ in range(3):
            with pytest.raises(OSError, match="no way"):
                await link.step()


class TestS5AnswerTimer:
    @pytest.fixture
    async def clock(self, monkeypatch: pytest.MonkeyPatch) -> ManualClock:
        """The running loop's."""
        clock = ManualClock()
        monkeypatch.setattr(asyncio.get_running_loop(), "time", clock)
        return clock

    async def test_an_exchange_that_takes_too_long_is_given_up(self, clock: ManualClock) -> None:
        """Once, and not before its time is over."""
        given_up: list[float] = []
        timer = AnswerTimer(lambda: given_up.append(clock()))
        timer.wait_until(1.0)
        clock.advance(0.9)
        await turns()
        assert given_up == []
        clock.advance(0.2)
        await turns()
        clock.advance(5)
        await turns()
        assert given_up == [1.1]

    async def test_each_exchange_has_its_own_time(self, clock: ManualClock) -> None:
        """The timer that an exchange has set rings during the next one, and is set anew."""
        given_up: list[float] = []
        timer = AnswerTimer(lambda: given_up.append(clock()))
        for _ in range(20):
            timer.wait_until(clock() + 1)
            clock.advance(0.3)
            await turns()
            timer.end()
        timer.wait_until(clock() + 1)
        clock.advance(0.9)
        await turns()
        assert given_up == []
        clock.advance(0.2)
        await turns()
        assert len(given_up) == 1

    async def test_many_exchanges_set_one_timer(
        self, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """S14: a timer for each would take as long as reading the answer."""
        loop = asyncio.get_running_loop()
        timers: list[asyncio.TimerHandle] = []
        call_at = loop.call_at

        def noted(*args: Any, **options: Any) -> asyncio.TimerHandle:
            timers.append(call_at(*args, **options))
            return timers[-1]

        monkeypatch.setattr(loop, "call_at", noted)
        timer = AnswerTimer(bool)
        for _ in range(100):
            timer.wait_until(clock() + 1)
            clock.advance(0.001)
            timer.end()
        assert len(timers) == 1
        timer.stop()
        assert timers[0].cancelled()


class TestS1Listed:
    def test_a_limit_is_a_number_in_a_range(self) -> None:
        """Of one to the most that a page may have."""
        assert [checked_limit(it) for it in (1, MOST_LISTED)] == [1, MOST_LISTED]
        for bad in (0, MOST_LISTED + 1, "5", 1.5):
            with pytest.raises(ConfigError, match="limit"):
                checked_limit(bad)  # type: ignore[arg-type]

    def test_an_entry_is_listed_by_kind_text_and_place(self) -> None:
        """Each of them may be left out."""
        name = ("post", "abc")
        assert is_listed(name, None, "", None)
        assert is_listed(name, "post", "b", ("post", "abb"))
        assert not is_listed(name, "page", "", None)
        assert not is_listed(name, None, "x", None)
        assert not is_listed(name, None, "", ("post", "abc"))

    def test_a_store_that_is_shared_by_name_has_an_address(self) -> None:
        """Without the tenant; memory belongs to one process, and has none."""
        clock = ManualClock()
        assert capabilities_of(store_for("memory://", clock)).address is None
        for url in ("sqlite:///a.db?tenant=x", "sqlite:///a.db"):
            assert capabilities_of(store_for(url, clock)).address == "sqlite:///a.db"

    @pytest.mark.parametrize("address", ["redis://localhost:1/0", "postgres://localhost:1/db"])
    async def test_a_server_that_refuses_us_is_let_go(self, address: str) -> None:
        """The next opening begins anew; to open or to close twice is to do it once."""
        store, link = full_store_for(address, ManualClock()), ScriptedLink(ValueError("no"), 1)
        closed, store._new_link = list[int](), lambda: link  # type: ignore[attr-defined]

        async def close() -> None:
            closed.append(1)

        link.close = close  # type: ignore[method-assign]
        with pytest.raises(StoreError, match="refused"):
            await store.open()
        assert closed == [1]
        with pytest.raises(NotOpen):
            await store.stats()
        await store.open()
        await store.open()
        assert (link.script, closed) == ([], [1])
        await store.close()
        await store.close()
        assert closed == [1, 1]

    async def test_two_that_open_at_once_share_a_link(self) -> None:
        """The other one is closed."""
        store, links = store_for("redis://localhost:1/0", ManualClock()), list[ScriptedLink]()

        def new_link() -> ScriptedLink:
            links.append(ScriptedLink(1))
            return links[-1]

        store._new_link = new_link  # type: ignore[attr-defined]
        await asyncio.gather(store.open(), store.open())
        first, second = links
        assert [link.made[0].closed for link in links] == [[], [False]]
        await store.close()
        assert first.made[0].closed == [False]
        assert second.script == []

    async def test_a_store_is_open_for_a_block(self) -> None:
        """And closed behind it."""
        store = MemoryStore(clock=ManualClock())
        async with running(store) as opened:
            assert (await opened.stats()).copies == 0
        with pytest.raises(NotOpen):
            await store.stats()
