"""`@fresh`: a route's answers are stored, served at once, and refreshed in the background.

FastAPI sees the function's own signature, so validation, dependencies and OpenAPI are as without
the cache. Dependencies run for every request, so a caller without the right to ask is refused.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Final, Generic, NoReturn, ParamSpec

from fastapi import Depends, Request, Response
from msgspec import Struct
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException

from stillfresh.durations import Duration
from stillfresh.engine import (
    Answer,
    Cache,
    Call,
    Codec,
    CodecMaker,
    Dropped,
    Handle,
    Private,
    Resource,
    Spec,
    like_function,
    no_loader,
    terms_of,
)
from stillfresh.errors import BadValue, ConfigError, LoadFailed, NotOpen, StoreError
from stillfresh.http import freshness_fields, pause_after, without_lifetime
from stillfresh.integrations.fastapi.parameters import KeyRule, Per, kept_type, typed_signature
from stillfresh.integrations.fastapi.replay import Replay, RouteLoad, Run
from stillfresh.integrations.fastapi.values import RouteValues
from stillfresh.integrations.routes import MARK, RouteSpec, Tags, check_cache, is_for_all

P = ParamSpec("P")

EXCHANGE: Final = "stillfresh_exchange"
"""The parameter that is added to a route."""
KEPT_BY: Final = "__stillfresh_route__"
"""Attribute of a function: the route that `@fresh` made of it."""


class Exchange(Struct):
    """What a route needs of its request, whatever parameters its function has."""

    request: Request
    response: Response


async def exchange(request: Request, response: Response) -> Exchange:
    return Exchange(request, response)


def fresh(
    cache: Cache,
    fresh_for: Duration,
    *,
    stale_for: Duration = 0,
    error_for: Duration = 0,
    per: Per = (),
    ignore: str | Iterable[str] = (),
    tags: Tags = (),
    name: str | None = None,
    model: Any = None,  # noqa: ANN401 (a type form)
    codec: Codec[Any] | CodecMaker | None = None,
    jitter: float = 0.0,
    memory_for: Duration = 0,
    max_entries: int = 10_000,
    max_bytes: int | str | None = None,
    concurrency: int = 40,
    load_timeout: Duration = "30s",
) -> Callable[[Callable[P, Any]], "FreshRoute[P]"]:
    """Cache what a route returns. Write it below `@app.get(...)`, next to the function.

    The key is made of the function's own parameters. Raises ConfigError for an option that cannot
    be used.

    Args:
        cache: The cache that stores the values.
        fresh_for: How long a copy is served without a refresh.
        stale_for: How long after that it is served while it is refreshed.
        error_for: How long after `fresh_for` it is served if the function fails.
        per: Parameters that FastAPI provides (a dependency, the request) and that the answer
            depends on: one copy for each value. A name, names, or `{name: function}`, which
            returns the part that counts.
        ignore: Parameters that FastAPI provides and that the answer does not depend on.
        tags: The tags of an entry, for `invalidate_tag`.
        name: The kind of the entries; None: the function's name.
        model: The type of the values; None: the return annotation.
        codec: Turns values into bytes; None: chosen by the type.
        jitter: The largest share, below 1, by which `fresh_for` is shortened at random.
        memory_for: How long memory is believed without asking a shared store.
        max_entries: The most values in memory.
        max_bytes: The most bytes of values in memory.
        concurrency: The most calls of the function at once.
        load_timeout: How long a call of the function may take; after that it has failed.
    """

    check_cache(cache, Cache)

    def decorate(function: Callable[P, Any]) -> FreshRoute[P]:
        kind = str(name or getattr(function, "__name__", ""))
        signature = typed_signature(kind, function)
        key_rule = KeyRule(kind, signature, per, ignore)
        values = RouteValues(kind, kept_type(kind, signature, model), codec)
        spec: RouteSpec = Spec(
            kind,
            no_loader,
            values.codec,
            _tagger(kind, key_rule, tags),
            terms_of(kind, fresh_for, stale_for, error_for, 0, jitter),
            concurrency=concurrency,
            max_entries=max_entries,
            max_bytes=max_bytes,
            memory_for=memory_for,
            load_timeout=load_timeout,
            by_id=False,
        )
        resource = cache.declare(spec, lambda call: call.id, lambda id_: Call(id_, (), {}))
        return FreshRoute(
            cache, resource, function, signature=signature, key_rule=key_rule, values=values
        )

    return decorate


class FreshRoute(Generic[P]):
    """A route's function, made by `@fresh`. Called by hand, it is the function itself."""

    def __init__(
        self,
        cache: Cache,
        resource: Resource[Any, Any],
        function: Callable[P, Any],
        *,
        signature: inspect.Signature,
        key_rule: KeyRule,
        values: RouteValues,
    ) -> None:
        self._cache = cache
        self._resource = resource
        self._function = function
        self._key_rule = key_rule
        self._values = values
        added = inspect.Parameter(
            EXCHANGE, inspect.Parameter.KEYWORD_ONLY, default=Depends(exchange)
        )
        parameters = [*signature.parameters.values(), added]
        like_function(self, function, signature.replace(parameters=parameters))
        with suppress(AttributeError):  # a method of an object
            setattr(function, KEPT_BY, self)

    async def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Any:  # noqa: ANN401 (its own)
        """Return the stored value, or load it."""
        given: Any = kwargs.pop(EXCHANGE, None)
        run = partial(self._run, *args, **kwargs)
        if not isinstance(given, Exchange) or self._cache.is_bypassed():
            return await run()
        call = self._key_rule.call(kwargs)
        replay = given.request.scope.get(MARK)
        if isinstance(replay, Replay):
            return await replay.run(call, partial(_shareable, run, given.response))
        try:
            return await self._read(call, run, given)
        except (StoreError, NotOpen):  # it cannot be opened: as without the cache
            return await run()

    def of(self, **arguments: Any) -> Handle[Any]:  # noqa: ANN401 (those of the function)
        """Return the handle of one entry, to invalidate, put or explain it. Only requests load it.

        For a parameter in `per`, give what its function returns: the user's id, not the user.
        """
        return Handle(self._resource, self._key_rule.call_by_hand(arguments))

    async def _run(self, *args: Any, **kwargs: Any) -> object:  # noqa: ANN401 (the function's)
        """A `def` function runs in FastAPI's threads, as it would without the cache."""
        if inspect.iscoroutinefunction(self._function):
            return await self._function(*args, **kwargs)
        return await run_in_threadpool(self._function, *args, **kwargs)

    async def _read(self, call: Call[Any], run: Run, given: Exchange) -> object:
        in_memory = self._resource.get_nowait(call)
        if in_memory is not None and in_memory.found:
            return self._value_with_fields(in_memory, given.response)
        load = RouteLoad(partial(_shareable, run, given.response), given.request, call)
        try:
            answer = await self._resource.read(call, partial(self._load, load, call))
        finally:
            await load.leave()
        match answer:
            case Private(HTTPException() as refusal):
                raise refusal
            case Private(value):
                return value
            case LoadFailed():
                self._fail(answer)
            case Answer(found=False):  # the load was for another caller only
                return await run()
        return self._value_with_fields(answer, given.response)

    async def _load(self, load: RouteLoad, call: Call[Any]) -> object:
        """The function's value, ready to be stored; exceptions are never stored."""
        try:
            return self._values.to_store(await load())
        except HTTPException as exc:
            if exc.status_code >= 500:
                raise
            if await self._resource.get_stored(call) is not None:  # the copy is out of date
                return Private(exc, is_noted=False)
            raise Dropped("the route refused the request") from exc
        except Exception as exc:
            if load.is_handled(exc):
                raise Dropped("the app has a handler for it") from exc
            raise

    def _fail(self, failed: LoadFailed) -> NoReturn:
        """Raise as without the cache; 503 if the function was not called, during a cooldown."""
        cause = failed if isinstance(failed, BadValue) else failed.__cause__
        if isinstance(cause, Dropped):
            cause = cause.__cause__
        if cause is not None:
            raise cause
        pause = f"{pause_after(failed, self._cache.clock())}"
        raise HTTPException(503, headers={"Retry-After": pause}) from failed

    def _value_with_fields(self, answer: Answer[Any], response: Response) -> object:
        """Return the value, and write its freshness into the header fields of the response."""
        value = self._values.to_serve(answer.value)
        sent = value if isinstance(value, Response) else response
        if answer.unverified:
            sent.raw_headers[:] = without_lifetime(sent.raw_headers)
        headers = sent.headers
        headers.update(freshness_fields(answer, answer.policy.fresh_for))
        if self._key_rule.is_personal:
            headers.setdefault("cache-control", "private, no-cache")
        return value


