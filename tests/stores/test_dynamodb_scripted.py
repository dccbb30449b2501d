"""I3-I7: what the DynamoDB store asks for, and makes of each answer; the service is a script."""

import asyncio
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any, cast

import pytest
from aiobotocore.session import get_session
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    EndpointConnectionError,
    NoCredentialsError,
)

from stillfresh import ConfigError, NotOpen, Policy, StoreError
from stillfresh.errors import LeaseHeld, LeaseLost
from stillfresh.stores import aws
from stillfresh.stores.aws import (
    Away,
    AwsPlace,
    AwsRefused,
    AwsService,
    ConditionFailed,
    Unanswered,
)
from stillfresh.stores.bodies import Body, S3Bodies, Trash
from stillfresh.stores.contract import (
    UNREAD,
    Ask,
    Copy,
    Costs,
    Failure,
    Held,
    Lease,
    Mark,
    Newer,
    Record,
)
from stillfresh.stores.dynamodb import DynamoStore, admin
from stillfresh.stores.dynamodb.leases import LIVE, TAKE_OVERS, TRIES, Claim
from stillfresh.stores.dynamodb.rows import RELEASED, VERSION, is_trace, name_beside, trace_item
from stillfresh.stores.dynamodb.scanning import MOST_PAGES, TableScan
from stillfresh.stores.dynamodb.schema import (
    INVALIDATED,
    LOCK,
    META,
    TABLE_VARIABLE,
    FaceTheoryCacheLease,
    Item,
    Names,
    attributes,
    key_of,
)
from stillfresh.stores.dynamodb.store import LONGEST_PREFIX, table_name
from stillfresh.stores.dynamodb.table import AT_ONCE, each, values
from stillfresh.stores.meter import CostMeter
from stillfresh.stores.versions import packed_version
from stillfresh.testing import ManualClock
from tests.kit.aws_script import (
    CONDITION,
    GONE,
    NOW,
    PK,
    Script,
    Steps,
    a_body,
    lock,
    meta,
    refused,
    table_of,
)

LEASE = FaceTheoryCacheLease.until(PK, "mine", NOW + 10)


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

    async def test_all_of_many_steps_run_to_their_end(self) -> None:
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
            await table.release(PK, "mine", has_copy=True, now=NOW)
        assert script.operations == ["delete_item", "delete_item", "update_item", "delete_item"]
        kept = script.asked[2][1]["ExpressionAttributeValues"]
        assert kept[":new_lease_token"]["S"].startswith(RELEASED)
        assert kept[":token"] == {"S": "mine"}

    async def test_s8_a_lease_that_ends_without_a_copy_leaves_a_trace(self) -> None:
        """A lease that is over by every clock, for an hour, never twice with the same token."""
        script = Script({}, {})
        table = table_of(script)
        for _ in range(2):
            await table.release(PK, "mine", has_copy=False, now=NOW + 0.5)
        first, second = (asked["Item"] for _, asked in script.asked)
        assert first["lease_token"] != second["lease_token"]
        for trace in (first, second):
            assert is_trace(trace)
            assert trace["lease_expires_at"] == {"N": "1"}
            assert trace["ttl"] == {"N": f"{NOW + 3600:.0f}"}
            assert trace.keys() == {"pk", "sk", "lease_token", "lease_expires_at", "ttl"}

    async def test_s8_a_lease_is_voided_only_as_it_was_read(self) -> None:
        """With a copy its row goes, without one it is a trace; a failure stays in its row."""
        failed = lock("x", failures=2, retry_at=NOW)
        as_read = "lease_token = :lease_token AND "
        for row, has_copy, operation, condition in (
            (lock("x"), True, "delete_item", f"{as_read}attribute_not_exists(failures)"),
            (lock("x"), False, "put_item", f"{as_read}attribute_not_exists(failures)"),
            ({}, False, "put_item", "attribute_not_exists(pk)"),
            (failed, True, "update_item", f"{as_read}failures = :failures"),
        ):
            answers: list[Any] = [{}, refused(lock("other"))]
            for answer in answers:
                script = Script(answer)
                await table_of(script).void(PK, row, has_copy=has_copy, now=NOW)
                assert script.operations == [operation]
                said = script.asked[0][1]["ConditionExpression"]
                assert said.removeprefix("attribute_exists(pk) AND ") == condition

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

    async def test_s8_a_copy_is_marked_only_as_it_was_read(self) -> None:
        """By all that changes with it; else the row that is there is returned."""
        row = meta()
        script = Script({}, {}, refused(row), refused())
        table = table_of(script)
        assert await table.mark(PK, row, Mark.HARD) is None
        asked = script.asked[0][1]
        assert "#mark = :mark" in asked["UpdateExpression"]
        assert asked["ConditionExpression"] == (
            "attribute_exists(pk) AND s3_key = :s3_key AND generated_at = :generated_at"
            " AND revalidate_seconds = :revalidate_seconds AND attribute_not_exists(etag)"
            " AND generation = :generation AND attribute_not_exists(voided)"
            " AND attribute_not_exists(current_sk)"
        )
        assert await table.mark(PK, row, Mark.SOFT) is None
        assert "if_not_exists(#mark, :mark)" in script.asked[1][1]["UpdateExpression"]
        voided = [it["ExpressionAttributeValues"][":invalidation"] for _, it in script.asked]
        assert voided[0] != voided[1]
        assert [await table.mark(PK, row, Mark.HARD) for _ in range(2)] == [row, {}]


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
        first, last = (script.asked[at][1]["ExpressionAttributeValues"] for at in (0, -1))
        assert sorted(it["S"] for it in first.values()) == ["mine", "old"]
        assert sorted(it["S"] for it in last.values()) == ["mine", "newer"]
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

    async def test_metadata_of_an_object_has_nothing_empty(self) -> None:
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
        first = {"Bucket": "b", "Prefix": "p/"}
        assert [it for _, it in script.asked] == [first, first | {"ContinuationToken": "next"}]


