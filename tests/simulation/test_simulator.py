"""T1: the simulator itself: virtual time, any order, faults by seed, replay, shrinking."""

import asyncio
import gc
import os
import random
import subprocess
import sys
import time
import weakref
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from stillfresh import ConfigError, Policy, StoreError
from stillfresh.stores.contract import (
    Ask,
    Copy,
    Grant,
    Held,
    Lease,
    Put,
    PutOutcome,
    Record,
    Store,
    When,
)
from stillfresh.testing import Faults, Process, Promise, SimulationFailed, World, simulate
from stillfresh.testing.simulator import nodes, wire
from stillfresh.testing.simulator.faults import REQUESTS, Blow, Plan, Strike, Trouble, planned
from stillfresh.testing.simulator.simulate import run
from tests.kit.processes import ROOT
from tests.simulation.engine_scenarios import KEYS, over_a_network, prices
from tests.simulation.scenarios import SCENARIOS

REPLAY = """
import sys, zlib
from tests.simulation.scenarios import SCENARIOS
from stillfresh.testing import simulate
for name in sys.argv[1:]:
    run = simulate(SCENARIOS[name], seed=3)
    print(name, run.steps, run.seconds, zlib.crc32("\\n".join(run.trace).encode()))
"""
SYSTEMS = ["of_pages", "of_a_hub", "of_a_coordinator", "of_a_feed", "of_games"]


async def nothing(world: World) -> None:
    await asyncio.sleep(0)


async def asked(process: Process, id_: str = "a", lease_for: float = 5) -> Grant:
    return (await process.store.acquire("price", [Ask(id_)], lease_for))[id_]


class TestT1Time:
    def test_simulated_hours_take_no_real_time(self) -> None:
        """A sleep moves the clock, and nothing waits for it."""

        async def scenario(world: World) -> None:
            await asyncio.sleep(10_000)

        began = time.monotonic()
        assert simulate(scenario, seed=1).seconds >= 10_000
        assert time.monotonic() - began < 60

    def test_a_scenario_that_waits_for_a_killed_process_fails(self) -> None:
        """T2: although another process goes on, and evicts from its store every hour."""

        async def scenario(world: World) -> None:
            survivor, victim = world.process(), world.process()
            await survivor.start(survivor.cache().open())
            waiting = victim.start(asyncio.sleep(10))
            victim.kill()
            await waiting

        with pytest.raises(SimulationFailed, match="not ended after 30 days"):
            simulate(scenario, seed=1, faults=Faults.none(), shrink=False)

    def test_ready_tasks_run_in_an_order_chosen_by_the_seed(self) -> None:
        """Tasks that are ready at once run in an order that the seed chooses; each order comes."""

        def order(seed: int) -> tuple[int, ...]:
            ran: list[int] = []

            async def one(number: int) -> None:
                await asyncio.sleep(0)
                ran.append(number)

            async def scenario(world: World) -> None:
                await asyncio.gather(*map(one, range(3)))

            simulate(scenario, seed=seed)
            return tuple(ran)

        assert len({order(seed) for seed in range(60)}) == 6
        assert order(7) == order(7)

    def test_a_scenario_that_wants_a_thread_fails(self) -> None:
        """What wants one is told so, and the run fails."""

        async def scenario(world: World) -> None:
            await asyncio.to_thread(print)

        with pytest.raises(SimulationFailed, match="one thread"):
            simulate(scenario, seed=1)


class TestT2Leases:
    def test_a_publication_that_came_too_late_may_be_stored_once_the_clock_is_set_back(
        self,
    ) -> None:
        """The lease was over by the clock alone: nobody else took it, and no tag ended it."""

        async def scenario(world: World) -> None:
            world._asks_callers = False
            process = world.process()
            store = process.store
            lease = await asked(process, lease_for=3)
            assert isinstance(lease, Lease)
            copy = Copy(lease.token, world.server_now(), Policy(5, 5, 5), b"late")
            publication = {"a": (lease, copy)}
            await asyncio.sleep(4)
            assert await store.publish("price", publication, {"a": ("tag",)}) == {"a"}
            world.set_server_clock(-3)
            assert await store.publish("price", publication, {"a": ("tag",)}) == set()

        simulated = run(scenario, Plan(1))
        assert simulated.broken is None, simulated.broken


