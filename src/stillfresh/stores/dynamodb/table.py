"""Rows of a table: read, put, changed and deleted under a condition. Only the mapping.

`schema.py` and `rows.py` say what the rows mean; `leases.py` has the recipes that use them. A write
whose condition does not hold is `ConditionFailed`.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias, TypeVar

from stillfresh.stores.aws import AwsService, ConditionFailed, Unanswered
from stillfresh.stores.dynamodb.schema import LOCK, META, Item, Names, key_of, typed

Action: TypeAlias = tuple[str, dict[str, Any]]
"""An action of a transaction: its verb, and what it does under which condition."""
Key: TypeAlias = tuple[str, str]
K = TypeVar("K")
T = TypeVar("T")

AT_ONCE: Final = 100
"""Keys in one BatchGetItem: DynamoDB takes no more."""
TELL: Final = {"ReturnValuesOnConditionCheckFailure": "ALL_OLD"}
WORKERS: Final = 16
"""Keys that are asked for at the same time, each on its own."""


@dataclass(frozen=True, slots=True)
class EntryRows:
    """The two rows of an entry as they were read; a row that is missing is empty."""

    meta: Item
    lock: Item


async def each(keys: Iterable[K], step: Callable[[K], Awaitable[T]]) -> dict[K, T]:
    """The result of `step` for each key.

    All run to their end, then the first error is raised: a cancelled step may have been done.
    """
    waiting = list(dict.fromkeys(keys))
    if len(waiting) == 1:
        return {waiting[0]: await step(waiting[0])}
    results: dict[K, T] = {}
    errors: list[Exception] = []
    queue = iter(waiting)

    async def work() -> None:
        for key in queue:
            try:
                results[key] = await step(key)
            except Exception as exc:  # noqa: BLE001 (raised below, when all have ended)
                errors.append(exc)

    async with asyncio.TaskGroup() as group:
        for _ in range(min(WORKERS, len(waiting))):
            group.create_task(work())
    if errors:
        raise errors[0]
    return {key: results[key] for key in waiting}


@dataclass(frozen=True, slots=True)
class Table:
    """One table of `pk` and `sk`. Urgent: sent even while the service is unavailable."""

    service: AwsService
    names: Names
    urgent: bool = False

    async def get(self, pk: str, sk: str, *, consistent: bool = True) -> Item:
        """The row; empty if there is none."""
        answer = await self._ask("get_item", Key=key_of(pk, sk), ConsistentRead=consistent)
        item: Item = answer.get("Item", {})
        return item

    async def get_many(self, keys: Sequence[Key], *, consistent: bool = True) -> dict[Key, Item]:
        """The rows, 100 in one request; a single one by GetItem."""
        if len(keys) == 1:
            item = await self.get(*keys[0], consistent=consistent)
            return {keys[0]: item} if item else {}
        rows: dict[Key, Item] = {}

        async def get_batches(start: int) -> None:
            wanted = [key_of(*key) for key in keys[start : start + AT_ONCE]]
            while wanted:
                wanted = await self._get_batch(wanted, rows, consistent=consistent)

        await each(range(0, len(keys), AT_ONCE), get_batches)
        return rows

    async def _get_batch(
        self, wanted: list[Item], rows: dict[Key, Item], *, consistent: bool
    ) -> list[Item]:
        """Add rows to `rows`; return the keys that DynamoDB left out of its answer."""
        table = self.names.table

        async def take_rows(answer: dict[str, Any]) -> list[Item]:
            for item in answer.get("Responses", {}).get(table, ()):
                rows[item["pk"]["S"], item["sk"]["S"]] = item
            left: list[Item] = answer.get("UnprocessedKeys", {}).get(table, {}).get("Keys", [])
            if len(left) == len(wanted):
                raise Unanswered(f"{self.service.target}: busy; {len(left)} rows were not read")
            return left

        left: list[Item] = await self.service.ask(
            "batch_get_item",
            take_rows,
            urgent=self.urgent,
            RequestItems={table: {"Keys": wanted, "ConsistentRead": consistent}},
            ReturnConsumedCapacity="TOTAL",
        )
        return left

    async def put(self, item: Item | Callable[[], Item], condition: str, given: Item) -> Item:
        """Return the replaced row. If `item` is a function, it makes a new row for each attempt."""
        return await self._replace("put_item", condition, given, Item=item)

    async def delete(
        self, pk: str, sk: str, condition: str = "", given: Item | None = None
    ) -> Item:
        """Return the deleted row."""
        return await self._replace("delete_item", condition, given, Key=key_of(pk, sk))

    async def _replace(
        self, operation: str, condition: str, given: Item | None, **what: object
    ) -> Item:
        """The replaced row; empty if there was none."""
        if condition:
            what |= TELL | {"ConditionExpression": condition}
        if given:
            what["ExpressionAttributeValues"] = given
        answer = await self._ask(operation, ReturnValues="ALL_OLD", **what)
        old: Item = answer.get("Attributes", {})
        return old

    async def update(self, pk: str, sk: str, change: dict[str, Any]) -> Item | None:
        """None if it was done; else the row that failed the condition, empty if there is none."""
        try:
            await self._ask("update_item", Key=key_of(pk, sk), **change, **TELL)
        except ConditionFailed as exc:
            return exc.item or {}
        return None

    async def transact(self, *actions: Action, name: str | None = None) -> None:
        """All actions or none; with a `name`, once, however often it is sent."""
        items = [{verb: {"TableName": self.names.table, **what}} for verb, what in actions]
        token: dict[str, Any] = {} if name is None else {"ClientRequestToken": name}
        await self.service.ask(
            "transact_write_items",
            urgent=self.urgent,
            TransactItems=items,
            ReturnConsumedCapacity="TOTAL",
            **token,
        )

    async def partition(self, pk: str) -> list[Item]:
        """The rows of one partition, consistently."""
        return await self._query("pk = :pk", values(pk=pk))

    async def entry(self, pk: str) -> EntryRows:
        """Both rows of an entry, consistently, in one request.

        A Query costs half of what reading the two rows by their keys costs.
        """
        condition = "pk = :pk AND sk BETWEEN :first AND :last"
        rows = await self._query(condition, values(pk=pk, first=LOCK, last=META))
        by_sk = {row["sk"]["S"]: row for row in rows}
        return EntryRows(by_sk.get(META, {}), by_sk.get(LOCK, {}))

    async def _query(self, condition: str, given: Item) -> list[Item]:
        pages = self._pages(
            "query",
            KeyConditionExpression=condition,
            ExpressionAttributeValues=given,
            ConsistentRead=True,
        )
        return [row async for page in pages for row in page["Items"]]

    def scan(
        self, *, after: Item | None = None, rows: int | None = None, consistent: bool = False
    ) -> AsyncIterator[dict[str, Any]]:
        """Every row of the tenant's entries, page by page; the whole table is read for it.

        In the table's own order, after the key `after`, which need not exist; `rows`: the most rows
        of a page, including those of other tenants.
        """
        return self._pages(
            "scan",
            FilterExpression="begins_with(pk, :prefix)",
            ExpressionAttributeValues=values(prefix=self.names.pk_prefix),
            ConsistentRead=consistent,
            **({} if rows is None else {"Limit": rows}),
            **({} if after is None else {"ExclusiveStartKey": after}),
        )

    async def _pages(self, operation: str, **arguments: Any) -> AsyncIterator[dict[str, Any]]:  # noqa: ANN401
        while True:
            page = await self._ask(operation, **arguments)
            yield page
            last_key = page.get("LastEvaluatedKey")
            if not last_key:
                return
            arguments["ExclusiveStartKey"] = last_key

    async def describe(self) -> dict[str, Any]:
        answer = await self.service.ask("describe_table", TableName=self.names.table)
        described: dict[str, Any] = answer["Table"]
        return described

    async def _ask(self, operation: str, **arguments: Any) -> Any:  # noqa: ANN401 (as described)
        return await self.service.ask(
            operation,
            urgent=self.urgent,
            TableName=self.names.table,
            ReturnConsumedCapacity="TOTAL",
            **arguments,
        )


def values(**given: str | int) -> Item:
    """The values of an expression: `:name` and its type."""
    return {f":{name}": typed(value) for name, value in given.items()}


def as_read(row: Item, names: Iterable[str]) -> tuple[str, Item]:
    """The condition that these attributes of a row are as they were read, or that it is missing.

    Returns the condition and its values. Whatever stands in an attribute is compared as it is.
    """
    if not row:
        return "attribute_not_exists(pk)", {}
    parts = ["attribute_exists(pk)"]
    given: Item = {}
    for name in names:
        if name in row:
            parts.append(f"{name} = :{name}")
            given[f":{name}"] = row[name]
        else:
            parts.append(f"attribute_not_exists({name})")
    return " AND ".join(parts), given


def put_of(item: Item, condition: str, given: Item) -> Action:
    """A put as an action of a transaction."""
    return "Put", _conditional({"Item": item}, condition, given)


def deletion(pk: str, sk: str, condition: str, given: Item) -> Action:
    """A deletion as an action of a transaction."""
    return "Delete", _conditional({"Key": key_of(pk, sk)}, condition, given)


def _conditional(what: dict[str, Any], condition: str, given: Item) -> dict[str, Any]:
    conditional = what | TELL | {"ConditionExpression": condition}
    if given:  # DynamoDB refuses an empty one
        conditional["ExpressionAttributeValues"] = given
    return conditional


def changes_of(attributes: Item, condition: str, given: Item | None = None) -> dict[str, Any]:
    """An update that sets these attributes under other names, as some are reserved words."""
    return {
        "UpdateExpression": "SET " + ", ".join(f"#{name} = :new_{name}" for name in attributes),
        "ConditionExpression": condition,
        "ExpressionAttributeNames": {f"#{name}": name for name in attributes},
        "ExpressionAttributeValues": {f":new_{name}": value for name, value in attributes.items()}
        | (given or {}),
    }
