"""The declaration of a resource: name, options, keys and tags.

Pure: options and signatures in, the declaration out, or a `ConfigError` that says what to write
instead.
"""

import inspect
import re
import sys
import types
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from difflib import get_close_matches
from functools import partial, wraps
from typing import (
    Any,
    Final,
    Generic,
    NoReturn,
    TypeAlias,
    TypeVar,
    Union,
    cast,
    get_args,
    get_origin,
)
from typing import get_type_hints as type_hints

from stillfresh.checks import checked_bytes, checked_whole
from stillfresh.durations import Duration, seconds
from stillfresh.engine.mistakes import SilentMistakes
from stillfresh.engine.model import Codec, Loaded, OwnTerms, checked_tags, utf8_size
from stillfresh.engine.rules import Terms, absent_believed_for
from stillfresh.engine.rules_truth import CALLS, Declared, Objectives
from stillfresh.errors import ConfigError, LoadFailed, StillfreshError, shown
from stillfresh.freshness import Policy

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")
D = TypeVar("D", bound=Callable[..., Any])

LONGEST_KIND: Final = 200
KIND: Final = re.compile(rf"[a-z][a-z0-9_]{{,{LONGEST_KIND - 1}}}")
MAX_KEY: Final = 1_000_000

Raises: TypeAlias = type[Exception] | tuple[type[Exception], ...]
"""The type of `raises=`: an exception class, or several."""


