"""T5, S15: rows of a DynamoDB table that were tampered with, under puts and invalidations.

Loads on such rows are in `test_tampered_servers.py`. Whatever stands in an attribute: a put is
stored and read back, an invalidation marks, a deletion deletes, and no step is refused for ever.
"""

import asyncio
from contextlib import AsyncExitStack
from itertools import count
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stillfresh import Policy
from stillfresh.stores.contract import (
    UNREAD,
    Ask,
    Copy,
    Lease,
    Mark,
    Put,
    PutOutcome,
    Record,
    When,
)
from stillfresh.stores.dynamodb.schema import Names
from stillfresh.stores.versions import packed_version
from stillfresh.testing import ManualClock
from tests.kit.examples import examples
from tests.kit.feed import NOW
from tests.kit.servers.aws import Aws, Raw

FEW = settings(
    max_examples=examples(5),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
LIMIT = 60
"""Seconds for one example, which takes one at most: a slow machine makes it, a circle does not."""
IDS = ("a", "b", "none")
MOST_PUTS = 20
VALUES = st.one_of(
    st.sampled_from(["", "x", "released", "released:x", "\ud7ff", "1", "theirs/1"]).map(
        lambda it: {"S": it}
    ),
    st.sampled_from(["0", "-1", "1.5", "1e125", "-1e125", "1e-130", str(int(NOW) + 30)]).map(
        lambda it: {"N": it}
    ),
    st.sampled_from([b"x", b"i1234567", packed_version(5), packed_version("5")]).map(
        lambda it: {"B": it}
    ),
    st.sampled_from(
        [{"NULL": True}, {"BOOL": True}, {"L": []}, {"L": [{"N": "1"}]}, {"M": {}}, {"SS": ["x"]}]
    ),
    st.none(),
)
NAMES = st.sampled_from(
    [
        *("s3_key", "generated_at", "revalidate_seconds", "etag", "ttl", "fetched_at"),
        *("fresh_for", "stale_for", "error_for", "mark", "body_size", "generation", "absent"),
        *("extra", "tags", "late_tags", "kind", "id", "failures", "retry_at", "error"),
        *("lease_token", "lease_expires_at", "voided", "value_version", "replaced"),
    ]
)


async def tamper(raw: Raw, pks: set[str], data: st.DataObject) -> None:
    """Up to five attributes of META and LOCK rows: another value, another type, none."""
    rows = [row for row in [*await raw.rows(), *await raw.traces()] if row["pk"]["S"] in pks]
    rows += [{"pk": row["pk"], "sk": {"S": "LOCK"}} for row in rows if row["sk"]["S"] == "META"]
    for _ in range(data.draw(st.integers(1, 5))):
        row = data.draw(st.sampled_from(rows))
        name = data.draw(NAMES)
        value = data.draw(VALUES)
        row.pop(name, None)
        if value is not None:
            row[name] = value
        await raw.dynamodb.put_item(TableName=raw.table, Item=row)


class Bench:
    """A store, and the bare clients; opened once for all examples, each with a kind of its own."""

    def __init__(self, aws: Aws) -> None:
        self.aws = aws
        self.table = aws.new_table()
        self.clock = ManualClock(NOW)
        self.store = aws.store(self.table, self.clock)
        self.stack = AsyncExitStack()
        self.kinds = (f"thing{number}" for number in count())

    async def open(self) -> None:
        self.raw = await self.stack.enter_async_context(self.aws.raw(self.table))
        await self.store.open()
        self.stack.push_async_callback(self.store.close)

    async def put(self, kind: str, id_: str, value: Any, **options: Any) -> PutOutcome:
        copy = Copy(self.store.new_generation(), self.clock(), Policy(60), value)
        for _ in range(MOST_PUTS):
            outcome = (await self.store.put(kind, {id_: Put(copy, **options)}))[id_].outcome
            if outcome is not PutOutcome.AGAIN:
                return outcome
        raise AssertionError("AGAIN for ever")

    async def record(self, kind: str, id_: str) -> Record:
        return (await self.store.read(kind, [id_])).get(id_, Record())

    async def used(self, data: st.DataObject) -> None:
        kind = next(self.kinds)
        for id_ in IDS:
            await self.put(kind, id_, None if id_ == "none" else id_.encode(), tags=("all",))
        if data.draw(st.booleans()):
            await self.store.delete(kind, ["b"])
        pks = {Names(self.table).pk(kind, id_) for id_ in IDS}
        await tamper(self.raw, pks, data)
        if data.draw(st.booleans()):
            await self.store.invalidate(kind, IDS)
            marks = [(await self.record(kind, id_)).copy for id_ in IDS]
            assert all(copy is None or copy.mark is Mark.HARD for copy in marks)
        await self.store.entries(kind)
        for id_ in IDS:
            await self.heals(kind, id_)
        assert {id_ for _, id_ in await self.store.invalidate_tag("new")} >= set(IDS)
        await self.store.delete(kind, IDS)
        assert await self.store.read(kind, IDS) == {}

    async def heals(self, kind: str, id_: str) -> None:
        """Any put ends; one without a condition is stored and read; then a load replaces it."""
        await self.put(kind, id_, b"added", when=When.NO_LIVE_COPY)
        await self.put(kind, id_, UNREAD, when=When.LIVE_COPY)
        assert await self.put(kind, id_, id_.encode(), tags=("new",)) is PutOutcome.STORED
        copy = (await self.record(kind, id_)).copy
        assert copy is not None
        assert (copy.value, copy.mark) == (id_.encode(), Mark.NONE)
        asks = [Ask(id_, copy.generation, ("new",))]
        lease = (await self.store.acquire(kind, asks, 5))[id_]
        assert isinstance(lease, Lease), lease
        loaded = Copy(lease.token, self.clock(), Policy(60), b"loaded")
        assert await self.store.publish(kind, {id_: (lease, loaded)}) == set()


@pytest.mark.timeout(900)
class TestT5TamperedPuts:
    def test_puts_and_invalidations_work_on_a_tampered_dynamodb_row(self, aws: Aws) -> None:
        """S15: the row heals with the first put."""
        with asyncio.Runner() as runner:
            bench = Bench(aws)
            runner.run(bench.open())

            @FEW
            @given(st.data())
            def example(data: st.DataObject) -> None:
                runner.run(asyncio.wait_for(bench.used(data), LIMIT))

            try:
                example()
            finally:
                runner.run(bench.stack.aclose())
