"""Every error that stillfresh raises, so that one `except StillfreshError` catches them all."""

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, NoReturn

STORE_CLOSED: Final = "this store is closed; open it again with open()"
LONGEST_SHOWN: Final = 60
LONGEST_TEXT: Final = 500
"""Characters of an exception's text that are remembered."""
USERINFO: Final = re.compile(r"(:/{0,2})(?!/).*@", re.DOTALL)
"""Up to the last @: a password may contain anything, and an address may have mistakes."""

AFTER_SLASHES: Final = re.compile(r"(?<=//)\S+")
QUERY: Final = re.compile(r"\?\S+")
CLOSING: Final = "'\"`)]}>:;,.?!"
"""Characters between a query and the next word."""
CREDENTIAL: Final = re.compile(
    r"(?i)\b((?:set-)?cookie|(?:proxy-)?authorization|(?:x-)?api-key|x-(?:auth|access)-token|password)"
    r"(['\"]?\s*[:=,]).+"
)
"""To the end of the line, because the end of a value is not certain."""
BEARER: Final = re.compile(r"(?i)\b(bearer|basic) +[\w.~+/=-]{8,}")


class StillfreshError(Exception):
    """The base class of every error that stillfresh raises."""


class ConfigError(StillfreshError, ValueError):
    """A setting cannot be used. The message names it, the value, and what is allowed."""


class MissingExtra(ConfigError, ModuleNotFoundError):
    """A part of stillfresh needs a library that is not installed; the message names the extra."""


class NotOpen(StillfreshError):
    """A cache, a store or a watch was used that is closed or was never opened."""


class StoreError(StillfreshError):
    """The store failed. `__cause__` is the error of its client library."""


class LeaseHeld(StillfreshError):
    """Another process holds the lease of this key, at most until `until` (seconds since 1970)."""

    def __init__(self, message: str, until: float) -> None:
        super().__init__(message)
        self.until = until


class LeaseLost(StillfreshError):
    """The lease ended: it expired, or an invalidation voided it."""


class LoadFailed(StillfreshError):
    """A load failed and no copy may be served. `__cause__` is the loader's error.

    `__cause__` is None if another process saw that error, or if it happened long ago. The message
    names it in any case.
    """

    _plain = True
    retry_at: float | None = None
    """Seconds since 1970: no load begins before then. None if this is the error of a load that
    was tried for this call. In the past: the cooldown is over, and no load has succeeded yet."""


class LoadTimeout(LoadFailed):
    """The load took longer than the caller's `patience`. It goes on, and is stored.

    It is no failure of the load: no cooldown begins.
    """


class BadValue(ConfigError, LoadFailed):
    """A loader's value cannot be stored: not of the annotated type, or unknown to the codec.

    During the cooldown that follows, processes that did not see the value raise LoadFailed instead.
    """


class UnreadableValue(StillfreshError, ValueError):
    """A codec cannot read stored bytes: they were changed, cut short, or written by another codec.

    The cache loads the value again; callers do not see this error.
    """


class RaisedByLoader(LoadFailed):
    """The loader raised an exception that `raises=` names: `__cause__` is that exception.

    Callers that wait get the exception itself. This stands for it in `answer.error`, where many
    keys are asked for at once, and in what a watch is told.
    """

    def __init__(self, message: str, cause: BaseException | None = None) -> None:
        super().__init__(message)
        self.__cause__ = cause
        self._traceback = None if cause is None else cause.__traceback__

    def raise_cause(self) -> NoReturn:
        """Raise the exception as it came from the loader.

        Several callers get the same object, so its traceback must not grow with each.
        """
        cause = self.__cause__
        if cause is None:
            raise self
        raise cause.with_traceback(self._traceback)


