"""S6, I2-I7: the store on a real DynamoDB server, values in a real S3."""

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from hashlib import sha256
from typing import Any, TypeVar

import pytest

from stillfresh import Cache, Clock, ConfigError, NotOpen, Policy
from stillfresh.stores.aws import ConditionFailed
from stillfresh.stores.bodies import Body
from stillfresh.stores.contract import (
    UNREAD,
    Ask,
    Copy,
    Failure,
    Grant,
    Held,
    Lease,
    Mark,
    Newer,
    Put,
    PutOutcome,
    PutResult,
    Record,
    Store,
    When,
)
from stillfresh.stores.dynamodb import (
    DynamoStore,
    FaceTheoryCacheLease,
    FaceTheoryCacheMetadata,
    scanning,
)
from stillfresh.stores.dynamodb.leases import Leases
from stillfresh.stores.dynamodb.rows import meta_item
from stillfresh.stores.dynamodb.scanning import entries_of
from stillfresh.stores.dynamodb.steps import DynamoSteps
from stillfresh.stores.dynamodb.table import Table
from stillfresh.stores.versions import packed_version
from stillfresh.testing import ManualClock, PutConformance, StoreConformance
from stillfresh.testing.conformance_capabilities import EvictionConformance, ListingConformance
from stillfresh.testing.conformance_copies import CopyConformance
from stillfresh.testing.conformance_kit import Deliver
from tests.kit.proxies.lossy import LossyProxy, lossy
from tests.kit.servers import aws as aws_servers
from tests.kit.servers.aws import Aws, Raw

T = TypeVar("T")

NOW = 1_700_000_000.0
PAGE = "page"
STORED, REPLACED, KEPT, MIXED, REFUSED, AGAIN = PutOutcome
SEVEN = packed_version(7)
THEIRS: dict[str, Any] = {"lease_token": "theirs"}
PK = "CACHE#" + sha256(b"/pricing").hexdigest()


@pytest.mark.timeout(300)  # the late requests take minutes on a very busy machine
class TestS6DynamoStore(StoreConformance):
    """S1, S2, S8, S13: every sentence of the contract, on real servers."""

    LISTS_LOADS = False
    FORGETS = False
    """True: the server does not know the names of transactions, so the rows alone are the fence."""

    proxy: LossyProxy | None = None

    @pytest.fixture(autouse=True)
    def _servers(self, aws: Aws, monkeypatch: pytest.MonkeyPatch) -> None:
        self.aws = aws
        monkeypatch.setattr("stillfresh.stores.aws.FIRST_PAUSE", 0.0)

    async def new_store(self, clock: Clock) -> DynamoStore:
        aws = self.aws
        if self.proxy is not None:
            aws = replace(aws, endpoint=self.proxy.address)
        return aws.store(self.aws.new_table(), clock)

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[Store]:
        """Through a proxy, which `delayed` tells to hold requests back."""
        async with lossy(self.aws.endpoint) as self.proxy, super().opened() as store:
            self.proxy.forgets = self.FORGETS
            yield store
        self.proxy = None

    async def delayed(self, step: Awaitable[T]) -> tuple[T, Deliver | None]:
        """S8: every write of the step is held back once, and sent again by the store."""
        assert self.proxy is not None
        self.proxy.held.clear()
        self.proxy.delays = True
        result = await step
        self.proxy.delays = False
        return result, self.proxy.deliver

    async def unanswered(self, step: Awaitable[T], meanwhile: Deliver) -> T:
        """S2: the server publishes, and the connection breaks."""
        assert self.proxy is not None
        self.proxy.lose["TransactWriteItems"] = 1
        self.proxy.meanwhile = meanwhile
        result = await step
        assert not self.proxy.lose["TransactWriteItems"]
        return result


