"""I3-I7: what the DynamoDB store asks for, and makes of each answer; the service is a script."""

import asyncio
from datetime import UTC, datetime
from typing import Any, cast

import pytest

from stillfresh import StoreError
from stillfresh.errors import LeaseHeld, LeaseLost
from stillfresh.stores.aws import AwsRefused, AwsService, ConditionFailed, Unanswered
from stillfresh.stores.bodies import Body, S3Bodies
from stillfresh.stores.contract import Failure, Mark
from stillfresh.stores.dynamodb import admin
from stillfresh.stores.dynamodb.leases import LIVE, TAKE_OVERS, Leases
from stillfresh.stores.dynamodb.rows import RELEASED, name_beside
from stillfresh.stores.dynamodb.scanning import MOST_PAGES, TableScan
from stillfresh.stores.dynamodb.schema import (
    INVALIDATED,
    LOCK,
    META,
    FaceTheoryCacheLease,
    Item,
    Names,
    attributes,
    key_of,
)
from stillfresh.stores.dynamodb.table import AT_ONCE, each, values
from stillfresh.stores.dynamodb.tags import TRIES
from stillfresh.stores.meter import CostMeter

NOW = 1_700_000_000.0
PK = Names("t").pk("post", "a")
LEASE = FaceTheoryCacheLease.until(PK, "mine", NOW + 10)


class Script:
    """Answers one after the other; an exception is raised. Every request is noted."""

    target = "the script"

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)
        self.asked: list[tuple[str, dict[str, Any]]] = []

    async def ask(self, operation: str, then: Any = None, /, **arguments: Any) -> Any:
        made = {name: it() if callable(it) else it for name, it in arguments.items()}
        self.asked.append((operation, made))
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer if then is None else await then(answer)

    @property
    def operations(self) -> list[str]:
        return [operation for operation, _ in self.asked]


def table_of(script: Script, **options: Any) -> Leases:
    return Leases(cast("AwsService", script), Names("t"), **options)


def refused(item: Item | None = None, *reasons: str) -> ConditionFailed:
    answer: dict[str, Any] = {"CancellationReasons": [{"Code": it} for it in reasons]}
    return ConditionFailed("no", "ConditionalCheckFailedException", answer | {"Item": item})


def lock(token: str, until: float = NOW + 5, **more: Any) -> Item:
    return key_of(PK, LOCK) | attributes(lease_token=token, lease_expires_at=until, **more)