def checked_kind(name: str) -> str:
    """A resource's name is a table's name in SQLite."""
    ours = isinstance(name, str) and KIND.fullmatch(name) and not name.endswith("_ttl")
    if not ours or name.startswith(("sqlite_", "stillfresh_")):
        raise ConfigError(
            f"resource name {shown(name)}: write a lower-case word such as 'price' or 'user_page' "
            f"(letters, digits, _, at most {LONGEST_KIND}; names that end in _ttl, or begin with "
            f"sqlite_ or stillfresh_, are reserved)"
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
        definition = "def" if is_def(loader) else "async def"
        raise ConfigError(
            f"{name}: a batched loader takes one parameter, the list of keys; "
            f"write {definition} {shown_name(loader)}(keys: list[str]) -> dict[str, ...]"
        )
    declared = hints.get(parameters[0].name)
    keys = get_args(declared)
    key_type = plain_type(keys[0]) if len(keys) == 1 else None
    if key_type not in (str, int):
        raise ConfigError(_wrong_keys(name, shown_name(loader), declared))
    returned = hints.get("return", Any)
    if returned is not Any and not (
        isinstance(get_origin(returned), type) and issubclass(get_origin(returned), Mapping)
    ):
        raise ConfigError(
            f"{name}: {shown_name(loader)} returns a mapping from key to value; "
            f"annotate it as dict[{key_type.__name__}, ...], not {returned!r}"
        )
    return key_type, value_type(get_args(returned)[1] if get_args(returned) else Any)


def _wrong_keys(name: str, loader: str, declared: object) -> str:
    problem = f"{name}: annotate the keys of {loader} as list[str] or list[int]"
    if declared is None:
        return problem
    return f"{problem}, not {shown(declared)}; a function below @cache.cached takes other arguments"


def is_def(loader: Callable[..., Any]) -> bool:
    """True for a plain function: its call would block the event loop."""
    return not inspect.iscoroutinefunction(loader)


def place_of(function: Callable[..., Any]) -> tuple[str, str] | None:
    """Module and name of a function; None if its code may make several (`<locals>`, a lambda)."""
    module = getattr(function, "__module__", None)
    name = getattr(function, "__qualname__", None)
    if module is None or name is None or "<" in name:
        return None
    return module, name


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
    try:
        parameters = list(inspect.signature(loader).parameters.values())
    except ValueError as exc:  # of some functions that are written in C
        raise ConfigError(
            f"{name}: Python does not know the parameters of {shown_name(loader)}; "
            f"write a function that calls it"
        ) from exc
    try:
        return type_hints(_annotated(loader)), parameters
    except Exception as exc:
        raise ConfigError(
            f"{name}: cannot read the annotations of {shown_name(loader)}: {exc}"
        ) from exc


def _annotated(loader: Callable[..., Any]) -> object:
    """What has the annotations: a partial's function, or the method that calls an object."""
    function = getattr(loader, "func", loader)
    return function if hasattr(function, "__name__") else type(function).__call__


def shown_name(loader: Callable[..., Any]) -> str:
    """The name of a loader; a partial has none, so its repr."""
    return getattr(loader, "__qualname__", repr(loader)).rpartition("<locals>.")[2]


def no_loader(_: object) -> NoReturn:
    """The loader of a resource whose callers bring their own loader."""
    raise LoadFailed("only a request for this entry can load it; send one")


OPTIONS: Final = (
    *("fresh_for", "stale_for", "error_for", "absent_for", "max_batch", "concurrency"),
    *("max_entries", "max_bytes", "memory_for", "jitter", "tags", "codec", "key", "ignore"),
    *("version", "lease_for", "load_timeout", "objective", "raises", "share", "patience"),
    *("check", "true_within", "check_calls"),
)
"""The options of both decorators."""
OTHER_NAMES: Final = {
    "ttl": "fresh_for",
    "expire": "fresh_for",
    "expires": "fresh_for",
    "expiration": "fresh_for",
    "expiration_time": "fresh_for",
    "expire_after": "fresh_for",
    "expires_in": "fresh_for",
    "ttl_seconds": "fresh_for",
    "lifetime": "fresh_for",
    "max_age": "fresh_for, or max_age= of get()",
    "timeout": "fresh_for for how long a value is fresh, load_timeout for how long a load may take",
    "maxsize": "max_entries",
    "max_size": "max_entries",
    "early_ttl": "stale_for",
    "stale_ttl": "stale_for",
    "stale_while_revalidate": "stale_for",
    "swr": "stale_for",
    "stale_if_error": "error_for",
    "grace": "error_for",
    "serializer": "codec",
    "key_builder": "key",
    "exclude": "ignore",
    "namespace": "the first argument, which names the resource",
    "prefix": "the first argument, which names the resource",
    "exceptions": "raises",
}
"""Options of other libraries, and what they are called here."""
LIKENESS: Final = 0.7
"""How like an option a name must be to be taken for a slip: at 0.6, `retries` is `max_entries`."""
NOT_OF_A_CACHE: Final = {
    "get": "a cache has no keys of its own; declare a function with @cache.cached(...) and call it",
    "set": "declare a function with @cache.cached(...); report.of(...).put(value) stores a value",
    "delete": "write report.of(...).delete(), for one entry of a cached function",
    "clear": "write cache.invalidate_all(), or clear() of one resource",
    "memoize": "write @cache.cached(name, fresh_for=...)",
}
"""Methods of other caches, and what to write instead."""


def check_options(decorator: str, unknown: Mapping[str, object]) -> None:
    """Refuse options that there are not, and name those that are meant."""
    for option in unknown:
        meant = OTHER_NAMES.get(option)
        if meant is None:
            close = get_close_matches(option, OPTIONS, 1, LIKENESS)
            meant = close[0] if close else f"one of {', '.join(OPTIONS)}"
        raise ConfigError(f"{decorator}: there is no option {option!r}; write {meant}")


def checks_options(decorator: D) -> D:
    """Say what to write if `cached` or `batched` is used without a name or without `fresh_for`.

    Python itself would only say which argument is missing, before the decorator is called.
    """
    name_of = decorator.__name__

    @wraps(decorator)
    def checked(cache: object, *args: Any, **options: Any) -> Any:  # noqa: ANN401 (any decorator)
        example = f"write @cache.{name_of}('report', fresh_for='5m')"
        is_named = bool(args) or "name" in options
        if not is_named or (args and callable(args[0])):
            raise TypeError(f"{name_of}: it needs the name of the resource; {example}")
        if len(args) > 1:
            raise TypeError(f"{name_of}: options are written by their names; {example}")
        if "fresh_for" not in options:
            known = {*OPTIONS, "name"}
            unknown = {option: None for option in options if option not in known}
            check_options(name_of, unknown)
            raise TypeError(f"{name_of}: it needs fresh_for; {example}")
        return decorator(cache, *args, **options)

    return cast("D", checked)


def checked_raises(kind: str, raises: object) -> tuple[type[Exception], ...]:
    """The exception classes that `raises=` names."""
    named = raises if isinstance(raises, tuple | list | set | frozenset) else (raises,)
    for error in named:
        if not isinstance(error, type) or not issubclass(error, Exception):
            raise ConfigError(
                f"{kind}: raises names exception classes, such as raises=(NotFound,), "
                f"not {shown(error)}"
            )
        if issubclass(error, StillfreshError):
            raise ConfigError(
                f"{kind}: raises names exceptions of your own, not {error.__name__}, which "
                f"stillfresh raises"
            )
    return tuple(named)


def _same_tags(tags: Sequence[str], _: object) -> Sequence[str]:
    """The `tags` function of a resource whose keys all have the same tags."""
    return tags


class Spec(Generic[K, V]):
    """The declaration of a resource. Raises ConfigError for an option that cannot be used.

    `terms` and `max_batch` may be set again while the cache is open: the next loads have them.
    """

    def __init__(
        self,
        kind: str,
        load: Callable[[list[K]], Any],
        codec: Codec[V],
        tags: Callable[[K], Sequence[str]] | Sequence[str] | None,
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
        objective: Objectives = None,
        raises: Raises = (),
        share: bool = True,
        patience: Duration | None = None,
        function: Callable[..., Any] | None = None,
        check: float = 0.0,
        true_within: Duration | None = None,
        check_calls: float = CALLS,
    ) -> None:
        if isinstance(tags, str):
            raise ConfigError(f"{kind}: tags is a list; write tags=[{tags!r}]")
        if tags is not None and not callable(tags):
            fixed = checked_tags(kind, tags)
            tags = partial(_same_tags, fixed)
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
        fresh_for = terms.policy.fresh_for
        declared = Declared.of(
            kind,
            objective,
            check=check,
            true_within=true_within,
            check_calls=check_calls,
            fresh_for=fresh_for,
        )
        self.objective = declared.objective
        self.check = declared.check
        """Which share of the reads is checked; None: none is."""
        if not isinstance(share, bool):
            raise ConfigError(f"{kind}: share is True or False, not {shown(share)}")
        self.share = share
        """False: each caller gets a value of its own, and memory holds bytes."""
        if patience is not None:
            patience = seconds(patience, name=f"{kind}: patience")
        self.patience = patience
        """Seconds that callers wait for a load, unless they say otherwise; None: to its end."""
        self.function = function
        """The decorated function, whose source is compared in development mode."""
        self.mistakes = SilentMistakes(kind, codec)
        self.raises = checked_raises(kind, raises)
        """Exceptions of the loader that callers get as they are."""

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
