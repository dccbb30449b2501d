"""Which parameters of a route make its key, and which it refuses to guess about.

Pure: a signature and options in, the rule of the key out, or a `ConfigError`. Everything that is
known before the first request belongs here. The rule of the design: nothing personal is shared
unless the key says for whom it is.
"""

import inspect
from collections.abc import AsyncIterable, Callable, Iterable, Mapping
from typing import Annotated, Any, Final, get_args, get_origin

from fastapi import params
from fastapi.responses import FileResponse, StreamingResponse
from fastapi.security import SecurityScopes
from pydantic.fields import FieldInfo
from starlette.background import BackgroundTasks
from starlette.datastructures import UploadFile
from starlette.requests import HTTPConnection
from starlette.responses import Response

from stillfresh.engine import Call
from stillfresh.errors import ConfigError
from stillfresh.integrations.routes import id_of

Per = str | Iterable[str] | Mapping[str, Callable[[Any], object]]

INJECTED: Final[tuple[type, ...]] = (HTTPConnection, Response, BackgroundTasks, SecurityScopes)
"""Types of parameters that FastAPI itself provides."""


def typed_signature(name: str, function: Callable[..., Any]) -> inspect.Signature:
    """The function's signature with evaluated annotations. Refuses a stream."""
    if inspect.isasyncgenfunction(function) or inspect.isgeneratorfunction(function):
        raise ConfigError(f"{name}: a stream cannot be kept; remove @fresh, or return a value")
    try:
        return inspect.signature(function, eval_str=True)
    except NameError as exc:
        raise ConfigError(f"{name}: cannot read its annotations: {exc}") from exc


def kept_type(name: str, signature: inspect.Signature, model: Any) -> Any:  # noqa: ANN401 (types)
    """The type of stored values: `model`, or the return annotation."""
    value_type = signature.return_annotation if model is None else model
    origin = get_origin(value_type) or value_type
    is_stream = isinstance(origin, type) and issubclass(
        origin, StreamingResponse | FileResponse | AsyncIterable
    )
    if is_stream:
        raise ConfigError(
            f"{name}: {value_type!r} is a stream, which cannot be kept; remove @fresh"
        )
    return value_type


class KeyRule:
    """Makes the key of a call from the values that FastAPI gives the function."""

    def __init__(
        self, name: str, signature: inspect.Signature, per: Per, ignore: str | Iterable[str]
    ) -> None:
        self._name = name
        self._by = _functions(per)
        ignored = set([ignore] if isinstance(ignore, str) else ignore)
        known = signature.parameters
        for unknown in (self._by.keys() | ignored) - known.keys():
            names = ", ".join(known) or "none"
            raise ConfigError(f"{name}: there is no parameter {unknown!r}; there are: {names}")
        for both in self._by.keys() & ignored:
            raise ConfigError(f"{name}: {both!r} is in per= and in ignore=; it can be in one")
        for parameter in known.values():
            self._check(parameter, ignored)
        self._defaults = {
            parameter.name: _default(parameter)
            for parameter in known.values()
            if parameter.name not in ignored
        }
        """The default of each parameter in the key."""

    def _check(self, parameter: inspect.Parameter, ignored: set[str]) -> None:
        name = parameter.name
        what = _kind(parameter)
        if parameter.kind in {parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD}:
            raise ConfigError(
                f"{self._name}: *{name} has no name in a request; write each parameter out"
            )
        if what == "form":
            raise ConfigError(
                f"{self._name}: the form or file {name!r} cannot be cached, since it can be read "
                "only once; take JSON instead"
            )
        if what and name not in self._by and name not in ignored:
            part = "headers.get('accept-language')" if what == "the Request" else "id"
            raise ConfigError(
                f"{self._name}: {name!r} is {what}, which may differ from caller to caller. If "
                f"the answer depends on it, write per={{{name!r}: lambda {name}: {name}.{part}}} "
                f"for a copy for each; if not, write ignore=({name!r},)"
            )

    @property
    def names(self) -> set[str]:
        return set(self._defaults)

    @property
    def is_personal(self) -> bool:
        """True if `per` is given: the key then says for which caller an answer is."""
        return bool(self._by)

    def call(self, values: Mapping[str, Any]) -> Call[Any]:
        """The entry of a request; parameters in `per` count by the result of their function."""
        arguments: dict[str, Any] = {}
        for name in self._defaults:
            value = values[name]
            arguments[name] = self._by[name](value) if name in self._by else value
        return self._entry(arguments)

    def call_by_hand(self, given: Mapping[str, Any]) -> Call[Any]:
        """The entry by hand: with defaults; for `per`, give the result of the function."""
        for unknown in given.keys() - self._defaults.keys():
            names = ", ".join(self._defaults)
            raise ConfigError(f"{self._name}: {unknown!r} is not in the key; it has: {names}")
        arguments = {**self._defaults, **given}
        for name, value in arguments.items():
            if value is inspect.Parameter.empty:
                raise ConfigError(f"{self._name}: {name!r} is in the key, and has no default")
        return self._entry(arguments)

    def _entry(self, arguments: dict[str, Any]) -> Call[Any]:
        advice = "say in per= what counts, as per={'user': lambda user: user.id}"
        id_ = id_of(self._name, list(arguments.values()), arguments, advice)
        return Call(id_, (), arguments)


def _functions(per: Per) -> dict[str, Callable[[Any], object]]:
    if isinstance(per, Mapping):
        return dict(per)
    return dict.fromkeys([per] if isinstance(per, str) else per, lambda value: value)


def _default(parameter: inspect.Parameter) -> object:
    """The default in `Query("x")`; a factory's value differs by request, so it is none."""
    default = parameter.default
    if isinstance(default, FieldInfo):
        is_none = default.is_required() or default.default_factory is not None
        return inspect.Parameter.empty if is_none else default.default
    return default


def _kind(parameter: inspect.Parameter) -> str:
    """What the parameter is, if it is not plain data of a request; "form" can be read only once."""
    annotation = getattr(parameter.annotation, "__value__", parameter.annotation)  # type X = …
    if get_origin(annotation) is Annotated:
        declared, *markers = get_args(annotation)
    else:
        declared = annotation
        markers = []
    markers.append(parameter.default)  # `x = Depends(…)` is the older way to write a marker
    if any(isinstance(marker, params.Depends) for marker in markers):
        return "a dependency"
    is_file = any(
        isinstance(part, type) and issubclass(part, UploadFile)
        for part in (declared, *get_args(declared))
    )
    if is_file or any(isinstance(marker, params.Form) for marker in markers):
        return "form"
    if isinstance(declared, type) and issubclass(declared, INJECTED):
        return f"the {declared.__name__}"
    return ""