class TestS1Requests:
    async def test_one_row_is_got_and_many_are_batched(self) -> None:
        """A hundred in one request; rows that were left out are asked for again."""
        row = key_of("p", META)
        script = Script({"Item": row}, {})
        table = table_of(script)
        assert await table.get_many([("p", META)]) == {("p", META): row}
        assert await table.get_many([("q", META)], consistent=False) == {}
        assert [it["ConsistentRead"] for _, it in script.asked] == [True, False]
        keys = [(f"{number}", META) for number in range(AT_ONCE)]
        left = {"t": {"Keys": [key_of(*keys[-1])]}}
        script.answers = [
            {"Responses": {"t": [key_of(*key) for key in keys[:-1]]}, "UnprocessedKeys": left},
            {"Responses": {"t": [key_of(*keys[-1])]}},
        ]
        assert list(await table.get_many(keys)) == keys
        assert script.asked[-1][1]["RequestItems"]["t"]["Keys"] == [key_of(*keys[-1])]
        script.answers = [{"Responses": {}}, {"Responses": {}}]
        assert await table.get_many([*keys, ("more", META)]) == {}
        assert script.answers == []

    async def test_a_batch_without_a_row_is_worth_another_attempt(self) -> None:
        """Otherwise it would be asked for again and again, without a pause."""
        both = [key_of("p", META), key_of("q", META)]
        script = Script({"UnprocessedKeys": {"t": {"Keys": both}}})
        with pytest.raises(Unanswered, match="the script: busy; 2 rows were not read"):
            await table_of(script).get_many([("p", META), ("q", META)])

    async def test_a_write_has_its_condition_and_tells_what_it_replaced(self) -> None:
        """Without a condition none is sent."""
        row = key_of("p", META)
        script = Script({"Attributes": row}, {}, {}, refused(row), refused())
        table = table_of(script, urgent=True)
        assert await table.put(row, "a = :a", values(a=1)) == row
        assert await table.delete("p", META) == {}
        (_, put), (_, deleted) = script.asked
        assert put["ConditionExpression"] == "a = :a"
        assert put["ExpressionAttributeValues"] == {":a": {"N": "1"}}
        assert put["ReturnValuesOnConditionCheckFailure"] == put["ReturnValues"] == "ALL_OLD"
        assert deleted.keys().isdisjoint({"ConditionExpression", "ExpressionAttributeValues"})
        assert put["urgent"]
        assert [await table.update("p", META, {}) for _ in range(3)] == [None, row, {}]

    async def test_pages_follow_each_other(self) -> None:
        """From the key where one ended, to the last; a scan begins behind a key."""
        one, two = key_of("p", META), key_of("q", META)
        script = Script({"Items": [one], "LastEvaluatedKey": one}, {"Items": [two]})
        table = table_of(script)
        assert await table.partition("p") == [one, two]
        assert [it.get("ExclusiveStartKey") for _, it in script.asked] == [None, one]
        script.answers = [{"Items": []}, {"Items": []}]
        pages = [page async for page in table.scan(after=one, rows=5, consistent=True)]
        assert pages == [{"Items": []}]
        asked = script.asked[-1][1]
        assert (asked["ExclusiveStartKey"], asked["Limit"]) == (one, 5)
        assert asked["ConsistentRead"]
        assert [page async for page in table.scan()] == [{"Items": []}]
        asked = script.asked[-1][1]
        assert asked.keys().isdisjoint({"ExclusiveStartKey", "Limit"})
        assert not asked["ConsistentRead"]

    async def test_of_many_steps_all_run_to_their_end(self) -> None:
        """Then the first error is raised; each key once, in its order."""
        done = list[int]()

        async def step(key: int) -> int:
            await asyncio.sleep(0)
            if key == 1:
                raise KeyError(key)
            done.append(key)
            return -key

        assert await each([3, 2, 3], step) == {3: -3, 2: -2}
        assert await each([5], step) == {5: -5}
        assert await each([], step) == {}
        done.clear()
        with pytest.raises(KeyError):
            await each(range(40), step)
        assert len(done) == 39

    async def test_a_transaction_is_named_once(self) -> None:
        """So that it is done once, however often it is sent."""
        script = Script({}, {})
        table = table_of(script)
        await table.transact(("Put", {"a": 1}), name="once")
        await table.transact(("Put", {"a": 1}))
        (_, named), (_, bare) = script.asked
        assert named["TransactItems"] == [{"Put": {"TableName": "t", "a": 1}}]
        assert named["ClientRequestToken"] == "once"
        assert "ClientRequestToken" not in bare


