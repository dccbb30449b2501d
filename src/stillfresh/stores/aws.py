"""The edge to AWS: clients, retries with jitter, errors translated, costs counted (I4, I7).

Everything that DynamoDB or S3 is asked goes through `Service.ask`. A request is repeated when the
service is busy or its answer got lost, so what is asked must bear being asked twice: conditions
and request tokens see to that, and who is refused looks at the token before believing it (S2).
"""

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import cache
from typing import Any, Final, TypeAlias

from aiobotocore.config import AioConfig
from aiobotocore.session import AioSession, get_session
from aiohttp import ClientError as TransferError
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    HTTPClientError,
    IncompleteReadError,
    NoRegionError,
)
from botocore.exceptions import ConnectionError as NotConnected
from botocore.loaders import Loader, create_loader

from stillfresh.errors import ConfigError, NotOpen, StoreError
from stillfresh.stores.contract import Costs

__all__ = ["CONDITION", "DENIED", "Meter", "Place", "Refused", "Service", "opened"]

Then: TypeAlias = Callable[[Any], Awaitable[Any]]

ATTEMPTS: Final = 5
FIRST_PAUSE: Final = 0.05
"""Doubling, each drawn between half and all of it: 0.4 to 0.75 s in all."""
PATIENCE: Final = 3.0
"""Seconds after which nothing is tried again: who waits has other means."""
CONNECT_TIMEOUT: Final = 2.0
READ_TIMEOUT: Final = 5.0
CONNECTIONS: Final = 32

CONDITION: Final = "ConditionalCheckFailedException"
CANCELLED: Final = "TransactionCanceledException"
BUSY: Final = frozenset(
    {
        "InternalError",
        "InternalServerError",
        "LimitExceededException",
        "ProvisionedThroughputExceeded",
        "ProvisionedThroughputExceededException",
        "RequestLimitExceeded",
        "RequestTimeout",
        "ServiceUnavailable",
        "SlowDown",
        "Throttling",
        "ThrottlingError",
        "ThrottlingException",
        "TransactionConflict",
        "TransactionConflictException",
        "TransactionInProgressException",
    }
)
"""Worth asking again; S3's words and DynamoDB's."""
DENIED: Final = frozenset({"AccessDenied", "AccessDeniedException", "AllAccessDisabled"})
NOT_MADE: Final = {
    "ResourceNotFoundException": "there is no such table; make it with `stillfresh table create`",
    "NoSuchBucket": "there is no such bucket; make it with `stillfresh table create`",
}
READS: Final = frozenset({"get_item", "batch_get_item", "query", "scan"})
S3_COUNTS: Final = {
    "get_object": "s3_gets",
    "put_object": "s3_puts",
    "delete_objects": "s3_deletes",
    "list_objects_v2": "s3_lists",
}

NO_ANSWER: Final = (
    HTTPClientError,
    NotConnected,
    IncompleteReadError,
    TransferError,
    TimeoutError,
)


class Refused(StoreError):
    """The service answered, and said no; `reasons` are a transaction's, action by action."""

    def __init__(self, message: str, code: str, response: Mapping[str, Any]) -> None:
        super().__init__(message)
        self.code = code
        self.item: dict[str, Any] | None = response.get("Item")
        reasons = response.get("CancellationReasons", ())
        self.reasons: tuple[str, ...] = tuple(each.get("Code", "None") for each in reasons)


class Unanswered(StoreError):
    """Worth another try: the service was busy, or its answer got lost."""


class Meter:
    """What was asked, in the units that are paid for; a refused write is paid for as well."""

    def __init__(self) -> None:
        self._counts: dict[str, float] = dict.fromkeys(Costs.__struct_fields__, 0)

    def costs(self) -> Costs:
        counts = self._counts
        s3 = {name: int(counts[name]) for name in S3_COUNTS.values()}
        return Costs(counts["read_units"], counts["write_units"], **s3)

    def asked(self, operation: str) -> None:
        if (name := S3_COUNTS.get(operation)) is not None:
            self._counts[name] += 1

    def answered(self, operation: str, response: Mapping[str, Any]) -> None:
        consumed = response.get("ConsumedCapacity", ())
        tables = [consumed] if isinstance(consumed, Mapping) else consumed
        name = "read_units" if operation in READS else "write_units"
        self._counts[name] += sum(table.get("CapacityUnits", 0.0) for table in tables)

    def refused(self, code: str, arguments: Mapping[str, Any]) -> None:
        """No figure comes with a refusal: one unit for a small row, two in a transaction."""
        actions = len(arguments.get("TransactItems", ()))
        if code in {CONDITION, CANCELLED}:
            self._counts["write_units"] += 2 * actions or 1


@dataclass(frozen=True, slots=True)
class Place:
    """Where the services are: AWS, by its own settings, or a server of the same kind."""

    region: str | None = None
    endpoint: str | None = None
    s3_endpoint: str | None = None

    def of(self, name: str) -> str | None:
        return (self.s3_endpoint or self.endpoint) if name == "s3" else self.endpoint


