"""From the arguments of a cached function to the key of its entry.

Pure: a signature and arguments in, the key out, or a `ConfigError` that says what to write instead.
"""

import inspect
from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any, Final, Generic, ParamSpec, Self, TypeVar

import msgspec

from stillfresh.checks import checked_function
from stillfresh.engine.keys import checked_id, hints_of, plain_type, shown_name, value_type
from stillfresh.errors import ConfigError, shown

P = ParamSpec("P")
T = TypeVar("T")

TOO_DEEP: Final = "it holds itself, or is nested too deeply"


class Call(str, Generic[P]):
    """One call of a cached function: the text that names its entry, and its arguments.

    It is text so that looking it up costs what looking up text costs. Calls with the same text are
    equal.
    """

    __slots__ = ("args", "kwargs")

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def __new__(cls, id_: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Self:
        call = super().__new__(cls, id_)
        call.args = args
        call.kwargs = kwargs
        return call

    @property
    def id(self) -> str:
        """The name of the entry in the store."""
        return str(self)

    def __repr__(self) -> str:
        return str(self)

    def __str__(self) -> str:
        return str.__str__(self)

    def bare(self) -> "Call[P]":
        """The call without its arguments, so that an entry in memory keeps no session alive."""
        return Call(self.id, (), {})


class Signature(Generic[P]):
    """Binds arguments with their defaults, so that one call has one key."""

    def __init__(
        self,
        name: str,
        function: Callable[P, Any],
        key: Callable[..., object] | None = None,
        ignore: Iterable[str] = (),
    ) -> None:
        hints, parameters = hints_of(name, function)
        self._name = name
        self._function = shown_name(function)
        self._signature = inspect.signature(function)
        self._binds_by_name = all(
            parameter.kind is parameter.POSITIONAL_OR_KEYWORD for parameter in parameters
        )
        self._names = tuple(parameter.name for parameter in parameters)
        self._defaults = {
            parameter.name: parameter.default
            for parameter in parameters
            if parameter.default is not parameter.empty
        }
        self._key = key if key is None else checked_function(f"{name}: key=", key)
        names = [parameter.name for parameter in parameters]
        self._ignored = _checked_ignore(name, function, ignore, names)
        if key is not None and self._ignored:
            raise ConfigError(
                f"{name}: key= and ignore= are both given; key= names what counts already, "
                f"so leave ignore= out"
            )
        if inspect.iscoroutinefunction(key):
            raise ConfigError(f"{name}: key= is async; write a plain function of the arguments")
        self.is_whole = key is None and not self._ignored
        """True if every argument is part of the key."""
        first = parameters[0].name if parameters else ""
        self.is_method = first == "self" and (key is not None or first in self._ignored)
        _refuse_method(name, function, "" if self.is_method else first)
        self._types = {
            parameter.name: of
            for parameter in (parameters if key is None else ())
            if (of := plain_type(hints.get(parameter.name))) in (str, int)
            and parameter.kind is parameter.POSITIONAL_OR_KEYWORD
            and parameter.name not in self._ignored
        }
        annotation = hints.get("return", Any)
        self.value_type = value_type(annotation)
        self.is_plain = self.is_whole and len(self._types) == len(parameters)
        """Every argument is a str or an int, so equal arguments are the same arguments."""
        self._plain_types = tuple(self._types.values()) if self.is_plain else None
        """What a call has that gives every argument by its place; None: it must be bound."""
        self.shown = self._signature
        """The signature as callers see it: without `Loaded`."""
        if self.value_type is not annotation:
            self.shown = self._signature.replace(return_annotation=self.value_type)

    def check_in(self, owner: type, name: str) -> None:
        """Refuse a method without `self`: it would not be bound as its author expects."""
        if not self.is_method:
            raise ConfigError(
                f"{self._name}: {owner.__name__}.{name} is a method without self; write "
                f"@staticmethod above @cache.cached(...), or a first parameter self and "
                f"ignore=('self',)"
            )

    def call(self, *args: P.args, **kwargs: P.kwargs) -> Call[P]:
        """The entry that these arguments name."""
        if tuple(map(type, args)) == self._plain_types and not kwargs:
            try:
                return Call(checked_id(self._name, msgspec.json.encode(args).decode()), args, {})
            except (TypeError, ValueError, OverflowError):
                pass  # the error below names the argument
        arguments = self._bind_by_name(args, kwargs) if self._binds_by_name else None
        bound = None
        if arguments is None:
            bound = self._bind(args, kwargs)
            arguments = bound.arguments
        for name, of in self._types.items():
            value = arguments[name]
            if type(value) is not of and (not isinstance(value, of) or isinstance(value, bool)):
                raise ConfigError(
                    f"{self._name}: {name} must be {of.__name__}, not {type(value).__name__} "
                    f"({shown(value)})"
                )
        if self._key is not None:
            all_args, all_kwargs = _call_arguments(arguments, bound)
            return Call(self._own_id(self._key(*all_args, **all_kwargs)), all_args, all_kwargs)
        counted: Mapping[str, Any] = arguments
        if self._ignored:
            counted = {name: arguments[name] for name in arguments if name not in self._ignored}
        id_ = self._id(counted)
        if not self.is_plain:
            # A load may begin later: it uses the arguments as they were at the call.
            arguments.update({name: self._made(deepcopy, name, counted[name]) for name in counted})
        all_args, all_kwargs = _call_arguments(arguments, bound)
        return Call(id_, all_args, all_kwargs)

    def _bind_by_name(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> dict[str, Any] | None:
        """The arguments with their defaults, in order. None if they do not fit: `_bind` says why.

        For a function without `*args`, `**kwargs`, `/` and `*`: most are. `inspect` takes as long
        as the rest of a read.
        """
        names = self._names
        if len(args) > len(names):
            return None
        arguments = dict(zip(names, args, strict=False))
        if len(args) == len(names) and not kwargs:
            return arguments
        if not arguments.keys().isdisjoint(kwargs):
            return None
        given = {**self._defaults, **arguments, **kwargs}
        if len(given) != len(names):
            return None
        try:
            return {name: given[name] for name in names}
        except KeyError:
            return None

    def _bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> inspect.BoundArguments:
        """The arguments with their defaults, for any function. TypeError if they do not fit."""
        try:
            bound = self._signature.bind(*args, **kwargs)
        except TypeError as exc:
            message = f"{self._name}{self._signature}: {exc}"
            if "max_age" in kwargs and "max_age" not in self._signature.parameters:
                age = shown(kwargs["max_age"])
                message += (
                    f"; write {self._function}.of(...).get(max_age={age}), with the arguments of "
                    "the call in of(...)"
                )
            raise TypeError(message) from None
        bound.apply_defaults()
        return bound

    def _id(self, arguments: Mapping[str, Any]) -> str:
        if self.is_plain:
            try:
                return checked_id(
                    self._name, msgspec.json.encode(list(arguments.values())).decode()
                )
            except (TypeError, ValueError, OverflowError):
                pass  # the error below names the argument
        texts = (self._made(key_text, name, value) for name, value in arguments.items())
        return checked_id(self._name, f"[{','.join(texts)}]")

    def _made(self, make: Callable[[Any], T], name: str, value: object) -> T:
        """The part of an argument that belongs to the key."""
        try:
            return make(value)
        except RecursionError:
            why = TOO_DEEP
        except (TypeError, ValueError) as exc:
            why = str(exc)
        raise ConfigError(
            f"{self._name}: the argument {name} has the type {type(value).__name__} "
            f"({shown(value)}), which cannot be part of a key: {why}. "
            f"Write ignore=({name!r},) to leave it out, or key= to say what is part of the key"
        )

    def _own_id(self, key: object) -> str:
        try:
            if isinstance(key, str | int | tuple) and not isinstance(key, bool):
                return checked_id(self._name, key_text(key))
        except (TypeError, ValueError, RecursionError) as exc:
            raise ConfigError(f"{self._name}: key= returned {shown(key)}: {exc}") from None
        raise ConfigError(
            f"{self._name}: key= returned {shown(key)}, a {type(key).__name__}; "
            f"return a str, an int, or a tuple of what counts"
        )


def _call_arguments(
    arguments: Mapping[str, Any], bound: inspect.BoundArguments | None
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What the function is called with. `bound`: None if every argument can be positional."""
    if bound is None:
        return tuple(arguments.values()), {}
    return bound.args, bound.kwargs


def key_text(value: object) -> str:
    """Return a value as text, the same in every process, for values of the same type and content.

    Lists and tuples are alike, and so are sets and frozensets; the order of sets and dicts does not
    count. Raises TypeError for a type that no text fully describes.
    """
    of = type(value)
    if of is str or of is bool or value is None:
        return msgspec.json.encode(value).decode()
    if isinstance(value, Enum):
        return f"{_type_name(of)}.{value.name or value.value}"
    for base, write in WRITTEN.items():
        if isinstance(value, base):
            return write(value)
    parts = _fields(value)
    if parts is not None:
        texts = (f"{name}={key_text(part)}" for name, part in parts.items())
        return f"{_type_name(of)}({','.join(texts)})"
    try:
        text = msgspec.json.encode(value, order="deterministic").decode()
    except TypeError:
        raise TypeError(f"values of type {_type_name(of)} cannot be written as text") from None
    return f"{_type_name(of)}({text})"


def _list_text(value: Iterable[object]) -> str:
    return f"[{','.join(map(key_text, value))}]"


def _mapping_text(value: Mapping[object, object]) -> str:
    items = (f"{key_text(name)}:{key_text(part)}" for name, part in value.items())
    return f"{{{','.join(sorted(items))}}}"


def _set_text(value: Iterable[object]) -> str:
    return f"set({','.join(sorted(map(key_text, value)))})"


WRITTEN: Final[Mapping[type, Callable[[Any], str]]] = {
    int: int.__repr__,
    float: float.__repr__,  # also NaN, which JSON does not have
    str: lambda text: msgspec.json.encode(str.__str__(text)).decode(),
    list: _list_text,
    tuple: _list_text,
    dict: _mapping_text,
    set: _set_text,
    frozenset: _set_text,
}
"""Types whose text carries no type name: equal values are interchangeable."""


def _fields(value: object) -> dict[str, object] | None:
    """The fields of a dataclass or attrs class (those that `==` compares), a struct or a model."""
    of = type(value)
    if is_dataclass(value):
        return {field.name: getattr(value, field.name) for field in fields(value) if field.compare}
    if isinstance(value, msgspec.Struct):
        return {name: getattr(value, name) for name in value.__struct_fields__}
    if isinstance(names := getattr(of, "model_fields", None), dict):
        extra = getattr(value, "model_extra", None)  # named by clients: apart, and in quotes
        own = {name: getattr(value, name) for name in names}
        return own | {"*": extra} if extra else own
    if isinstance(known := getattr(of, "__attrs_attrs__", None), tuple):
        return {
            attribute.name: getattr(value, attribute.name) for attribute in known if attribute.eq
        }
    return None


def _type_name(of: type) -> str:
    return f"{of.__module__}.{of.__qualname__}".removeprefix("builtins.")


def _checked_ignore(
    name: str, function: Callable[..., Any], ignore: Iterable[str], known: list[str]
) -> frozenset[str]:
    if isinstance(ignore, str) or not isinstance(ignore, Iterable):
        raise ConfigError(f"{name}: ignore= takes many names; write ignore=({ignore!r},)")
    ignored = tuple(ignore)
    for given in ignored:
        if given not in known:
            raise ConfigError(
                f"{name}: ignore= names {shown(given)}, which is no parameter of "
                f"{shown_name(function)}; it has {', '.join(known) or 'none'}"
            )
    return frozenset(ignored)


def _refuse_method(name: str, function: Callable[..., Any], first: str) -> None:
    """Raise for a method. `first`: the parameter that would receive the object or class."""
    if first == "self":
        raise ConfigError(
            f"{name}: {shown_name(function)} is a method; write ignore=('self',) if all instances "
            f"share their entries, or say what of self counts: key=lambda self, x: (self.id, x)"
        )
    if first == "cls":
        raise ConfigError(
            f"{name}: {shown_name(function)} is a class method; write @staticmethod above "
            f"@cache.cached(...), and no cls"
        )
