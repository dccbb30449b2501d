"""S3, S6: the DynamoDB store answers as the memory store does, whatever is asked, in any order.

The rules are those of the other stores' model; times are whole seconds here, and the tags of a
key are a function of it, as they are in the engine (E8).
"""

import asyncio
import itertools
import os
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test
from msgspec.structs import replace

from stillfresh.stores.contract import Ask, Lease, Newer, Record
from stillfresh.stores.memory import MemoryStore
from stillfresh.testing import ManualClock
from tests.kit.examples import examples
from tests.kit.servers.aws import ENVIRONMENT, Aws
from tests.kit.store_model import IDS, KINDS, SECONDS, SOME_IDS, StoreModel, without_epochs

TAGS = {"a": ("eu",), "b": ("eu", "us"), "c": ()}


class DynamoModel(StoreModel):
    aws: Aws

    def __init__(self) -> None:
        RuleBasedStateMachine.__init__(self)
        self.clock = ManualClock(start=1_700_000_000.0)
        self.tokens: list[str] = []
        table, count = self.aws.new_table(), itertools.count()
        self.store = self.aws.store(table, self.clock, new_token=lambda: self.tokens.pop(0))
        self.memory = MemoryStore(clock=self.clock, new_token=lambda: f"token-{next(count)}")
        self.runner = asyncio.Runner()
        self.both(lambda store: store.open())
        self.leases: dict[str, list[Lease]] = {"post": [], "page": []}
        self.generations = ["unknown"]
        self.epochs: dict[str, int] = {}

    def both(self, ask: Callable[[Any], Coroutine[Any, Any, Any]]) -> Any:
        expected = self.plain(self.runner.run(ask(self.memory)))
        assert self.plain(self.runner.run(ask(self.store))) == expected
        return expected

    def plain(self, answer: Any) -> Any:
        """A lease that has ended may be forgotten sooner or later."""
        match answer:
            case dict():
                plain = {key: self.plain(value) for key, value in answer.items()}
                return {key: value for key, value in plain.items() if value != Record()}
            case Record(held_until=float(until)) if until <= self.clock():
                return replace(answer, held_until=None)
            case Newer(record):
                return Newer(self.plain(record))
            case _:
                return answer

    @rule(kind=KINDS, ids=SOME_IDS, lease_for=SECONDS, data=st.data())
    def acquire(self, kind: str, ids: list[str], lease_for: float, data: st.DataObject) -> None:
        records, asks = self.memory.read_now(kind, ids), []
        for id_ in ids:
            copy = records[id_].copy if id_ in records else None
            now = copy.generation if copy is not None else None
            seen = data.draw(st.sampled_from([now, now, None, self.generations[-1]]))
            failures = data.draw(st.sampled_from([None, 0, 2]))
            asks.append(Ask(id_, seen, TAGS[id_], failures))
        expected = self.runner.run(self.memory.acquire(kind, asks, lease_for))
        granted = {id_: it for id_, it in expected.items() if isinstance(it, Lease)}
        self.tokens = [granted[id_].token if id_ in granted else f"no-{id_}" for id_ in ids]
        actual = self.runner.run(self.store.acquire(kind, asks, lease_for))
        assert self.plain(without_epochs(actual)) == self.plain(without_epochs(expected))
        self.leases[kind] += granted.values()
        self.generations += [lease.token for lease in granted.values()]
        own = [lease for lease in actual.values() if isinstance(lease, Lease)]
        self.epochs.update((lease.token, lease.epoch) for lease in own)

    def draw_tags(self, data: st.DataObject, id_: str) -> tuple[str, ...]:
        del data
        return TAGS[id_]

    @rule(seconds=st.sampled_from([1.0, 4.0, 10.0]))
    def wait(self, seconds: float) -> None:
        self.clock.advance(seconds)

    @rule(kind=st.sampled_from(["post", None]), search=st.sampled_from(["", "a"]))
    def list_entries(self, kind: str | None, search: str) -> None:
        """In an order of its own: what has a copy, and of the rest only leases that name tags."""
        memory, store = (
            {(entry.kind, entry.id): (self.plain(entry.record), entry.size) for entry in found}
            for each in (self.memory, self.store)
            for found in [self.runner.run(each.entries(kind, search))]
        )
        assert store == {name: it for name, it in memory.items() if name in store}
        assert store.keys() >= {name for name, it in memory.items() if it[0].copy is not None}

    @invariant()
    def both_hold_the_same(self) -> None:
        for kind in ("post", "page"):
            self.both(lambda store, kind=kind: store.read(kind, IDS))  # type: ignore[misc]
        stats, expected = (self.runner.run(each.stats()) for each in (self.store, self.memory))
        assert (stats.copies, stats.leases) == (expected.copies, expected.leases)

    def teardown(self) -> None:
        self.runner.run(self.store.close())
        self.runner.close()


@pytest.mark.hypothesis
def test_s3_dynamodb_is_as_memory(aws: Aws, monkeypatch: pytest.MonkeyPatch) -> None:
    """S6: leases, copies, failures, tags, marks and counts, step by step."""
    assert ENVIRONMENT.items() <= os.environ.items()
    monkeypatch.setattr(DynamoModel, "aws", aws, raising=False)
    run_state_machine_as_test(
        DynamoModel, settings=settings(max_examples=examples(4), stateful_step_count=30)
    )
