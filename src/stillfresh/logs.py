"""The lines of a program's log: text or JSON, without secrets, on standard error.

A thread writes them, so that the event loop never waits for a reader; a reader that is too slow
loses lines, and the log says how many. No line is longer than a pipe takes whole, so lines of
several workers do not mix.
"""

import logging
import os
import re
import select
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from functools import lru_cache
from queue import SimpleQueue
from typing import Any, Final, TypeAlias
from urllib.parse import quote, unquote, urlsplit

import msgspec

from stillfresh.errors import without_secrets

Render: TypeAlias = Callable[[], bytes]
"""Makes the bytes of one entry, with the line end; called on the writing thread."""
MOST_WAITING: Final = 10_000
"""Entries; more are dropped and counted."""
LONGEST_LINE: Final = select.PIPE_BUF
"""Bytes that a pipe takes in one piece, even if other processes write to it."""
GATHERED_FOR: Final = 0.02
"""Seconds between an entry and its writing: one wake-up for many entries."""
PATIENCE: Final = 1.0
"""Seconds for a reader to read the rest when the server ends."""
WRITES_WITHIN: Final = 5.0
"""Seconds to wait for the thread at the end: a reader may stop in the middle of a piece."""
LONGEST_RECORD: Final = 4 * LONGEST_LINE
"""Characters of a record as text: of a longer one, its middle is left out."""
SHORTEST_SECRET: Final = 4
"""Characters; hiding shorter ones would hide half of the log."""
PASSWORD: Final = re.compile(r"\bpassword\s*=\s*(?:'((?:[^'\\]|\\.)*)'|(\S+))")
"""A password in a connection string of PostgreSQL, or in the query of a URL."""
UNSEEN: Final = re.compile(
    r"[^\t\n\x20-\x7e\xa0-\u2027\u202f-\u2065\u206a-\ud7ff\ue000-\U0010ffff]"
)
"""Control characters, which a terminal would obey, and lone surrogates."""

logger = logging.getLogger(__name__)


@contextmanager
def quietly(level: int) -> Iterator[None]:
    """Inside the block, stillfresh logs nothing below this level: its program does."""
    own = logging.getLogger("stillfresh")
    before = own.level
    own.setLevel(level)
    try:
        yield
    finally:
        own.setLevel(before)


class LineWriter:
    """Lines to a file descriptor. Without its thread (before a fork) it writes or drops at once."""

    def __init__(
        self, fd: int | None = None, *, most: int = MOST_WAITING, patience: float = PATIENCE
    ) -> None:
        self._fd = _standard_error() if fd is None else fd
        self._most = most
        self._patience = patience
        self._waiting: SimpleQueue[Render] = SimpleQueue()
        self._is_ending = threading.Event()
        self._is_running = False
        self.dropped = 0
        """Lost lines that the log has not reported yet."""

    def put(self, render: Render) -> None:
        """From any thread; never waits."""
        if not self._is_running:
            self._write([render], waits=False)
        elif self._waiting.qsize() < self._most:
            self._waiting.put(render)
        else:
            self.dropped += 1

    @contextmanager
    def running(self) -> Iterator[None]:
        """From now on a thread of this process writes, until the end of the block."""
        thread = threading.Thread(target=self._run, name="stillfresh-log", daemon=True)
        self._is_ending.clear()
        self._is_running = True
        thread.start()
        try:
            yield
        finally:
            self._is_running = False
            self._is_ending.set()
            self._waiting.put(bytes)  # wakes it
            thread.join(2 * self._patience + WRITES_WITHIN)

    def _run(self) -> None:
        while not self._is_ending.is_set() or not self._waiting.empty():
            batch = [self._waiting.get()]
            self._is_ending.wait(GATHERED_FOR)
            batch += [self._waiting.get() for _ in range(self._waiting.qsize())]
            self._write(batch, waits=True)
            if self.dropped and not self._is_ending.is_set():
                lost = self.dropped
                self.dropped = 0
                logger.warning("%d log lines are lost: standard error is read too slowly", lost)

    def _write(self, batch: list[Render], *, waits: bool) -> None:
        is_read = True
        for piece in pieces(render() for render in batch):
            is_read = is_read and self._write_all(piece, waits=waits)
            if not is_read:
                self.dropped += piece.count(b"\n")

    def _write_all(self, data: bytes, *, waits: bool) -> bool:
        try:
            while data and self._has_room(waits=waits):
                with suppress(BlockingIOError):  # another process filled the pipe
                    data = data[os.write(self._fd, data) :]
        except OSError:  # nobody reads any more
            return False
        return not data

    def _has_room(self, *, waits: bool) -> bool:
        """Wait until the reader has read; at the end of the server, at most `PATIENCE`."""
        while waits and not self._is_ending.is_set():
            if select.select([], [self._fd], [], self._patience)[1]:
                return True
        return bool(select.select([], [self._fd], [], self._patience if waits else 0)[1])


