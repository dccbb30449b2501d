"""Signals wait while the main thread does work that must not stop in the middle.

Python calls the handler of a signal between any two steps of the main thread, and a handler may
raise: KeyboardInterrupt, a soft time limit. In the middle of the work of a `SyncCache`, such an
exception could leave a lock taken for ever. So the program's handlers are replaced for that time by
one that notes the signal, and called afterwards.

To replace a handler takes a fifth of a microsecond. In other threads there is nothing to hold:
Python calls no handler there.
"""

import importlib
import signal
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from threading import get_ident, main_thread
from types import FrameType
from typing import Any, Final, Self, TypeAlias

Handler: TypeAlias = Callable[[int, FrameType | None], object]

NAMES: Final = (
    "SIGINT",
    "SIGTERM",
    "SIGALRM",
    "SIGHUP",
    "SIGQUIT",
    "SIGUSR1",
    "SIGUSR2",
    "SIGVTALRM",
    "SIGPROF",
    "SIGXCPU",
    "SIGBREAK",
)
"""Signals whose handlers raise in many programs. Each costs every call 0.1 µs."""
NUMBERS: Final = tuple(int(getattr(signal, name)) for name in NAMES if hasattr(signal, name))

# The module below `signal`, which makes no enum of each handler: that takes five microseconds.
_PLAIN: Final[Any] = importlib.import_module("_signal")
_handler_of: Final[Callable[[int], Any]] = _PLAIN.getsignal
_set_handler: Final[Callable[[int, Any], Any]] = _PLAIN.signal


class HeldSignals(AbstractContextManager["HeldSignals"]):
    """Inside the block no handler runs in this thread; afterwards those of arrived signals do."""

    __slots__ = ("_arrived", "_handlers", "_thread")

    def __init__(self) -> None:
        self._handlers: dict[int, Handler] = {}
        """The program's own, of signals that are held."""
        self._arrived: list[int] = []
        self._thread = get_ident()

    def __enter__(self) -> Self:
        if self._thread == main_thread().ident:
            try:
                self._replace()
            except ValueError:  # a subinterpreter, where Python calls no handlers
                self._handlers.clear()
            except BaseException:  # of a handler that was not replaced yet
                self._put_back()
                raise
        return self

    def __exit__(self, *_: object) -> None:
        if self._handlers:
            self._put_back()
            self._call_handlers()

    def release(self) -> None:
        """Call the handlers of arrived signals, and let others be called from now on."""
        if self._handlers:
            try:
                self._put_back()
                self._call_handlers()
            except BaseException:
                self.hold_again()
                raise

    def hold_again(self) -> None:
        """What a handler raises meanwhile is raised when all signals are held."""
        if not self._handlers:
            return
        interruption: BaseException | None = None
        is_held = False
        while not is_held:
            try:
                self._replace()
                is_held = True
            except BaseException as exc:  # noqa: BLE001 (raised below)
                interruption = exc
        if interruption is not None:
            raise interruption

    def _replace(self) -> None:
        handlers = self._handlers
        for number in NUMBERS:
            handler = _handler_of(number)
            if not callable(handler):  # the program has none
                if handlers:
                    handlers.pop(number, None)
            elif handler != self._note:
                handlers[number] = handler
                _set_handler(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if get_ident() == self._thread:
            self._arrived.append(number)
        else:  # another thread has forked, and is the main thread of the child
            self._put_back()
            self._handlers[number](number, frame)

    def _put_back(self) -> None:
        note = self._note
        for number, handler in self._handlers.items():
            if note == _handler_of(number):  # else the program has set another one
                _set_handler(number, handler)

    def _call_handlers(self) -> None:
        """The signals are not sent once more: event loops would count them twice."""
        while self._arrived:
            number = self._arrived.pop(0)
            self._handlers[number](number, sys._getframe())  # noqa: SLF001 (as Python calls it)


class LetThrough(AbstractContextManager[None]):
    """Inside the block, which is the program's own code, handlers are called at once."""

    __slots__ = ("_signals",)

    def __init__(self, signals: HeldSignals) -> None:
        self._signals = signals

    def __enter__(self) -> None:
        self._signals.release()

    def __exit__(self, *_: object) -> None:
        self._signals.hold_again()
