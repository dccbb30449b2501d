"""Several processes on one port: a parent starts workers and replaces those that end.

Workers are forked. The parent runs no event loop and no thread, and opens no store, so a fork
copies nothing that is in use; every worker opens its own store. Each one accepts connections on the
parent's socket, and has the settings that the parent has checked, also one that starts much later.

A worker has a line (a socket pair) to its parent: it says there that it is ready, or why it could
not start. The line is closed with the parent, however that ends, and its workers end then too.
"""

import asyncio
import logging
import os
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final, NoReturn

from stillfresh.backoff import pause_after
from stillfresh.errors import ConfigError, StillfreshError
from stillfresh.gateway.server.worker_numbers import WorkerNumbers

FIRST_PAUSE: Final = 0.1
LONGEST_PAUSE: Final = 30.0
"""Seconds before a worker that ended is replaced: longer each time that it ended soon."""
SOON: Final = 10.0
"""Seconds; after a worker that lived longer, the pauses start again at the first."""
MOST_FAILED_STARTS: Final = 5
"""In a row, while no worker is ready: then the parent gives up."""
KILLED_AFTER: Final = 30.0
"""Seconds that workers have to end: requests under way have their own grace, and stores close."""
LONGEST_ERROR: Final = 10_000
READY: Final = b"r"
"""The first byte of a worker's message: it listens."""
FAILED: Final = b"f"
"""It failed; the reason follows."""
WRONG: Final = b"w"
"""Its settings are wrong; the reason follows."""
TAKEN: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD, signal.SIGHUP)

logger = logging.getLogger(__name__)


class Worker:
    """What a worker receives: its place in the shared memory, and its connection to the parent."""

    def __init__(self, place: int, shared_numbers: WorkerNumbers, line: socket.socket) -> None:
        self.place = place
        self.shared_numbers = shared_numbers
        self._line = line

    def ready(self) -> None:
        """It listens."""
        self._line.send(READY)

    def failed(self, error: Exception) -> None:
        kind = WRONG if isinstance(error, ConfigError) else FAILED
        self._line.send(kind + str(error).encode(errors="replace")[:LONGEST_ERROR])

    def end_with_parent(self, end: Callable[[], None]) -> None:
        """On the running loop: `end()` when the parent is gone, which never writes."""
        loop = asyncio.get_running_loop()

        def end_here() -> None:
            loop.remove_reader(self._line)
            end()

        loop.add_reader(self._line, end_here)


class Slot:
    """One of the workers that there should be, whichever process it is now."""

    pid = 0
    """0 if there is none now."""
    line: socket.socket | None = None
    is_ready = False
    error = b""
    """Its last message before it ended."""
    started_at = due = 0.0
    failures = 0
    """Processes in a row that ended soon."""

    def __init__(self, place: int) -> None:
        self.place = place