class Service:
    """One client, and how it is asked."""

    def __init__(
        self,
        client: Any,  # noqa: ANN401 (made from the service's description when it is opened)
        *,
        target: str,
        meter: Meter,
        sleep: Callable[[float], Awaitable[object]],
        dice: Callable[[], float],
    ) -> None:
        self.target = target
        self._client = client
        self._meter = meter
        self._sleep = sleep
        self._dice = dice
        self._under_way = 0
        self._is_closed = False
        self._idle = asyncio.Event()

    @property
    def region(self) -> str:
        """Where the client found that it works."""
        region: str = self._client.meta.region_name
        return region

    async def ask(
        self,
        operation: str,
        then: Then | None = None,
        /,
        **arguments: Any,  # noqa: ANN401 (as the service describes them)
    ) -> Any:  # noqa: ANN401
        """The answer, or what `then` makes of it; `Refused`, or `StoreError` if none came."""
        self._under_way += 1
        try:
            return await self._ask(operation, then, arguments)
        finally:
            self._under_way -= 1
            if not self._under_way:
                self._idle.set()

    async def close(self) -> None:
        """Requests under way end; without this the client would cancel who waits for them."""
        self._is_closed = True
        if self._under_way:
            self._idle.clear()
            await self._idle.wait()

    async def _ask(self, operation: str, then: Then | None, arguments: Mapping[str, Any]) -> Any:  # noqa: ANN401
        for pause in self._pauses():
            if self._is_closed:
                raise NotOpen("this store is closed")
            try:
                return await self._once(operation, then, arguments)
            except Unanswered:
                if pause is None:
                    raise
            await self._sleep(pause)
        raise AssertionError("the last pause is None")

    def _pauses(self) -> Iterator[float | None]:
        """After each attempt; None after the last, or when patience has ended."""
        loop = asyncio.get_running_loop()
        patience = loop.time() + PATIENCE
        for attempt in range(ATTEMPTS - 1):
            if loop.time() > patience:
                break
            yield FIRST_PAUSE * 2**attempt * (1 + self._dice()) / 2
        yield None

    async def _once(self, operation: str, then: Then | None, arguments: Mapping[str, Any]) -> Any:  # noqa: ANN401
        self._meter.asked(operation)
        try:
            response = await getattr(self._client, operation)(**arguments)
            self._meter.answered(operation, response)
            return response if then is None else await then(response)
        except ClientError as exc:
            error = self._refused(operation, exc, arguments)
            if _is_busy(exc, error):
                raise Unanswered(f"{error}; asked up to {ATTEMPTS} times") from exc
            raise error from exc
        except NO_ANSWER as exc:
            raise Unanswered(f"{self.target}: no answer to {operation}: {exc}") from exc
        except BotoCoreError as exc:
            raise StoreError(f"{self.target}: {exc}") from exc

    def _refused(self, operation: str, exc: ClientError, arguments: Mapping[str, Any]) -> Refused:
        error = exc.response.get("Error", {})
        code, said = str(error.get("Code", "")), str(error.get("Message", exc))
        self._meter.refused(code, arguments)
        if code in NOT_MADE:
            said = NOT_MADE[code]
        elif code in DENIED:
            said = f"no permission for {operation.title().replace('_', '')}: {said}"
        return Refused(f"{self.target}: {said} ({code})", code, exc.response)


def _is_busy(exc: ClientError, error: Refused) -> bool:
    """A transaction is worth another try unless one of its conditions failed."""
    if error.code == CANCELLED:
        reasons = set(error.reasons) - {"None"}
        return bool(reasons) and reasons <= BUSY
    status = exc.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    return error.code in BUSY or status >= 500


async def opened(
    stack: AsyncExitStack,
    place: Place,
    targets: Mapping[str, str],
    meter: Meter,
    *,
    sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    dice: Callable[[], float] = random.random,
) -> list[Service]:
    """A service for each name in `targets` (what its errors speak of), closed by the stack."""
    session = get_session()
    with ThreadPoolExecutor(1) as thread:  # the descriptions are megabytes of JSON
        loop = asyncio.get_running_loop()
        loader = await loop.run_in_executor(thread, _described, tuple(targets))
    session.register_component("data_loader", loader)
    services = []
    for name, target in targets.items():
        try:
            client = await stack.enter_async_context(_client(session, name, place))
        except NoRegionError as exc:
            raise ConfigError(
                f"{target}: no region; write &region=… or set AWS_DEFAULT_REGION"
            ) from exc
        except (BotoCoreError, ValueError) as exc:
            raise ConfigError(f"{target}: {exc}") from exc
        service = Service(client, target=target, meter=meter, sleep=sleep, dice=dice)
        stack.push_async_callback(service.close)
        services.append(service)
    return services


@cache
def _described(names: tuple[str, ...]) -> Loader:
    """What a client is made from, read once, so that making one reads no file on the loop."""
    loader: Loader = create_loader()
    for name in names:
        for what in ("service-2", "endpoint-rule-set-1", "paginators-1", "waiters-2"):
            loader.load_service_model(name, what)
    for what in ("endpoints", "partitions", "sdk-default-configuration", "_retry"):
        loader.load_data(what)
    return loader


def _client(session: AioSession, name: str, place: Place) -> Any:  # noqa: ANN401
    """Without retries of its own: they would hide whether an answer was lost."""
    own_server = {
        "s3": {"addressing_style": "path"},
        "request_checksum_calculation": "when_required",
        "response_checksum_validation": "when_required",
    }
    config = AioConfig(
        retries={"total_max_attempts": 1},
        connect_timeout=CONNECT_TIMEOUT,
        read_timeout=READ_TIMEOUT,
        max_pool_connections=CONNECTIONS,
        **(own_server if place.of(name) else {}),
    )
    return session.create_client(
        name, region_name=place.region, endpoint_url=place.of(name), config=config
    )