@pytest.mark.filterwarnings("ignore:asynchronous generator:ResourceWarning")  # the AWS library's
class TestE21PublishingAsTheLoopEnds:
    def test_drops_the_tags_of_the_copy_before(
        self, aws: Aws, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A loop that ends closes every generator, also under steps that it has to wait for."""
        table, transact = aws.new_table(), Table.transact

        async def publish(store: Store, seen: str | None, tag: str) -> str:
            lease = (await store.acquire(PAGE, [Ask("a", seen)], 30))["a"]
            assert isinstance(lease, Lease)
            copy = Copy(lease.token, time.time(), Policy(60), b"value")
            assert await store.publish(PAGE, {"a": (lease, copy)}, {"a": (tag,)}) == set()
            return lease.token

        async def ends(table: Table, *actions: Any, **options: Any) -> None:
            await asyncio.get_running_loop().shutdown_asyncgens()
            await transact(table, *actions, **options)

        async def main() -> None:
            store = aws.store(table)
            await store.open()
            seen = await publish(store, None, "old")
            monkeypatch.setattr(Table, "transact", ends)
            await publish(store, seen, "new")
            await store.close()

        async def reached() -> list[list[tuple[str, str]]]:
            store = aws.store(table)
            await store.open()
            found = [await store.invalidate_tag(tag) for tag in ("old", "new")]
            await store.close()
            return found

        asyncio.run(main())
        assert asyncio.run(reached()) == [[], [(PAGE, "a")]]


@pytest.fixture(scope="module")
def real_storage(tmp_path_factory: pytest.TempPathFactory, aws: Aws) -> Iterator[Aws]:
    """Also where the two ports that it would take by itself are somebody's."""
    with ExitStack() as stack:
        for port in (9101, 8181):
            taken = stack.enter_context(socket.socket())
            with suppress(OSError):  # then it is somebody's already
                taken.bind(("127.0.0.1", port))
                taken.listen()
        s3 = stack.enter_context(aws_servers.seaweed_s3(tmp_path_factory.mktemp("weed")))
        aws_servers.make_bucket(s3)
        yield Aws(aws.endpoint, s3)


@pytest.mark.proof
async def test_s6_copies_on_real_storage(real_storage: Aws) -> None:
    """All of copies, whose bodies are there, on files; one test: its server is started once."""
    suite = TestS6DynamoStore()
    suite.aws = real_storage
    parts = (CopyConformance, ListingConformance, EvictionConformance)
    names = [name for part in parts for name in dir(part) if name.startswith("test_")]
    names = [name for name in names if "late_requests" not in name]  # bodies are not late
    assert len(names) > 25
    for name in names:
        suite.setup_method()
        await getattr(suite, name)()


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=(pytest.mark.proof,) * ("late_requests" in name))
        for name in dir(PutConformance)
        if "late_requests" in name or "was_lost" in name
    ],
)
async def test_s8_puts_on_a_server_that_forgets_their_names(
    aws: Aws, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """The rows that were read are the fence; the name of a transaction is not needed."""
    monkeypatch.setattr("stillfresh.stores.aws.FIRST_PAUSE", 0.0)
    monkeypatch.setattr(TestS6DynamoStore, "FORGETS", True)
    suite = TestS6DynamoStore()
    suite.aws = aws
    suite.setup_method()
    await getattr(suite, name)()


class Bench:
    """A store on a manual clock, and the bare clients beside it."""

    def __init__(self, store: DynamoStore, raw: Raw, clock: ManualClock) -> None:
        self.store = store
        self.raw = raw
        self.clock = clock

    @property
    def steps(self) -> DynamoSteps:
        assert self.store._steps is not None
        return self.store._steps

    async def lease(self, seen: str | None = None, *tags: str, id_: str = "/pricing") -> Lease:
        grant = (await self.store.acquire(PAGE, [Ask(id_, seen, tags)], 5))[id_]
        assert isinstance(grant, Lease), grant
        return grant

    async def publish(self, lease: Lease, value: bytes | None = b"<h1>", **terms: Any) -> Copy:
        copy = Copy(lease.token, self.clock(), Policy(60, **terms), value)
        assert await self.store.publish(PAGE, {lease.id: (lease, copy)}) == set()
        return copy

    async def put(self, value: Any = b"put", *, version: bytes = b"", **options: Any) -> PutResult:
        generation = self.store.new_generation()
        copy = Copy(generation, self.clock(), Policy(60), value, Mark.NONE, version)
        return (await self.store.put(PAGE, {"/pricing": Put(copy, **options)}))["/pricing"]

    async def ask(self, seen: str | None = None, lease_for: float = 5) -> Grant:
        return (await self.store.acquire(PAGE, [Ask("/pricing", seen)], lease_for))["/pricing"]

    async def record(self, **known: str) -> Record:
        found = await self.store.read(PAGE, ["/pricing"], {"/pricing": known.get("known", "")})
        return found.get("/pricing", Record())

    def units(self) -> list[float]:
        costs = self.store._meter.costs()
        return [costs.read_units, costs.write_units, costs.s3_gets, costs.s3_puts]

    def spent(self, before: list[float]) -> list[float]:
        return [after - was for after, was in zip(self.units(), before, strict=True)]


@asynccontextmanager
async def bench_on(aws: Aws, **options: Any) -> AsyncIterator[Bench]:
    clock, table = ManualClock(start=NOW), aws.new_table()
    store = aws.store(table, clock, **options)
    async with aws.raw(table) as raw:
        await store.open()
        try:
            yield Bench(store, raw, clock)
        finally:
            await store.close()


@pytest.fixture
async def bench(aws: Aws) -> AsyncIterator[Bench]:
    async with bench_on(aws) as bench:
        yield bench


class TestS6Closing:
    async def test_closing_lets_requests_under_way_end(self, aws: Aws) -> None:
        """Nobody who was not cancelled is told so: served, or told that the store is closed."""
        async with bench_on(aws) as bench:
            ids = [str(number) for number in range(40)]
            grants = await bench.store.acquire(PAGE, [Ask(id_) for id_ in ids], 5)
            copies = {
                id_: (lease, Copy(lease.token, NOW, Policy(60), b"value"))
                for id_, lease in grants.items()
                if isinstance(lease, Lease)
            }
            publishing = asyncio.create_task(bench.store.publish(PAGE, copies))
            while len(await bench.raw.objects()) < 3:
                pass
            reading = [asyncio.create_task(bench.store.read(PAGE, [id_])) for id_ in ids * 3]
            await asyncio.wait(reading, return_when=asyncio.FIRST_COMPLETED)
            await bench.store.close()
            ended = await asyncio.gather(publishing, *reading, return_exceptions=True)
            for answer in ended:
                assert isinstance(answer, dict | set | NotOpen), answer
            assert [
                task for task in asyncio.all_tasks() if task is not asyncio.current_task()
            ] == []

    async def test_a_store_is_opened_once_for_many_callers(self, aws: Aws) -> None:
        """One of them opens it, and closing it once leaves no connection behind."""
        store = aws.store(aws.new_table())
        await asyncio.gather(*(store.open() for _ in range(3)))
        assert await store.read(PAGE, ["a"]) == {}
        await store.close()


class TestI2Interop:
    async def test_rows_are_literally_the_schemas(self, bench: Bench) -> None:
        """A lease, then a copy: every attribute, name, type and value."""
        lease = await bench.lease()
        lock = {
            "pk": {"S": PK},
            "sk": {"S": "LOCK"},
            "lease_token": {"S": lease.token},
            "lease_expires_at": {"N": "1700000005"},
            "ttl": {"N": "1700003605"},
        }
        assert await bench.raw.rows() == [lock]
        await bench.publish(lease)
        (row,) = await bench.raw.rows()
        s3_key = row.pop("s3_key")["S"]
        assert row == {
            "pk": {"S": PK},
            "sk": {"S": "META"},
            "generated_at": {"N": "1700000000"},
            "revalidate_seconds": {"N": "60"},
            "ttl": {"N": "1700604860"},
            "generation": {"S": lease.token},
            "fetched_at": {"N": "1700000000"},
            "fresh_for": {"N": "60"},
            "body_size": {"N": "4"},
            "kind": {"S": "page"},
            "id": {"S": "/pricing"},
        }
        stored = await bench.raw.s3.get_object(Bucket="pages", Key=s3_key)
        assert await stored["Body"].read() == b"<h1>"

    async def test_a_tenants_rows_have_its_name_in_front(self, aws: Aws) -> None:
        """The same behind its name; another tenant does not see them."""
        async with bench_on(aws, tenant="acme") as bench:
            await bench.publish(await bench.lease())
            (row,) = await bench.raw.rows()
            assert row["pk"] == {"S": f"TENANT#acme#{PK}"}
            other = aws.store(bench.raw.table, bench.clock, tenant="other")
            await other.open()
            assert await other.read(PAGE, ["/pricing"]) == {}
            assert (await other.stats()).copies == 0
            await other.close()

    async def test_another_languages_row_is_served(self, bench: Bench) -> None:
        """Minimal META and a plain object; leased, regenerated and replaced like our own."""
        await bench.raw.put_object("theirs/pricing.html", b"<h1>theirs")
        theirs: dict[str, Any] = {"generated_at": 1_700_000_000, "revalidate_seconds": 60}
        await bench.raw.put(pk=PK, sk="META", s3_key="theirs/pricing.html", **theirs)
        copy = (await bench.record()).copy
        assert copy is not None
        assert copy.value == b"<h1>theirs"
        assert copy.policy.verdict(copy.fetched_at, bench.clock()) == "fresh"
        assert isinstance(await bench.ask(), Newer)
        await bench.publish(await bench.lease(copy.generation))
        bench.clock.advance(3600)
        await bench.store.close()
        kept = await bench.raw.s3.get_object(Bucket="pages", Key="theirs/pricing.html")
        assert await kept["Body"].read() == b"<h1>theirs", "another's body is not ours to delete"

    async def test_another_languages_page_rewritten_within_a_second(self, bench: Bench) -> None:
        """Under the same key: its etag tells that it is another one."""
        row: dict[str, Any] = {"s3_key": "theirs", "generated_at": int(NOW)}
        for etag in ("one", "two"):
            await bench.raw.put(pk=PK, sk="META", revalidate_seconds=60, etag=etag, **row)
            await bench.raw.put_object("theirs", etag.encode())
            known = "theirs@1700000000@one"
            copy = (await bench.record(known=known)).copy
            assert copy is not None
            assert copy.value == (UNREAD if etag == "one" else b"two")

    async def test_a_shape_puts_a_page_into_the_open(self, aws: Aws) -> None:
        """Body and content type for everybody, the ETag in the row, the rest for us alone."""

        class Pages:
            others = None

            def outside(self, value: bytes) -> Body:
                return Body(value.upper(), "text/html", '"v1"', b"status=200")

            def inside(self, body: Body) -> bytes:
                return b"|".join(
                    [
                        body.data,
                        (body.content_type or "").encode(),
                        (body.etag or "").encode(),
                        body.extra,
                    ]
                )

        async with bench_on(aws, shapes={PAGE: Pages()}) as bench:
            await bench.publish(await bench.lease(), b"<h1>")
            row = await bench.raw.row("META")
            assert row is not None
            assert (row["etag"], row["extra"]) == ({"S": '"v1"'}, {"B": b"status=200"})
            assert row["own_etag"] == row["etag"]
            copy = (await bench.record()).copy
            assert copy is not None
            assert copy.value == b'<H1>|text/html|"v1"|status=200'

    async def test_an_absent_copy_needs_no_body(self, bench: Bench) -> None:
        """It points where nothing lies: to who does not know the attribute it is a miss."""
        await bench.publish(await bench.lease(), None)
        row = await bench.raw.row("META")
        assert row is not None
        assert row["absent"] == {"BOOL": True}
        assert (await bench.raw.objects(), bool(row["s3_key"]["S"])) == (set(), True)


class TestI3Invalidate:
    async def test_an_invalidated_row_is_stale_for_other_languages_too(self, bench: Bench) -> None:
        """LOCK is gone, `revalidate_seconds` is zero, the rest is as it was, but for our own."""
        copy = await bench.publish(await bench.lease())
        before = await bench.raw.row("META")
        await bench.lease(copy.generation)
        await bench.store.invalidate(PAGE, ["/pricing"])
        assert before is not None
        changed = {"revalidate_seconds": {"N": "0"}, "mark": {"N": "2"}}
        (row,) = await bench.raw.rows()
        assert len(row.pop("voided")["S"]) == 36
        assert row == before | changed

    async def test_the_lease_goes_before_the_copy_is_marked(self, aws: Aws) -> None:
        """In that order nothing is published between the two, and no transaction is needed."""
        async with bench_on(aws) as bench, lossy(aws.endpoint) as proxy:
            copy = await bench.publish(await bench.lease())
            await bench.lease(copy.generation)
            store = Aws(proxy.address, aws.s3_endpoint).store(bench.raw.table, bench.clock)
            await store.open()
            proxy.seen.clear()
            await store.invalidate(PAGE, ["/pricing"])
            assert list(proxy.seen) == ["Query", "DeleteItem", "UpdateItem"]
            await store.close()

    async def test_another_languages_copy(self, bench: Bench) -> None:
        """Its terms are remembered, so that who finds it knows how long it may be served."""
        await bench.raw.put_object("theirs.html", b"")
        theirs: dict[str, Any] = {"generated_at": 1_700_000_000, "revalidate_seconds": 60}
        await bench.raw.put(pk=PK, sk="META", s3_key="theirs.html", **theirs)
        await bench.store.invalidate(PAGE, ["/pricing"], soft=True)
        copy = (await bench.record()).copy
        assert copy is not None
        assert (copy.mark, copy.policy.fresh_for) == (Mark.SOFT, 60)

    async def test_a_row_past_its_ttl_is_judged_like_any_other(self, bench: Bench) -> None:
        """TTL is garbage collection: nobody depends on when it happens."""
        await bench.raw.put_object("theirs.html", b"here")
        theirs: dict[str, Any] = {"generated_at": 1_700_000_000, "revalidate_seconds": 60}
        await bench.raw.put(pk=PK, sk="META", s3_key="theirs.html", ttl=1_600_000_000, **theirs)
        copy = (await bench.record()).copy
        assert copy is not None
        assert copy.policy.verdict(copy.fetched_at, bench.clock()) == "fresh"

    async def test_an_invalidation_keeps_a_failure_that_has_no_copy(self, bench: Bench) -> None:
        """The row of the lease goes on remembering it; nobody holds it any more."""
        failure = Failure(2, NOW + 4.5, "TimeoutError: upstream")
        await bench.store.release(PAGE, [await bench.lease()], {"/pricing": failure})
        await bench.store.invalidate(PAGE, ["/pricing"])
        assert await bench.record() == Record(None, None, failure)
        again = await bench.lease()
        assert await bench.record() == Record(None, again.expires_at, failure)
        await bench.store.release(PAGE, [again])
        assert await bench.record() == Record(None, None, failure)
        copy = await bench.publish(await bench.lease())
        assert await bench.record() == Record(copy)


class TestI4Lease:
    async def test_ends_on_whole_seconds_never_too_soon(self, bench: Bench) -> None:
        """A lease of 1.1 s taken at .25 is held to the next whole second after its end."""
        bench.clock.advance(0.25)
        lease = await bench.ask(lease_for=1.1)
        assert isinstance(lease, Lease)
        assert lease.expires_at == NOW + 2
        bench.clock.advance(1.5)
        assert isinstance(await bench.ask(), Held)
        bench.clock.advance(0.25)
        assert isinstance(await bench.ask(), Lease)

    async def test_a_fresh_copy_does_not_hide_it_from_who_knows(
        self, bench: Bench, aws: Aws
    ) -> None:
        """Its holder, and who was denied it and waits for its end, see it in every read."""
        copy = await bench.publish(await bench.lease())
        lease = await bench.lease(copy.generation)
        assert await bench.record() == Record(copy, lease.expires_at)
        other = aws.store(bench.raw.table, bench.clock)
        await other.open()
        assert (await other.read(PAGE, ["/pricing"]))["/pricing"] == Record(copy)
        asked = await other.acquire(PAGE, [Ask("/pricing", copy.generation)], 5)
        assert asked["/pricing"] == Held(lease.expires_at)
        known = (await other.read(PAGE, ["/pricing"]))["/pricing"]
        assert known == Record(copy, lease.expires_at)
        await other.close()

    async def test_another_languages_lease_is_respected(self, bench: Bench) -> None:
        """Until its end, whoever holds it."""
        await bench.raw.put(pk=PK, sk="LOCK", **THEIRS, lease_expires_at=1_700_000_009)
        denied = await bench.ask()
        assert denied == Held(NOW + 9)
        assert await bench.record() == Record(None, NOW + 9)
        bench.clock.advance(9)
        await bench.publish(await bench.lease())

    async def test_a_row_without_an_end_is_no_lease(self, bench: Bench) -> None:
        """It would never be free again."""
        await bench.raw.put(pk=PK, sk="LOCK", **THEIRS)
        await bench.store.release(PAGE, [await bench.lease()])
        await bench.raw.put(pk=PK, sk="LOCK", **THEIRS, lease_expires_at="soon")
        await bench.lease()

    async def test_tokens_are_uuids(self, bench: Bench) -> None:
        """As in every language."""
        token = (await bench.lease()).token
        assert [len(part) for part in token.split("-")] == [8, 4, 4, 4, 12]


class TestI5Publish:
    async def test_a_lost_lease_writes_nothing(self, bench: Bench) -> None:
        """The transaction is cancelled as a whole, and its body deleted after the delay."""
        copy = await bench.publish(await bench.lease())
        bodies = await bench.raw.objects()
        late = await bench.lease(copy.generation)
        await bench.store.invalidate(PAGE, ["/pricing"], soft=True)
        invalidated = await bench.raw.rows()
        value = Copy(late.token, NOW, Policy(60), b"too late")
        assert await bench.store.publish(PAGE, {"/pricing": (late, value)}) == {"/pricing"}
        assert await bench.raw.rows() == invalidated
        assert len(await bench.raw.objects()) == 2
        bench.clock.advance(60)
        await bench.store.close()
        assert await bench.raw.objects() == bodies

    async def test_the_body_that_was_replaced_goes_after_a_delay(self, bench: Bench) -> None:
        """Not at once: a reader may have seen the pointer to it a moment ago."""
        copy = await bench.publish(await bench.lease())
        old = await bench.raw.objects()
        await bench.publish(await bench.lease(copy.generation), b"new")
        assert len(await bench.raw.objects()) == 2
        bench.clock.advance(59)
        await bench.steps.trash.delete_due()
        assert len(await bench.raw.objects()) == 2
        bench.clock.advance(1)
        await bench.steps.trash.delete_due()
        assert len(await bench.raw.objects()) == 1
        assert await bench.raw.objects() != old

    async def test_the_delay_passes_by_itself(self, aws: Aws) -> None:
        """One task waits for the oldest, and ends when there is nothing to delete."""
        async with bench_on(aws, delete_after=0.01) as bench:
            copy = await bench.publish(await bench.lease())
            await bench.publish(await bench.lease(copy.generation), b"new")
            bench.clock.advance(1)
            async with asyncio.timeout(30):
                while len(await bench.raw.objects()) != 1:
                    pass
            task = bench.steps.trash._task
            assert task is not None
            await asyncio.wait([task], timeout=30)
            assert task.done()

    async def test_publishing_twice_leaves_the_first_body_alone(self, bench: Bench) -> None:
        """Every body has a key of its own, even those of one lease."""
        lease = await bench.lease()
        copy = await bench.publish(lease)
        again = Copy(lease.token, NOW, Policy(60), b"again")
        assert await bench.store.publish(PAGE, {"/pricing": (lease, again)}) == {"/pricing"}
        assert await bench.record() == Record(copy)

    async def test_a_body_that_vanished_is_a_miss(self, bench: Bench) -> None:
        """Not a crash, nor a key that can never be loaded again."""
        await bench.publish(await bench.lease())
        for key in await bench.raw.objects():
            await bench.raw.s3.delete_object(Bucket="pages", Key=key)
        assert await bench.record() == Record()
        copy = await bench.publish(await bench.lease(), b"new")
        assert await bench.record() == Record(copy)

    async def test_a_body_replaced_while_it_was_read_is_the_new_one(self, bench: Bench) -> None:
        """The row is looked at again when nothing lies where it pointed."""
        copy = await bench.publish(await bench.lease())
        row = await bench.steps.row(PAGE, PK)
        new = await bench.publish(await bench.lease(copy.generation), b"new")
        assert row.meta is not None
        await bench.raw.s3.delete_object(Bucket="pages", Key=row.meta.s3_key)
        record = await bench.steps.with_body(PAGE, PK, row, Record(row.copy))
        assert record == Record(new)

    async def test_an_eviction_finds_what_nobody_points_to(self, aws: Aws) -> None:
        """Bodies of processes that died, and of rows that TTL swept; young ones stay."""
        async with bench_on(aws) as bench:
            await bench.publish(await bench.lease(), b"kept", stale_for=10**9)
            names = bench.store._names
            orphan = names.body(PK, "died", "early")
            swept = names.body(names.pk(PAGE, "/swept"), "by", "ttl")
            kept = await bench.raw.objects()
            await bench.raw.put_object(orphan, b"")
            await bench.raw.put_object(swept, b"")
            bench.clock.advance(time.time() - bench.clock())
            assert await bench.store.evict(0) == 0
            assert len(await bench.raw.objects()) == 3
            bench.clock.advance(3700)
            await bench.store.evict(0)
            assert await bench.raw.objects() == kept

    async def test_an_eviction_leaves_others_rows_alone(self, bench: Bench) -> None:
        """Of another language, of another role, or of a shape that we do not understand."""
        await bench.raw.put(pk=PK, sk="META", s3_key="theirs", generated_at=1, revalidate_seconds=1)
        await bench.raw.put(pk="CACHE#odd", sk="META", s3_key="theirs")
        await bench.raw.put(pk="CACHE#odd", sk="VERSION#7", ttl=1)
        rows = await bench.raw.rows()
        assert await bench.store.evict(NOW * 2) == 0
        assert await bench.raw.rows() == rows


class TestI6Tags:
    async def test_a_tag_is_a_row_of_its_own(self, bench: Bench) -> None:
        """Under the tag's hash, named after the entry, written with the lease."""
        lease = await bench.lease(None, "shop")
        rows = await bench.raw.rows()
        assert rows[1] == {
            "pk": {"S": f"TAG#{sha256(b'shop').hexdigest()}"},
            "sk": {"S": PK},
            "kind": {"S": PAGE},
            "id": {"S": "/pricing"},
            "lease_token": {"S": lease.token},
            "ttl": {"N": str(1_700_000_005 + 30 * 86400)},
        }
        assert rows[0]["tags"] == {"SS": ["shop"]}

    async def test_what_was_made_of_an_entry_that_was_still_to_come_is_reached_too(
        self, bench: Bench, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """E8, E37: values with one tag are made of each other, and entries are not done at once."""
        await bench.publish(await bench.lease(None, "shop"))
        invalidate = DynamoSteps.invalidate
        invalidated: list[str] = []

        async def invalidate_while_a_value_is_made(steps: DynamoSteps, pk: str, mark: Mark) -> bool:
            invalidated.append(pk)
            if len(invalidated) == 1:
                await bench.publish(await bench.lease(None, "shop", id_="/whole"))
            return await invalidate(steps, pk, mark)

        monkeypatch.setattr(DynamoSteps, "invalidate", invalidate_while_a_value_is_made)
        reached = await bench.store.invalidate_tag("shop")
        assert reached == [(PAGE, "/pricing"), (PAGE, "/whole")]
        assert len(invalidated) == 2
        copy = (await bench.store.read(PAGE, ["/whole"]))["/whole"].copy
        assert copy is not None
        assert copy.mark is Mark.HARD

    async def test_a_tag_may_be_any_text(self, bench: Bench) -> None:
        """Empty ones and odd ones are found, and leave nothing behind."""
        tags = ["", "\0", "\0\0", "ü", "x" * 3_000]
        await bench.publish(await bench.lease(None, *tags))
        for tag in tags:
            assert await bench.store.invalidate_tag(tag) == [(PAGE, "/pricing")]
        await bench.store.delete(PAGE, ["/pricing"])
        assert await bench.raw.rows() == []

    async def test_a_tag_with_half_a_character_is_refused(self, bench: Bench) -> None:
        """Refused before anything is written; an id without tags is only hashed."""
        for ask in (Ask("\ud800", None, ("eu",)), Ask("a", None, ("eu", "\ud800"))):
            with pytest.raises(ConfigError, match="lone surrogates"):
                await bench.store.acquire(PAGE, [Ask("b"), ask], 5)
        assert await bench.raw.rows() == []
        lease = await bench.lease(id_="\ud800")
        await bench.store.release(PAGE, [lease], {lease.id: Failure(1, NOW + 9, "bad: \ud800")})
        assert (await bench.store.read(PAGE, [lease.id]))[lease.id].failure == Failure(
            1, NOW + 9, "bad: ?"
        )

    async def test_a_tag_row_lives_as_long_as_its_copy(self, bench: Bench) -> None:
        """A copy with long terms takes its tags along."""
        await bench.publish(await bench.lease(None, "shop"), error_for=90 * 86400)
        meta, tag = await bench.raw.rows()
        assert meta["ttl"] == tag["ttl"] == {"N": str(1_700_000_060 + 90 * 86400)}

    async def test_tags_that_are_no_more_go(self, bench: Bench) -> None:
        """The tags of the last lease are the tags."""
        copy = await bench.publish(await bench.lease(None, "eu", "shop"))
        await bench.publish(await bench.lease(copy.generation, "shop"))
        assert await bench.store.invalidate_tag("eu") == []
        assert await bench.store.invalidate_tag("shop") == [(PAGE, "/pricing")]

    async def test_a_row_that_speaks_of_nothing_is_dropped(self, bench: Bench) -> None:
        """By the invalidation that finds it."""
        await bench.store.release(PAGE, [await bench.lease(None, "shop")])
        assert len(await bench.raw.rows()) == 1
        assert await bench.store.invalidate_tag("shop") == []
        assert await bench.raw.rows() == []

    async def test_a_caller_that_wins_the_lease_late_reads_the_row_once_more(
        self, bench: Bench
    ) -> None:
        """The lease was free, and the copy not the one seen: released, and the copy served."""
        seen = await bench.record()
        copy = await bench.publish(await bench.lease())
        grant = await bench.ask()
        assert (seen, grant) == (Record(), Newer(Record(copy)))
        assert await bench.raw.row("LOCK") is None


class TestI6TagsOfLoadsUnderWay:
    """A tag's row goes only with the lease that wrote it: a later load stands under it too."""

    async def test_an_eviction_leaves_a_new_load_alone(
        self, bench: Bench, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Leased between the scan and the drop: nothing of it goes, and its tag reaches it."""
        old = await bench.publish(await bench.lease(None, "eu"))
        bench.clock.advance(100)
        leases = []

        async def visited(*args: Any) -> AsyncIterator[Any]:
            async for found in entries_of(*args):
                if found:
                    leases.append(await bench.lease(old.generation, "eu"))
                yield found

        monkeypatch.setattr(scanning, "entries_of", visited)
        assert await bench.store.evict(bench.clock()) == 0
        assert (await bench.record(known=old.generation)).copy is not None
        await bench.publish(leases[0])
        assert await bench.store.invalidate_tag("eu") == [(PAGE, "/pricing")]

    async def test_an_eviction_leaves_a_new_copy_alone(
        self, bench: Bench, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Leased and published again after the rows went: the tag is the new copy's."""
        await bench.publish(await bench.lease(None, "eu"))
        bench.clock.advance(100)
        transact = Table.transact

        async def visited(table: Table, *actions: Any, name: str | None = None) -> None:
            await transact(table, *actions, name=name)
            if name is None:
                await bench.publish(await bench.lease(None, "eu"))

        monkeypatch.setattr(Table, "transact", visited)
        assert await bench.store.evict(bench.clock()) == 1
        assert await bench.store.invalidate_tag("eu") == [(PAGE, "/pricing")]

    @pytest.mark.parametrize("step", ["is_past", "tagged"])
    async def test_a_publication_and_an_invalidation_cross(
        self, bench: Bench, monkeypatch: pytest.MonkeyPatch, step: str
    ) -> None:
        """I26: each writes before it looks, so one of them sees the other, whoever is slow."""
        lease, look = await bench.lease(), getattr(Leases, step)
        copies = {lease.id: (lease, Copy(lease.token, NOW, Policy(60), b"old"))}
        publish = partial(bench.store.publish, PAGE, copies, {lease.id: ("late",)})
        steps: list[Callable[[], Awaitable[object]]]
        steps = [publish, partial(bench.store.invalidate_tag, "late")]
        slow, quick = steps if step == "is_past" else steps[::-1]

        async def looked(*given: object) -> object:
            """The other one is done between this look and what follows."""
            monkeypatch.setattr(Leases, step, look)
            found = await look(*given)
            await quick()
            return found

        monkeypatch.setattr(Leases, step, looked)
        await slow()
        copy = (await bench.store.read(PAGE, [lease.id])).get(lease.id, Record()).copy
        assert copy is None or copy.mark is Mark.HARD

    async def test_an_eviction_takes_the_tags_along(self, bench: Bench) -> None:
        """Of a copy, and of a lease that ended without one."""
        await bench.publish(await bench.lease(None, "eu"))
        await bench.lease(None, "eu", id_="/died")
        bench.clock.advance(100)
        assert await bench.store.evict(bench.clock()) == 2
        assert await bench.raw.rows() == []

    async def test_deleting_leaves_a_new_load_alone(
        self, bench: Bench, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Leased again before the tags went: its tag reaches it."""
        await bench.publish(await bench.lease(None, "eu"))
        delete, leases = Table.delete, []

        async def visited(table: Table, pk: str, sk: str, *more: Any) -> Any:
            went = await delete(table, pk, sk, *more)
            if sk == "META":
                leases.append(await bench.lease(None, "eu"))
            return went

        monkeypatch.setattr(Table, "delete", visited)
        await bench.store.delete(PAGE, ["/pricing"])
        await bench.publish(leases[0])
        assert await bench.store.invalidate_tag("eu") == [(PAGE, "/pricing")]

    async def test_a_holder_that_was_overtaken_leaves_the_next_one_alone(
        self, bench: Bench, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Paused past its lease before it took away the tags of before, which are the next's."""
        old = await bench.publish(await bench.lease(None, "eu"))
        leases, look = [], DynamoSteps.row

        async def paused(self: DynamoSteps, kind: str, pk: str) -> Any:
            row = await look(self, kind, pk)
            monkeypatch.setattr(DynamoSteps, "row", look)
            bench.clock.advance(10)
            leases.append(await bench.lease(old.generation, "eu"))
            return row

        monkeypatch.setattr(DynamoSteps, "row", paused)
        await bench.lease(old.generation, "shop")
        await bench.publish(leases[0])
        assert await bench.store.invalidate_tag("eu") == [(PAGE, "/pricing")]


class TestI7Costs:
    async def test_a_fresh_hit_is_one_read_and_one_get(self, aws: Aws) -> None:
        """One GetItem; S3 is not asked for what the reader has."""
        async with bench_on(aws) as bench, lossy(aws.endpoint) as proxy:
            copy = await bench.publish(await bench.lease())
            store = Aws(proxy.address, aws.s3_endpoint).store(bench.raw.table, bench.clock)
            await store.open()
            proxy.seen.clear()
            await store.read(PAGE, ["/pricing"])
            assert (proxy.seen, store._meter.costs().s3_gets) == ({"GetItem": 1}, 1)
            known = await store.read(PAGE, ["/pricing"], {"/pricing": copy.generation})
            assert known["/pricing"].copy is not None
            assert known["/pricing"].copy.value is UNREAD
            assert (proxy.seen, store._meter.costs().s3_gets) == ({"GetItem": 2}, 1)
            assert store._meter.costs().read_units == 2
            await store.close()

    async def test_many_are_read_together(self, bench: Bench) -> None:
        """Two hundred and fifty rows in three requests."""
        ids = [str(number) for number in range(250)]
        asks = [Ask(id_) for id_ in ids]
        grants = await bench.store.acquire("price", asks, 5)
        copies = {
            id_: (lease, Copy(lease.token, NOW, Policy(60), None))
            for id_, lease in grants.items()
            if isinstance(lease, Lease)
        }
        assert await bench.store.publish("price", copies) == set()
        assert len(await bench.store.read("price", ids)) == 250

    async def test_a_stale_hit_adds_one_conditional_put(self, bench: Bench) -> None:
        """And the second look, and one at the epoch of tags (I26), which may be behind.

        The publication is a transaction, the body one put.
        """
        copy = await bench.publish(await bench.lease())
        bench.clock.advance(61)
        before = bench.units()
        lease = await bench.lease(copy.generation)
        assert bench.spent(before) == [1.5, 1, 0, 0]
        await bench.publish(lease)
        assert bench.spent(before) == [1.5, 5, 0, 1]

    async def test_lag_halves_the_units(self, bench: Bench) -> None:
        """Eventually consistent where a second is allowed; never for what we changed ourselves."""
        reader = bench.store
        await bench.publish(await bench.lease())
        for lag, units in ((0.5, 1), (1.0, 1)):
            before = bench.units()[0]
            await reader.read(PAGE, ["/pricing"], {}, lag)
            assert bench.units()[0] - before == units
        other = bench.store
        await other.close()
        await other.open()
        before = bench.units()[0]
        await other.read(PAGE, ["/pricing"], {}, 1.0)
        assert bench.units()[0] - before == 0.5

    async def test_a_cache_shows_them(self, aws: Aws) -> None:
        """`stats()`: read and write units, S3 calls; nothing is asked within `memory_for`."""
        address = aws.address(aws.new_table())
        async with Cache(address) as cache:

            @cache.cached("report", fresh_for="1h", memory_for="1m")
            async def report(year: int) -> str:
                return str(year)

            assert await report(2026) == "2026"
            before = (await cache.stats()).store
            assert await report(2026) == "2026"
            after = (await cache.stats()).store
        async with Cache(address) as other:

            @other.cached("report", fresh_for="1h", memory_for="1m")
            async def same(year: int) -> str:
                raise AssertionError(year)

            assert await same(2026) == "2026"
            costs = other._store._meter.costs()  # type: ignore[attr-defined]
            assert (costs.read_units, costs.s3_gets) == (0.5, 1)
        assert before is not None
        assert before.costs is not None
        assert after is not None
        assert after.costs is not None
        assert (before.costs.s3_puts, before.costs.write_units) == (1, 5)
        assert after.costs.s3_gets == before.costs.s3_gets == 0

    async def test_counting_is_bounded(self, bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
        """Past some pages it estimates by the table's own count."""
        monkeypatch.setattr("stillfresh.stores.dynamodb.scanning.MOST_PAGES", 1)
        await bench.publish(await bench.lease())
        for number in range(4):
            blob = {"pk": {"S": f"CACHE#{number}"}, "sk": {"S": "META"}, "x": {"S": "x" * 390_000}}
            await bench.raw.dynamodb.put_item(TableName=bench.raw.table, Item=blob)
        stats = await bench.store.stats()
        assert stats.copies in {0, 1, 2}


class TestS13Rows:
    async def test_a_put_as_other_languages_see_it(self, bench: Bench) -> None:
        """The schema's attributes, and ours beside them; no lease is left."""
        await bench.put(b"first")
        (first,) = await bench.raw.rows()
        await bench.lease(first["generation"]["S"])
        assert await bench.put(b"<h1>", version=SEVEN, tags=("eu",)) == PutResult(STORED, SEVEN)
        row, tag = await bench.raw.rows()
        s3_key = row.pop("s3_key")["S"]
        generation = row.pop("generation")["S"]
        assert row == {
            "pk": {"S": PK},
            "sk": {"S": "META"},
            "generated_at": {"N": "1700000000"},
            "revalidate_seconds": {"N": "60"},
            "ttl": {"N": "1700604860"},
            "fetched_at": {"N": "1700000000"},
            "fresh_for": {"N": "60"},
            "body_size": {"N": "4"},
            "kind": {"S": "page"},
            "id": {"S": "/pricing"},
            "value_version": {"B": SEVEN},
            "replaced": {"L": [first["generation"]]},
            "tags": {"SS": ["eu"]},
        }
        stored = await bench.raw.s3.get_object(Bucket="pages", Key=s3_key)
        assert await stored["Body"].read() == b"<h1>"
        assert tag["lease_token"] == {"S": generation}
        assert await bench.raw.traces() == []

    async def test_another_languages_page_is_replaced(self, bench: Bench) -> None:
        """I2: its row lacks all that is ours; its body is not ours to delete."""
        await bench.raw.put_object("theirs.html", b"theirs")
        theirs: dict[str, Any] = {"generated_at": 1_700_000_000, "revalidate_seconds": 60}
        await bench.raw.put(pk=PK, sk="META", s3_key="theirs.html", **theirs)
        await bench.raw.put(pk=PK, sk="LOCK", **THEIRS, lease_expires_at=1_700_000_009)
        assert (await bench.put(when=When.NO_LIVE_COPY)).outcome is REFUSED
        assert (await bench.put(b"ours", version=SEVEN)).outcome is STORED
        copy = (await bench.record()).copy
        assert copy is not None
        assert (copy.value, copy.version) == (b"ours", SEVEN)
        assert await bench.raw.row("LOCK") is None
        bench.clock.advance(3600)
        await bench.store.close()
        kept = await bench.raw.s3.get_object(Bucket="pages", Key="theirs.html")
        assert await kept["Body"].read() == b"theirs"

    async def test_another_languages_page_is_touched(self, bench: Bench) -> None:
        """E35: its value stays, with all that S3 says of it, under a key of ours."""
        await bench.raw.put_object("theirs.html", b"theirs", "text/plain")
        theirs: dict[str, Any] = {"generated_at": 1_700_000_000, "revalidate_seconds": 60}
        await bench.raw.put(pk=PK, sk="META", s3_key="theirs.html", etag="e", **theirs)
        bench.clock.advance(30)
        assert (await bench.put(UNREAD, when=When.LIVE_COPY)).outcome is STORED
        record = await bench.record()
        assert record.copy is not None
        assert (record.copy.value, record.copy.fetched_at) == (b"theirs", NOW + 30)
        row = await bench.raw.row("META")
        assert row is not None
        assert row["etag"] == {"S": "e"}
        body = await bench.raw.s3.get_object(Bucket="pages", Key=row["s3_key"]["S"])
        assert body["ContentType"] == "text/plain"

    async def test_another_languages_change_is_not_overtaken(self, aws: Aws) -> None:
        """S8: the same key, rewritten within a second: its ETag tells that it is another page."""
        async with bench_on(aws) as bench:
            row: dict[str, Any] = {"s3_key": "theirs", "generated_at": int(NOW)}
            await bench.raw.put(pk=PK, sk="META", revalidate_seconds=60, etag="one", **row)
            entry = await bench.steps.table.entry(PK)
            await bench.raw.put(pk=PK, sk="META", revalidate_seconds=60, etag="two", **row)
            item = meta_item(Copy("g", NOW, Policy(60), None), pk=PK, s3_key="k", retention=0)
            with pytest.raises(ConditionFailed):
                await bench.steps.table.replace(item, entry, name="late")
            await bench.raw.put(pk=PK, sk="META", revalidate_seconds=0, etag="one", **row)
            with pytest.raises(ConditionFailed):
                await bench.steps.table.replace(item, entry, name="late 2")

    async def test_an_update_of_another_service_keeps_the_version(self, bench: Bench) -> None:
        """E35: as a load without one does."""
        await bench.put(version=SEVEN)
        await bench.raw.put_object("theirs", b"theirs")
        await bench.raw.dynamodb.update_item(
            TableName=bench.raw.table,
            Key={"pk": {"S": PK}, "sk": {"S": "META"}},
            UpdateExpression="SET s3_key = :key",
            ExpressionAttributeValues={":key": {"S": "theirs"}},
        )
        copy = (await bench.record()).copy
        assert copy is not None
        assert (copy.value, copy.version) == (b"theirs", SEVEN)
        assert (await bench.put(version=packed_version(6))).outcome is KEPT

    async def test_a_page_of_ours_is_touched_whole(self, aws: Aws) -> None:
        """E35: with its ETag and with the part that only we read."""

        class Pages:
            others = None

            def outside(self, value: bytes) -> Body:
                return Body(value, "text/html", '"v1"', b"status=404")

            def inside(self, body: Body) -> bytes:
                return b"|".join([body.data, (body.etag or "").encode(), body.extra])

        async with bench_on(aws, shapes={PAGE: Pages()}) as bench:
            await bench.put(b"<h1>")
            bench.clock.advance(30)
            assert (await bench.put(UNREAD)).outcome is STORED
            copy = (await bench.record()).copy
            assert copy is not None
            assert (copy.value, copy.fetched_at) == (b'<h1>|"v1"|status=404', NOW + 30)

    async def test_bodies_of_puts_go_as_those_of_loads_do(self, bench: Bench) -> None:
        """I5: one that was replaced, and one that was not stored, after the delay."""
        await bench.put(b"one", version=SEVEN)
        await bench.put(b"two", version=SEVEN)
        assert (await bench.put(b"three", version=packed_version(6))).outcome is KEPT
        assert len(await bench.raw.objects()) == 3
        bench.clock.advance(60)
        await bench.steps.trash.delete_due()
        row = await bench.raw.row("META")
        assert row is not None
        assert await bench.raw.objects() == {row["s3_key"]["S"]}


class TestS13OldRows:
    """Rows as the release before puts wrote them: without versions, without marks of ours."""

    async def write(self, bench: Bench, mark: int = 0) -> None:
        key = bench.store._names.body(PK, "old", "1")
        await bench.raw.put_object(key, b"old")
        row: dict[str, Any] = {
            "pk": PK,
            "sk": "META",
            "s3_key": key,
            "generated_at": int(NOW),
            "revalidate_seconds": 0 if mark else 60,
            "ttl": int(NOW) + 604_860,
            "generation": "old",
            "fetched_at": int(NOW),
            "fresh_for": 60,
            "body_size": 3,
            "kind": PAGE,
            "id": "/pricing",
        }
        await bench.raw.put(**row, **({"mark": mark} if mark else {}))

    async def test_old_rows_are_served_and_replaced(self, bench: Bench) -> None:
        """Without a version, so that any is stored."""
        await self.write(bench)
        copy = (await bench.record()).copy
        assert copy == Copy("old", NOW, Policy(60), b"old")
        assert (await bench.put(when=When.NO_LIVE_COPY)).outcome is REFUSED
        condition: dict[str, Any] = {"when": When.UNCHANGED, "seen": "old"}
        assert (await bench.put(b"new", version=SEVEN, **condition)).outcome is STORED
        assert (await bench.put(version=packed_version(6))).outcome is KEPT

    @pytest.mark.parametrize("mark", [0, 1, 2])
    async def test_old_rows_are_invalidated_deleted_and_loaded(
        self, bench: Bench, mark: int
    ) -> None:
        """Each as a row of today, marked or not."""
        await self.write(bench, mark)
        await bench.store.invalidate(PAGE, ["/pricing"])
        copy = (await bench.record()).copy
        assert copy is not None
        assert copy.mark is Mark.HARD
        await bench.publish(await bench.lease("old"), b"new")
        await self.write(bench, mark)
        await bench.store.delete(PAGE, ["/pricing"])
        assert await bench.raw.rows() == []

    async def test_a_failure_that_an_old_release_noted(self, bench: Bench) -> None:
        """Its row had one and the same token; it is read, and ended by a put."""
        failed: dict[str, Any] = {"failures": 2, "retry_at": int(NOW) + 9, "error": "down"}
        ended: dict[str, Any] = {"lease_token": "released", "lease_expires_at": int(NOW)}
        await bench.raw.put(pk=PK, sk="LOCK", ttl=int(NOW) + 3600, **ended, **failed)
        assert await bench.record() == Record(None, None, Failure(2, NOW + 9, "down"))
        await bench.store.invalidate(PAGE, ["/pricing"])
        row = await bench.raw.row("LOCK")
        assert row is not None
        assert row["lease_token"]["S"].startswith("released:")
        assert (await bench.put()).outcome is STORED
        assert (await bench.record()).failure is None

    async def test_the_old_release_reads_what_puts_and_traces_left(self, bench: Bench) -> None:
        """A trace is a lease that is over, with the schema's own attributes and no others."""
        await bench.store.delete(PAGE, ["/pricing"])
        (trace,) = await bench.raw.traces()
        lease = FaceTheoryCacheLease.from_item(trace)
        assert lease is not None
        assert not lease.is_held(NOW)
        assert not lease.is_held(2)
        assert lease.item() == trace
        assert lease.ttl == NOW + 3600
        await bench.put(b"put", version=SEVEN)
        row = await bench.raw.row("META")
        assert row is not None
        meta = FaceTheoryCacheMetadata.from_item(row)
        assert meta is not None
        assert meta.is_fresh(NOW)


class TestS13Costs:
    async def test_a_put_is_two_round_trips(self, aws: Aws) -> None:
        """I7: one read unit, one transaction of two rows, one object; a tag is one unit more."""
        async with bench_on(aws) as bench, lossy(aws.endpoint) as proxy:
            store = Aws(proxy.address, aws.s3_endpoint).store(bench.raw.table, bench.clock)
            await store.open()
            bench.store = store
            for number in range(2):  # also of a key that was never read
                proxy.seen.clear()
                before = bench.units()
                await bench.put()
                assert dict(proxy.seen) == {"Query": 1, "TransactWriteItems": 1}
                assert bench.spent(before) == [1, 4, 0, 1], number
            before = bench.units()
            await bench.put(tags=("eu",))
            assert bench.spent(before) == [1, 5, 0, 1]
            before = bench.units()
            assert (await bench.put(when=When.NO_LIVE_COPY)).outcome is REFUSED
            assert bench.spent(before) == [1, 0, 1, 0]
            before = bench.units()
            assert (await bench.put(UNREAD, tags=None)).outcome is STORED
            assert bench.spent(before) == [1, 5, 0, 1]
            await store.close()

    async def test_an_invalidation_and_a_deletion(self, bench: Bench) -> None:
        """I7: a look and one write; without a copy, a trace and a second look."""
        await bench.put()
        for step, expected in (
            (bench.store.invalidate, [1, 1]),
            (bench.store.delete, [1, 2]),
            (bench.store.invalidate, [2, 1]),
            (bench.store.delete, [2, 1]),
        ):
            before = bench.units()
            await step(PAGE, ["/pricing"])
            assert bench.spent(before)[:2] == expected


class TestT5ChangedRows:
    """What somebody else has changed in a row of ours."""

    @pytest.mark.parametrize("name", ["fresh_for", "stale_for", "error_for"])
    async def test_terms_below_zero_are_none(self, bench: Bench, name: str) -> None:
        """It raised ConfigError at readers."""
        await bench.publish(await bench.lease(), stale_for=60, error_for=60)
        row = await bench.raw.row("META")
        assert row is not None
        row |= {name: {"N": "-1"}, "revalidate_seconds": {"N": "0"}}
        await bench.raw.dynamodb.put_item(TableName=bench.raw.table, Item=row)
        copy = (await bench.record()).copy
        assert copy is not None
        assert getattr(copy.policy, name) == 0

    async def test_anothers_body_is_not_served(self, bench: Bench) -> None:
        """A miss, which the next publication mends; the other keeps its body."""
        await bench.publish(await bench.lease(id_="/other"), b"theirs")
        other = await bench.raw.row("META")
        assert other is not None
        await bench.publish(await bench.lease(), b"mine")
        row = next(it for it in await bench.raw.rows() if it["pk"]["S"] == PK)
        row |= {name: other[name] for name in ("s3_key", "generation")}
        await bench.raw.dynamodb.put_item(TableName=bench.raw.table, Item=row)
        assert (await bench.record()).copy is None
        await bench.publish(await bench.lease(), b"new")
        bench.clock.advance(1_000)
        await bench.steps.trash.delete_due()
        copy = (await bench.record()).copy
        assert copy is not None
        assert copy.value == b"new"
        found = (await bench.store.read(PAGE, ["/other"]))["/other"].copy
        assert found is not None
        assert found.value == b"theirs"