class TestT1Replay:
    def test_what_the_program_froze_stays_frozen_after_a_run(self) -> None:
        gc.freeze()
        simulate(SCENARIOS["over_a_network"], seed=11)
        assert gc.get_freeze_count() > 0

    @pytest.mark.parametrize("name", SCENARIOS)
    def test_a_seed_gives_the_same_run_again(self, name: str) -> None:
        """To the letter: every line of the trace, every step."""
        assert simulate(SCENARIOS[name], seed=11) == simulate(SCENARIOS[name], seed=11)

    @pytest.mark.parametrize(
        "names",
        [
            pytest.param(["over_a_network", *SYSTEMS], id="systems"),
            pytest.param(list(SCENARIOS), id="all", marks=pytest.mark.proof),
        ],
    )
    def test_a_seed_gives_the_same_run_in_another_process(self, names: list[str]) -> None:
        """Whatever the order of its sets."""
        said = set()
        for hashes in ("1", "2"):
            environment = {**os.environ, "PYTHONHASHSEED": hashes}
            command = [sys.executable, "-c", REPLAY, *names]
            done = subprocess.run(
                command, env=environment, cwd=ROOT, capture_output=True, check=True
            )
            said.add(done.stdout)
        assert len(said) == 1
        assert len(said.pop().splitlines()) == len(names)

    def test_other_seeds_give_other_runs(self) -> None:
        """In what happens and in what goes wrong."""
        runs = [simulate(over_a_network, seed=seed) for seed in range(4)]
        assert len({run.trace for run in runs}) == len({run.plan for run in runs}) == 4

    def test_a_simulation_leaves_the_global_random_state(self) -> None:
        """The dice of the program that simulates are not the simulation's."""
        random.seed(5)
        before = random.getstate()
        simulate(over_a_network, seed=2)
        assert random.getstate() == before


def grants(trouble: Trouble | None, *, ids: int = 1, resends: bool = False) -> list[object]:
    """What one process is told, and what another finds ten seconds later."""
    told: list[object] = []
    asks = [Ask(f"id-{number}") for number in range(ids)]

    async def scenario(world: World) -> None:
        for _ in range(2):
            process = world.process()
            try:
                told.extend((await process.store.acquire("price", asks, 100)).values())
            except StoreError:
                told.append("no answer")
            await asyncio.sleep(10)

    troubles = () if trouble is None else ((0, trouble),)
    assert run(scenario, Plan(1, troubles, resends=resends)).broken is None
    return [type(it) if isinstance(it, Lease | Held) else it for it in told]


class TestT1Requests:
    """Each trouble does what it says."""

    def test_a_request_without_trouble_is_done_and_answered(self) -> None:
        assert grants(None) == [Lease, Held]

    def test_a_lost_request_is_neither_done_nor_answered(self) -> None:
        assert grants(Trouble.LOST) == ["no answer", Lease]

    @pytest.mark.parametrize("trouble", [Trouble.UNANSWERED, Trouble.LATE])
    def test_an_unanswered_or_late_request_is_done(self, trouble: Trouble) -> None:
        assert grants(trouble) == ["no answer", Held]

    @pytest.mark.parametrize("trouble", [Trouble.SLOW, Trouble.TWICE])
    def test_a_slow_or_doubled_request_is_done_and_answered(self, trouble: Trouble) -> None:
        assert grants(trouble) == [Lease, Held]

    def test_half_of_a_batch_may_be_done_without_an_answer(self) -> None:
        assert grants(Trouble.HALF, ids=2) == ["no answer", Held, Lease]

    @pytest.mark.parametrize("blow", [Blow.AWAY, Blow.FULL])
    def test_a_store_may_be_away_or_too_full_to_write(self, blow: Blow) -> None:
        """Full, it can be read."""
        told: list[str] = []

        async def scenario(world: World) -> None:
            process = world.process()
            await asyncio.sleep(1)
            for step in (asked(process), process.store.read("price", ["a"])):
                try:
                    await step
                except StoreError as exc:
                    told.append(str(exc))
            await asyncio.sleep(5)
            await asked(process)

        assert run(scenario, Plan(1, (), (Strike(0.5, blow, 1, 3.0),))).broken is None
        assert told == [str(blow)] * (2 if blow is Blow.AWAY else 1)