async def _shareable(run: Run, response: Response) -> object:
    """The value; private if the function set a cookie, a status or the like on the response."""
    before = list(response.raw_headers)
    value = await run()
    added = [header for header in response.raw_headers if header not in before]
    if is_for_all(response.status_code or 200, added, 0):
        return value
    return Private(value, is_noted=False)


def check_order(routes: Iterable[object]) -> None:
    """Raise ConfigError if `@fresh` is above `@app.get`: FastAPI then has only the function."""
    endpoints = list(_endpoints(routes))
    for function in endpoints:
        if isinstance(function, FreshRoute):
            continue
        route = getattr(function, KEPT_BY, None)
        if route is not None and route not in endpoints:
            name = getattr(function, "__name__", function)
            raise ConfigError(f"{name}: @fresh stands above the route; write it below @app.get(…)")


def _endpoints(routes: Iterable[object]) -> Iterator[object]:
    for route in routes:
        yield getattr(route, "endpoint", None)
        inner = getattr(route, "original_router", route)  # a router, as newer FastAPIs include it
        yield from _endpoints(getattr(inner, "routes", ()))


def _tagger(
    kind: str, key_rule: KeyRule, tags: Tags
) -> Callable[[Call[Any]], Sequence[str]] | None:
    """The function that tags an entry; a `tags` function gets the arguments that it names."""
    if not callable(tags):
        return (lambda _: tags) if tags else None
    names = tuple(inspect.signature(tags).parameters)
    for unknown in set(names) - key_rule.names:
        raise ConfigError(f"{kind}: tags= names {unknown!r}, which is not in the key")
    return lambda call: tags(**{name: call.kwargs[name] for name in names})