class TestI5Trash:
    def trash(self, script: Script, clock: ManualClock) -> Trash:
        async def sleep(pause: float) -> None:
            self.pauses.append(pause)
            await asyncio.Event().wait()

        self.pauses = list[float]()
        bodies = S3Bodies(cast("AwsService", script), "b")
        return Trash(bodies, 10.0, clock, sleep)

    def deleted(self, script: Script) -> list[list[str]]:
        return [[it["Key"] for it in asked["Delete"]["Objects"]] for _, asked in script.asked]

    async def test_a_body_goes_after_a_delay(self) -> None:
        """A reader may have read its row just before; one task waits for all of them."""
        script, clock = Script({}, {}), ManualClock(NOW)
        trash = self.trash(script, clock)
        trash.add(["a"])
        clock.advance(4)
        trash.add(["b"])
        await asyncio.sleep(0)
        assert self.pauses == [6.0]
        await trash.delete_due()
        assert script.asked == []
        clock.advance(6)
        await trash.delete_due()
        assert self.deleted(script) == [["a"]]
        await trash.close()
        assert self.deleted(script) == [["a"]]

    async def test_closing_deletes_what_is_due(self) -> None:
        """The rest is left to the next eviction, and nothing is taken any more."""
        script, clock = Script({}), ManualClock(NOW)
        trash = self.trash(script, clock)
        trash.add(["a"])
        clock.advance(10)
        trash.add(["b"])
        await trash.close()
        assert self.deleted(script) == [["a"]]
        trash.add(["c"])
        clock.advance(10)
        await trash.delete_due()
        assert self.deleted(script) == [["a"]]

    async def test_an_error_is_logged(self, caplog: pytest.LogCaptureFixture) -> None:
        """The next eviction finds the bodies."""
        clock = ManualClock(NOW)
        trash = self.trash(Script(StoreError("away")), clock)
        trash.add(["a", "b"])
        clock.advance(10)
        await trash.close()
        assert [it.getMessage() for it in caplog.records] == [
            "2 replaced bodies were not deleted: away"
        ]


def a_page(*items: Item, more: bool = False, count: int = 10) -> dict[str, Any]:
    last = {"LastEvaluatedKey": key_of("p", META)} if more else {}
    return {"Items": list(items), "ScannedCount": count, **last}


def scan_of(script: Script, now: float = NOW) -> TableScan:
    bodies = S3Bodies(cast("AwsService", script), "b")
    return TableScan(table_of(script), bodies, lambda: now)


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
    async def test_a_row_is_gone_if_it_has_no_copy_no_load_and_no_cooldown(
        self, rows: list[Item], before: float, *, gone: bool
    ) -> None:
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
        drop, trace = script.asked[1][1]["TransactItems"]
        assert "s3_key = :s3_key" in drop["Delete"]["ConditionExpression"]
        assert is_trace(trace["Put"]["Item"])
        assert trace["Put"]["ConditionExpression"] == "attribute_not_exists(pk)"
        assert script.asked[2][1]["Delete"]["Objects"] == [{"Key": row["s3_key"]["S"]}]
        script = Script(a_page(row), refused(), orphans)
        assert await scan_of(script).evict(before) == 0
        bare = {name: it for name, it in lock("x", NOW).items() if name != "lease_token"}
        script = Script(a_page(bare), {}, orphans)
        assert await scan_of(script).evict(before) == 1
        _, free = (it["Delete"] for it in script.asked[1][1]["TransactItems"])
        said = "attribute_not_exists(lease_token) AND NOT lease_expires_at >= :before"
        assert free["ConditionExpression"] == f"attribute_exists(pk) AND {said}"

    async def test_s8_an_eviction_leaves_a_trace_of_what_is_young(self) -> None:
        """For an hour after it was written; a later eviction drops the trace, and counts none."""
        orphans: dict[str, Any] = {"Contents": []}
        for age, expected in ((3_599, "Put"), (3_600, "Delete")):
            script = Script(a_page(meta()), {}, {}, orphans)
            scan = scan_of(script, NOW + age)
            assert await scan.evict(NOW + 9_999) == 1
            assert list(script.asked[1][1]["TransactItems"][1]) == [expected]
        trace = trace_item(PK, NOW)
        script = Script(a_page(trace), orphans)
        assert await scan_of(script).evict(NOW + 3_600) == 0
        answers: list[Any] = [{}, refused(lock("newer"))]
        for answer in answers:
            script = Script(a_page(trace), answer, orphans)
            assert await scan_of(script).evict(NOW + 3_601) == 0
            asked = script.asked[1][1]
            assert asked["Key"] == key_of(PK, LOCK)
            assert asked["ExpressionAttributeValues"] == {":lease_token": trace["lease_token"]}

    async def test_bodies_that_no_row_points_to_go(self) -> None:
        """After an hour; those that a row points to stay."""
        row, lost = meta(), Names("t").body(PK, "lost", "2")
        old = [object_at(it, NOW - 3_601) for it in (row["s3_key"]["S"], lost)]
        young = object_at(Names("t").body(PK, "young", "3"), NOW - 3_599)
        script = Script({"Contents": [*old, young]}, {"Item": row}, {})
        await scan_of(script)._drop_orphans()
        assert script.asked[-1][1]["Delete"]["Objects"] == [{"Key": lost}]