class TestT7SentAgain:
    """A request without an answer is sent again, and the first one may arrive later."""

    @pytest.mark.parametrize("trouble", [Trouble.LOST, Trouble.UNANSWERED, Trouble.LATE])
    def test_a_resent_request_gets_the_lease_of_the_first(self, trouble: Trouble) -> None:
        """The second request is answered with the lease that the first one took."""
        assert grants(trouble, resends=True) == [Lease, Held]

    def test_a_late_request_takes_a_lease_under_another_token(self) -> None:
        """S8: the first one arrives when the second one's lease was voided."""
        held: list[float | None] = []

        async def scenario(world: World) -> None:
            store = world.process().store
            lease = (await store.acquire("price", [Ask("a")], 100))["a"]
            assert isinstance(lease, Lease)
            await store.invalidate("price", ["a"])
            held.append(world.store.read_now("price", ["a"]).get("a", Record()).held_until)
            await asyncio.sleep(20)
            held.append(world.store.read_now("price", ["a"]).get("a", Record()).held_until)
            assert await store.renew("price", [lease], 100) == {"a"}

        plan = Plan(1, ((0, Trouble.LATE),), resends=True)
        assert run(scenario, plan).broken is None
        assert [until is not None for until in held] == [False, True]

    @pytest.mark.parametrize("trouble", [Trouble.UNANSWERED, Trouble.LATE])
    def test_a_resent_publication_is_done_once(self, trouble: Trouble) -> None:
        """S2: done once, and known to be done."""

        async def scenario(world: World) -> None:
            store = world.process().store
            lease = (await store.acquire("price", [Ask("a")], 100))["a"]
            assert isinstance(lease, Lease)
            copy = Copy(lease.token, world.wall(), Policy(60), b"value")
            assert await store.publish("price", {"a": (lease, copy)}) == set()
            await asyncio.sleep(20)
            assert world.store.read_now("price", ["a"])["a"].copy == copy

        assert run(scenario, Plan(1, ((1, trouble),), resends=True)).broken is None


class TestT1Processes:
    def test_a_killed_process_does_nothing_any_more(self) -> None:
        """No cleanup, no answer; who runs in its place begins anew, with a memory of its own."""
        ran: list[tuple[int, str]] = []

        async def app(process: Process) -> None:
            ran.append((process.number, "begins"))
            try:
                await asyncio.sleep(10)
                ran.append((process.number, "ends"))
            finally:
                if not process.world.is_over:
                    ran.append((process.number, "cleans up"))

        async def scenario(world: World) -> None:
            world.launch(app, 1)

        assert run(scenario, Plan(1, (), (Strike(5.0, Blow.KILL, 1, 1.0),))).broken is None
        assert ran == [(1, "begins"), (2, "begins"), (2, "ends"), (2, "cleans up")]

    def test_nothing_of_a_run_stays_in_memory_although_killed_processes_close_no_cache(
        self,
    ) -> None:
        """Thousands of seeds run in one program."""
        worlds: list[weakref.ref[World]] = []

        async def app(process: Process) -> None:
            resource = prices(process, process.cache())
            await resource.get("a")
            await asyncio.sleep(10)

        async def scenario(world: World) -> None:
            worlds.append(weakref.ref(world))
            world.launch(app, 1)

        assert run(scenario, Plan(1, (), (Strike(5.0, Blow.KILL, 1, 1.0),))).broken is None
        gc.collect()  # the caches
        gc.collect()  # what their entries led to, past the collector
        assert [world() for world in worlds] == [None]

    def test_a_paused_process_continues_later(self) -> None:
        """Its timers fire when it is let go, and what it had sent has happened meanwhile."""
        found: list[object] = []

        async def app(process: Process) -> None:
            await asyncio.sleep(1)
            grant = await asked(process, lease_for=100)
            found.append((type(grant), process.world.time() > 20))

        async def scenario(world: World) -> None:
            process, other = world.process(), world.process()
            process.start(app(process))
            world.loop.call_at(1.0004, process.pause, 20)  # sent, and not yet arrived
            await asyncio.sleep(10)
            found.append(type(await asked(other)))

        simulate(scenario, seed=1, faults=Faults.none())
        assert found == [Held, (Lease, True)]

    def test_each_process_has_its_own_clock_which_may_jump(self) -> None:
        """Each process has its own; the world's time is nobody's."""
        seen: list[float] = []

        async def scenario(world: World) -> None:
            process = world.process()
            seen.append(process.clock() - world.wall())
            await asyncio.sleep(2)
            seen.append(process.clock() - world.wall())

        plan = Plan(1, (), (Strike(1.0, Blow.JUMP, 1, -7.0),), (2.5,))
        assert run(scenario, plan).broken is None
        assert seen == pytest.approx([2.5, -4.5])

    def test_a_task_that_waits_for_ever_is_named(self) -> None:
        """By where it waits."""

        async def app(process: Process) -> None:
            await asyncio.Event().wait()

        async def scenario(world: World) -> None:
            world.launch(app, 1)

        with pytest.raises(SimulationFailed, match=r"these wait still: .* in app") as failed:
            simulate(scenario, seed=1)
        assert failed.value.promise == Promise.ALIVE


