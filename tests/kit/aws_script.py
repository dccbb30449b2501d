"""A script in the place of DynamoDB and S3: answers one after the other, every request noted."""

from types import SimpleNamespace
from typing import Any, cast

from stillfresh.stores.aws import AwsRefused, AwsService, ConditionFailed
from stillfresh.stores.bodies import S3Bodies, Trash
from stillfresh.stores.dynamodb.leases import Leases
from stillfresh.stores.dynamodb.rows import name_beside
from stillfresh.stores.dynamodb.schema import LOCK, META, Item, Names, attributes, key_of
from stillfresh.stores.dynamodb.steps import DynamoSteps

NOW = 1_700_000_000.0
PK = Names("t").pk("post", "a")
CONDITION = "ConditionalCheckFailed"


class Script:
    """Answers one after the other; an exception is raised. Every request is noted."""

    target = "the script"

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)
        self.asked: list[tuple[str, dict[str, Any]]] = []

    async def ask(self, operation: str, then: Any = None, /, **arguments: Any) -> Any:
        values = {name: value() if callable(value) else value for name, value in arguments.items()}
        self.asked.append((operation, values))
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
    answer: dict[str, Any] = {"CancellationReasons": [{"Code": reason} for reason in reasons]}
    return ConditionFailed("no", "ConditionalCheckFailedException", answer | {"Item": item})


def lock(token: str, until: float = NOW + 5, **more: Any) -> Item:
    return key_of(PK, LOCK) | attributes(lease_token=token, lease_expires_at=until, **more)


def meta(id_: str = "a", **more: Any) -> Item:
    """A row of ours, fetched at NOW and fresh for a minute."""
    pk = Names("t").pk("post", id_)
    key = Names("t").body(pk, "g", "1")
    given = {"s3_key": key, "generated_at": int(NOW), "revalidate_seconds": 60, "body_size": 7}
    own = {"generation": "g", "fetched_at": NOW, "fresh_for": 60.0}
    return key_of(pk, META) | attributes(**given, **own, **more) | name_beside("post", id_)  # type: ignore[arg-type]


class Stream:
    """The body of an answer of S3."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    async def __aenter__(self) -> "Stream":
        return self

    async def __aexit__(self, *_: object) -> None: ...

    async def read(self) -> bytes:
        return self._data


def a_body(data: bytes = b"7 bytes") -> dict[str, Any]:
    return {"Body": Stream(data)}


GONE = AwsRefused("x", "NoSuchKey", {})


class Steps:
    """The store's steps on a script; what would be deleted later is noted."""

    def __init__(self, *answers: Any) -> None:
        self.script = Script(*answers)
        self.trash: list[str] = []
        self.now = NOW
        bodies = S3Bodies(cast("AwsService", self.script), "b")
        trash = cast("Trash", SimpleNamespace(add=self.trash.extend))
        self.run = DynamoSteps(
            table_of(self.script), bodies, {}, lambda: self.now, trash, 0.0, lambda: "t1"
        )

    async def read(self, known: str | None = None, *, lagging: bool = False) -> Any:
        names = {} if known is None else {"a": known}
        records = await self.run.read("post", ["a"], names, lagging=lagging)
        return records.get("a")

    def looks(self) -> list[bool]:
        """Of each read, whether it was consistent."""
        requests = [values for name, values in self.script.asked if name == "get_item"]
        return [values["ConsistentRead"] for values in requests]