class TestS6Reads:
    async def test_a_fresh_copy_is_one_row_and_one_body(self) -> None:
        """Its lease is looked at only if it matters; a known value is not read again."""
        its = Steps({"Item": meta()}, a_body())
        assert (await its.read()).copy.value == b"7 bytes"
        assert its.script.operations == ["get_item", "get_object"]
        its.script.answers = [{"Item": meta()}]
        assert (await its.read("g")).copy.value is UNREAD
        its.script.answers = [{"Item": meta()}, {"Item": lock("x")}]
        its.run.leased.insert(PK, True)
        assert (await its.read("g")).held_until == NOW + 5
        its.now += 60
        its.script.answers = [{"Item": meta()}, {}]
        assert (await its.read("g")).held_until is None
        assert its.script.answers == []
        its.script.answers = [{}, {}]
        assert await its.read() is None

    async def test_a_read_may_lag_unless_this_process_changed_the_row(self) -> None:
        """Then it sees its own change."""
        its = Steps({"Item": meta()}, {"Item": meta()})
        await its.read("g", lagging=True)
        its.run.changed.insert(PK, True)
        await its.read("g", lagging=True)
        assert its.looks() == [False, True]
        its = Steps({}, {})
        assert await its.read(lagging=True) is None
        assert its.looks() == [False, False]

    @pytest.mark.parametrize("body", [GONE, a_body(b"6 byte")], ids=["gone", "short"])
    async def test_i8_a_row_without_its_body_is_a_miss(self, body: Any) -> None:
        """Also where the body is shorter than the row says."""
        its = Steps({"Item": meta()}, body, {"Item": meta()})
        assert await its.read() is None

    async def test_i8_a_row_that_was_replaced_meanwhile_is_read_again(self) -> None:
        """With the body of its own; without one, it is a miss."""
        key = attributes(s3_key=Names("t").body(PK, "h", "2"), generation="h")
        its = Steps({"Item": meta()}, GONE, {"Item": meta() | key}, a_body())
        found = (await its.read()).copy
        assert (found.generation, found.value) == ("h", b"7 bytes")
        its.script.answers = [{"Item": meta()}, GONE, {"Item": meta() | key}, GONE]
        assert await its.read() is None

    async def test_i19_a_body_of_another_row_is_not_read(self) -> None:
        """Whoever writes a row must not choose what is read."""
        other = Names("t").body(Names("t").pk("post", "b"), "g", "1")
        for pointer in (other, "s3://elsewhere/key"):
            row = {"Item": meta() | attributes(s3_key=pointer)}
            its = Steps(row, {}, row)
            assert await its.read() is None
            assert "get_object" not in its.script.operations

    async def test_i19_a_pointer_leads_to_its_version(self) -> None:
        """In the same partition; both are read as one row."""
        pointer = key_of(PK, META) | attributes(current_sk="v2")
        its = Steps({"Item": pointer}, {"Item": meta() | key_of(PK, "v2")}, a_body())
        assert (await its.read()).copy.value == b"7 bytes"
        assert its.script.asked[1][1]["Key"] == key_of(PK, "v2")