class TestI4Leases:
    async def acquired(self, script: Script, *, take_over: bool = False) -> Any:
        tokens = iter(f"t{number}" for number in range(1, 99))
        return await table_of(script, max_lease=60.0).acquire(
            PK, end=NOW + 10, now=NOW, new_token=lambda: next(tokens), take_over=take_over
        )

    async def test_a_free_lease_is_taken(self) -> None:
        """And what it replaced is told, such as a failure."""
        lease, old = await self.acquired(Script({"Attributes": lock("before", NOW - 1)}))
        assert (lease.lease_token, lease.lease_expires_at) == ("t1", NOW + 10)
        assert (old.token, old.held_until) == ("before", NOW - 1)

    async def test_a_held_lease_is_told_with_its_end(self) -> None:
        """By the row that came with the refusal, or by another look."""
        with pytest.raises(LeaseHeld, match=f"until {NOW + 5:.0f}"):
            await self.acquired(Script(refused(lock("other"))))
        script = Script(refused(), {"Item": lock("other")})
        with pytest.raises(LeaseHeld):
            await self.acquired(script)
        assert script.operations == ["put_item", "get_item"]

    async def test_a_lease_whose_answer_was_lost_is_ours(self) -> None:
        """S2: the refusal names our own token."""
        lease, old = await self.acquired(Script(refused(lock("t1"))))
        assert (lease.lease_token, old.token) == ("t1", None)

    async def test_e17_a_take_over_names_the_holder(self) -> None:
        """So that a late one voids no later lease; after some attempts it is held."""
        script = Script(refused(lock("other")), {"Attributes": lock("other")})
        lease, old = await self.acquired(script, take_over=True)
        assert (lease.lease_token, old.token) == ("t2", "other")
        _, (_, second) = script.asked
        assert second["ExpressionAttributeValues"][":token"] == {"S": "other"}
        script = Script(*(refused(lock(f"o{number}")) for number in range(TAKE_OVERS + 1)))
        with pytest.raises(LeaseHeld):
            await self.acquired(script, take_over=True)
        assert script.answers == []

    async def test_a_lost_lease_is_not_renewed(self) -> None:
        """It ran out, or it was voided; a live one is."""
        script = Script({}, refused(lock("other")))
        table = table_of(script)
        await table.refresh(LEASE, now=NOW)
        assert script.asked[0][1]["ConditionExpression"] == LIVE
        with pytest.raises(LeaseLost, match="the lease is no longer ours"):
            await table.refresh(LEASE, now=NOW)

    async def test_a_row_with_a_failure_outlives_its_lease(self) -> None:
        """Without a holder; one without a failure is deleted, another's is left alone."""
        failed = lock("mine", failures=2, retry_at=NOW)
        script = Script({"Attributes": lock("mine")}, refused(failed), {}, refused(lock("other")))
        table = table_of(script)
        for _ in range(3):
            await table.release(PK, "mine", now=NOW)
        assert script.operations == ["delete_item", "delete_item", "update_item", "delete_item"]
        kept = script.asked[2][1]["ExpressionAttributeValues"]
        assert (kept[":new_lease_token"], kept[":token"]) == ({"S": RELEASED}, {"S": "mine"})
        script = Script({"Attributes": lock("x")}, {}, refused(failed), {}, refused(lock("x")))
        table = table_of(script)
        assert [await table.void(PK, now=NOW) for _ in range(4)] == [True, False, True, False]

    async def test_a_failure_is_noted_with_the_copy_or_without_one(self) -> None:
        """In the lease's row if there is no copy; nowhere if the lease is another's."""
        failure = Failure(2, NOW + 5, "no")
        script = Script({}, refused(None, CONDITION, "None"), {}, refused(None, "None", CONDITION))
        table = table_of(script)
        for _ in range(3):
            await table.fail(PK, "mine", failure, now=NOW)
        steps = ["transact_write_items", "transact_write_items", "update_item"]
        assert script.operations == [*steps, "transact_write_items"]

    async def test_a_publication_that_was_refused_may_have_been_done(self) -> None:
        """Then the row points to its body; else the lease was lost."""
        item = key_of(PK, META) | attributes(s3_key="body")
        script = Script(refused(), {"Item": item}, refused(), {"Item": {}})
        table = table_of(script)
        await table.publish(item, "mine", name="n", now=NOW)
        with pytest.raises(LeaseLost):
            await table.publish(item, "mine", name="n", now=NOW)

    async def test_i19_the_mark_goes_to_the_version_that_a_row_points_to(self) -> None:
        """If META is a pointer; without a row there is nothing to mark."""
        pointer = key_of(PK, META) | attributes(current_sk="v2")
        script = Script({}, refused(), refused(pointer), {}, refused(pointer), refused())
        table = table_of(script)
        marked = [await table.mark(PK, Mark.HARD) for _ in range(4)]
        assert marked == [True, False, True, False]
        assert script.asked[3][1]["Key"] == key_of(PK, "v2")
        assert "#mark = :mark" in script.asked[0][1]["UpdateExpression"]
        script.answers = [{}]
        await table.mark(PK, Mark.SOFT)
        assert "if_not_exists(#mark, :mark)" in script.asked[-1][1]["UpdateExpression"]


CONDITION = "ConditionalCheckFailed"


