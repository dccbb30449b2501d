"""A table's rows: read, put, changed and deleted under a condition. Nothing but the mapping.

What the rows mean is in `schema.py` and `rows.py`; the recipes that use them in `leases.py`.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from typing import Any, Final, TypeAlias, TypeVar

from stillfresh.errors import StoreError
from stillfresh.stores.aws import CONDITION, AwsRefused, AwsService
from stillfresh.stores.dynamodb.schema import Item, key_of

Key: TypeAlias = tuple[str, str]
K = TypeVar("K")
T = TypeVar("T")

AT_ONCE: Final = 100
"""Keys in one BatchGetItem: DynamoDB takes no more."""
FAILED_REASON: Final = "ConditionalCheckFailed"
"""Of an action in a transaction, where alone it would be `CONDITION`."""
PAUSES: Final = (0.05, 0.1, 0.2, 0.4)
"""Seconds before asking again for what a batch left out."""
WORKERS: Final = 16
"""Keys that are asked for at the same time, each on its own (S1)."""


async def each(keys: Iterable[K], step: Callable[[K], Awaitable[T]]) -> dict[K, T]:
    """What `step` answered for each key. All run to their end, then the first error is raised:
    a step that was cut off might or might not have been done.
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


class Table:
    """One table of `pk` and `sk`; urgent: asked even while the service is away."""

    def __init__(
        self,
        service: AwsService,
        name: str,
        sleep: Callable[[float], Awaitable[object]],
        *,
        urgent: bool = False,
    ) -> None:
        self.name = name
        self._service = service
        self._sleep = sleep
        self._urgent = urgent

    async def get(self, pk: str, sk: str, *, consistent: bool = True) -> Item | None:
        answer = await self._ask("get_item", Key=key_of(pk, sk), ConsistentRead=consistent)
        item: Item | None = answer.get("Item")
        return item

    async def get_many(self, keys: Sequence[Key], *, consistent: bool = True) -> dict[Key, Item]:
        """By the hundred; one alone is a GetItem."""
        if len(keys) == 1:
            item = await self.get(*keys[0], consistent=consistent)
            return {} if item is None else {keys[0]: item}
        found: dict[Key, Item] = {}

        async def get_some(start: int) -> None:
            wanted = [key_of(*key) for key in keys[start : start + AT_ONCE]]
            pauses = iter(PAUSES)
            while left := await self._get_batch(wanted, found, consistent=consistent):
                if len(left) == len(wanted):
                    await self._pause(next(pauses, None), left)
                wanted = left

        await each(range(0, len(keys), AT_ONCE), get_some)
        return found

    async def _pause(self, pause: float | None, left: list[Item]) -> None:
        if pause is None:
            raise StoreError(f"{self._service.target}: busy; {len(left)} rows were not read")
        await self._sleep(pause)

    async def _get_batch(
        self, wanted: list[Item], found: dict[Key, Item], *, consistent: bool
    ) -> list[Item]:
        """What DynamoDB left out of its answer, and has to be asked again."""
        asked = {self.name: {"Keys": wanted, "ConsistentRead": consistent}}
        answer = await self._service.ask(
            "batch_get_item", RequestItems=asked, ReturnConsumedCapacity="TOTAL"
        )
        for item in answer.get("Responses", {}).get(self.name, ()):
            found[item["pk"]["S"], item["sk"]["S"]] = item
        left: list[Item] = answer.get("UnprocessedKeys", {}).get(self.name, {}).get("Keys", [])
        return left

    async def put(
        self, item: Item | Callable[[], Item], condition: str = "", given: Item | None = None
    ) -> Item | None:
        """Returns the row that it replaced. A function makes the row anew for each attempt."""
        answer = await self._ask(
            "put_item", Item=item, ReturnValues="ALL_OLD", **_conditions(condition, given)
        )
        old: Item | None = answer.get("Attributes")
        return old

    async def delete(
        self, pk: str, sk: str, condition: str = "", given: Item | None = None
    ) -> Item | None:
        """Returns the row that went."""
        answer = await self._ask(
            "delete_item",
            Key=key_of(pk, sk),
            ReturnValues="ALL_OLD",
            **_conditions(condition, given),
        )
        old: Item | None = answer.get("Attributes")
        return old

    async def delete_if(self, pk: str, sk: str, **unchanged: str) -> Item | None:
        """The row that went; None if there was none, or those texts are not in it any more."""
        condition = " AND ".join(f"{name} = :{name}" for name in unchanged)
        try:
            return await self.delete(pk, sk, condition, values(**unchanged))
        except AwsRefused as exc:
            if exc.code != CONDITION:
                raise
            return None

    async def update(self, pk: str, sk: str, change: dict[str, Any]) -> bool:
        """Whether its condition held."""
        return await self.refused_by(pk, sk, change) is None

    async def refused_by(self, pk: str, sk: str, change: dict[str, Any]) -> Item | None:
        """None: it was done. Else the row that its condition refused, empty if there is none."""
        told = {"ReturnValuesOnConditionCheckFailure": "ALL_OLD"}
        try:
            await self._ask("update_item", Key=key_of(pk, sk), **change, **told)
        except AwsRefused as exc:
            if exc.code != CONDITION:
                raise
            return exc.item or {}
        return None

    async def transact(self, *actions: tuple[str, dict[str, Any]], name: str | None = None) -> None:
        """All of them or none; with a `name`, once, however often it is asked."""
        items = [{verb: {"TableName": self.name, **what}} for verb, what in actions]
        named: dict[str, Any] = {} if name is None else {"ClientRequestToken": name}
        await self._service.ask(
            "transact_write_items", TransactItems=items, ReturnConsumedCapacity="TOTAL", **named
        )

    async def transact_if(self, *actions: tuple[str, dict[str, Any]]) -> bool:
        """Whether all their conditions held."""
        try:
            await self.transact(*actions)
        except AwsRefused as exc:
            if FAILED_REASON not in exc.reasons:
                raise
            return False
        return True

    async def partition(self, pk: str) -> AsyncIterator[list[Item]]:
        """The rows of one partition, page by page, consistently."""
        asked = {
            "KeyConditionExpression": "pk = :pk",
            "ExpressionAttributeValues": values(pk=pk),
            "ConsistentRead": True,
        }
        async for page in self._pages("query", asked):
            yield page["Items"]

    async def scan(
        self, prefix: str, *, after: Item | None = None, rows: int | None = None
    ) -> AsyncIterator[dict[str, Any]]:
        """Every row whose `pk` begins so, page by page; the whole table is read for it.

        In the table's own order; from behind the key `after`, which need not be there, and in
        pages of so many `rows`, whoever's they are.
        """
        asked: dict[str, Any] = {
            "FilterExpression": "begins_with(pk, :prefix)",
            "ExpressionAttributeValues": values(prefix=prefix),
        }
        if rows is not None:
            asked["Limit"] = rows
        async for page in self._pages("scan", asked, after):
            yield page

    async def _pages(
        self, operation: str, asked: dict[str, Any], after: Item | None = None
    ) -> AsyncIterator[dict[str, Any]]:
        start: dict[str, Any] = {} if after is None else {"ExclusiveStartKey": after}
        while True:
            page = await self._ask(operation, **asked, **start)
            yield page
            if not (last := page.get("LastEvaluatedKey")):
                return
            start = {"ExclusiveStartKey": last}

    async def describe(self) -> dict[str, Any]:
        answer = await self._service.ask("describe_table", TableName=self.name)
        described: dict[str, Any] = answer["Table"]
        return described

    async def _ask(self, operation: str, **arguments: Any) -> Any:  # noqa: ANN401 (as described)
        return await self._service.ask(
            operation,
            urgent=self._urgent,
            TableName=self.name,
            ReturnConsumedCapacity="TOTAL",
            **arguments,
        )


def values(**given: str | int) -> Item:
    """As an expression's values: `:name` and its type."""
    return {
        f":{name}": {"S": value} if isinstance(value, str) else {"N": str(value)}
        for name, value in given.items()
    }


def changes_of(attributes: Item, condition: str, given: Item | None = None) -> dict[str, Any]:
    """An update that sets these attributes; by other names, since some are reserved words."""
    return {
        "UpdateExpression": "SET " + ", ".join(f"#{name} = :new_{name}" for name in attributes),
        "ConditionExpression": condition,
        "ExpressionAttributeNames": {f"#{name}": name for name in attributes},
        "ExpressionAttributeValues": {f":new_{name}": it for name, it in attributes.items()}
        | (given or {}),
    }


def _conditions(condition: str, given: Item | None) -> dict[str, Any]:
    if not condition:
        return {}
    asked = {
        "ConditionExpression": condition,
        "ReturnValuesOnConditionCheckFailure": "ALL_OLD",
    }
    return asked | ({"ExpressionAttributeValues": given} if given else {})
