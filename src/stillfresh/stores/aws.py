"""The edge to AWS: clients, retries with jitter, translated errors.

Every request to DynamoDB or S3 goes through `AwsService.ask`. A request is repeated if the service
is busy or its answer was lost. So a request must do no harm if it is done twice, nor if its first
attempt arrives last: conditions and tokens ensure that. A caller that is refused checks the token
in the row before it believes the refusal: its own first attempt may have written the row.
"""

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, Final, TypeAlias

from aiobotocore.config import AioConfig
from aiobotocore.session import AioSession, get_session
from aiohttp import ClientError as TransferError
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    HTTPClientError,
    IncompleteReadError,
    NoCredentialsError,
    NoRegionError,
)
from botocore.exceptions import ConnectionError as NotConnected
from botocore.loaders import Loader, create_loader

from stillfresh.backoff import pause_after, spread
from stillfresh.errors import STORE_CLOSED, ConfigError, NotOpen, StoreError
from stillfresh.stores.breaker import TRIED_AGAIN, Breaker
from stillfresh.stores.meter import CostMeter

Then: TypeAlias = Callable[[Any], Awaitable[Any]]
Attempt: TypeAlias = Callable[[float], Awaitable[Any]]
"""One request, which ends at this time of the loop."""

ATTEMPTS: Final = 5
FIRST_PAUSE: Final = 0.05
"""Seconds; it doubles, and each pause is drawn between half and all of it: 0.4 to 0.75 s in all."""
PATIENCE: Final = 3.0
"""Seconds for all attempts together: callers can also load without the store."""
PROBE: Final = 1.0
"""Seconds for the one attempt that finds out whether the service answers again."""
SLOWEST: Final = 1_000_000.0
"""Bytes a second: a large value gets one more second for each of these."""
CONNECT_TIMEOUT: Final = 2.0
READ_TIMEOUT: Final = 2.0
"""Seconds without data, so that a connection that died leaves time for another."""
CONNECTIONS: Final = 32
NAMES: Final = ("dynamodb", "s3")

CONDITION: Final = "ConditionalCheckFailed"
BUSY: Final = frozenset(
    {
        "LimitExceeded",
        "ProvisionedThroughputExceeded",
        "RequestLimitExceeded",
        "RequestTimeout",
        "Throttling",
        "ThrottlingError",
        "TransactionConflict",
        "TransactionInProgress",
    }
)
"""Codes that are worth another attempt, as is any status of 500 or more.

Written without the `Exception` that most codes end with, here and in a transaction's reasons.
"""
DENIED: Final = frozenset({"AccessDenied", "AccessDeniedException", "AllAccessDisabled"})
NOT_MADE: Final = {
    "ResourceNotFoundException": "there is no such table; make it with `stillfresh table create`",
    "NoSuchBucket": "there is no such bucket; make it with `stillfresh table create`",
}
NO_ANSWER: Final = (
    HTTPClientError,
    NotConnected,
    IncompleteReadError,
    TransferError,
    TimeoutError,
)

logger = logging.getLogger(__name__)


class AwsRefused(StoreError):
    """The service refused; `reasons` are those of a transaction, by action.

    `items` are the rows that failed a transaction's conditions, by action: None for an action whose
    condition held, and for a row that is missing or was not sent. `follows_loss`: the request was
    sent before, and got no answer then.
    """

    follows_loss: bool = False

    def __init__(self, message: str, code: str, response: Mapping[str, Any]) -> None:
        super().__init__(message)
        self.code = code
        self.item: dict[str, Any] | None = response.get("Item")
        reasons = response.get("CancellationReasons", ())
        self.reasons: tuple[str, ...] = tuple(each.get("Code", "None") for each in reasons)
        self.items: tuple[dict[str, Any] | None, ...] = tuple(each.get("Item") for each in reasons)


class ConditionFailed(AwsRefused):
    """Nothing was written; `item` is the row that failed the condition, if the service sends it."""


class Unanswered(StoreError):
    """Worth another attempt: the service was busy, or its answer was lost."""


class Away(Unanswered):
    """The service did not answer."""


@dataclass(frozen=True, slots=True)
class AwsPlace:
    """Where the services are: AWS, by its own settings, or compatible servers."""

    region: str | None = None
    endpoint: str | None = None
    s3_endpoint: str | None = None

    def of(self, name: str) -> str | None:
        return (self.s3_endpoint or self.endpoint) if name == "s3" else self.endpoint