class TestI26Tags:
    async def test_a_tag_is_past_if_it_was_invalidated_since(self) -> None:
        """One of them is enough; in the same epoch it was not."""
        row = key_of(Names("t").tag("a"), INVALIDATED) | attributes(epoch=5)
        for epoch, expected in ((4, True), (5, False), (6, False)):
            assert await table_of(Script({"Item": row})).is_past(["a"], epoch) is expected
        assert await table_of(Script({})).is_past(["a"], 0) is False
        assert await table_of(Script({"Item": row}, {})).epoch() == 5
        assert await table_of(Script({})).epoch() == 0

    async def test_an_invalidation_begins_an_epoch(self) -> None:
        """And a later one of the same tag may have been faster."""
        answers: list[Any] = [{}, refused()]
        for answer in answers:
            script = Script({"Attributes": {"epoch": {"N": "7"}}}, answer)
            await table_of(script).begin_epoch("a", NOW + 0.5)
            put = script.asked[1][1]
            assert put["Item"]["epoch"] == {"N": "7"}
            assert put["Item"]["ttl"] == {"N": f"{NOW + 1:.0f}"}

    async def test_the_entries_of_a_tag(self) -> None:
        """By kind and id, which may be empty; the row of its invalidation is none."""
        tag = Names("t").tag("a")
        row, bare = (key_of(tag, sk) | attributes(kind="post", id=sk) for sk in ("x", "y"))
        del bare["id"]
        script = Script({"Items": [row, bare, key_of(tag, INVALIDATED)]})
        assert await table_of(script).tagged("a") == {("post", "x"): row, ("post", ""): bare}

    async def test_s8_a_late_row_replaces_no_later_one(self) -> None:
        """The row that was seen is replaced; a holder that lost its lease stops silently."""
        held, row = {"Item": lock("mine")}, lock("newer")
        script = Script(refused(row), held, {})
        await write_tag(script)
        assert [it for it in script.operations if it == "put_item"] == ["put_item"] * 2
        assert script.asked[0][1]["ExpressionAttributeValues"][":seen"] == {"S": "old"}
        assert script.asked[-1][1]["ExpressionAttributeValues"][":seen"] == {"S": "newer"}
        script = Script(refused(row), {"Item": lock("other")})
        await write_tag(script)
        assert script.answers == []
        script = Script(*[refused(row), held] * TRIES)
        with pytest.raises(StoreError, match="t: other processes keep changing the row of a tag"):
            await write_tag(script)
        assert script.answers == []


async def write_tag(script: Script) -> None:
    await table_of(script).write_tags(
        ["a"], kind="post", id_="a", token=LEASE.lease_token, ttl=NOW, seen="old"
    )


def object_at(key: str, written_at: float) -> dict[str, Any]:
    return {"Key": key, "LastModified": datetime.fromtimestamp(written_at, UTC)}


class TestI5Bodies:
    async def test_an_object_that_is_missing_is_none(self) -> None:
        """Any other refusal is raised."""
        bodies = S3Bodies(cast("AwsService", Script(AwsRefused("x", "NoSuchKey", {}))), "b")
        assert await bodies.get("key") is None
        bodies = S3Bodies(cast("AwsService", Script(AwsRefused("x", "AccessDenied", {}))), "b")
        with pytest.raises(AwsRefused):
            await bodies.get("key")

    async def test_what_is_told_of_an_object(self) -> None:
        """Nothing that is empty."""
        script = Script({}, {})
        bodies = S3Bodies(cast("AwsService", script), "b")
        await bodies.put("key", Body(b"x"))
        await bodies.put("key", Body(b"x", "text/html", encoding="br", metadata={"a": "b"}))
        bare = {"Bucket": "b", "Key": "key", "Body": b"x"}
        said = {"ContentType": "text/html", "ContentEncoding": "br", "Metadata": {"a": "b"}}
        assert [it for _, it in script.asked] == [bare, bare | said]

    async def test_keys_are_deleted_by_the_thousand(self) -> None:
        """One that could not be is an error."""
        script = Script({}, {"Errors": [{"Key": "1000"}]})
        bodies = S3Bodies(cast("AwsService", script), "b")
        with pytest.raises(StoreError, match=r"the script: not deleted: .*1000"):
            await bodies.delete([str(number) for number in range(1_001)])
        counts = [len(it["Delete"]["Objects"]) for _, it in script.asked]
        assert counts == [1_000, 1]
        await bodies.delete([])

    async def test_older_objects_are_listed_page_by_page(self) -> None:
        """Those that were written before then."""
        script = Script(
            {
                "Contents": [object_at("a", NOW - 1), object_at("b", NOW)],
                "NextContinuationToken": "next",
            },
            {},
        )
        bodies = S3Bodies(cast("AwsService", script), "b")
        assert [keys async for keys in bodies.older("p/", NOW)] == [["a"], []]
        assert script.asked[1][1]["ContinuationToken"] == "next"


def a_page(*items: Item, more: bool = False, count: int = 10) -> dict[str, Any]:
    last = {"LastEvaluatedKey": key_of("p", META)} if more else {}
    return {"Items": list(items), "ScannedCount": count, **last}


def meta(id_: str = "a", **more: Any) -> Item:
    """A row of ours, fetched at NOW and fresh for a minute."""
    pk = Names("t").pk("post", id_)
    key = Names("t").body(pk, "g", "1")
    given = {"s3_key": key, "generated_at": int(NOW), "revalidate_seconds": 60, "body_size": 7}
    own = {"generation": "g", "fetched_at": NOW, "fresh_for": 60.0}
    return key_of(pk, META) | attributes(**given, **own, **more) | name_beside("post", id_)  # type: ignore[arg-type]


