"""S13, S8, I7: what a put asks of DynamoDB and S3, and makes of each answer."""

import asyncio
from typing import Any, cast

import pytest

from stillfresh import Policy, StoreError
from stillfresh.stores.aws import AwsRefused, AwsService, ConditionFailed, Unanswered
from stillfresh.stores.bodies import S3Bodies
from stillfresh.stores.contract import UNREAD, Copy, Mark, Put, PutOutcome, PutResult, When
from stillfresh.stores.dynamodb.leases import TAGGED_FOR, TRIES
from stillfresh.stores.dynamodb.puts import ATTEMPTS, DynamoPut
from stillfresh.stores.dynamodb.rows import VERSION, is_trace, trace_item
from stillfresh.stores.dynamodb.schema import LOCK, META, Item, Names, attributes, key_of
from stillfresh.stores.versions import packed_version
from tests.kit.aws_script import CONDITION, GONE, NOW, PK, Script, Steps, lock, meta, refused

STORED, REPLACED, KEPT, MIXED, REFUSED, AGAIN = PutOutcome
OWN = "own"
SEVEN = packed_version(7)
EIGHT = packed_version(8)


def a_put(value: Any = b"value", *, version: bytes = b"", **options: Any) -> Put:
    return Put(Copy(OWN, NOW, Policy(60), value, Mark.NONE, version), **options)


def both(*rows: Item) -> dict[str, Any]:
    return {"Items": list(rows)}


def met(meta_row: Item | None = None, lock_row: Item | None = None, *codes: str) -> ConditionFailed:
    """A refusal of the transaction, with the rows that failed its conditions."""
    reasons: list[dict[str, Any]] = [
        {"Code": "None"} if row is None else {"Code": CONDITION, "Item": row}
        for row in (meta_row, lock_row)
    ]
    for at, code in enumerate(codes):
        reasons[at] = {"Code": code}
    answer = {"CancellationReasons": reasons}
    return ConditionFailed("no", "TransactionCanceledException", answer)


def renewed(number: int, **more: Any) -> Item:
    """A copy that another process put."""
    key = Names("t").body(PK, f"g{number}", "1")
    return meta() | attributes(s3_key=key, generation=f"g{number}", **more)


class Puts(Steps):
    async def put(self, put: Put | None = None) -> PutResult:
        return await DynamoPut(self.run, "post", "a", put or a_put()).run()

    def transactions(self) -> list[dict[str, Any]]:
        return [asked for name, asked in self.script.asked if name == "transact_write_items"]

    def stored(self) -> Item:
        item: Item = self.transactions()[-1]["TransactItems"][0]["Put"]["Item"]
        return item

    def body_key(self) -> str:
        (key,) = [asked["Key"] for name, asked in self.script.asked if name == "put_object"]
        return str(key)