class TestI4Steps:
    async def acquired(self, its: Steps, ask: Ask) -> Any:
        return await its.run.acquire("post", ask, 10)

    async def test_a_lease_comes_with_the_epoch(self) -> None:
        """I26: of the last invalidation by tag, for the publication."""
        its = Steps({}, {}, {"Item": attributes(epoch=5)})
        assert await self.acquired(its, Ask("a")) == Lease("a", "t1", NOW + 10, 5)
        assert its.run.leased.get(PK)

    async def test_a_copy_that_is_newer_ends_the_lease(self) -> None:
        """E5: and is the answer, if its body exists."""
        its = Steps({}, {"Item": meta()}, {}, a_body(), {})
        grant = await self.acquired(its, Ask("a"))
        assert grant.record.copy.value == b"7 bytes"
        assert its.script.operations[-1] == "delete_item"
        its = Steps({}, {"Item": meta()}, {}, GONE, {"Item": meta()})
        assert isinstance(await self.acquired(its, Ask("a")), Lease)
        its = Steps({}, {"Item": meta()}, {})
        assert isinstance(await self.acquired(its, Ask("a", "g")), Lease)

    async def test_a_held_lease_is_told_unless_the_copy_is_newer(self) -> None:
        """Then that is the answer, with the end of the lease."""
        its = Steps(refused(lock("other")), {})
        assert await self.acquired(its, Ask("a")) == Held(NOW + 5)
        its = Steps(refused(lock("other")), {"Item": meta()}, a_body())
        grant = await self.acquired(its, Ask("a"))
        assert grant.record.held_until == NOW + 5

    async def test_e17_only_a_copy_that_was_seen_is_taken_over(self) -> None:
        """The first attempt looks."""
        held = refused(lock("other"))
        its = Steps(held, {}, held, {"Attributes": lock("other")}, {}, {})
        assert isinstance(await self.acquired(its, Ask("a", take_over=True)), Lease)
        its = Steps(held, {"Item": meta()}, a_body())
        assert isinstance(await self.acquired(its, Ask("a", take_over=True)), Newer)
        assert its.script.answers == []

    @pytest.mark.parametrize("which", [0, 1])
    async def test_a_lease_that_is_of_no_use_is_given_back(self, which: int) -> None:
        """The look failed: others need not wait for its end."""
        answers: list[Any] = [{}, {}]
        answers[which] = StoreError("away")
        its = Steps({}, *answers, {})
        with pytest.raises(StoreError, match="away"):
            await self.acquired(its, Ask("a"))
        assert is_trace(its.script.asked[-1][1]["Item"])

    async def test_i19_a_page_of_others_is_never_replaced(self) -> None:
        """Its META is a pointer."""
        pointer = {"Item": key_of(PK, META) | attributes(current_sk="v2")}
        its = Steps({}, pointer, {}, {}, {})
        with pytest.raises(StoreError, match="only its own services publish it"):
            await self.acquired(its, Ask("a"))

    async def test_e7_a_failure_that_was_not_seen_is_the_answer(self) -> None:
        """And is put back where the lease took its place."""
        failed = lock(RELEASED, NOW, failures=2, retry_at=NOW + 9, error="no")
        its = Steps({"Attributes": failed}, {}, {}, {})
        grant = await self.acquired(its, Ask("a", failures=0))
        assert grant.record == Record(None, None, Failure(2, NOW + 9, "no"))
        assert its.script.operations[-1] == "transact_write_items"

    async def test_a_publication_writes_its_body_first(self) -> None:
        """Then the row; the body that it replaced goes later."""
        lease = Lease("a", "t1", NOW + 10, 5)
        old = Names("t").body(PK, "g", "1")
        its = Steps({}, {})
        its.run.claims.insert("t1", Claim(old))
        its.run.leased.insert(PK, True)
        copy = Copy("t1", NOW, Policy(60), b"value")
        assert await its.run.publish("post", "a", lease, copy)
        assert its.script.operations == ["put_object", "transact_write_items"]
        assert its.trash == [old]
        assert its.run.changed.get(PK)
        assert not its.run.leased.get(PK)
        its = Steps({})
        its.run.claims.insert("t1", Claim())
        assert await its.run.publish("post", "a", lease, Copy("t1", NOW, Policy(60), None))
        assert its.script.operations == ["transact_write_items"]

    async def test_a_holder_that_was_forgotten_looks_again(self) -> None:
        """E35: the version of the copy that it replaces stays, and its body goes."""
        row = meta() | {VERSION: {"B": packed_version(7)}}
        its = Steps({"Item": row}, {}, {})
        lease, copy = Lease("a", "t1", NOW + 10, 5), Copy("t1", NOW, Policy(60), b"value")
        assert await its.run.publish("post", "a", lease, copy)
        stored = its.script.asked[-1][1]["TransactItems"][0]["Put"]["Item"]
        assert stored[VERSION] == row[VERSION]
        assert stored["replaced"] == {"L": [{"S": "g"}]}
        assert its.trash == [row["s3_key"]["S"]]

    async def test_the_holder_knows_what_it_replaces(self) -> None:
        """From its grant to its publication: the body of the copy that it saw goes."""
        row = meta()
        its = Steps({}, {"Item": row}, {})
        lease = await self.acquired(its, Ask("a", "g"))
        its.script.answers = [{}, {}]
        copy = Copy(lease.token, NOW, Policy(60), b"value")
        assert await its.run.publish("post", "a", lease, copy)
        assert its.trash == [row["s3_key"]["S"]]

    async def test_a_publication_that_came_too_late_leaves_nothing(self) -> None:
        """Its own body goes, and the one before stays."""
        its = Steps({}, refused(), {})
        its.run.claims.insert("t1", Claim(Names("t").body(PK, "g", "1")))
        lease, copy = Lease("a", "t1", NOW + 10, 5), Copy("t1", NOW, Policy(60), b"value")
        assert not await its.run.publish("post", "a", lease, copy)
        (mine,) = its.trash
        assert mine == its.script.asked[0][1]["Key"]
        assert not its.run.changed.get(PK)

    async def test_i26_a_tag_that_was_invalidated_voids_the_lease(self) -> None:
        """Before the transaction, which then refuses."""
        past = {"Item": attributes(epoch=6)}
        its = Steps({}, {}, past, {}, refused(), {}, {})
        its.run.claims.insert("t1", Claim(Names("t").body(PK, "g", "1")))
        lease, copy = Lease("a", "t1", NOW + 10, 5), Copy("t1", NOW, Policy(60), b"value")
        assert not await its.run.publish("post", "a", lease, copy, ("eu",))
        steps = ["put_object", "put_item", "get_item", "delete_item", "transact_write_items"]
        assert its.script.operations[:5] == steps

    async def test_an_invalidation_says_whether_there_was_anything(self) -> None:
        """A lease or a copy; this process reads it consistently from then on."""
        trace = trace_item(PK, NOW)
        cases: list[tuple[list[Item], int, bool]] = [
            ([lock("x")], 2, True),
            ([meta()], 1, True),
            ([meta(), lock("x")], 2, True),
            ([trace, meta()], 1, True),
            ([], 2, False),
            ([trace], 2, False),
            ([lock(RELEASED, NOW, failures=1, retry_at=NOW)], 2, True),
        ]
        for rows, requests, expected in cases:
            its = Steps({"Items": rows}, *[{}] * requests)
            assert await its.run.invalidate(PK, Mark.HARD) is expected
            assert its.run.changed.get(PK)
            assert its.script.answers == []

    async def test_s8_an_invalidation_marks_what_came_in_between(self) -> None:
        """A copy that was stored before its trace, and one that replaced the copy that it saw."""
        new = meta() | attributes(s3_key=Names("t").body(PK, "h", "2"), generation="h")
        its = Steps({"Items": []}, {}, {"Item": new}, {})
        assert await its.run.invalidate(PK, Mark.HARD)
        assert its.script.operations == ["query", "put_item", "get_item", "update_item"]
        its = Steps({"Items": [lock("x"), meta()]}, refused(), refused(new), {})
        assert await its.run.invalidate(PK, Mark.HARD)
        assert its.script.operations == ["query", "delete_item", "update_item", "update_item"]
        given = its.script.asked[-1][1]["ExpressionAttributeValues"]
        assert given[":generation"] == {"S": "h"}

    async def test_s8_an_invalidation_leaves_a_trace_if_the_copy_went_in_between(self) -> None:
        """Else a put that saw neither row could still be stored."""
        its = Steps({"Items": [meta()]}, refused(), {}, {})
        assert await its.run.invalidate(PK, Mark.HARD)
        assert its.script.operations == ["query", "update_item", "put_item", "get_item"]
        assert is_trace(its.script.asked[2][1]["Item"])

    async def test_an_invalidation_ends_while_others_keep_replacing_the_copy(self) -> None:
        """What they put after it began came later."""
        rows = [meta() | attributes(generation=f"g{number}") for number in range(TRIES + 1)]
        its = Steps({"Items": [rows[0]]}, *(refused(row) for row in rows[1:]))
        assert await its.run.invalidate(PK, Mark.HARD)
        assert its.script.answers == []

    async def test_i19_the_mark_goes_to_the_version_that_a_row_points_to(self) -> None:
        """If META is a pointer; a lease of ours ends; without that row there is no copy."""
        pointer = key_of(PK, META) | attributes(current_sk="v2")
        its = Steps({"Items": [lock("x"), pointer]}, {}, {})
        assert await its.run.invalidate(PK, Mark.HARD)
        assert its.script.operations == ["query", "delete_item", "update_item"]
        assert its.script.asked[-1][1]["Key"] == key_of(PK, "v2")
        its = Steps({"Items": [pointer]}, refused())
        assert not await its.run.invalidate(PK, Mark.HARD)
        its = Steps({"Items": [key_of(PK, META) | attributes(current_sk=META)]})
        assert not await its.run.invalidate(PK, Mark.HARD)

    async def test_a_row_of_a_tag_without_an_entry_goes(self) -> None:
        """It is not told as reached."""
        row = key_of(Names("t").tag("eu"), "x") | attributes(kind="post", id="a", lease_token="l")  # noqa: S106
        begun = {"Attributes": {"epoch": {"N": "7"}}}
        its = Steps(begun, {}, {"Items": [row]}, {"Items": []}, {}, {}, {})
        assert await its.run.invalidate_tag("eu", Mark.HARD) == []
        assert its.script.operations[-1] == "delete_item"
        once_more: tuple[Any, ...] = (begun, {}, {"Items": [row]})
        its = Steps(begun, {}, {"Items": [row]}, {"Items": [meta()]}, {}, *once_more)
        assert await its.run.invalidate_tag("eu", Mark.HARD) == [("post", "a")]

    async def test_renewing_tells_a_lost_lease_and_ending_stores_a_failure(self) -> None:
        """A lost lease is told; a failure goes with the end."""
        lease = Lease("a", "t1", NOW + 10, 5)
        its = Steps({}, refused(lock("other")))
        assert [await its.run.renew("post", lease, 10) for _ in range(2)] == [True, False]
        assert its.run.leased.get(PK), "so its next read looks at the lease, too"
        its = Steps({}, {}, {})
        its.run.claims.insert("t1", Claim(Names("t").body(PK, "g", "1")))
        await its.run.release("post", lease, None)
        await its.run.release("post", lease, None)
        await its.run.release("post", lease, Failure(1, NOW, "no"))
        assert its.script.operations == ["delete_item", "put_item", "transact_write_items"]
        assert its.run.claims.get("t1") is None

    async def test_deleting_takes_the_body_too(self) -> None:
        """And both rows; a trace stays in the place of the lease."""
        row = meta()
        its = Steps({"Items": [lock("x"), row]}, {}, {})
        await its.run.delete(PK)
        assert its.script.operations == ["query", "put_item", "delete_item"]
        _, (_, trace), (_, deleted) = its.script.asked
        assert is_trace(trace["Item"])
        assert trace["ExpressionAttributeValues"] == {":lease_token": {"S": "x"}}
        assert deleted["ExpressionAttributeValues"][":s3_key"] == row["s3_key"]
        assert its.trash == [row["s3_key"]["S"]]

    async def test_s8_a_deletion_takes_what_came_in_between(self) -> None:
        """A copy that was stored before its trace, and one that replaced the copy that it saw."""
        new = meta() | attributes(s3_key=Names("t").body(PK, "h", "2"), generation="h")
        its = Steps({"Items": []}, {}, {"Item": new}, {}, {})
        await its.run.delete(PK)
        steps = ["query", "put_item", "get_item", "put_item", "delete_item"]
        assert its.script.operations == steps
        assert its.trash == [new["s3_key"]["S"]]
        its = Steps({"Items": [meta()]}, {}, refused(new), refused(), {})
        await its.run.delete(PK)
        steps = ["query", "put_item", "delete_item", "put_item", "delete_item"]
        assert its.script.operations == steps
        assert its.trash == [new["s3_key"]["S"]]
        its = Steps({"Items": []}, {}, {})
        await its.run.delete(PK)
        assert its.trash == []