def scan_of(script: Script) -> TableScan:
    bodies = S3Bodies(cast("AwsService", script), "b")
    return TableScan(table_of(script), bodies, lambda: NOW)


class TestI7Scanning:
    async def test_a_large_table_is_estimated(self) -> None:
        """After some pages, by the table's own count; a smaller one is counted."""
        live, over = lock("x", NOW + 5), lock("y", NOW)
        script = Script(a_page(meta(), live, more=True), a_page(meta("b"), over))
        stats = await scan_of(script).stats(CostMeter())
        assert (stats.copies, stats.leases, stats.bytes) == (2, 1, 14)
        pages = [a_page(meta(), live, more=True)] * MOST_PAGES
        for count, copies in ((400, 40), (None, MOST_PAGES)):
            described = {} if count is None else {"ItemCount": count}
            stats = await scan_of(Script(*pages, {"Table": described})).stats(CostMeter())
            assert (stats.copies, stats.leases, stats.bytes) == (copies, copies, 7 * copies)

    async def test_an_entry_may_be_cut_by_the_end_of_a_page(self) -> None:
        """Its rows are listed together, with the size of its value."""
        held = lock("x") | name_beside("post", "a")
        tag = key_of(PK, "TAG")
        script = Script(a_page(held, tag, more=True), a_page(meta(), meta("b")))
        found = await scan_of(script).entries(None, "", None, 10)
        assert [(it.id, it.size, it.record.held_until) for it in found] == [
            ("a", 7, NOW + 5),
            ("b", 7, None),
        ]

    async def test_a_listing_ends_when_it_has_enough(self) -> None:
        """Rows without a name, or with a wrong one, are not listed."""
        nameless = {name: it for name, it in meta("c").items() if name not in {"kind", "id"}}
        wrong = meta("d") | attributes(id="other")
        page = a_page(meta(), nameless, wrong, meta("b"), meta("e"), meta("f"), more=True)
        script = Script(page)
        found = await scan_of(script).entries("post", "", ("post", "0"), 2)
        assert [it.id for it in found] == ["a", "b"]
        asked = script.asked[0][1]
        assert (asked["Limit"], asked["ConsistentRead"]) == (200, True)
        assert asked["ExclusiveStartKey"] == key_of(Names("t").pk("post", "0"), META)
        script = Script(a_page(meta(), meta("b")))
        assert [it.id for it in await scan_of(script).entries("page", "", None, 150)] == []
        assert script.asked[0][1]["Limit"] == 300
        script = Script(a_page(meta(), meta("b")))
        assert [it.id for it in await scan_of(script).entries(None, "b", None, 5)] == ["b"]
        assert "Limit" not in script.asked[0][1]

    @pytest.mark.parametrize(
        ("rows", "before", "gone"),
        [
            ([meta()], NOW + 60, False),
            ([meta()], NOW + 61, True),
            ([meta(), lock("x", NOW + 90)], NOW + 61, False),
            ([lock("x", NOW + 5)], NOW + 5, False),
            ([lock("x", NOW + 5)], NOW + 6, True),
            ([lock(RELEASED, NOW, failures=1, retry_at=NOW + 9)], NOW + 9, False),
            ([lock(RELEASED, NOW, failures=1, retry_at=NOW + 9)], NOW + 10, True),
            ([key_of(PK, META) | attributes(s3_key="x")], NOW + 999, False),
        ],
    )
    async def test_what_is_gone(self, rows: list[Item], before: float, *, gone: bool) -> None:
        """Nothing can be served, no load runs, no cooldown lasts; rows of others stay."""
        found = {row["sk"]["S"]: row for row in rows}
        assert scan_of(Script())._is_gone(found, before) is gone

    async def test_an_eviction_drops_the_row_and_its_body(self) -> None:
        """In one step, if both are as they were read; else they stay."""
        row, before = meta(), NOW + 999
        orphans: dict[str, Any] = {"Contents": []}
        script = Script(a_page(row), {}, {}, orphans)
        assert await scan_of(script).evict(before) == 1
        operations = ["scan", "transact_write_items", "delete_objects", "list_objects_v2"]
        assert script.operations == operations
        drop, free = (it["Delete"] for it in script.asked[1][1]["TransactItems"])
        assert drop["ConditionExpression"] == "s3_key = :s3_key"
        assert free["ConditionExpression"] == "attribute_not_exists(pk)"
        assert script.asked[2][1]["Delete"]["Objects"] == [{"Key": row["s3_key"]["S"]}]
        script = Script(a_page(row), refused(), orphans)
        assert await scan_of(script).evict(before) == 0
        bare = {name: it for name, it in lock("x", NOW).items() if name != "lease_token"}
        script = Script(a_page(bare), {}, orphans)
        assert await scan_of(script).evict(before) == 1
        _, free = (it["Delete"] for it in script.asked[1][1]["TransactItems"])
        said = "attribute_not_exists(lease_token) AND NOT lease_expires_at >= :before"
        assert free["ConditionExpression"] == said

    async def test_bodies_that_no_row_points_to_go(self) -> None:
        """After an hour; those that a row points to stay."""
        row, lost = meta(), Names("t").body(PK, "lost", "2")
        old = [object_at(it, NOW - 3_601) for it in (row["s3_key"]["S"], lost)]
        young = object_at(Names("t").body(PK, "young", "3"), NOW - 3_599)
        script = Script({"Contents": [*old, young]}, {"Item": row}, {})
        await scan_of(script)._drop_orphans()
        assert script.asked[-1][1]["Delete"]["Objects"] == [{"Key": lost}]