class TestS13Put:
    async def test_a_put_is_one_read_one_body_and_one_transaction(self) -> None:
        """Put META, delete LOCK, each if it is missing as it was read; its name is its own."""
        its = Puts(both(), {}, {})
        assert await its.put(a_put(version=SEVEN)) == PutResult(STORED, SEVEN)
        assert its.script.operations == ["query", "put_object", "transact_write_items"]
        (asked,) = its.transactions()
        put, end = (action for item in asked["TransactItems"] for action in item.values())
        assert len(asked["ClientRequestToken"]) == 32
        for action in (put, end):
            assert action["ConditionExpression"] == "attribute_not_exists(pk)"
            assert action["ReturnValuesOnConditionCheckFailure"] == "ALL_OLD"
            assert "ExpressionAttributeValues" not in action
        assert end["Key"] == key_of(PK, LOCK)
        stored = its.stored()
        assert (stored["generation"], stored[VERSION]) == ({"S": OWN}, {"B": SEVEN})
        assert stored["s3_key"] == {"S": its.body_key()}
        assert "replaced" not in stored
        assert its.trash == []
        assert its.run.changed.get(PK)

    async def test_replaces_both_rows_as_they_were_read(self) -> None:
        """The copy that it replaced is remembered, its body goes later, a lease is void."""
        row = meta() | {"voided": {"S": "v"}, "replaced": {"L": [{"S": f"{it}"} for it in "abcd"]}}
        its = Puts(both(lock("x", failures=2), row), {}, {})
        its.run.leased.insert(PK, True)
        assert (await its.put()).outcome is STORED
        ((put,), (end,)) = (it.values() for it in its.transactions()[0]["TransactItems"])
        for name in ("s3_key", "generated_at", "revalidate_seconds", "generation", "voided"):
            assert f"{name} = :{name}" in put["ConditionExpression"]
            assert put["ExpressionAttributeValues"][f":{name}"] == row[name]
        assert "attribute_not_exists(etag)" in put["ConditionExpression"]
        assert end["ConditionExpression"] == "attribute_exists(pk) AND lease_token = :lease_token"
        assert end["ExpressionAttributeValues"] == {":lease_token": {"S": "x"}}
        stored = its.stored()
        assert stored["replaced"] == {"L": [{"S": "g"}, {"S": "a"}, {"S": "b"}, {"S": "c"}]}
        assert stored.keys().isdisjoint({"failures", "voided", "mark"})
        assert its.trash == [row["s3_key"]["S"]]
        assert not its.run.leased.get(PK)

    async def test_an_absence_has_no_body(self) -> None:
        """E4: a row, and nothing in S3."""
        its = Puts(both(), {})
        assert (await its.put(a_put(None))).outcome is STORED
        assert its.script.operations == ["query", "transact_write_items"]
        assert its.stored()["absent"] == {"BOOL": True}

    async def test_a_version_stays_unless_the_put_brings_one(self) -> None:
        """E35: a greater one is kept, before anything is asked of the table."""
        row = meta() | {VERSION: {"B": SEVEN}}
        its = Puts(both(row), {}, {})
        assert await its.put() == PutResult(STORED, SEVEN)
        its = Puts(both(row), {}, {})
        assert await its.put(a_put(version=EIGHT)) == PutResult(STORED, EIGHT)
        for given, outcome in ((packed_version(6), KEPT), (packed_version("6"), MIXED)):
            its = Puts(both(row), {})
            assert await its.put(a_put(version=given)) == PutResult(outcome, SEVEN)
            assert its.script.operations == ["query", "put_object"]
            assert its.trash == [its.body_key()]

    async def test_a_damaged_version_is_none(self) -> None:
        """T5: else no put with a version could ever be stored."""
        for damaged in ({"B": b"x"}, {"B": b"i123"}, {"S": "7"}, {"N": "7"}):
            its = Puts(both(meta() | {VERSION: damaged}), {}, {})
            assert await its.put(a_put(version=SEVEN)) == PutResult(STORED, SEVEN)

    async def test_a_conditional_put_writes_its_body_when_the_condition_holds(self) -> None:
        """I7: an object for each refused `add` would cost more than all the rest."""
        its = Puts(both(), {}, {})
        assert (await its.put(a_put(when=When.NO_LIVE_COPY))).outcome is STORED
        assert its.script.operations == ["query", "put_object", "transact_write_items"]
        its = Puts(both(meta()), {"ContentLength": 7})
        assert (await its.put(a_put(when=When.NO_LIVE_COPY))).outcome is REFUSED
        assert its.script.operations == ["query", "head_object"]
        assert its.trash == []

    @pytest.mark.parametrize("answer", [GONE, {"ContentLength": 6}], ids=["gone", "short"])
    @pytest.mark.parametrize(
        "condition",
        [{"when": When.NO_LIVE_COPY}, {"when": When.UNCHANGED, "seen": None}],
        ids=["add", "update"],
    )
    async def test_i8_a_copy_whose_body_is_gone_is_no_copy(
        self, answer: Any, condition: dict[str, Any]
    ) -> None:
        """Readers see a miss, so `add` and an update of a missing value must work."""
        its = Puts(both(meta()), answer, {}, {})
        assert (await its.put(a_put(**condition))).outcome is STORED
        condition_of_put = its.transactions()[0]["TransactItems"][0]["Put"]["ConditionExpression"]
        assert "s3_key = :s3_key" in condition_of_put

    async def test_i19_a_body_that_the_row_may_not_show_is_no_copy(self) -> None:
        """It points to another bucket; S3 is not even asked."""
        row = meta() | attributes(s3_key="s3://elsewhere/key")
        its = Puts(both(row), {}, {})
        assert (await its.put(a_put(when=When.NO_LIVE_COPY))).outcome is STORED
        assert its.script.operations == ["query", "put_object", "transact_write_items"]

    async def test_i19_a_page_of_others_is_never_replaced(self) -> None:
        """Its META is a pointer."""
        its = Puts(both(key_of(PK, META) | attributes(current_sk="v2")), {})
        with pytest.raises(StoreError, match="only its own services publish it"):
            await its.put()

    async def test_i2_a_row_that_lacks_everything_is_replaced_as_it_was_read(self) -> None:
        """By the attributes that it has, whatever their types are."""
        odd = key_of(PK, META) | {"s3_key": {"N": "5"}, "voided": {"L": []}}
        its = Puts(both(odd), {}, {})
        assert (await its.put()).outcome is STORED
        put = its.transactions()[0]["TransactItems"][0]["Put"]
        assert put["ExpressionAttributeValues"] == {":s3_key": {"N": "5"}, ":voided": {"L": []}}
        assert "attribute_not_exists(generated_at)" in put["ConditionExpression"]