def pieces(texts: Iterable[bytes]) -> Iterator[bytes]:
    """Whole lines together, as many as a pipe takes at once; a longer line is cut."""
    piece = b""
    for text in texts:
        for line in text.split(b"\n")[:-1]:
            whole = line[: LONGEST_LINE - 1] + b"\n"
            if len(piece) + len(whole) > LONGEST_LINE:
                yield piece
                piece = b""
            piece += whole
    if piece:
        yield piece


class Hidden:
    """Hides known secrets, and text that looks like one, from the log."""

    def __init__(self, secrets: Iterable[str] = ()) -> None:
        self._known = set[str]()
        self.add(secrets)

    def add(self, secrets: Iterable[str]) -> None:
        """Hide these, also as an address, Python or JSON would write them."""
        for form in {form for secret in secrets for form in (secret, unquote(secret))}:
            self._known |= {form, quote(form), quote(form, safe=""), repr(form)[1:-1]}
            self._known.add(msgspec.json.encode(form)[1:-1].decode())
        hidden = sorted(self._known, key=len, reverse=True)
        known = "|".join(re.escape(form) for form in hidden if len(form) >= SHORTEST_SECRET)
        self._pattern = re.compile(known or r"(?!)")

    def __call__(self, text: str) -> str:
        shown = without_secrets(self._pattern.sub("***", text))
        return UNSEEN.sub(lambda match: match[0].encode("unicode_escape").decode(), shown)


def passwords_in(address: str) -> Iterator[str]:
    """The passwords in a URL or a connection string."""
    for quoted, plain in PASSWORD.findall(address):
        yield from (re.sub(r"\\(.)", r"\1", quoted), quoted, plain, plain.partition("&")[0])
    with suppress(ValueError):
        yield urlsplit(address).password or ""


class LineHandler(logging.Handler):
    """Log records as lines of text, or as one JSON object each."""

    def __init__(self, writer: LineWriter, hide: Hidden, *, is_json: bool) -> None:
        super().__init__()
        self._writer = writer
        self._hide = hide
        self._is_json = is_json

    def emit(self, record: logging.LogRecord) -> None:
        """Render the record now, because its arguments may change."""
        try:
            line = self._json(record) if self._is_json else self._text(record)
        except Exception:  # noqa: BLE001 (a message or an exception of somebody else's)
            line = f"{moment(record.created)} ERROR {record.name}: cannot be logged\n".encode()
        self._writer.put(lambda: line)

    def _text(self, record: logging.LogRecord) -> bytes:
        """Further lines are indented, so that none looks like another record."""
        head = f"{moment(record.created)} {record.levelname} {record.name}: "
        text = self._hide("\n".join([record.getMessage(), *filter(None, [_traceback(record)])]))
        if len(text) > LONGEST_RECORD:
            text = f"{text[:LONGEST_LINE]}\n…\n{text[LONGEST_LINE - LONGEST_RECORD :]}"
        return (head + text.replace("\n", "\n  ") + "\n").encode()

    def _json(self, record: logging.LogRecord) -> bytes:
        message = {"message": self._hide(record.getMessage())}
        if text := _traceback(record):
            message["exception"] = self._hide(text)
        head = {"level": record.levelname.lower(), "logger": record.name}
        return json_line({"time": moment(record.created), **head, **message})


def _standard_error() -> int:
    """Standard error; if it was closed at the start, its number may belong to a connection."""
    return 2 if sys.__stderr__ is not None else os.open(os.devnull, os.O_WRONLY)


def _traceback(record: logging.LogRecord) -> str:
    formatter = logging.Formatter()
    return formatter.formatException(record.exc_info) if record.exc_info else ""


def json_line(fields: dict[str, Any]) -> bytes:
    """One JSON line; its longest text is shortened until a pipe takes the line in one piece."""
    while len(line := msgspec.json.encode(fields)) >= LONGEST_LINE:
        longest = max(fields, key=lambda name: len(str(fields[name])))
        half = str(fields[longest])
        fields[longest] = f"{half[: len(half) // 4]} … {half[-len(half) // 2 :]}"
    return line + b"\n"


def moment(at: float) -> str:
    return f"{_second(int(at))}.{int(at % 1 * 1000):03}Z"


@lru_cache(maxsize=16)
def _second(at: int) -> str:
    return datetime.fromtimestamp(at, UTC).isoformat()[:-6]