class TestS6Admin:
    async def test_a_new_table_is_waited_for(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """For a while; then it is an error."""
        pauses = list[float]()

        async def sleep(pause: float) -> None:
            pauses.append(pause)

        monkeypatch.setattr(asyncio, "sleep", sleep)
        creating, active = ({"Table": {"TableStatus": it}} for it in ("CREATING", "ACTIVE"))
        await admin._ready(cast("AwsService", Script(creating, active)), "t")
        assert pauses == [admin.PAUSE]
        script = Script(*[creating] * admin.LOOKS)
        with pytest.raises(StoreError, match="table 't': not ready after 60 s"):
            await admin._ready(cast("AwsService", script), "t")

    async def test_a_refusal_with_another_code_is_raised(self) -> None:
        """Only the codes that were named are an answer."""
        denied = AwsRefused("x", "AccessDenied", {})
        assert not await admin._has_bucket(
            cast("AwsService", Script(AwsRefused("x", "404", {}))), "b"
        )
        assert await admin._has_bucket(cast("AwsService", Script({})), "b")
        with pytest.raises(AwsRefused):
            await admin._has_bucket(cast("AwsService", Script(denied)), "b")

    async def test_the_ttl_of_a_table(self) -> None:
        """Off, unless it says that it is on, or soon will be."""
        for status, expected in (("ENABLED", "ttl"), ("ENABLING", "ttl"), ("DISABLED", None)):
            about = {"TimeToLiveStatus": status, "AttributeName": "ttl"}
            script = Script({"TimeToLiveDescription": about})
            assert await admin._ttl_attribute(cast("AwsService", script), "t") == expected

    async def test_a_table_with_other_keys_is_refused(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        """One that may not be described, or does not answer, is taken."""
        good = {
            "KeySchema": [
                {"AttributeName": "pk", "KeyType": "HASH"},
                {"AttributeName": "sk", "KeyType": "RANGE"},
            ],
            "AttributeDefinitions": [
                {"AttributeName": "pk", "AttributeType": "S"},
                {"AttributeName": "sk", "AttributeType": "S"},
            ],
        }
        bad = good | {"AttributeDefinitions": [{"AttributeName": "pk", "AttributeType": "S"}]}
        denied = AwsRefused("denied", "AccessDenied", {})
        for answer in ({"Table": good}, denied, StoreError("away")):
            await admin.check_table(table_of(Script(answer)))
        assert [it.getMessage() for it in caplog.records if it.levelname == "WARNING"] == [
            "away; the table's keys were not checked"
        ]
        with pytest.raises(StoreError, match=r"its keys are pk \(HASH, S\), sk \(RANGE, None\)"):
            await admin.check_table(table_of(Script({"Table": bad})))
        other = AwsRefused("x", "ResourceNotFoundException", {})
        with pytest.raises(AwsRefused):
            await admin.check_table(table_of(Script(other)))


def test_i20_a_name_that_dynamodb_cannot_take_is_not_beside_its_hash() -> None:
    """Too long, or not valid Unicode: then the entry cannot be listed."""
    assert name_beside("post", "a") == attributes(kind="post", id="a")
    assert name_beside("post", "é" * 512) == attributes(kind="post", id="é" * 512)
    assert name_beside("post", "é" * 512 + "a") == name_beside("post", "\ud800") == {}