class TestT1Shrinks:
    def test_a_failure_is_shrunk_to_the_one_fault_that_matters(self) -> None:
        """Of dozens; the seed, the promise and the trace are in what is raised."""

        async def app(process: Process) -> None:
            resource = prices(process, process.cache())
            for _ in process.world.steps(8):
                await resource.get(KEYS[0])
                await asyncio.sleep(4)

        async def scenario(world: World) -> None:
            world.always("nobody is killed", lambda: "one was" if dead(world) else None)
            world.launch(app, 3)

        def dead(world: World) -> bool:
            return not all(process.is_alive for process in world.processes)

        seed = next(
            seed
            for seed in range(100)
            if any(strike.blow is Blow.KILL for strike in planned(seed, Faults()).strikes)
            and planned(seed, Faults()).troubles
        )
        with pytest.raises(SimulationFailed) as failed:
            simulate(scenario, seed=seed)
        smallest = failed.value.smallest
        assert [strike.blow for strike in smallest.plan.strikes] == [Blow.KILL]
        assert smallest.plan.troubles == ()
        assert smallest.plan.processes == 1
        assert not smallest.plan.shuffled
        assert f"seed {seed}: broken: nobody is killed" in str(failed.value)
        assert "p1  is killed" in str(failed.value)

    def test_shrinking_can_be_switched_off(self) -> None:
        async def scenario(world: World) -> None:
            world.broken("a promise", "did not hold")

        with pytest.raises(SimulationFailed, match="did not hold") as failed:
            simulate(scenario, seed=9, shrink=False)
        assert failed.value.smallest is failed.value.first


