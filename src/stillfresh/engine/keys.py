"""The declaration of a resource: name, options, keys and tags.

Pure: options and signatures in, the declaration out, or a `ConfigError` that says what to write
instead.
"""

import inspect
import re
import sys
import types
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import Any, Final, Generic, NoReturn, TypeVar, Union, get_args, get_origin
from typing import get_type_hints as type_hints

from stillfresh.checks import checked_bytes, checked_whole
from stillfresh.durations import Duration, seconds
from stillfresh.engine.model import Codec, Loaded, OwnTerms, checked_tags, utf8_size
from stillfresh.engine.rules import Terms, absent_believed_for
from stillfresh.engine.rules_objective import Objective
from stillfresh.errors import ConfigError, LoadFailed, shown
from stillfresh.freshness import Policy

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

KIND: Final = re.compile(r"[a-z][a-z0-9_]*")
MAX_KEY: Final = 1_000_000


def checked_kind(name: str) -> str:
    """A resource's name is a table's name in SQLite."""
    ours = isinstance(name, str) and KIND.fullmatch(name) and not name.endswith("_ttl")
    if not ours or name.startswith(("sqlite_", "stillfresh_")):
        raise ConfigError(
            f"resource name {shown(name)}: write a lower-case word such as 'price' or 'user_page' "
            f"(letters, digits, _; names that end in _ttl, or begin with sqlite_ or stillfresh_, "
            f"are reserved)"
        )
    return name


def versioned(name: str, version: str | None) -> str:
    """A kind for each version, so that no release reads values of another one."""
    if version is None:
        return name
    if not isinstance(version, str) or not re.fullmatch("[a-z0-9_]+", version):
        raise ConfigError(
            f"{name}: version is {shown(version)}; write small letters, digits and _, "
            f"such as version='2'"
        )
    return f"{name}_v{version}"


def checked_text(resource: str, key: object, of: type[str] | type[int]) -> str:
    """The key as the store has it; a key of another type than declared is refused."""
    if not isinstance(key, of) or isinstance(key, bool):
        why = f"{resource}: a key is {of.__name__}, not {type(key).__name__} ({shown(key)})"
        several = (
            "; get_many([...]) takes several keys, and so do refresh(*keys), "
            "invalidate(*keys) and delete(*keys)"
        )
        raise ConfigError(why + several * isinstance(key, list | tuple | set | dict))
    if isinstance(key, str):
        return checked_id(resource, str.__str__(key))
    try:
        return checked_id(resource, int.__repr__(key))
    except ValueError as exc:
        raise ConfigError(f"{resource}: the key is {shown(key)}") from exc


def checked_id(resource: str, text: str) -> str:
    """Raise for an id that is empty, too long or not valid UTF-8."""
    if not isinstance(text, str):
        raise ConfigError(f"{resource}: must be text, not {shown(text)}")
    if 0 < len(text) <= MAX_KEY and text.isascii():
        return text
    if not text:
        raise ConfigError(f"{resource}: the key is empty; a key has at least one character")
    if (size := utf8_size(resource, "key", text)) > MAX_KEY:
        raise ConfigError(
            f"{resource}: the key {shown(text)} is {size:,} bytes long, of {MAX_KEY:,} allowed"
        )
    return text


def are_plain(keys: Collection[Any], of: object) -> bool:
    """True if `of` is str or int, and each key is exactly that, valid, and its own name.

    Passes over the keys in C, ten times as fast as one by one. If False, some may be valid.
    """
    if of is str and set(map(type, keys)) == {str}:
        return all(keys) and all(map(str.isascii, keys)) and max(map(len, keys)) <= MAX_KEY
    return of is int and set(map(type, keys)) == {int} and max(map(abs, keys)) < sys.maxsize


class KeyNames(Generic[K]):
    """How the keys of a resource are named in the store.

    Callers use keys of any type. `text` returns the name of a key, and `key` the key of a name.
    """

    def __init__(self, text: Callable[[K], str], key: Callable[[str], K]) -> None:
        self.text = text
        self.key = key

    def check(self, keys: Collection[K]) -> None:
        """Raise ConfigError if one is not a valid key."""
        if not are_plain(keys, self.key):
            self.texts(keys)

    def texts(self, keys: Collection[K]) -> dict[K, str]:
        """The names of the keys in the store. ConfigError if one is not a valid key."""
        if are_plain(keys, self.key):
            return dict(zip(keys, map(str, keys), strict=True))
        return {key: self.text(key) for key in keys}