class TestS6Admin:
    async def test_a_new_table_is_waited_for(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """For a while; then it is an error."""
        pauses = list[float]()

        async def sleep(pause: float) -> None:
            pauses.append(pause)

        monkeypatch.setattr(asyncio, "sleep", sleep)
        creating, active = ({"Table": {"TableStatus": it}} for it in ("CREATING", "ACTIVE"))
        await admin._wait_until_ready(cast("AwsService", Script(creating, active)), "t")
        assert pauses == [admin.PAUSE]
        script = Script(*[creating] * admin.LOOKS)
        with pytest.raises(StoreError, match="table 't': not ready after 60 s"):
            await admin._wait_until_ready(cast("AwsService", script), "t")

    @pytest.mark.parametrize("region", ["us-east-1", "eu-west-1"])
    async def test_a_table_and_its_bucket_are_made_once(
        self, region: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """With keys, a price for each request and a TTL; those that exist are left as they are."""
        keys = [
            {"AttributeName": "pk", "KeyType": "HASH"},
            {"AttributeName": "sk", "KeyType": "RANGE"},
        ]
        types = [{"AttributeName": name, "AttributeType": "S"} for name in ("pk", "sk")]
        full = {"KeySchema": keys, "AttributeDefinitions": types, "TableStatus": "ACTIVE"}
        table, named = {"Table": full | {"ItemCount": 3, "TableSizeBytes": 9}}, {"TableName": "t"}
        off = {"TimeToLiveDescription": {"TimeToLiveStatus": "DISABLED"}}
        on = {"TimeToLiveDescription": {"TimeToLiveStatus": "ENABLED", "AttributeName": "ttl"}}
        missing = AwsRefused("x", admin.NO_TABLE, {})
        dynamodb = Script(
            missing, {}, table, off, {}, table, on, table, table, on, {"Table": full}, off
        )
        s3 = Script(AwsRefused("x", "404", {}), {}, {}, {}, {})
        s3.client = SimpleNamespace(meta=SimpleNamespace(region_name=region))  # type: ignore[attr-defined]
        places = list[object]()

        async def opened(_: object, place: object, what: object, meter: object) -> list[Script]:
            assert (what, type(meter)) == (("t", "b"), CostMeter) or what == ("t", None)
            places.append(place)
            return [dynamodb, s3]

        monkeypatch.setattr(admin, "open_services", opened)
        place = cast("AwsPlace", object())
        expected = admin.TableState("t", "ACTIVE", "ttl", 3, 9, "b", bucket_exists=True)
        assert await admin.create("t", "b", place) == expected
        ttl = {"Enabled": True, "AttributeName": "ttl"}
        assert dynamodb.asked == [
            ("describe_table", named),
            (
                "create_table",
                named
                | {"KeySchema": keys, "AttributeDefinitions": types}
                | {"BillingMode": "PAY_PER_REQUEST"},
            ),
            ("describe_table", named),
            ("describe_time_to_live", named),
            ("update_time_to_live", named | {"TimeToLiveSpecification": ttl}),
            ("describe_table", named),
            ("describe_time_to_live", named),
        ]
        where = {"CreateBucketConfiguration": {"LocationConstraint": region}}
        made = {"Bucket": "b"} | (where if region != "us-east-1" else {})
        assert s3.asked == [
            ("head_bucket", {"Bucket": "b"}),
            ("create_bucket", made),
            ("head_bucket", {"Bucket": "b"}),
        ]
        assert await admin.create("t", "b", place) == expected
        assert [*dynamodb.operations[7:], *s3.operations[3:]] == [
            "describe_table",
            "describe_table",
            "describe_time_to_live",
            "head_bucket",
            "head_bucket",
        ]
        state = admin.TableState("t", "ACTIVE", None, 0, 0, None, bucket_exists=False)
        assert await admin.describe("t", None, place) == state
        assert places == [place] * 3

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


class Client:
    """A client of the library; each call ends as the script says."""

    def __init__(self, *script: Any) -> None:
        self.script = list(script)
        self.calls: list[tuple[str, dict[str, Any]]] = []

    def __getattr__(self, operation: str) -> Any:
        async def call(**arguments: Any) -> Any:
            self.calls.append((operation, arguments))
            done = self.script.pop(0)
            if isinstance(done, Exception):
                raise done
            return done

        return call


def aws_error(code: str, *reasons: str, status: int = 400, **more: Any) -> ClientError:
    response = {
        "Error": {"Code": code, "Message": "said"},
        "ResponseMetadata": {"HTTPStatusCode": status},
        "CancellationReasons": [{"Code": it} if it else {} for it in reasons],
    }
    return ClientError(cast("Any", response | more), "x")


class Service(AwsService):
    """On a scripted client; pauses are noted, and none is waited for."""

    def __init__(self, *script: Any) -> None:
        self.pauses: list[float] = []

        async def sleep(pause: float) -> None:
            self.pauses.append(pause)

        super().__init__(Client(*script), "table 't'", CostMeter(), sleep, lambda: 1.0)


BUSY = aws_error("ThrottlingException")
AWAY = EndpointConnectionError(endpoint_url="http://x")


class TestI4Aws:
    async def test_a_busy_service_is_asked_again_after_growing_pauses(self) -> None:
        """Up to five times; an argument that is a function is made anew each time."""
        service, made = Service(BUSY, BUSY, {"a": 1}), list[int]()

        def attempt() -> int:
            made.append(len(made))
            return len(made)

        assert await service.ask("get_item", Item=attempt, Other=5) == {"a": 1}
        assert [it["Item"] for _, it in service.client.calls] == [1, 2, 3]
        assert service.pauses == sorted(service.pauses)
        assert len(set(service.pauses)) == 2
        service = Service(*[BUSY] * 5)
        with pytest.raises(Unanswered, match=r"table 't': said \(ThrottlingException\); asked up"):
            await service.ask("get_item")
        assert (service.client.script, len(service.pauses)) == ([], 4)
        assert not service._breaker.is_open

    async def test_a_service_that_is_away_is_left_alone_for_a_moment(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        """Urgent requests are sent; the first answer ends it, and both are logged once."""
        service = Service(*[AWAY] * 10, {})
        for _ in range(2):
            with pytest.raises(Away, match="table 't': no answer to get_item: Could not connect"):
                await service.ask("get_item", urgent=True)
        with pytest.raises(StoreError, match="table 't': unavailable; stillfresh tries it again"):
            await service.ask("get_item")
        assert await service.ask("get_item", urgent=True) == {}
        messages = [record.getMessage() for record in caplog.records]
        assert len(messages) == 2
        assert "no answer to get_item" in messages[0]
        assert messages[1] == "table 't': answers again"

    async def test_every_request_is_metered(self) -> None:
        """I7: as it is asked, answered or refused."""
        refused = aws_error("ConditionalCheckFailedException")
        units = {"ConsumedCapacity": {"CapacityUnits": 2.5}}
        service = Service(units, units, refused, {})
        await service.ask("get_item")
        await service.ask("put_item")
        with pytest.raises(AwsRefused):
            await service.ask("put_item")
        await service.ask("get_object")
        assert service.meter.costs() == Costs(read_units=2.5, write_units=3.5, s3_gets=1)

    async def test_a_probe_is_one_attempt(self) -> None:
        """It finds out whether the service answers again; a refusal is an answer."""
        service = Service(*[AWAY] * 6, aws_error("ValidationException"))
        with pytest.raises(Away):
            await service.ask("get_item")
        assert len(service.client.script) == 2
        service._breaker._next_at = 0.0
        with pytest.raises(Away):
            await service.ask("get_item")
        assert len(service.client.script) == 1
        with pytest.raises(AwsRefused):
            await service.ask("get_item", urgent=True)
        assert not service._breaker.is_open

    @pytest.mark.parametrize(
        ("error", "kind", "words"),
        [
            (aws_error("ConditionalCheckFailedException"), ConditionFailed, "said"),
            (aws_error("TransactionCanceledException", "", CONDITION), ConditionFailed, "said"),
            (
                aws_error("TransactionCanceledException", "TransactionConflict", CONDITION),
                ConditionFailed,
                "said",
            ),
            (aws_error("ValidationException"), AwsRefused, "said"),
            (aws_error("ResourceNotFoundException"), AwsRefused, "there is no such table; make it"),
            (aws_error("NoSuchBucket"), AwsRefused, "there is no such bucket"),
            (aws_error("AccessDenied"), AwsRefused, "no permission for GetItem: said"),
        ],
    )
    async def test_a_refusal_is_not_asked_again(
        self, error: ClientError, kind: type[AwsRefused], words: str
    ) -> None:
        """With its code and what to do."""
        service = Service(error)
        with pytest.raises(AwsRefused, match=words) as refusal:
            await service.ask("get_item")
        assert type(refusal.value) is kind
        assert refusal.value.code == error.response["Error"]["Code"]
        assert service.pauses == []

    @pytest.mark.parametrize(
        "error",
        [
            aws_error("InternalServerError", status=500),
            aws_error("TransactionCanceledException", "None", "TransactionConflict"),
            aws_error("RequestTimeout"),
        ],
    )
    async def test_conflicts_and_errors_of_the_service_are_tried_again(
        self, error: ClientError
    ) -> None:
        """A conflict of transactions, and any error of the service itself."""
        service = Service(error, {})
        assert await service.ask("get_item") == {}
        assert len(service.pauses) == 1

    async def test_a_refusal_brings_the_row_that_it_met(self) -> None:
        """And the reasons of each action."""
        error = aws_error("TransactionCanceledException", "", CONDITION, Item={"a": 1})
        with pytest.raises(ConditionFailed) as refusal:
            await Service(error).ask("get_item")
        assert (refusal.value.item, refusal.value.reasons) == ({"a": 1}, ("None", CONDITION))

    async def test_s2_a_refusal_says_whether_an_answer_was_lost_before(self) -> None:
        """A busy service has answered; one that did not may have done it."""
        for script, expected in (
            ([], False),
            ([BUSY], False),
            ([AWAY], True),
            ([AWAY, BUSY], True),
        ):
            service = Service(*script, aws_error("ConditionalCheckFailedException"))
            with pytest.raises(ConditionFailed) as refusal:
                await service.ask("put_item")
            assert refusal.value.follows_loss is expected

    async def test_other_errors_are_the_stores(self) -> None:
        """With what to do where that is known."""
        with pytest.raises(StoreError, match="found no AWS credentials; set AWS_ACCESS_KEY_ID"):
            await Service(NoCredentialsError()).ask("get_item")
        with pytest.raises(StoreError, match="table 't': An unspecified error"):
            await Service(BotoCoreError()).ask("get_item")

    async def test_closing_waits_for_requests(self) -> None:
        """Then nothing is asked any more."""
        service, may_end = Service({}), asyncio.Event()

        async def then(_: object) -> str:
            await may_end.wait()
            return "done"

        asking = asyncio.create_task(service.ask("get_item", then))
        await asyncio.sleep(0)
        closing = asyncio.create_task(service.close())
        await asyncio.sleep(0)
        assert not closing.done()
        may_end.set()
        assert await asking == "done"
        await closing
        with pytest.raises(NotOpen):
            await service.ask("get_item")

    async def test_e28_making_a_client_reads_no_description_on_the_loop(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """They are megabytes: a thread has read them before; small extras may be looked for."""
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "x")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "x")
        loader, read = aws._service_descriptions.__wrapped__(), list[str]()
        real = loader.file_loader.load_file

        def noted(path: str) -> Any:
            read.append(path)
            return real(path)

        monkeypatch.setattr(loader.file_loader, "load_file", noted)
        session = get_session()
        session.register_component("data_loader", loader)
        for name in aws.NAMES:
            async with aws._client(session, name, AwsPlace("eu-west-1")):
                pass
        assert [path for path in read if not path.endswith(".sdk-extras")] == []

    def test_s3_may_be_elsewhere(self) -> None:
        """By its own address, else by that of both."""
        place = AwsPlace("eu", "http://both", "http://s3")
        assert (place.of("s3"), place.of("dynamodb")) == ("http://s3", "http://both")
        assert AwsPlace("eu", "http://both").of("s3") == "http://both"


class TestI1Options:
    def test_a_table_is_named_or_in_the_environment(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Else the error says where to name it."""
        monkeypatch.delenv(TABLE_VARIABLE, raising=False)
        for table in (None, ""):
            with pytest.raises(ConfigError, match=f"or in {TABLE_VARIABLE}"):
                table_name(table)
        monkeypatch.setenv(TABLE_VARIABLE, "theirs")
        assert (table_name(None), table_name("mine")) == ("theirs", "mine")
        with pytest.raises(ConfigError, match="table: must be a name, not 5"):
            table_name(5)  # type: ignore[arg-type]

    @pytest.mark.parametrize(
        "bad",
        [
            *[{"pk": "md5"}, {"s3_key": "long"}, {"bucket": ""}, {"bucket": 5}],
            *[{"s3_prefix": 5}, {"s3_prefix": "p" * (LONGEST_PREFIX + 1)}, {"tenant": "a#b"}],
            *[{"max_lease": 0}, {"retention": -1}, {"delete_after": "soon"}],
        ],
    )
    def test_a_bad_option_is_named(self, bad: dict[str, Any]) -> None:
        """With what is allowed."""
        (name,) = bad
        with pytest.raises(ConfigError, match=name):
            DynamoStore(**{"table": "t", "bucket": "b"} | bad)

    def test_a_prefix_ends_with_one_slash(self) -> None:
        """However it is written."""
        for given, expected in (("", ""), ("/", ""), ("a", "a/"), ("/a/b//", "a/b/")):
            assert DynamoStore("t", bucket="b", s3_prefix=given)._names.prefix == expected
        longest = DynamoStore("t", bucket="b", s3_prefix="p" * LONGEST_PREFIX)._names.prefix
        assert len(longest) == LONGEST_PREFIX + 1

    def test_i17_a_tenant_has_a_store_of_its_own(self) -> None:
        """With the same table, and nothing that is open."""
        store = DynamoStore("t", bucket="b", shapes={})
        other = store.for_tenant("acme")
        assert (other.tenant, other._names.tenant, store.tenant) == ("acme", "acme", None)
        assert other.shapes == store.shapes
        assert other.shapes is not store.shapes
        assert other._meter is not store._meter
        with pytest.raises(NotOpen):
            other._opened()

    async def test_tags_are_text_that_can_be_read_back(self) -> None:
        """With the id and the kind; an id without tags is stored as its hash, and may be any."""
        store = DynamoStore("t", bucket="b")
        for ask in (Ask("\ud800", tags=("a",)), Ask("a", tags=("\ud800",))):
            with pytest.raises(ConfigError):
                await store.acquire("post", [ask], 5)
        with pytest.raises(NotOpen):
            await store.acquire("post", [Ask("\ud800")], 5)