class TestT3Doors:
    @pytest.mark.parametrize(
        ("wrong", "said"),
        [
            ({"seed": "1"}, "seed: a whole number"),
            ({"seed": True}, "seed: a whole number"),
            ({"seed": 1, "faults": 0.5}, "faults: Faults"),
        ],
    )
    def test_bad_arguments_of_simulate_are_refused(
        self, wrong: dict[str, object], said: str
    ) -> None:
        with pytest.raises(ConfigError, match=said):
            simulate(nothing, **wrong)  # type: ignore[arg-type]

    def test_bad_faults_are_refused(self) -> None:
        with pytest.raises(ConfigError, match=r"^most_blows: "):
            Faults(most_blows=-1)
        with pytest.raises(ConfigError, match="faults: Troubles, not"):
            Faults(troubles=["lost"])  # type: ignore[list-item]
        with pytest.raises(ConfigError, match="skew: seconds"):
            Faults(skew=-1)

    def test_a_scenario_that_is_no_async_function_is_refused(self) -> None:
        with pytest.raises(ConfigError, match="scenario: must be an async function"):
            simulate("scenario", seed=1)  # type: ignore[arg-type]

    async def test_simulate_inside_an_event_loop_is_refused(self) -> None:
        """Inside another it says so."""
        with pytest.raises(RuntimeError, match="from plain code"):
            simulate(nothing, seed=1)

    def test_without_faults_no_trouble_is_planned(self) -> None:
        for seed in range(20):
            assert planned(seed, Faults.none()).size[0] == 0

    def test_only_allowed_faults_are_planned(self) -> None:
        """And in no more than the first requests."""
        faults = Faults(troubles=[Trouble.LOST], blows=[Blow.PAUSE], skew=0)
        for seed in range(50):
            plan = planned(seed, faults)
            assert {trouble for _, trouble in plan.troubles} <= {Trouble.LOST}
            assert all(number < REQUESTS for number, _ in plan.troubles)
            assert {strike.blow for strike in plan.strikes} <= {Blow.PAUSE}


def put_of(store: Store, value: bytes, **options: Any) -> Put:
    return Put(Copy(store.new_generation(), 1_700_000_000.0, Policy(600), value), **options)