class TestS13Touch:
    async def test_copies_the_body_under_a_key_of_its_own(self) -> None:
        """E35: the value, its size, its ETag and our own part stay; S3 copies by itself."""
        row = meta(etag="e", own_etag="e") | {"extra": {"B": b"more"}}
        its = Puts(both(row), {}, {})
        assert (await its.put(a_put(UNREAD))).outcome is STORED
        assert its.script.operations == ["query", "copy_object", "transact_write_items"]
        copied = its.script.asked[1][1]
        assert copied["CopySource"] == {"Bucket": "b", "Key": row["s3_key"]["S"]}
        stored = its.stored()
        assert stored["s3_key"] == {"S": copied["Key"]}
        assert stored["s3_key"] != row["s3_key"]
        for name in ("body_size", "etag", "own_etag", "extra"):
            assert stored[name] == row[name]
        assert its.trash == [row["s3_key"]["S"]]

    async def test_copies_again_if_the_value_was_replaced(self) -> None:
        """Its own first object goes."""
        new = renewed(2, etag="new")
        its = Puts(both(meta()), {}, met(new), {}, {})
        assert (await its.put(a_put(UNREAD))).outcome is STORED
        first, second = (it for name, it in its.script.asked if name == "copy_object")
        assert second["CopySource"]["Key"] == new["s3_key"]["S"]
        assert its.stored()["etag"] == {"S": "new"}
        assert its.trash == [first["Key"], new["s3_key"]["S"]]

    async def test_copies_once_if_only_the_lease_changed(self) -> None:
        """The body is the same."""
        its = Puts(both(meta()), {}, met(None, lock("x")), {})
        assert (await its.put(a_put(UNREAD))).outcome is STORED
        assert its.script.operations.count("copy_object") == 1

    async def test_a_touched_absence_stays_an_absence(self) -> None:
        """There is no body to copy."""
        its = Puts(both(meta() | {"absent": {"BOOL": True}}), {})
        assert (await its.put(a_put(UNREAD))).outcome is STORED
        assert its.stored()["absent"] == {"BOOL": True}

    async def test_touching_a_value_that_is_gone_is_refused(self) -> None:
        """Unless it went because the copy was replaced: then the new one is touched."""
        its = Puts(both(meta()), GONE, both(meta()))
        assert (await its.put(a_put(UNREAD))).outcome is REFUSED
        its = Puts(both(meta()), GONE, both(renewed(2)), {}, {})
        assert (await its.put(a_put(UNREAD))).outcome is STORED
        its = Puts(both())
        assert (await its.put(a_put(UNREAD))).outcome is REFUSED
        assert its.trash == []