def batch_types(name: str, loader: Callable[..., Any]) -> tuple[type[str] | type[int], Any]:
    """The type of keys and of values, from `async def loader(keys: list[K]) -> Mapping[K, V]`."""
    hints, parameters = hints_of(name, loader)
    if parameters and parameters[0].name in {"self", "cls"}:
        raise ConfigError(
            f"{name}: {shown_name(loader)} is a method; decorate a function, or decorate inside "
            f"__init__: self.prices = cache.batched(...)(self._load)"
        )
    if len(parameters) != 1:
        raise ConfigError(
            f"{name}: a batched loader takes one parameter, the list of keys; "
            f"write async def {shown_name(loader)}(keys: list[str]) -> dict[str, ...]"
        )
    keys = get_args(hints.get(parameters[0].name))
    key_type = plain_type(keys[0]) if len(keys) == 1 else None
    if key_type not in (str, int):
        raise ConfigError(
            f"{name}: annotate the keys of {shown_name(loader)} as list[str] or list[int]"
        )
    returned = hints.get("return", Any)
    if returned is not Any and not (
        isinstance(get_origin(returned), type) and issubclass(get_origin(returned), Mapping)
    ):
        raise ConfigError(
            f"{name}: {shown_name(loader)} returns a mapping from key to value; "
            f"annotate it as dict[{key_type.__name__}, ...], not {returned!r}"
        )
    return key_type, value_type(get_args(returned)[1] if get_args(returned) else Any)


def is_def(loader: Callable[..., Any]) -> bool:
    """True for a plain function: its call would block the event loop."""
    return not inspect.iscoroutinefunction(loader)


def value_type(annotation: Any) -> Any:  # noqa: ANN401 (a type form)
    """The type without wrappers: `Price | Loaded[Price] | Exception` becomes `Price`."""
    if get_origin(annotation) is Loaded:
        return get_args(annotation)[0]
    if get_origin(annotation) not in (Union, types.UnionType):
        return annotation
    parts = [value_type(part) for part in get_args(annotation) if not _is_exception(part)]
    return Union[tuple(dict.fromkeys(parts))] if parts else Any  # noqa: UP007 (made at run time)


def _is_exception(part: Any) -> bool:  # noqa: ANN401 (a type form)
    return isinstance(part, type) and issubclass(part, BaseException)


def plain_type(of: Any) -> Any:  # noqa: ANN401 (a type form)
    """A NewType of str is str."""
    while hasattr(of, "__supertype__"):
        of = of.__supertype__
    return of


def hints_of(
    name: str, loader: Callable[..., Any]
) -> tuple[dict[str, Any], list[inspect.Parameter]]:
    if isinstance(loader, staticmethod | classmethod):
        kind = type(loader).__name__
        what = "it" if kind == "staticmethod" else "@staticmethod, and no cls,"
        raise ConfigError(f"{name}: @{kind} stands below the cache's decorator; write {what} above")
    if inspect.isasyncgenfunction(loader) or inspect.isgeneratorfunction(loader):
        raise ConfigError(f"{name}: {shown_name(loader)} yields; return one value, such as a list")
    called = getattr(type(loader), "__call__", None)  # noqa: B004 (it may be async)
    if not callable(loader) or inspect.iscoroutinefunction(called):
        raise ConfigError(f"{name}: a loader is a function, async def or def, not {shown(loader)}")
    parameters = list(inspect.signature(loader).parameters.values())
    try:
        return type_hints(getattr(loader, "func", loader)), parameters  # a partial's function
    except Exception as exc:
        raise ConfigError(
            f"{name}: cannot read the annotations of {shown_name(loader)}: {exc}"
        ) from exc


def shown_name(loader: Callable[..., Any]) -> str:
    """The name of a loader; a partial has none, so its repr."""
    return getattr(loader, "__qualname__", repr(loader)).rpartition("<locals>.")[2]


def no_loader(_: object) -> NoReturn:
    """The loader of a resource whose callers bring their own loader."""
    raise LoadFailed("only a request for this entry can load it; send one")