class TestS13Puts:
    """T7: a put over the simulated network is fenced by stamps, and over a file by its queue."""

    def played(self, scenario: Callable[[World], Awaitable[object]]) -> None:
        simulated = run(scenario, Plan(1))
        assert simulated.broken is None, simulated.broken

    def trouble(self, world: World, trouble: Trouble) -> None:
        """The next request meets it."""
        world.weather._troubles[world.weather.requests] = trouble

    def test_an_undisturbed_put_of_an_unknown_key_is_one_request(self) -> None:
        async def scenario(world: World) -> None:
            store, other = world.process().store, world.process().store
            await settled(other, "b", put_of(other, b"first"))
            requests = world.weather.requests
            result = await store.put("price", {"a": put_of(store, b"value")})
            assert result["a"].outcome is PutOutcome.STORED
            assert world.weather.requests == requests + 1

        self.played(scenario)

    def test_a_put_after_an_unknown_change_is_sent_again(self) -> None:
        async def scenario(world: World) -> None:
            store, other = world.process().store, world.process().store
            await settled(store, "a", put_of(store, b"first"))
            await settled(other, "a", put_of(other, b"second"))
            put = put_of(store, b"third")
            results = [(await store.put("price", {"a": put}))["a"].outcome for _ in range(2)]
            assert results == [PutOutcome.AGAIN, PutOutcome.STORED]

        self.played(scenario)

    @pytest.mark.parametrize("changes", [0, 1, 4])
    def test_a_put_whose_answer_was_lost_is_settled(self, changes: int) -> None:
        """S2: it was stored, or stored and replaced since."""

        async def scenario(world: World) -> None:
            store, other = world.process().store, world.process().store
            await settled(store, "a", put_of(store, b"first"))
            self.trouble(world, Trouble.UNANSWERED)
            putting = asyncio.ensure_future(store.put("price", {"a": put_of(store, b"lost")}))
            await asyncio.sleep(0.03)  # it has taken effect, and the sender waits for longer
            for number in range(changes):
                await settled(other, "a", put_of(other, b"later %d" % number))
            outcome = (await putting)["a"].outcome
            assert outcome is (PutOutcome.REPLACED if changes else PutOutcome.STORED)
            copy = world.store.read_now("price", ["a"])["a"].copy
            assert copy is not None
            assert copy.value == (b"later %d" % (changes - 1) if changes else b"lost")

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(wire, "PATIENCE", (5.0, 6.0))
            self.played(scenario)

    def test_a_conditional_put_whose_answer_was_lost_is_not_refused(self) -> None:
        """S13: its first attempt may have been stored, and replaced since."""

        async def scenario(world: World) -> None:
            store, other = world.process().store, world.process().store
            await settled(store, "a", put_of(store, b"first"))
            await settled(other, "a", put_of(other, b"second"))
            put = put_of(store, b"added", when=When.NO_LIVE_COPY)
            self.trouble(world, Trouble.LOST)
            with pytest.raises(StoreError, match="not known"):
                await store.put("price", {"a": put})

        self.played(scenario)

    def test_a_conditional_put_whose_answer_was_lost_is_not_stored_again(self) -> None:
        """S13: it was stored and forgotten, and the key is empty again, as it was at first."""

        async def scenario(world: World) -> None:
            store, other = world.process().store, world.process().store
            await settled(store, "b", put_of(store, b"the counter begins"))
            self.trouble(world, Trouble.UNANSWERED)
            put = put_of(store, b"one", when=When.UNCHANGED)
            putting = asyncio.ensure_future(store.put("price", {"a": put}))
            await asyncio.sleep(0.03)  # it has taken effect, and the sender waits for longer
            for number in range(4):
                await settled(other, "a", put_of(other, b"later %d" % number))
            await other.delete("price", ["a"])
            with pytest.raises(StoreError, match="not known"):
                await putting
            assert world.store.read_now("price", ["a"]) == {}

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(wire, "PATIENCE", (5.0, 6.0))
            self.played(scenario)

    @pytest.mark.parametrize("by", ["put", "invalidate", "delete"])
    def test_a_put_that_was_given_up_does_not_act_after_a_later_change(self, by: str) -> None:
        async def scenario(world: World) -> None:
            store, other = world.process().store, world.process().store
            await settled(store, "a", put_of(store, b"first"))
            await settled(other, "a", put_of(other, b"second"))
            await store.read("price", ["a"])  # it hears of the change
            self.trouble(world, Trouble.LATE)
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.01):
                    await store.put("price", {"a": put_of(store, b"late")})
            match by:
                case "put":
                    await settled(other, "a", put_of(other, b"third"))
                case "invalidate":
                    await other.invalidate("price", ["a"])
                case _:
                    await other.delete("price", ["a"])
            after = world.store.read_now("price", ["a"])
            await asyncio.sleep(20)
            assert world.store.read_now("price", ["a"]) == after

        self.played(scenario)

    def test_a_put_to_a_file_that_was_given_up_does_not_act(self) -> None:
        async def scenario(world: World) -> None:
            store = world.process().file_store
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.5):
                    await store.put("price", {"a": put_of(store, b"late")})
            await asyncio.sleep(20)
            assert world.store.read_now("price", ["a"]) == {}

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(wire, "LATENCY", (1.0, 2.0))
            self.played(scenario)

    def test_a_broken_connection_is_not_used_again(self) -> None:
        """S9: the replica may give stamps again, so a message for the old node does nothing."""

        async def scenario(world: World) -> None:
            store = nodes.ClusterWire(world.process())
            await settled(store, "a", put_of(store, b"first"))
            world.fail_over(nodes.first_node("a"))
            requests = world.weather.requests
            await settled(store, "a", put_of(store, b"second"))
            assert world.weather.requests == requests + 2

        self.played(scenario)

    @pytest.mark.parametrize("seed", range(6))
    def test_a_node_that_failed_does_not_answer_a_paused_process(self, seed: int) -> None:
        """S9: its replica did not have the put. Both answers would be there when it goes on."""

        async def scenario(world: World) -> None:
            process = world.process()
            store = nodes.ClusterWire(process)

            async def app() -> None:
                world.longest_lag = 0.0
                await settled(store, "a", put_of(store, b"first"))
                world.longest_lag = 10.0
                await settled(store, "a", put_of(store, b"second"))
                copy = world.store.read_now("price", ["a"])["a"].copy
                assert copy is not None
                assert copy.value == b"second"

            process.start(app())
            await asyncio.sleep(0.2)
            process.pause(20)
            world.fail_over(nodes.first_node("a"))
            world.longest_lag = 0.0

        simulate(scenario, seed=seed, faults=Faults.none())


async def settled(store: Store, id_: str, put: Put) -> PutOutcome:
    """Put until the store does not answer AGAIN."""
    while True:
        result = (await store.put("price", {id_: put}))[id_]
        if result.outcome is not PutOutcome.AGAIN:
            return result.outcome