class MissingMethod:
    """Replaces a method that a class does not have: the error says what to write instead."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __get__(self, obj: object, owner: type) -> NoReturn:
        raise AttributeError(self._text.format(getattr(obj, "__name__", owner.__name__)))


def refuse_with(of: type, text: str, *, is_async: bool = False) -> None:
    """Make `with` (or `async with`) on objects of this class an error with this text.

    Only the method that Python looks up first is set: with both, frameworks that enter every
    context manager would think that the object is one.
    """
    name = "exit" if sys.version_info >= (3, 14) else "enter"
    setattr(of, f"__{'a' if is_async else ''}{name}__", MissingMethod(text))


@contextmanager
def needs(extra: str, what: str) -> Iterator[None]:
    """For imports of libraries that `what` needs and `stillfresh[extra]` installs."""
    try:
        yield
    except ModuleNotFoundError as exc:
        library = (exc.name or "").partition(".")[0]
        if library in {"", "stillfresh"}:  # none: a MissingExtra, which says it already
            raise
        raise MissingExtra(f"{what} needs {library}: install stillfresh[{extra}]") from exc


def note_unconfirmed(error: StoreError) -> None:
    """Say in the error of a change that a store must confirm what to do."""
    error.add_note("Others may serve the old copy until the store confirms an invalidation.")


@contextmanager
def unconfirmed() -> Iterator[None]:
    """For changes that a store must confirm: its error says what to do."""
    try:
        yield
    except StoreError as exc:
        note_unconfirmed(exc)
        raise


def cannot_be_pickled(cache: object) -> TypeError:
    """Return the error for a cache that is sent to another process."""
    name = type(cache).__name__
    return TypeError(
        f"a {name} cannot be pickled, because each process opens its own; make it at the top of a "
        f"module, and send a cached function instead, which is pickled by its name"
    )


def shown(value: object) -> str:
    """A value as an error names it: its repr, cut at a sane length."""
    return _cut(_safe_repr(value))


def shown_address(value: object) -> str:
    """Like `shown`, without a possible password."""
    return _cut(without_password(_safe_repr(value)))


def shown_place(url: str) -> str:
    """An address without its password and its options, because errors end up in logs."""
    address, mark, _ = without_password(url).partition("?")
    return shown(f"{address}{mark and '?…'}")


def without_password(address: str) -> str:
    """An address for errors: a name and a password become `***`; a file's name stays."""
    return USERINFO.sub(r"\1***@", address)


def without_secrets(text: str) -> str:
    """A text for logs: no name and password of a URL, no query, no credential of a request.

    The time is proportional to the length of any text.
    """
    if "//" in text:
        text = AFTER_SLASHES.sub(_without_userinfo, text)
    if "?" in text:
        text = QUERY.sub(_without_query, text)
    return BEARER.sub(r"\1 ***", CREDENTIAL.sub(r"\1\2 ***", text))


def _without_userinfo(match: re.Match[str]) -> str:
    _, at, host = match[0].rpartition("@")
    return f"***@{host}" if at else match[0]


def _without_query(match: re.Match[str]) -> str:
    query = match[0].rstrip(CLOSING)
    return f"?***{match[0][len(query) :]}" if query else match[0]


def error_text(error: BaseException) -> str:
    """An exception's type and text, in a form that any store, log or client can take.

    Its text may be huge, not be UTF-8, or raise. Of a long one the middle is left out: the end may
    name the cause of the cause. The type of a `_plain` exception, which stillfresh's own loaders
    raise, is left out.
    """
    start = "an exception: "
    try:
        start = f"{type(error).__name__}: "
        text = str.__str__(str(error))
        start = "" if text and "_plain" in vars(type(error)) else start
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException:  # noqa: BLE001 (a user's exception may raise anything)
        text = "its text cannot be read"
    whole = _without_middle(start + _without_middle(text))
    return whole.encode(errors="backslashreplace").decode()


def _without_middle(text: str) -> str:
    """At most `LONGEST_TEXT` characters of it."""
    if len(text) <= LONGEST_TEXT:
        return text
    half = LONGEST_TEXT // 2
    return f"{text[: half - 3]} … {text[-half:]}"


def _safe_repr(value: object) -> str:
    try:
        return repr(value)
    except ValueError:  # an int of more digits than Python prints
        return f"a {type(value).__name__} too long to print"


def _cut(text: str) -> str:
    return text if len(text) <= LONGEST_SHOWN else f"{text[:LONGEST_SHOWN]}…"