class Spec(Generic[K, V]):
    """The declaration of a resource. Raises ConfigError for an option that cannot be used.

    `terms` and `max_batch` may be set again while the cache is open: the next loads have them.
    """

    def __init__(
        self,
        kind: str,
        load: Callable[[list[K]], Any],
        codec: Codec[V],
        tags: Callable[[K], Sequence[str]] | None,
        terms: Terms,
        *,
        max_batch: int = 1,
        concurrency: int,
        max_entries: int,
        max_bytes: int | str | None = None,
        memory_for: Duration = 0,
        lease_for: Duration = "5s",
        load_timeout: Duration,
        by_id: bool = True,
        in_thread: bool = False,
        held: Callable[[K], K] | None = None,
        objective: str | None = None,
    ) -> None:
        if tags is not None and not callable(tags):
            raise ConfigError(f"{kind}: tags is a function of the key, not {shown(tags)}")
        if not all(callable(getattr(codec, name, None)) for name in ("encode", "decode")):
            raise ConfigError(f"{kind}: codec must have encode and decode, not {shown(codec)}")
        self.kind = kind
        self.load = load
        self.codec = codec
        self.tags = tags
        self.terms = terms
        self.max_batch = checked_whole(f"{kind}: max_batch", max_batch)
        self.concurrency = checked_whole(f"{kind}: concurrency", concurrency)
        self.max_entries = checked_whole(f"{kind}: max_entries", max_entries)
        if max_bytes is not None:
            max_bytes = checked_bytes(f"{kind}: max_bytes", max_bytes)
        self.max_bytes = max_bytes
        self.memory_for = seconds(memory_for, name=f"{kind}: memory_for")
        self.lease_for = seconds(lease_for, name=f"{kind}: lease_for", positive=True)
        self.load_timeout = seconds(load_timeout, name=f"{kind}: load_timeout", positive=True)
        self.by_id = by_id
        """True if an id alone is enough to load its entry."""
        self.in_thread = in_thread
        """Its loaders are plain functions, which would block the event loop."""
        self.held = held
        """The key as memory holds it, without the arguments that only its load needs."""
        own = None if objective is None else Objective.of(objective, name=f"{kind}: objective")
        self.objective = own

    def tags_of(self, key: K) -> tuple[str, ...]:
        """The key's tags, or the error of the `tags` function."""
        return () if self.tags is None else checked_tags(self.kind, self.tags(key))

    def with_terms(self, value: object, terms: OwnTerms) -> object:
        """Times that `put` leaves out are the resource's; a value's own times come first."""
        if not terms:
            return value
        for unknown in terms.keys() - OwnTerms.__annotations__.keys():
            names = ", ".join(OwnTerms.__annotations__)
            raise TypeError(f"{self.kind}: there is no term {unknown!r}; there are {names}")
        own: dict[str, Any] = {"fresh_for": self.terms.policy.fresh_for, **terms}
        if isinstance(value, Loaded):
            given = {name: getattr(value, name) for name in OwnTerms.__annotations__}
            own |= {name: term for name, term in given.items() if term is not None}
            own["tags"] = value.tags
            own["version"] = value.version
            value = value.value
        return Loaded(value, **own)

    def possible_tags(self, key: K) -> tuple[str | None, ...]:
        """The key's tags. None among them stands for any tag, because `tags` failed."""
        try:
            return self.tags_of(key)
        except Exception:  # noqa: BLE001 (a user's function may raise anything)
            return (None,)


def terms_of(  # noqa: PLR0917 (the order of `Policy`, and then what counts beside it)
    kind: str,
    fresh_for: Duration,
    stale_for: Duration,
    error_for: Duration,
    absent_for: Duration | None,
    jitter: float = 0.0,
) -> Terms:
    """Return the terms of a declaration."""
    policy = Policy(
        seconds(fresh_for, name=f"{kind}: fresh_for"),
        seconds(stale_for, name=f"{kind}: stale_for"),
        seconds(error_for, name=f"{kind}: error_for"),
    )
    if absent_for is not None:
        absent_for = seconds(absent_for, name=f"{kind}: absent_for")
    if not isinstance(jitter, float | int) or not 0 <= jitter < 1:
        raise ConfigError(f"{kind}: jitter is a share from 0 to below 1, not {shown(jitter)}")
    return Terms(policy, absent_believed_for(policy.fresh_for, absent_for), jitter)