class TestS13Refused:
    async def test_a_refusal_brings_the_rows_for_the_next_attempt(self) -> None:
        """No further look, the same body, another name for another transaction."""
        new = renewed(2)
        its = Puts(both(meta()), {}, met(new, lock("x")), {})
        assert (await its.put()).outcome is STORED
        steps = ["query", "put_object", "transact_write_items", "transact_write_items"]
        assert its.script.operations == steps
        first, second = its.transactions()
        assert first["ClientRequestToken"] != second["ClientRequestToken"]
        put, end = (action for item in second["TransactItems"] for action in item.values())
        assert put["ExpressionAttributeValues"][":generation"] == {"S": "g2"}
        assert end["ExpressionAttributeValues"] == {":lease_token": {"S": "x"}}
        assert put["Item"]["s3_key"] == {"S": its.body_key()}
        assert put["Item"]["replaced"] == {"L": [{"S": "g2"}]}
        assert its.trash == [new["s3_key"]["S"]]

    async def test_a_row_whose_condition_held_is_as_it_was(self) -> None:
        """Only the other one came with the refusal."""
        its = Puts(both(lock("x"), meta()), {}, met(None, lock("y")), met(renewed(2)), {})
        assert (await its.put()).outcome is STORED
        (_, second, third) = its.transactions()
        put, end = (action for item in second["TransactItems"] for action in item.values())
        assert put["ExpressionAttributeValues"][":generation"] == {"S": "g"}
        assert end["ExpressionAttributeValues"] == {":lease_token": {"S": "y"}}
        put, end = (action for item in third["TransactItems"] for action in item.values())
        assert put["ExpressionAttributeValues"][":generation"] == {"S": "g2"}
        assert end["ExpressionAttributeValues"] == {":lease_token": {"S": "y"}}

    @pytest.mark.parametrize(
        "refusal",
        [met({}), met(None, {}), met(None, None, CONDITION, "TransactionConflict"), refused()],
        ids=["no META", "no LOCK", "a conflict", "no reasons"],
    )
    async def test_rows_that_do_not_come_are_read_again(self, refusal: ConditionFailed) -> None:
        """A row that is missing, or of which the server says nothing."""
        its = Puts(both(lock("x"), meta()), {}, refusal, both(), {})
        assert (await its.put()).outcome is STORED
        steps = ["query", "put_object", "transact_write_items", "query", "transact_write_items"]
        assert its.script.operations == steps
        put = its.transactions()[-1]["TransactItems"][0]["Put"]
        assert put["ConditionExpression"] == "attribute_not_exists(pk)"

    async def test_the_put_is_decided_again(self) -> None:
        """By the copy that came first: its condition may not hold any more."""
        live = met(renewed(2))
        its = Puts(both(), {}, live, {"ContentLength": 7})
        assert (await its.put(a_put(when=When.NO_LIVE_COPY))).outcome is REFUSED
        assert its.trash == [its.body_key()]
        newer = met(renewed(2) | {VERSION: {"B": EIGHT}})
        its = Puts(both(), {}, newer)
        assert await its.put(a_put(version=SEVEN)) == PutResult(KEPT, EIGHT)
        assert its.trash == [its.body_key()]

    async def test_s2_a_put_recognises_itself(self) -> None:
        """Its answer was lost and its name forgotten: it is there, or it was replaced."""
        own = renewed(2) | attributes(s3_key=Names("t").body(PK, OWN, "0"), generation=OWN)
        its = Puts(both(meta()), {}, met(own | {VERSION: {"B": SEVEN}}))
        assert await its.put() == PutResult(STORED, SEVEN)
        assert its.trash == [its.body_key()]
        for before in ([OWN], ["x", "y", "z", OWN]):
            replaced = {"replaced": {"L": [{"S": it} for it in before]}}
            its = Puts(both(meta()), {}, met(renewed(3) | replaced))
            assert (await its.put()).outcome is REPLACED
        theirs = own | attributes(s3_key="theirs")
        its = Puts(both(meta()), {}, met(theirs))
        assert (await its.put()).outcome is REPLACED, "another service updated the row"

    async def test_s2_a_condition_is_not_judged_after_a_lost_answer(self) -> None:
        """E35: the put itself may be why it does not hold: an increment would be done twice."""
        unanswered = met(renewed(9))
        unanswered.follows_loss = True
        for condition in ({"when": When.UNCHANGED, "seen": "g"}, {"when": When.NO_LIVE_COPY}):
            row = meta() if "seen" in condition else trace_item(PK, NOW)
            its = Puts(both(row), {}, unanswered, {"ContentLength": 7})
            with pytest.raises(StoreError, match="did not confirm the put; it may have been done"):
                await its.put(a_put(**condition))
            assert its.trash == []
        its = Puts(both(meta()), {}, unanswered, {"ContentLength": 7})
        answer = await its.put(a_put(when=When.LIVE_COPY))
        assert answer.outcome is STORED

    async def test_ends_with_again_if_others_are_always_faster(self) -> None:
        """Nothing of it is under way then, so its body goes."""
        refusals = [met(renewed(number)) for number in range(ATTEMPTS)]
        its = Puts(both(meta()), {}, *refusals)
        assert (await its.put()).outcome is AGAIN
        assert its.script.answers == []
        assert its.trash == [its.body_key()]

    async def test_an_error_leaves_the_body(self) -> None:
        """The put may have been stored: the sweep of bodies without a row decides."""
        for error in (Unanswered("no answer"), AwsRefused("x", "AccessDenied", {})):
            its = Puts(both(meta()), {}, error)
            with pytest.raises(StoreError, match=str(error)):
                await its.put()
            assert its.trash == []

    async def test_a_failed_look_or_body_is_an_error(self) -> None:
        """No transaction is sent."""
        answers: tuple[list[Any], ...] = ([StoreError("away"), {}], [both(), StoreError("away")])
        for some in answers:
            its = Puts(*some)
            with pytest.raises(StoreError, match="away"):
                await its.put()
            assert its.transactions() == []

    async def test_s8_a_cancelled_put_sends_nothing_more(self) -> None:
        """Neither of its two first requests goes on, and no transaction follows."""
        its = Puts(both(meta()))
        waiting = asyncio.Event()

        async def ask(operation: str, then: Any = None, /, **arguments: Any) -> Any:
            its.script.asked.append((operation, arguments))
            waiting.set()
            await asyncio.Event().wait()

        its.script.ask = ask  # type: ignore[method-assign]
        putting = asyncio.create_task(its.put())
        await waiting.wait()
        await asyncio.sleep(0)
        putting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await putting
        assert its.script.operations == ["query", "put_object"]


