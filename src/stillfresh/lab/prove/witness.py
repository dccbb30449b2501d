"""What happened to a store, as one process saw it: appended to a log that all processes share.

A line is written in one system call, so a killed process leaves whole lines, and its begun steps
are known. Times are of the machine's monotonic clock, which all processes share.
"""

import asyncio
import itertools
import mmap
import os
import random
import struct
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from stillfresh.errors import StoreError
from stillfresh.stores import WrappedStore
from stillfresh.stores.contract import (
    Ask,
    Copy,
    Failure,
    Generations,
    Grant,
    LateTags,
    Lease,
    Record,
    Store,
)

T = TypeVar("T")

OFFSET: Final = struct.Struct("d")
LONGEST_LOAD: Final = 0.06
"""Seconds."""


class Seen(msgspec.Struct, omit_defaults=True):
    """One line of the log; `ended` 0: it had only begun."""

    what: str
    at: float
    ended: float = 0.0
    pid: int = 0
    key: str = ""
    load: str = ""
    lease: str = ""
    """Its token."""
    wall: float = 0.0
    """By the clock of the process that logs it."""
    until: float = 0.0
    verdict: str = ""
    fetched_at: float = 0.0
    blind: bool = False
    """True if the store did not answer: memory or the loader served it."""
    unverified: bool = False
    """True if the answer itself says so."""
    text: str = ""


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(Seen)


def events_of(lines: bytes) -> list[Seen]:
    return [_decoder.decode(line) for line in lines.splitlines()]


class Log:
    """Appends lines to the log file that all processes share."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        self._pid = os.getpid()

    def tell(self, *events: Seen) -> None:
        for event in events:
            event.pid = self._pid
        os.write(self._file, b"".join(_encoder.encode(event) + b"\n" for event in events))

    def close(self) -> None:
        os.close(self._file)


class MovedClock:
    """The machine's clock, moved by the seconds in the shared file."""

    def __init__(self, path: Path) -> None:
        with path.open("r+b") as file:
            self._offset = mmap.mmap(file.fileno(), OFFSET.size)

    def __call__(self) -> float:
        (offset,) = OFFSET.unpack_from(self._offset)
        return time.time() + float(offset)


def move_clock(path: Path, by: float) -> None:
    """Move the clock of all processes at once by so many seconds."""
    if not path.exists():
        path.write_bytes(OFFSET.pack(by))
        return
    with path.open("r+b") as file, mmap.mmap(file.fileno(), OFFSET.size) as offset:
        (before,) = OFFSET.unpack_from(offset)
        OFFSET.pack_into(offset, 0, before + by)


class LoadNames:
    """Gives each load a name, which is its value: a served value shows its load."""

    def __init__(self, seed: float, log: Log, clock: Callable[[], float]) -> None:
        self._dice = random.Random(seed)  # noqa: S311 (no secret)
        self._numbers = itertools.count()
        self._log = log
        self._clock = clock

    async def load(self, leases: Mapping[str, str]) -> dict[str, str]:
        """Load a value for each key; it takes a while."""
        names = self._begin(leases)
        await asyncio.sleep(self._dice.random() * LONGEST_LOAD)
        self._tell("loaded", names, leases)
        return names

    def load_in_thread(self, leases: Mapping[str, str]) -> dict[str, str]:
        """The same, while this thread waits."""
        names = self._begin(leases)
        time.sleep(self._dice.random() * LONGEST_LOAD)
        self._tell("loaded", names, leases)
        return names

    def _begin(self, leases: Mapping[str, str]) -> dict[str, str]:
        names = {key: f"{os.getpid()}-{next(self._numbers)}-{key}" for key in leases}
        self._tell("load", names, leases)
        return names

    def _tell(self, what: str, names: Mapping[str, str], leases: Mapping[str, str]) -> None:
        at = time.monotonic()
        wall = self._clock()
        events = (
            Seen(what, at, key=key, load=name, lease=leases[key], wall=wall)
            for key, name in names.items()
        )
        self._log.tell(*events)


class Witness(WrappedStore):
    """A store that logs its steps and their results."""

    def __init__(self, store: Store, log: Log, clock: Callable[[], float]) -> None:
        super().__init__(store)
        self._log = log
        self._clock = clock
        self.troubles = 0
        self.tokens: dict[str, str] = {}
        """Of the leases that this process was given, by key."""

    def read_now(
        self, kind: str, ids: Sequence[str], known: Generations = None
    ) -> dict[str, Record]:
        try:
            return super().read_now(kind, ids, known)
        except StoreError:
            self.troubles += 1
            raise

    def read_in_thread(
        self, kind: str, ids: Sequence[str], known: Generations = None
    ) -> dict[str, Record]:
        try:
            return super().read_in_thread(kind, ids, known)
        except StoreError:
            self.troubles += 1
            raise

    async def step(self, name: str, work: Callable[[], Awaitable[T]]) -> T:
        try:
            return await super().step(name, work)
        except StoreError:
            self.troubles += 1
            raise

    async def acquire(self, kind: str, asks: Sequence[Ask], lease_for: float) -> dict[str, Grant]:
        began = time.monotonic()
        for ask in asks:
            self.tokens.pop(ask.id, None)
        grants = await super().acquire(kind, asks, lease_for)
        ended = time.monotonic()
        wall = self._clock()
        events: list[Seen] = []
        for id_, lease in grants.items():
            if not isinstance(lease, Lease):
                continue
            token = lease.token
            self.tokens[id_] = token
            until = lease.expires_at
            events.append(
                Seen("leased", began, ended, key=id_, lease=token, wall=wall, until=until)
            )
        self._log.tell(*events)
        return grants

    async def publish(
        self, kind: str, copies: Mapping[str, tuple[Lease, Copy]], tags: LateTags = None
    ) -> set[str]:
        began = time.monotonic()
        tokens = {id_: lease.token for id_, (lease, _) in copies.items()}
        self._tell("publishing", tokens, began)
        try:
            superseded = await super().publish(kind, copies, tags)
        except StoreError:
            self._tell("unstored", tokens, began)
            raise
        stored = {key: token for key, token in tokens.items() if key not in superseded}
        self._tell("published", stored, began, time.monotonic())
        return superseded

    async def release(
        self, kind: str, leases: Sequence[Lease], failures: Mapping[str, Failure] | None = None
    ) -> None:
        tokens = {lease.id: lease.token for lease in leases}
        self._tell("releasing", tokens, time.monotonic())
        await super().release(kind, leases, failures)

    async def invalidate(self, kind: str, ids: Sequence[str], *, soft: bool = False) -> None:
        began = time.monotonic()
        no_tokens = dict.fromkeys(ids, "")
        self._tell("invalidating", no_tokens, began)
        await super().invalidate(kind, ids, soft=soft)
        self._tell("invalidated", no_tokens, began, time.monotonic())

    def _tell(self, what: str, tokens: Mapping[str, str], at: float, ended: float = 0.0) -> None:
        """Log a step. `tokens`: of the leases, by key."""
        events = [Seen(what, at, ended, key=key, lease=token) for key, token in tokens.items()]
        self._log.tell(*events)