@dataclass(eq=False)
class AwsService:
    """DynamoDB or S3 behind one client: each request is limited, repeated and counted here."""

    client: Any
    """Made when the service is opened."""
    target: str
    """The name in errors."""
    meter: CostMeter
    sleep: Callable[[float], Awaitable[object]]
    dice: Callable[[], float]
    _breaker: Breaker = field(default_factory=Breaker)
    _under_way: int = 0
    _is_closed: bool = False
    _idle: asyncio.Event = field(default_factory=asyncio.Event)

    async def ask(
        self,
        operation: str,
        then: Then | None = None,
        /,
        *,
        urgent: bool = False,
        **arguments: Any,  # noqa: ANN401 (as the service describes them)
    ) -> Any:  # noqa: ANN401
        """The answer, or what `then` makes of it. AwsRefused, or StoreError if none came.

        An urgent request is sent even while the service is unavailable. An argument that is a
        function is called for each attempt, so its value may differ.
        """
        self._under_way += 1
        try:
            attempt = partial(self._once, operation, then, arguments)
            return await self._unless_away(attempt, urgent=urgent)
        finally:
            self._under_way -= 1
            if not self._under_way:
                self._idle.set()

    async def close(self) -> None:
        """Wait for running requests: closing the client earlier would cancel their callers."""
        self._is_closed = True
        if self._under_way:
            self._idle.clear()
            await self._idle.wait()

    async def _unless_away(self, attempt: Attempt, *, urgent: bool) -> Any:  # noqa: ANN401
        """While the service is unavailable, send urgent requests, and one more after each pause."""
        breaker = self._breaker
        now = asyncio.get_running_loop().time
        began = now()
        if not breaker.allows(began) and not urgent:
            raise StoreError(f"{self.target}: unavailable; {TRIED_AGAIN}")
        probes = breaker.is_open and not urgent
        try:
            answer = await self._ask(attempt, PROBE if probes else PATIENCE)
        except Away as exc:
            if not breaker.is_open:
                logger.warning("%s; %s", str(exc).removesuffix("."), TRIED_AGAIN)
            breaker.failed(began, now())
            raise
        except (AwsRefused, Unanswered):
            breaker.succeeded()
            raise
        if breaker.is_open:
            breaker.succeeded()
            logger.warning("%s: answers again", self.target)
        return answer

    async def _ask(self, attempt: Attempt, patience: float) -> Any:  # noqa: ANN401
        loop = asyncio.get_running_loop()
        until = loop.time() + patience
        most = 1 if patience == PROBE else ATTEMPTS
        failures = 0
        is_lost = False
        while True:
            if self._is_closed:
                raise NotOpen(STORE_CLOSED)
            try:
                return await attempt(until)
            except AwsRefused as exc:
                exc.follows_loss = is_lost
                raise
            except Unanswered as exc:
                is_lost = is_lost or isinstance(exc, Away)
                failures += 1
                pause = pause_after(failures, first=FIRST_PAUSE, longest=PATIENCE)
                pause = spread(pause, self.dice)
                if failures == most or loop.time() + pause >= until:
                    raise
            await self.sleep(pause)

    async def _once(
        self, operation: str, then: Then | None, given: Mapping[str, Any], until: float
    ) -> Any:  # noqa: ANN401
        arguments = {name: value() if callable(value) else value for name, value in given.items()}
        self.meter.count_request(operation)
        try:
            body = arguments.get("Body", b"")
            async with asyncio.timeout_at(until + len(body) / SLOWEST) as limit:
                response = await getattr(self.client, operation)(**arguments)
                self.meter.count_response(operation, response)
                limit.reschedule(until + response.get("ContentLength", 0) / SLOWEST)
                return response if then is None else await then(response)
        except ClientError as exc:
            raise self._store_error(operation, exc, arguments) from exc
        except NO_ANSWER as exc:
            reason = str(exc) or "it took too long"
            raise Away(f"{self.target}: no answer to {operation}: {reason}") from exc
        except NoCredentialsError as exc:
            advice = "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE"
            raise StoreError(f"{self.target}: found no AWS credentials; {advice}") from exc
        except BotoCoreError as exc:
            raise StoreError(f"{self.target}: {exc}") from exc

    def _store_error(
        self, operation: str, exc: ClientError, arguments: Mapping[str, Any]
    ) -> StoreError:
        """The error for a refusal, and whether it is worth another attempt.

        A transaction is worth another attempt unless one of its conditions failed.
        """
        error = exc.response.get("Error", {})
        code = str(error.get("Code", ""))
        reason = str(error.get("Message", exc))
        self.meter.count_refusal(code, arguments)
        if code in NOT_MADE:
            reason = NOT_MADE[code]
        elif code in DENIED:
            reason = f"no permission for {operation.title().replace('_', '')}: {reason}"
        message = f"{self.target}: {reason} ({code})"
        refusal = AwsRefused(message, code, exc.response)
        codes = set(refusal.reasons) - {"None"} or {code.removesuffix("Exception")}
        status = exc.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
        if codes <= BUSY or status >= 500:
            return Unanswered(f"{message}; asked up to {ATTEMPTS} times")
        if CONDITION in codes:
            return ConditionFailed(message, code, exc.response)
        return refusal


async def open_services(
    stack: AsyncExitStack,
    place: AwsPlace,
    what: tuple[str, str | None],
    meter: CostMeter,
    *,
    sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    dice: Callable[[], float] = random.random,
) -> list[AwsService]:
    """Clients of DynamoDB and S3, named in errors by table and bucket, closed by the stack."""
    session = get_session()
    with ThreadPoolExecutor(1) as thread:  # the service descriptions are megabytes of JSON
        loop = asyncio.get_running_loop()
        descriptions = await loop.run_in_executor(thread, _service_descriptions)
        session.register_component("data_loader", descriptions)
    services = []
    for name, target in zip(NAMES, (f"table {what[0]!r}", f"bucket {what[1]!r}"), strict=True):
        try:
            client = await stack.enter_async_context(_client(session, name, place))
        except NoRegionError as exc:
            raise ConfigError(
                f"{target}: no region; name it (&region=… in a store's address, --region in a"
                " command) or set AWS_DEFAULT_REGION"
            ) from exc
        except (BotoCoreError, ValueError) as exc:
            raise ConfigError(f"{target}: {exc}") from exc
        service = AwsService(client, target, meter, sleep, dice)
        stack.push_async_callback(service.close)
        services.append(service)
    return services


@cache
def _service_descriptions() -> Loader:
    """The descriptions of the services, read once, so that a new client reads no file."""
    loader: Loader = create_loader()
    for name in NAMES:
        for what in ("service-2", "endpoint-rule-set-1", "paginators-1", "waiters-2"):
            loader.load_service_model(name, what)
    for what in ("endpoints", "partitions", "sdk-default-configuration", "_retry"):
        loader.load_data(what)
    return loader


def _client(session: AioSession, name: str, place: AwsPlace) -> Any:  # noqa: ANN401
    """A client without its own retries: they would hide whether an answer was lost."""
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