class TestS13Tags:
    async def test_tags_of_a_put_are_written_before_its_transaction(self) -> None:
        """E8, I26: of the key and of the value, by the put itself, for longer than the copy."""
        its = Puts(both(), {}, {}, {}, {})
        assert (await its.put(a_put(tags=("eu",), late=("us",)))).outcome is STORED
        steps = ["query", "put_object", "put_item", "put_item", "transact_write_items"]
        assert its.script.operations == steps
        rows = [asked["Item"] for name, asked in its.script.asked if name == "put_item"]
        names = Names("t")
        assert {row["pk"]["S"] for row in rows} == {names.tag("eu"), names.tag("us")}
        for row in rows:
            assert row["lease_token"] == {"S": OWN}
            assert row["ttl"] == {"N": f"{NOW + TAGGED_FOR:.0f}"}
            assert (row["kind"], row["id"]) == ({"S": "post"}, {"S": "a"})
        assert its.stored()["tags"] == {"SS": ["eu"]}
        assert its.stored()["late_tags"] == {"SS": ["us"]}

    async def test_that_are_not_named_stay(self) -> None:
        """E35, `touch`: those of the copy, and those of a load under way."""
        row = meta() | {"tags": {"SS": ["eu"]}}
        its = Puts(both(lock("x") | {"tags": {"SS": ["us"]}}, row), {}, {}, {}, {})
        assert (await its.put(a_put(tags=None))).outcome is STORED
        assert its.stored()["tags"] == {"SS": ["eu", "us"]}
        assert its.script.operations.count("put_item") == 2
        assert "delete_item" not in its.script.operations

    async def test_tags_of_a_replaced_copy_are_dropped_after_the_put(self) -> None:
        """By the names of the writers that the two rows tell; tags of the value may stay."""
        row = meta() | {"tags": {"SS": ["eu", "us"]}, "late_tags": {"SS": ["shop"]}}
        its = Puts(both(lock("x"), row), {}, {}, {}, {}, {}, {})
        assert (await its.put(a_put(tags=("us",)))).outcome is STORED
        written = [asked["Item"]["pk"]["S"] for name, asked in its.script.asked if "put_i" in name]
        names = Names("t")
        assert set(written) == {names.tag("us"), names.tag("shop")}
        dropped = [asked for name, asked in its.script.asked if name == "delete_item"]
        assert {it["Key"]["pk"]["S"] for it in dropped} == {names.tag("eu")}
        tokens = {it["ExpressionAttributeValues"][":token"]["S"] for it in dropped}
        assert tokens == {"g", "x"}

    async def test_that_cannot_be_dropped_do_no_harm(self) -> None:
        """The put is stored: an invalidation may reach one entry too many."""
        row = meta() | {"tags": {"SS": ["eu"]}}
        its = Puts(both(row), {}, {}, StoreError("away"))
        assert (await its.put()).outcome is STORED

    async def test_replace_only_rows_that_were_seen(self) -> None:
        """S8: a late write replaces no later row."""
        later = key_of("x", "y") | attributes(lease_token="later")  # noqa: S106
        its = Puts(both(lock("x"), meta()), {}, refused(later), {}, {})
        assert (await its.put(a_put(tags=("eu",)))).outcome is STORED
        first, second = (asked for name, asked in its.script.asked if name == "put_item")
        given = [it["ExpressionAttributeValues"].values() for it in (first, second)]
        assert sorted(it["S"] for it in given[0]) == ["g", OWN, "x"]
        assert sorted(it["S"] for it in given[1]) == ["later", OWN]

    async def test_tags_are_written_again_in_each_attempt_of_a_put(self) -> None:
        """Between two attempts a load may have dropped the rows of an earlier writer."""
        its = Puts(both(meta()), {}, {}, met(renewed(2)), {}, {})
        assert (await its.put(a_put(tags=("eu",)))).outcome is STORED
        assert its.script.operations[2:] == ["put_item", "transact_write_items"] * 2

    async def test_that_others_keep_changing_are_a_lost_attempt(self) -> None:
        """It looks at the rows again, and in the end answers AGAIN."""
        later = [refused(key_of("x", "y") | attributes(lease_token=f"l{it}")) for it in range(99)]
        lost: list[Any] = [*later[:TRIES], both(meta())]
        its = Puts(both(meta()), {}, *lost * ATTEMPTS)
        assert (await its.put(a_put(tags=("eu",)))).outcome is AGAIN
        assert its.transactions() == []
        assert its.script.answers == []

    async def test_tags_of_a_put_that_is_not_stored_are_not_written(self) -> None:
        """Else an invalidation by tag would reach the copy that stayed."""
        row = meta() | {VERSION: {"B": EIGHT}}
        its = Puts(both(row), {})
        assert (await its.put(a_put(version=SEVEN, tags=("eu",)))).outcome is KEPT
        assert "put_item" not in its.script.operations


class TestS8Traces:
    async def test_a_put_in_the_place_of_a_trace(self) -> None:
        """The trace is a row as any other: it goes if it is as it was read."""
        trace = trace_item(PK, NOW)
        assert is_trace(trace)
        its = Puts(both(trace), {}, {})
        assert (await its.put()).outcome is STORED
        end = its.transactions()[0]["TransactItems"][1]["Delete"]
        assert end["ExpressionAttributeValues"] == {":lease_token": trace["lease_token"]}


class TestI5Objects:
    async def test_the_size_and_the_copy_of_an_object_that_is_missing(self) -> None:
        """None and False; any other refusal is raised."""
        script = Script(GONE, AwsRefused("x", "404", {}), {"ContentLength": 5}, {})
        bodies = S3Bodies(cast("AwsService", script), "b")
        assert (await bodies.size("k"), await bodies.copy("k", "l")) == (None, False)
        assert (await bodies.size("k"), await bodies.copy("k", "l")) == (5, True)
        script.answers = [AwsRefused("x", "AccessDenied", {}), AwsRefused("x", "AccessDenied", {})]
        with pytest.raises(AwsRefused):
            await bodies.size("k")
        with pytest.raises(AwsRefused):
            await bodies.copy("k", "l")
