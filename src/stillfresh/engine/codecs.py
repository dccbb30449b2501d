"""Values as bytes: the codec of a resource, chosen by its loader's annotation.

msgspec's msgpack, or Pydantic's JSON if a type of Pydantic's occurs anywhere in the
annotation; only then is Pydantic imported. Tables of pandas and polars become Arrow's stream. Never
pickle: a cache file must not be able to run code.
"""

import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from importlib import import_module
from inspect import signature
from types import (
    AsyncGeneratorType,
    BuiltinFunctionType,
    CoroutineType,
    FunctionType,
    GeneratorType,
    MethodType,
)
from typing import Any, Final, Generic, TypeVar

from msgspec import Struct, msgpack
from msgspec.inspect import CustomType, type_info

from stillfresh.engine.arrow_codec import ArrowCodec, table_type
from stillfresh.engine.codec_makers import innermost
from stillfresh.engine.model import Codec
from stillfresh.errors import ConfigError, shown

V = TypeVar("V")

ADVICE: Final = "annotate a type that msgspec or Pydantic knows, or give codec="
UNTYPED: Final = (Any, object)
HOLDERS: Final = (list, dict, Mapping, Sequence)
SECRETS: Final = {"SecretStr", "SecretBytes", "Secret"}


class MsgpackCodec(Generic[V]):
    """Turns values of one type into msgpack and back."""

    def __init__(self, of: Any, resource: str) -> None:  # noqa: ANN401 (a type form)
        try:
            decoder: msgpack.Decoder[V] = msgpack.Decoder(of)
            custom = next(_custom(type_info(of), set()), None)
        except TypeError as exc:
            raise ConfigError(f"{resource}: {_refusal_text(of)} ({exc}); {ADVICE}") from exc
        if custom is not None:
            raise ConfigError(f"{resource}: {_refusal_text(of)}: it holds a {custom!r}; {ADVICE}")
        self.encode = msgpack.Encoder().encode
        self.decode = decoder.decode
        self.of = of


class PydanticCodec(Generic[V]):
    """JSON by Pydantic, by the names of the fields, whatever aliases they have elsewhere."""

    def __init__(self, of: Any, resource: str) -> None:  # noqa: ANN401 (a type form)
        try:
            adapter = import_module("pydantic").TypeAdapter(of)
        except Exception as exc:
            raise ConfigError(f"{resource}: {_refusal_text(of)} ({exc}); {ADVICE}") from exc
        secret = next((type_ for type_ in types_in(of) if type_.__name__ in SECRETS), None)
        if secret is not None:
            why = f"it holds a {secret.__name__}, which Pydantic writes as asterisks"
            raise ConfigError(f"{resource}: {_refusal_text(of)}: {why}; give codec=")
        if "by_name" not in signature(adapter.validate_json).parameters:
            raise ConfigError(f"{resource}: {_refusal_text(of)}: it needs Pydantic 2.11 or newer")
        self._adapter = adapter
        self._last: tuple[bytes, V] | None = None

    def encode(self, value: V, /) -> bytes:
        """Refuse a value of another type, and one that would be read back as another value."""
        dump = self._adapter.dump_json
        data: bytes = dump(value, by_alias=False, round_trip=True, warnings="error")
        data = data.ljust(2)  # one digit alone would also be valid msgpack
        back = self.decode(data)
        is_other = hasattr(type(back), "__pydantic_fields__") and not isinstance(value, type(back))
        is_same = dump(back, by_alias=True) == dump(value, by_alias=True) or back == value
        if is_other or not is_same:  # compare texts first: comparing models runs Python code
            raise ValueError(f"it would come back as {shown(back)}")
        self._last = data, back
        return data

    def decode(self, data: bytes, /) -> V:
        """Validate and return the value; a value that was just encoded is returned unchanged."""
        last = self._last
        self._last = None
        if last is not None and last[0] is data:
            return last[1]
        value: V = self._adapter.validate_json(data, by_alias=False, by_name=True)
        return value


def codec_for(of: Any, resource: str) -> Codec[Any]:  # noqa: ANN401 (a type form)
    """Return the codec for values of this type. Raises ConfigError if there is none."""
    if table_type(of) is not None:
        return ArrowCodec(of, resource)
    is_pydantic = any(
        hasattr(type_, "__get_pydantic_core_schema__") or hasattr(type_, "__pydantic_core_schema__")
        for type_ in types_in(of)
    )
    return PydanticCodec(of, resource) if is_pydantic else MsgpackCodec(of, resource)


def advice_on(codec: object, value: object = None) -> str:
    """What to do about a loaded value that the codec refuses."""
    cls = type(value)  # not isinstance: a value may be a proxy whose class cannot be had
    if cls is CoroutineType:
        return "the function returned a coroutine; write async def, and await what it calls"
    if cls in (GeneratorType, AsyncGeneratorType):
        return "the function returned a generator; return a list"
    if cls in (FunctionType, MethodType, BuiltinFunctionType):
        return "the function returned a function; did you forget to call it?"
    if is_unannotated(codec):
        return "annotate the return type, or give codec="
    if is_untyped(codec):
        return "write into the return type what it holds, as in list[Item], or give codec="
    return "return what the annotation says, or give codec="


def is_unannotated(codec: object) -> bool:
    """True if the loader's return type is not annotated, or is Any."""
    typed = innermost(codec)
    return isinstance(typed, MsgpackCodec) and typed.of is Any


def is_untyped(codec: object) -> bool:
    """True if the return type names nothing inside: Any, object, list, dict[str, Any]."""
    typed = innermost(codec)
    if not isinstance(typed, MsgpackCodec):
        return False
    if typed.of in UNTYPED:
        return True
    if (typing.get_origin(typed.of) or typed.of) not in HOLDERS:
        return False
    arguments = typing.get_args(typed.of)
    return not arguments or arguments[-1] in UNTYPED


def types_in(of: Any, seen: set[Any] | None = None) -> Iterator[type]:  # noqa: ANN401 (a type form)
    """Every class that the annotation names, including those in the fields of its classes."""
    seen = set() if seen is None else seen
    for part in typing.get_args(of):
        yield from types_in(part, seen)
    cls = typing.get_origin(of) or of
    if isinstance(cls, list):  # the parameters of a Callable
        for part in cls:
            yield from types_in(part, seen)
    if not isinstance(cls, type) or cls in seen:
        return
    seen.add(cls)
    yield cls
    if is_dataclass(cls) or hasattr(cls, "__annotations__"):
        try:
            hints = typing.get_type_hints(cls, include_extras=True)
        except Exception:  # noqa: BLE001 (the codec says what cannot be resolved)
            return
        for hint in hints.values():
            yield from types_in(hint, seen)


def _custom(info: object, seen: set[int]) -> Iterator[type]:
    """The classes in a type that msgspec would pass to a hook; `object` counts as anything."""
    if isinstance(info, CustomType):
        if info.cls is not object:
            yield info.cls
    elif isinstance(info, tuple):
        for part in info:
            yield from _custom(part, seen)
    elif isinstance(info, Struct) and id(info) not in seen:
        seen.add(id(info))
        for name in info.__struct_fields__:
            yield from _custom(getattr(info, name), seen)


def _refusal_text(of: Any) -> str:  # noqa: ANN401 (a type form)
    return f"cannot store values of type {of!r}"
