"""S6, I4, I5, I6: what a table, a bucket, a network or a user may do wrong; what is said then."""

import asyncio
import random
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from stillfresh import Cache, ConfigError, LeaseHeld, LeaseLost, NotOpen, Policy, StoreError
from stillfresh.stores.aws import AwsService
from stillfresh.stores.contract import Ask, Copy, Failure, Held, Lease, Put, Record
from stillfresh.stores.dynamodb import DynamoStore, FaceTheoryCacheLease
from stillfresh.stores.dynamodb.rows import lock_of
from stillfresh.stores.dynamodb.schema import Names
from stillfresh.stores.dynamodb.table import Table
from stillfresh.stores.meter import CostMeter
from stillfresh.stores.urls import store_for
from stillfresh.testing import ManualClock
from tests.kit.proxies.lossy import LossyProxy, lossy
from tests.kit.servers.aws import Aws

NOW = 1_700_000_000.0
KIND = "price"


class Pauses:
    """Does not sleep; notes for how long it was asked to, and waits at the gate."""

    def __init__(self) -> None:
        self.asked: list[float] = []
        self.gate = asyncio.Event()
        self.gate.set()

    async def __call__(self, seconds: float) -> None:
        self.asked.append(seconds)
        await self.gate.wait()
        await asyncio.sleep(0)


@asynccontextmanager
async def troubled(
    aws: Aws, **options: Any
) -> AsyncIterator[tuple[DynamoStore, LossyProxy, Pauses]]:
    """A store behind a proxy that does as it is told."""
    pauses = Pauses()
    async with lossy(aws.endpoint) as proxy:
        store = Aws(proxy.address, aws.s3_endpoint).store(
            aws.new_table(), ManualClock(start=NOW), sleep=pauses, **options
        )
        await store.open()
        proxy.seen.clear()
        try:
            yield store, proxy, pauses
        finally:
            await store.close()


async def leased(store: DynamoStore, id_: str = "a") -> Lease:
    grant = (await store.acquire(KIND, [Ask(id_)], 5))[id_]
    assert isinstance(grant, Lease)
    return grant


def copy_by(lease: Lease, value: bytes | None = b"value") -> Copy:
    return Copy(lease.token, NOW, Policy(60, 60), value)


def new_put(store: DynamoStore, value: bytes | None = b"value", **options: Any) -> Put:
    return Put(Copy(store.new_generation(), NOW, Policy(60, 60), value), **options)


class TestI4LostAnswers:
    async def test_a_lease_whose_answer_was_lost_is_ours(self, aws: Aws) -> None:
        """Asked again we are refused by our own token, and have won; nobody else can."""
        async with troubled(aws) as (store, proxy, _):
            proxy.lose["PutItem"] = 1
            lease = await leased(store)
            assert proxy.seen["PutItem"] == 2
            assert isinstance((await store.acquire(KIND, [Ask("a")], 5))["a"], Held)
            assert await store.publish(KIND, {"a": (lease, copy_by(lease))}) == set()

    async def test_a_release_whose_answer_was_lost_is_done(self, aws: Aws) -> None:
        """Asked again it finds nothing of ours, which is no error."""
        async with troubled(aws) as (store, proxy, _):
            for failures in (None, {"a": Failure(1, NOW, "x")}):
                lease = await leased(store)
                proxy.lose["DeleteItem"] = proxy.lose["TransactWriteItems"] = 1
                await store.release(KIND, [lease], failures)
                proxy.lose.clear()

    async def test_a_renewal_whose_answer_was_lost_is_done(self, aws: Aws) -> None:
        """It may be done twice."""
        async with troubled(aws) as (store, proxy, _):
            lease = await leased(store)
            proxy.lose["UpdateItem"] = 1
            assert await store.renew(KIND, [lease], 50) == set()


