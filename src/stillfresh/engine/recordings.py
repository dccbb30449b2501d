"""A recording of reads for `stillfresh plan`: which keys were read when, and how long loads took.

One JSON line for each: never a value, and ids as hashes that nobody can undo, unless plain ids are
asked for. Sampling is by key, so that a recorded key keeps its own pattern of reads.
Lines are written by a thread; a recording that cannot be written ends, and no read notices.
"""

import logging
import os
import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b
from pathlib import Path
from secrets import token_bytes
from typing import Annotated, Final, Literal, TypeAlias

from msgspec import Meta, Struct, json

from stillfresh.checks import checked_bytes, checked_flag, checked_share
from stillfresh.errors import StillfreshError
from stillfresh.file_locks import lock_whole_file

VERSION: Final = 1
DIGEST: Final = 6
"""Bytes of an id's hash."""
BUFFER: Final = 65_536
"""Bytes that are written together."""
FLUSH_EVERY: Final = 1.0
"""Seconds after which fewer bytes are written too."""
MOST_WAITING: Final = 4_000_000
"""Bytes that wait for a slow disk. Beyond that the recording ends: one with gaps would mislead."""
ENCODE: Final = json.Encoder().encode
Span: TypeAlias = Annotated[float, Meta(ge=0, le=366 * 86_400)]
"""Seconds; a recording lasts at most a year."""
What: TypeAlias = Literal["read", "put", "invalidate", "soft", "delete", "watch", "unwatch"]

logger = logging.getLogger(__name__)


class RecordingHead(Struct, frozen=True, array_like=True, tag="stillfresh-recording"):
    """The first line."""

    version: int
    share: Annotated[float, Meta(gt=0, le=1)]
    """The share of keys that are recorded."""


class RecordedKind(Struct, frozen=True, array_like=True, tag="kind"):
    """The declaration of a resource; written before its first read."""

    kind: str
    fresh_for: float
    stale_for: float
    error_for: float
    absent_for: float
    max_batch: int
    concurrency: int
    load_timeout: float


class RecordedUse(Struct, frozen=True, array_like=True, tag="use", gc=False):
    """One action on keys: a read, a change or a watch."""

    at: Span
    """Seconds since the recording began."""
    kind: str
    ids: tuple[str, ...]
    what: What


class RecordedLoad(Struct, array_like=True, tag="load", gc=False):
    """One call of a loader; `ids` are its recorded keys."""

    at: Span
    kind: str
    ids: tuple[str, ...]
    took: Span
    of: Annotated[int, Meta(ge=1)]
    """All keys that were loaded together, recorded or not."""
    size: float = 0
    """Bytes of all recorded values, as they are stored."""
    failed: tuple[str, ...] = ()
    absent: tuple[str, ...] = ()
    terms: tuple[float, float, float] | None = None
    """The loader's own fresh_for, stale_for and error_for, if it gave any."""


Line: TypeAlias = RecordingHead | RecordedKind | RecordedUse | RecordedLoad


class Recording:
    """A file to which reads are recorded: `async with cache.recording(Recording("reads.jsonl")):`.

    `share` is the part of all keys that is recorded. At `max_bytes` the recording ends, and the log
    says so. Ids are written as hashes unless `plain_ids`.
    """

    def __init__(
        self,
        file: str | Path,
        *,
        share: float = 1.0,
        max_bytes: int | str = "64MB",
        plain_ids: bool = False,
    ) -> None:
        self.path = Path(file)
        self.share = checked_share("share", share)
        self.kinds: set[str] = set()
        """Kinds whose declaration is written."""
        self.is_over = False
        self._most = checked_bytes("max_bytes", max_bytes, 10_000)
        self._plain = checked_flag("plain_ids", plain_ids)
        self._limit = self.share * 256**DIGEST
        self._salt = token_bytes(16)
        self._began: float | None = None
        self._users = 0
        self._buffer = bytearray()
        self._flushed = 0.0

    def begin(self, now: float) -> None:
        """Create or empty the file, once: `serve` does so before it forks its workers."""
        if self._began is None:
            self._file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
            self._make_own()
            self._began = now
            self._free = threading.Semaphore(0)
            self._write(ENCODE(RecordingHead(VERSION, self.share)) + b"\n")

    def _make_own(self) -> None:
        """Lock and empty the file. Raises if another recording is being written to it."""
        try:
            lock_whole_file(self._file)
            os.fchmod(self._file, 0o600)
            os.ftruncate(self._file, 0)
        except BlockingIOError as exc:
            os.close(self._file)
            why = "is being written by another recording; choose another file, or end that one"
            raise StillfreshError(f"{self.path}: {why}") from exc

    def open(self, now: float) -> None:
        """Share the file with one more cache."""
        self.begin(now)
        if not self._users:
            self._thread = ThreadPoolExecutor(1, "stillfresh-recording")
        self._users += 1

    def close(self) -> None:
        """End the recording of one cache. After the last one, all lines are in the file."""
        self._users -= 1
        if not self._users:
            self._thread.submit(self._write, self._take_buffer())
            self._thread.shutdown()
            os.close(self._file)
            self._began = None
            self.kinds.clear()

    def chosen(self, kind: str, texts: Iterable[str]) -> tuple[str, ...]:
        """The names of these ids in the recording; ids outside the share are left out."""
        names = []
        for text in texts:
            name = f"{kind} {text}".encode(errors="replace")
            digest = blake2b(name, digest_size=DIGEST, key=self._salt).digest()
            if int.from_bytes(digest) < self._limit:
                names.append(text if self._plain else digest.hex())
        return tuple(names)

    def since(self, now: float) -> float:
        """Seconds since the beginning, in whole milliseconds."""
        return max(0.0, round(now - (self._began or 0.0), 3))

    def note(self, line: Line, at: float) -> None:
        """Add a line; a thread writes it soon."""
        if not self.is_over:
            self._buffer += ENCODE(line) + b"\n"
            if len(self._buffer) >= BUFFER or at - self._flushed >= FLUSH_EVERY:
                self._flushed = at
                if self._free.acquire(blocking=False):
                    self._thread.submit(self._write, self._take_buffer())
                elif len(self._buffer) >= MOST_WAITING:
                    self._end("the disk is too slow")

    def _take_buffer(self) -> bytes:
        data = bytes(self._buffer)
        self._buffer = bytearray()
        return data

    def _write(self, data: bytes) -> None:
        """Append whole lines, even if other processes write to the file."""
        try:
            if os.fstat(self._file).st_size + len(data) > self._most:
                self._end(f"it would be longer than max_bytes={self._most:,}")
            elif os.write(self._file, data) < len(data):
                self._end("the disk is full")
        except OSError as exc:
            self._end(exc.strerror or str(exc))
        finally:
            self._free.release()

    def _end(self, why: str) -> None:
        if not self.is_over:
            self.is_over = True
            logger.warning("%s: nothing more is recorded: %s", self.path, why)