class Workers:
    """The parent of the workers: it waits for signals, for messages of workers, and for pauses.

    `work` runs in each worker; `ready` is called when the first one listens. `run` returns after
    SIGTERM or SIGINT. It raises what keeps the first worker from starting, and StillfreshError if
    workers end before they are ready, again and again, and none is left.
    """

    def __init__(
        self,
        listener: socket.socket,
        shared_numbers: WorkerNumbers,
        work: Callable[[Worker], None],
        ready: Callable[[], None],
        *,
        drain: float = 0.0,
        reload: Callable[[], bool] = lambda: False,
    ) -> None:
        self._reload = reload
        """Called in the parent on SIGHUP; if True, the workers get the signal too."""
        self._patience = KILLED_AFTER + drain
        self._listener = listener
        self._shared_numbers = shared_numbers
        self._work = work
        self._tell_ready = ready
        self._slots = [Slot(place) for place in range(shared_numbers.places)]
        self._failed_starts = 0
        self._was_ready = False
        self._killed_at: float | None = None
        """Set when it ends: workers that are left then are killed."""
        self._error: StillfreshError | None = None

    def run(self) -> None:
        with _signal_socket() as signals:
            while self._killed_at is None or any(slot.pid for slot in self._slots):
                if self._killed_at is None:
                    for slot in self._missing():
                        if slot.due <= time.monotonic():
                            self._start(slot, signals)
                elif time.monotonic() >= self._killed_at:
                    self._send(signal.SIGKILL)
                    self._killed_at += KILLED_AFTER
                self._wait(signals)
                self._reap()
        if self._error is not None:
            raise self._error

    def _missing(self) -> list[Slot]:
        """The first worker starts alone, so that an error of its start is reported once."""
        wanted = self._slots if self._was_ready else self._slots[:1]
        return [slot for slot in wanted if not slot.pid]

    def _start(self, slot: Slot, signals: socket.socket) -> None:
        slot.is_ready = False
        slot.error = b""
        slot.started_at = time.monotonic()
        sys.stdout.flush()  # buffered text would be written by both processes
        sys.stderr.flush()
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, TAKEN)
        try:
            slot.line, theirs = socket.socketpair()
            with theirs:
                slot.pid = os.fork()
                if not slot.pid:
                    lines = [other.line for other in self._slots if other.line is not None]
                    worker = Worker(slot.place, self._shared_numbers, theirs)
                    _become(self._work, worker, mask, [signals, *lines])
        except OSError as exc:
            self._replace_later(slot, f"could not be started: {exc}")
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def _wait(self, signals: socket.socket) -> None:
        """Wait until something happens, or something is due."""
        starting = [
            slot.line for slot in self._slots if slot.line and not (slot.is_ready or slot.error)
        ]
        if self._killed_at is None:
            due = min((slot.due for slot in self._missing()), default=None)
        else:
            due = self._killed_at
        left = None if due is None else max(0.0, due - time.monotonic())
        select.select([signals, *starting], [], [], left)
        for slot in self._slots:
            self._hear(slot)
        for number in _read_waiting(signals):
            if number == signal.SIGHUP:
                if self._killed_at is None and self._reload():
                    self._send(signal.SIGHUP)
            elif number != signal.SIGCHLD:
                self._end(number)

    def _hear(self, slot: Slot) -> None:
        message = b"" if slot.line is None else _read_waiting(slot.line)
        if message[:1] != READY:
            slot.error = slot.error or message
            return
        slot.is_ready = True
        slot.error = message[1:]
        self._failed_starts = 0
        if not self._was_ready:
            self._was_ready = True
            self._tell_ready()

    def _end(self, number: int) -> None:
        """Tell all workers to end, and give them their time; a second SIGINT hurries them."""
        if self._killed_at is None:
            self._killed_at = time.monotonic() + self._patience
            self._listener.close()  # accept no connection that nobody would answer
            self._send(signal.SIGTERM)
            self._send(signal.SIGCONT)  # a stopped process would not get it
        elif number == signal.SIGINT:
            self._send(signal.SIGINT)

    def _send(self, number: signal.Signals) -> None:
        for slot in self._slots:
            if slot.pid:
                os.kill(slot.pid, number)

    def _reap(self) -> None:
        """Collect all children that ended, so that none stays a zombie."""
        by_pid = {slot.pid: slot for slot in self._slots if slot.pid}
        while by_pid:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                return
            if (slot := by_pid.pop(pid, None)) is not None:
                self._hear(slot)
                code = os.waitstatus_to_exitcode(status)
                how = f"exit code {code}" if code >= 0 else f"signal {-code}"
                self._replace_later(slot, f"(process {pid}) ended by {how}")

    def _replace_later(self, slot: Slot, how: str) -> None:
        """Replace it after a pause, unless all are ending."""
        was_ready = slot.is_ready
        lived = time.monotonic() - slot.started_at
        if slot.line is not None:
            slot.line.close()
        slot.pid = 0
        slot.line = None
        slot.is_ready = False
        self._shared_numbers.ended(slot.place)
        if self._killed_at is not None:
            return
        if slot.error:
            how += f": {slot.error[1:].decode(errors='replace')}"
        self._failed_starts += not was_ready
        if not was_ready and (error := self._reason_to_give_up(slot, how)) is not None:
            self._error = error
            self._end(signal.SIGTERM)
            return
        slot.failures = slot.failures + 1 if lived < SOON else 1
        pause = pause_after(slot.failures, first=FIRST_PAUSE, longest=LONGEST_PAUSE)
        slot.due = time.monotonic() + pause
        logger.warning("worker %d %s; another one starts in %g s", slot.place + 1, how, pause)

    def _reason_to_give_up(self, slot: Slot, how: str) -> StillfreshError | None:
        """Why to give up, if so: an error of the first start would come at every start."""
        if slot.error and not self._was_ready:
            failed = ConfigError if slot.error[:1] == WRONG else StillfreshError
            return failed(slot.error[1:].decode(errors="replace"))
        if self._failed_starts < MOST_FAILED_STARTS or any(other.is_ready for other in self._slots):
            return None
        many = f"{self._failed_starts} workers in a row ended before they were ready"
        return StillfreshError(f"{many}, and none is left; the last one {how}")


@contextmanager
def _signal_socket() -> Iterator[socket.socket]:
    """A socket that receives the numbers of signals, so that one `select` waits for everything."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.settimeout(0)
        before = {number: signal.signal(number, lambda *_: None) for number in TAKEN}
        last = signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
        try:
            yield ours
        finally:
            signal.set_wakeup_fd(last)
            for number, handler in before.items():
                signal.signal(number, handler)


def _read_waiting(line: socket.socket) -> bytes:
    try:
        return line.recv(2 * LONGEST_ERROR, socket.MSG_DONTWAIT)
    except BlockingIOError:
        return b""


def _become(
    work: Callable[[Worker], None],
    worker: Worker,
    mask: set[int | signal.Signals],
    lines: Sequence[socket.socket],
) -> NoReturn:
    """A child begins and ends here, so it finishes nothing that the parent has begun."""
    code = 1
    try:
        signal.set_wakeup_fd(-1)
        for number in TAKEN:
            signal.signal(number, signal.SIG_DFL)
        for line in lines:
            line.close()
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        work(worker)
        code = 0
    except (StillfreshError, OSError) as exc:
        worker.failed(exc)
    except SystemExit as exc:
        code = exc.code if isinstance(exc.code, int) else 1
    except BaseException:  # noqa: BLE001 (told, and then it is over)
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