class TestI5LostAnswers:
    @pytest.mark.parametrize("losses", [1, 3])
    async def test_a_transaction_whose_answer_was_lost_is_settled(
        self, aws: Aws, losses: int
    ) -> None:
        """Published once, and known to be: it is not taken for superseded."""
        async with troubled(aws) as (store, proxy, _):
            lease = await leased(store)
            proxy.lose["TransactWriteItems"] = losses
            assert await store.publish(KIND, {"a": (lease, copy_by(lease))}) == set()
            assert (await store.read(KIND, ["a"]))["a"] == Record(copy_by(lease))

    async def test_settled_by_reading_when_the_server_has_forgotten(
        self, aws: Aws, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Without a memory of request tokens the repeated one is refused; the row says why."""
        async with troubled(aws) as (store, proxy, _):
            lease = await leased(store)
            assert store._steps is not None
            service = store._steps.table.service
            ask = service._once

            async def forgetful(
                operation: str, then: Any, arguments: dict[str, Any], until: float
            ) -> Any:
                arguments.pop("ClientRequestToken", None)
                return await ask(operation, then, arguments, until)

            monkeypatch.setattr(service, "_once", forgetful)
            proxy.lose["TransactWriteItems"] = 1
            assert await store.publish(KIND, {"a": (lease, copy_by(lease))}) == set()

    async def test_an_invalidation_in_between_wins(self, aws: Aws) -> None:
        """The law, with a busy server in it: what was voided between two attempts is superseded."""
        async with troubled(aws) as (store, proxy, pauses):
            lease = await leased(store)
            proxy.refuse["TransactWriteItems"] = (1, "TransactionInProgressException")
            pauses.gate.clear()
            publishing = asyncio.create_task(store.publish(KIND, {"a": (lease, copy_by(lease))}))
            while not pauses.asked:
                await asyncio.sleep(0)
            await store.invalidate(KIND, ["a"])
            pauses.gate.set()
            assert await publishing == {"a"}
            assert await store.read(KIND, ["a"]) == {}

    async def test_never_answered_is_an_error_and_the_body_stays(
        self, aws: Aws, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """It may have been published: deleting its body would make that a miss."""
        monkeypatch.setattr("stillfresh.stores.breaker.FIRST_PAUSE", 0.0)
        async with troubled(aws) as (store, proxy, _):
            lease = await leased(store)
            proxy.lose["TransactWriteItems"] = 5
            with pytest.raises(StoreError, match="no answer to transact_write_items"):
                await store.publish(KIND, {"a": (lease, copy_by(lease))})
            assert (await store.read(KIND, ["a"]))["a"] == Record(copy_by(lease))


class TestI6SecondLook:
    async def test_a_failed_second_look_frees_the_lease(self, aws: Aws) -> None:
        """Who won it and could not look has no use for it; others need not wait for its end."""
        async with troubled(aws) as (store, proxy, _):
            proxy.refuse["GetItem"] = (10, "ThrottlingException")  # the row, and the epoch of tags
            with pytest.raises(StoreError):
                await store.acquire(KIND, [Ask("a")], 5)
            await leased(store)


class TestI4Errors:
    async def test_held_lost_and_failed_are_told_apart(self, aws: Aws) -> None:
        """Three errors for three things."""
        async with troubled(aws) as (store, proxy, _):
            assert store._steps is not None
            leases = store._steps.table
            terms: dict[str, Any] = {"end": NOW + 5, "now": NOW}
            theirs, _ = await leases.acquire("CACHE#1", new_token=lambda: "theirs", **terms)
            with pytest.raises(LeaseHeld, match="held by another process until 1700000005") as held:
                await leases.acquire("CACHE#1", new_token=lambda: "mine", **terms)
            mine = FaceTheoryCacheLease.until("CACHE#1", "mine", NOW + 5)
            assert held.value.until == NOW + 5
            with pytest.raises(LeaseLost):
                await leases.refresh(mine, now=NOW)
            with pytest.raises(LeaseLost):
                await leases.refresh(theirs, now=NOW + 5)
            proxy.refuse["UpdateItem"] = (1, "AccessDeniedException")
            with pytest.raises(StoreError, match="no permission for UpdateItem"):
                await leases.refresh(theirs, now=NOW)
            proxy.refuse["PutItem"] = (1, "ValidationException")
            with pytest.raises(StoreError, match="ValidationException"):
                await leases.acquire("CACHE#1", new_token=lambda: "mine", **terms)
            await leases.release("CACHE#1", "mine", has_copy=True, now=NOW)
            found = await leases.entry("CACHE#1")
            assert lock_of(found.lock).token == theirs.lease_token
            await leases.void("CACHE#1", found.lock, has_copy=True, now=NOW)
            assert (await leases.entry("CACHE#1")).lock == {}


class TestS6Throttling:
    async def test_throttling_is_waited_out_with_jitter(self, aws: Aws) -> None:
        """Growing, uneven pauses; then it works."""
        async with troubled(aws, dice=random.Random(1).random) as (store, proxy, pauses):
            proxy.refuse["GetItem"] = (4, "ProvisionedThroughputExceededException")
            assert await store.read(KIND, ["a"]) == {}
            assert len(pauses.asked) == 4
            for number, pause in enumerate(pauses.asked):
                assert 0.025 <= pause / 2**number <= 0.05
            assert len({round(pause / 2**n, 6) for n, pause in enumerate(pauses.asked)}) == 4

    async def test_throttling_is_an_error_after_five_attempts(self, aws: Aws) -> None:
        """After five times; the store says so and is none the worse for it."""
        async with troubled(aws) as (store, proxy, _):
            steps: dict[str, Callable[[], Awaitable[object]]] = {
                "GetItem": lambda: store.read(KIND, ["a"]),
                "PutItem": lambda: store.acquire(KIND, [Ask("a")], 5),
                "Query": lambda: store.invalidate(KIND, ["a"]),
                "TransactWriteItems": lambda: store.put(KIND, {"a": new_put(store)}),
            }
            for operation, ask in steps.items():
                proxy.refuse[operation] = (5, "ThrottlingException")
                with pytest.raises(StoreError, match="asked up to 5 times"):
                    await ask()
                await ask()

    async def test_keys_that_a_batch_left_out_are_asked_for_again(self) -> None:
        """At once where some came; after a pause where none did; an error in the end."""
        left, asked, pauses = [2, 2, 0, *[2] * 5], list[int](), Pauses()

        class Client:
            async def batch_get_item(self, **given: Any) -> dict[str, Any]:
                keys = given["RequestItems"]["t"]["Keys"]
                asked.append(len(keys))
                late = keys[len(keys) - left.pop(0) :]
                found = [key for key in keys if key not in late]
                return {"Responses": {"t": found}, "UnprocessedKeys": {"t": {"Keys": late}}}

        service = AwsService(Client(), "table 't'", CostMeter(), pauses, random.random)
        table, keys = Table(service, Names("t")), [(pk, "META") for pk in "abc"]
        assert set(await table.get_many(keys)) == set(keys)
        assert (asked, len(pauses.asked)) == ([3, 2, 2], 1)
        with pytest.raises(StoreError, match="busy; 2 rows were not read"):
            await table.get_many(keys[:2])
        assert len(pauses.asked) == 1 + 4

    async def test_a_busy_transaction_is_not_a_lost_lease(self, aws: Aws) -> None:
        """A conflict with another's transaction is tried again."""
        async with troubled(aws) as (store, proxy, _):
            lease = await leased(store)
            proxy.refuse["TransactWriteItems"] = (2, "TransactionInProgressException")
            assert await store.publish(KIND, {"a": (lease, copy_by(lease))}) == set()

    async def test_one_of_many_leaves_the_others_done(self, aws: Aws) -> None:
        """All run to their end; then the error is raised."""
        async with troubled(aws) as (store, proxy, _):
            leases = [await leased(store, id_) for id_ in "abc"]
            copies = {lease.id: (lease, copy_by(lease)) for lease in leases}
            proxy.refuse["TransactWriteItems"] = (1, "AccessDeniedException")
            with pytest.raises(StoreError, match="no permission"):
                await store.publish(KIND, copies)
            assert len(await store.read(KIND, list("abc"))) == 3
            stats = await store.stats()
            assert (stats.copies, stats.leases) == (2, 1)


class TestS6BadInput:
    async def test_a_missing_table_is_reported_with_what_to_do(self, aws: Aws) -> None:
        """Told when it is opened, with what to do; and by use, should it go later."""
        store = aws.store("not-there")
        with pytest.raises(StoreError, match="table 'not-there': there is no such table; make it"):
            await store.open()
        with pytest.raises(NotOpen):
            await store.read(KIND, ["a"])
        store = aws.store(aws.new_table())
        await store.open()
        async with aws.raw(store._names.table) as raw:
            await raw.dynamodb.delete_table(TableName=raw.table)
        with pytest.raises(StoreError, match="stillfresh table create"):
            await store.read(KIND, ["a"])
        await store.close()

    @pytest.mark.parametrize(
        "keys", [{"id": "HASH"}, {"pk": "HASH"}, {"sk": "HASH", "pk": "RANGE"}]
    )
    async def test_a_table_of_other_keys(self, aws: Aws, keys: dict[str, str]) -> None:
        """Said with the keys it has, and those it must have."""
        store = aws.store(aws.new_table(**keys))
        with pytest.raises(StoreError, match=r"they must be pk \(HASH, S\) and sk \(RANGE, S\)"):
            await store.open()

    async def test_a_missing_bucket_is_reported_and_the_lease_is_kept(self, aws: Aws) -> None:
        """Said by the first who needs it; the lease is not lost by it."""
        store = aws.store(aws.new_table(), bucket="no-such-bucket")
        await store.open()
        lease = await leased(store)
        with pytest.raises(StoreError, match="bucket 'no-such-bucket': there is no such bucket"):
            await store.publish(KIND, {"a": (lease, copy_by(lease))})
        await store.release(KIND, [lease])
        await store.close()

    async def test_a_denied_action_is_named(self, aws: Aws) -> None:
        """The action that was denied is named; looking at the table is not required."""
        async with lossy(aws.endpoint) as proxy:
            proxy.refuse["DescribeTable"] = (1, "AccessDeniedException")
            store = Aws(proxy.address, aws.s3_endpoint).store(aws.new_table())
            await store.open()
            proxy.refuse["GetItem"] = (1, "AccessDeniedException")
            with pytest.raises(StoreError, match="no permission for GetItem"):
                await store.read(KIND, ["a"])
            await store.close()

    @pytest.mark.usefixtures("aws")
    async def test_a_store_opens_while_its_server_is_away_and_each_step_fails(self) -> None:
        """A store can be opened while it is unavailable; until it is back each step fails."""
        pauses = Pauses()
        store = Aws("http://127.0.0.1:9", "http://127.0.0.1:9").store("table", sleep=pauses)
        await store.open()
        with pytest.raises(StoreError, match=r"unavailable|no answer to get_item"):
            await store.read(KIND, ["a"])
        with pytest.raises(StoreError, match="no answer to query"):
            await store.invalidate(KIND, ["a"])
        await store.close()

    @pytest.mark.usefixtures("aws")
    @pytest.mark.parametrize(
        ("address", "says"),
        [
            ("dynamodb://table", "write dynamodb://table\\?bucket=name"),
            ("dynamodb://table?bucket=", "write dynamodb://table\\?bucket=name"),
            ("dynamodb://table/path?bucket=b", "write dynamodb://table\\?bucket=name"),
            ("dynamodb://key:secret@table?bucket=b", "write dynamodb://table\\?bucket=name"),
            ("dynamodb://table?bucket=b#x", "write dynamodb://table\\?bucket=name"),
            ("dynamodb://table?bucket=b&bucket=c", "takes each once"),
            ("dynamodb://table?bucket=b&colour=red", "takes each once"),
            ("dynamodb://table?bucket=b&tenant=", "tenant"),
            ("dynamodb://table?bucket=b&tenant=a%23b", "tenant"),
            ("dynamodb://?bucket=b", "FACETHEORY_CACHE_TABLE_NAME"),
        ],
    )
    def test_an_address_that_says_too_little_or_too_much(self, address: str, says: str) -> None:
        """Refused before anything is opened, with what to write."""
        with pytest.raises(ConfigError, match=says):
            Cache(address)

    def test_the_tables_name_comes_from_the_environment(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """As the schema's other users have it, where the address has none."""
        monkeypatch.setenv("FACETHEORY_CACHE_TABLE_NAME", "site-cache")
        store = store_for("dynamodb://?bucket=b&tenant=acme", ManualClock())
        assert isinstance(store, DynamoStore)
        assert (store._names.table, store._names.tenant) == ("site-cache", "acme")
        named = store_for("dynamodb://own?bucket=b", ManualClock())
        assert isinstance(named, DynamoStore)
        assert named._names.table == "own"

    async def test_a_missing_region_is_reported(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Neither in the address nor in the settings."""
        monkeypatch.delenv("AWS_DEFAULT_REGION", raising=False)
        monkeypatch.setenv("AWS_CONFIG_FILE", "/dev/null")
        with pytest.raises(ConfigError, match="no region"):
            await DynamoStore("table", bucket="b").open()

    async def test_an_endpoint_that_is_none(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The error names the table."""
        monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-west-1")
        with pytest.raises(ConfigError, match=r"table 'prices': Invalid endpoint: nowhere"):
            await DynamoStore("prices", bucket="b", endpoint="nowhere").open()

    async def test_missing_credentials_are_reported_with_what_to_set(
        self, aws: Aws, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The error says what to set."""
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            monkeypatch.delenv(name)
        monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/dev/null")
        store = aws.store(aws.new_table())
        await store.open()
        with pytest.raises(StoreError, match="no AWS credentials; set AWS_ACCESS_KEY_ID"):
            await store.read(KIND, ["a"])
        await store.close()

    def test_a_missing_library_is_named(self) -> None:
        """The schema can be imported without it; the store says what to install."""
        script = """
import sys
sys.modules["aiobotocore"] = None
from stillfresh.stores.dynamodb.schema import FaceTheoryCacheMetadata
from stillfresh import Cache, ConfigError
try:
    Cache("dynamodb://table?bucket=b")
except ConfigError as exc:
    assert "stillfresh[aws]" in str(exc), exc
else:
    raise AssertionError("imported")
"""
        subprocess.run([sys.executable, "-W", "error", "-c", script], check=True, timeout=60)


@asynccontextmanager
async def silent() -> AsyncIterator[str]:
    """The address of a server that accepts, and never says a word."""
    waiting, ended = set[asyncio.Task[Any]](), asyncio.Event()

    async def serve(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        waiting.add(task)
        await ended.wait()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        ended.set()
        server.close()
        await asyncio.gather(*waiting)
        await server.wait_closed()


class TestS6Away:
    async def test_a_silent_server_costs_no_more_than_the_patience(
        self, aws: Aws, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A server that accepts and does not answer: all attempts together end with it."""
        monkeypatch.setattr("stillfresh.stores.aws.PATIENCE", 0.3)
        async with silent() as address:
            store = Aws(address, aws.s3_endpoint).store("table")
            async with asyncio.timeout(25):  # less than the others' thirty seconds
                await store.open()
                with pytest.raises(StoreError, match="no answer to query"):
                    await store.invalidate(KIND, ["a"])
            await store.close()

    async def test_a_server_that_is_away_is_asked_by_one_caller_in_a_while(
        self, aws: Aws, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        """The others are told at once; an invalidation is always tried; an answer ends it. The log
        says once that the service is unavailable, and once that it answers again."""
        monkeypatch.setattr("stillfresh.stores.breaker.FIRST_PAUSE", 3600.0)
        monkeypatch.setattr("stillfresh.stores.breaker.LONGEST_PAUSE", 3600.0)
        async with troubled(aws) as (store, proxy, _):
            proxy.lose["GetItem"] = 5
            with pytest.raises(StoreError, match="no answer to get_item"):
                await store.read(KIND, ["a"])
            for step in (store.read(KIND, ["a"]), store.acquire(KIND, [Ask("a")], 5)):
                with pytest.raises(StoreError, match="unavailable; stillfresh tries it again"):
                    await step
            assert (proxy.seen["GetItem"], proxy.seen["PutItem"]) == (5, 0)
            await store.invalidate(KIND, ["a"])
            assert proxy.seen["Query"] == 1
            assert await store.read(KIND, ["a"]) == {}
        away, back = [record.getMessage() for record in caplog.records]
        assert away.endswith("stillfresh tries it again within 2 s")
        assert back.endswith(": answers again")

    async def test_a_busy_one_is_not_away(self, aws: Aws) -> None:
        """Who is refused for being one too many is no reason to hold back the others."""
        async with troubled(aws) as (store, proxy, _):
            proxy.refuse["GetItem"] = (5, "ThrottlingException")
            with pytest.raises(StoreError, match="asked up to 5 times"):
                await store.read(KIND, ["a"])
            assert await store.read(KIND, ["a"]) == {}
