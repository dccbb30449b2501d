"""The SQLite store: reads on the caller's thread, writes one after the other.

It maps the contract to the steps of `steps.py`, and decides nothing itself. The thread of the event
loop has its own connection for reading; other threads borrow one of the spare readers. Everything
that writes is a job of the writer (`writer.py`), which runs it in its own thread, or in the
caller's if that may wait. So jobs of all callers run one after the other, and jobs that take long
are cut in slices, between which other jobs run.
"""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from os import PathLike, fspath, urandom
from pathlib import Path
from threading import get_ident
from typing import Any, Final, TypeAlias, TypeVar

import apsw
from msgspec.structs import replace

from stillfresh.checks import checked_bytes
from stillfresh.clock import Clock
from stillfresh.errors import STORE_CLOSED, ConfigError, NotOpen, StoreError, shown
from stillfresh.stores.capabilities import (
    CountsEntries,
    EvictsEntries,
    HasAddress,
    LimitsBytes,
    ListsEntries,
    ReadsInline,
    WaitsInThreads,
)
from stillfresh.stores.contract import (
    After,
    Ask,
    Copy,
    Failures,
    Generations,
    Grant,
    LateTags,
    Lease,
    Put,
    PutOutcome,
    PutResult,
    Record,
    Store,
    StoredEntry,
    StoreStats,
    When,
)
from stillfresh.stores.rules import checked_limit, put_refusal
from stillfresh.stores.sqlite import steps
from stillfresh.stores.sqlite.bounds import WRITTEN_EVERY, FileBounds
from stillfresh.stores.sqlite.connection import CORRUPT, FAILED, PATIENCE, abandon, explained
from stillfresh.stores.sqlite.ownership import Format
from stillfresh.stores.sqlite.readers import SpareReaders
from stillfresh.stores.sqlite.schema import (
    BEHIND_ID_AT,
    ID_AT,
    Row,
    Statements,
    lacks_versions,
    record_of,
)
from stillfresh.stores.sqlite.steps import STORE, own_kinds, own_tables
from stillfresh.stores.sqlite.tags import FIRST
from stillfresh.stores.sqlite.writer import Writer
from stillfresh.turns import THIS_THREAD, outside

T = TypeVar("T")

Execute: TypeAlias = Callable[[str, Sequence[Any]], apsw.Cursor]
SLICE: Final = 500
"""Ids in one step of an eviction; other writes run between steps."""
STRETCH: Final = 2_000
"""Ids in one job of a listing or a count."""
COUNTED_FOR: Final = 10.0
"""Seconds for which the count of a large file is kept."""
CHUNK: Final = 128
"""Ids in one statement: longer texts are not kept prepared."""
LOOK_EVERY: Final = 0.1
"""Seconds after which a reader looks whether it is still the same file."""


class SqliteStore(
    Store,
    ReadsInline,
    WaitsInThreads,
    ListsEntries,
    EvictsEntries,
    CountsEntries,
    LimitsBytes,
    HasAddress,
):
    """Entries in one file, shared by the processes of a machine, opened by `sqlite:///file.db`.

    `patience` is how many seconds a write waits for a locked file. `max_bytes` limits the file.
    """

    def __init__(
        self,
        path: str | PathLike[str],
        *,
        clock: Clock = time.time,
        new_token: Callable[[], str] = lambda: urandom(16).hex(),
        patience: float = PATIENCE,
        file_format: Format = STORE,
        max_bytes: int | str | None = None,
    ) -> None:
        """`file_format`: for a file that has more in it than a store."""
        if fspath(path) in {"", ":memory:"}:
            raise ConfigError(
                f"path: must name a file, not {shown(path)}; to keep copies in memory, use memory://"
            )
        self.path = Path(path).absolute()
        self._patience = patience
        self._writer: Writer | None = None
        self._reader: apsw.Connection | None = None
        self._execute: Execute = _closed
        self._home = 0
        """The thread of the event loop, which has its own reader."""
        self._spare: SpareReaders | None = None
        """Readers of other threads."""
        self._look_at = 0.0
        """When a read looks at the file next."""
        self._format = file_format
        self._clock = clock
        self._new_token = new_token
        self._carried: set[str] = set()
        """Kinds whose tables of layout 1 the writer was asked to carry over."""
        self._counted: tuple[float, StoreStats] | None = None
        self._bounds: FileBounds | None = None
        self._write_uses_at = 0.0
        self._is_shrinking = False
        if max_bytes is not None:
            self.max_bytes = checked_bytes("max_bytes", max_bytes)
            self._bounds = FileBounds(self.max_bytes, clock)

    async def open(self) -> None:
        if self._writer is not None and self._writer.is_stopping:
            await self.close()
        if self._writer is None:
            loop = asyncio.get_running_loop()
            self._writer = Writer(self.path, self._format, self._adopt, loop, self._patience)
        writer = self._writer
        try:
            await writer.opened()
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """Wait for queued steps; the last process that closes the file leaves no log."""
        self._write_uses()
        self._execute = _closed
        reader = self._reader
        self._reader = None
        self._replace_spare_readers(None)
        if reader is not None:
            abandon(reader)  # the writer writes the log back, if the file is still ours
        writer = self._writer
        if writer is not None:
            await writer.stopped()
            if self._writer is writer:  # another task may have opened the store meanwhile
                self._writer = None

    def _adopt(self, reader: apsw.Connection) -> None:
        """Use this connection for reading: the first, or that of a newly opened file."""
        if self._writer is None or self._writer.is_stopping:
            abandon(reader)
            return
        old = self._reader
        self._carried.clear()
        self._read_from(reader)
        self._replace_spare_readers(SpareReaders(self.path, self._writer.connect_reader))
        if old is not None:
            abandon(old)

    def _replace_spare_readers(self, readers: SpareReaders | None) -> None:
        old = self._spare
        self._spare = readers
        if old is not None:
            old.close()

    def _read_from(self, reader: apsw.Connection) -> None:
        self._reader = reader
        self._home = get_ident()
        self._execute = reader.cursor().execute

    def _cannot_read(self, exc: Exception) -> None:
        """A missing table, or a broken or missing file, counts as empty."""
        if isinstance(exc, CORRUPT) and self._writer is not None and self._reader is not None:
            self._writer.mend(self._reader)
        elif not str(exc).startswith("no such table"):
            raise explained(self.path, exc) from exc

    def _look(self) -> None:
        """Is it still our file, and are there uses to write? StoreError if the file is lost."""
        if self._reader is None:
            raise NotOpen(STORE_CLOSED)
        self._opened().check_file()
        now = time.monotonic()
        self._look_at = now + LOOK_EVERY
        if now >= self._write_uses_at:
            self._write_uses()

    def _opened(self) -> Writer:
        if self._writer is None:
            raise NotOpen(STORE_CLOSED)
        return self._writer

    async def read(
        self, kind: str, ids: Sequence[str], known: Generations = None, lag: float = 0.0
    ) -> dict[str, Record]:
        del lag
        return self.read_now(kind, ids, known)

    def read_now(
        self, kind: str, ids: Sequence[str], known: Mapping[str, str] | None = None
    ) -> dict[str, Record]:
        """Read in any thread; a damaged file counts as empty."""
        if time.monotonic() > self._look_at:
            self._look()
        sql = own_tables(kind).sql
        if get_ident() == self._home:
            return self._read(self._execute, kind, ids, known or {}, sql)
        spare = self._spare
        if spare is None:
            raise NotOpen(STORE_CLOSED)
        reader = spare.take()
        try:
            return self._read(reader.connection.execute, kind, ids, known or {}, sql)
        finally:
            spare.give_back(reader)

    def _read(
        self,
        execute: Execute,
        kind: str,
        ids: Sequence[str],
        known: Mapping[str, str],
        sql: Statements,
    ) -> dict[str, Record]:
        if len(ids) != 1:
            return self._read_many(execute, kind, ids, known, sql)
        id_ = ids[0]
        generation = known.get(id_)
        try:
            row = execute(sql.point, (generation, id_)).get
        except FAILED as exc:
            older = self._older(exc, kind, sql)
            return {} if older is None else self._read(execute, kind, ids, known, older)
        if row is None:
            return {}
        if self._bounds is not None:
            self._bounds.note(kind, ids)
        return {id_: record_of(row, generation)}

    def _read_many(
        self,
        execute: Execute,
        kind: str,
        ids: Sequence[str],
        known: Mapping[str, str],
        sql: Statements,
    ) -> dict[str, Record]:
        pairs = [(id_, known.get(id_)) for id_ in dict.fromkeys(ids)]
        chunks = [pairs[start : start + CHUNK] for start in range(0, len(pairs), CHUNK)]
        try:
            rows = [row for chunk in chunks for row in _select(execute, sql, chunk)]
        except FAILED as exc:
            older = self._older(exc, kind, sql)
            return {} if older is None else self._read(execute, kind, ids, known, older)
        if self._bounds is not None:
            self._bounds.note(kind, [row[ID_AT] for row in rows])
        return {row[ID_AT]: record_of(row[:ID_AT], known=row[BEHIND_ID_AT]) for row in rows}

    def _older(self, exc: Exception, kind: str, sql: Statements) -> Statements | None:
        """After a read that failed: statements for a table of layout 1; None: nothing was read."""
        if lacks_versions(exc):
            self._carry_over(kind)
            return sql.layout_1
        self._cannot_read(exc)
        return None

    def _carry_over(self, kind: str) -> None:
        """Give a table of layout 1 its new columns soon; reads of it are slow until then.

        Asked for once: if the file cannot be written now, the next write does it.
        """
        if self._writer is not None and kind not in self._carried:
            self._carried.add(kind)
            self._writer.put(own_tables(kind).ensure_tables)

    async def acquire(self, kind: str, asks: Sequence[Ask], lease_for: float) -> dict[str, Grant]:
        tables = own_tables(kind)

        def job(file: apsw.Connection) -> dict[str, Grant]:
            return tables.acquire(file, asks, lease_for, self._clock(), self._new_token)

        return await self.run(job, urgent=False)

    async def publish(
        self, kind: str, copies: Mapping[str, tuple[Lease, Copy]], tags: LateTags = None
    ) -> set[str]:
        def job(file: apsw.Connection) -> set[str]:
            tables = own_tables(kind)
            bounds = self._bounds
            if bounds is None:
                return tables.publish(file, copies, self._clock(), tags)
            bounds.count(file, kind)
            superseded = tables.publish(file, copies, self._clock(), tags)
            stored = {id_: copy for id_, (_, copy) in copies.items() if id_ not in superseded}
            if bounds.make_room(file, kind, stored):
                self._shrink_soon()
            return superseded

        return await self.run(job, urgent=False)

    def new_generation(self) -> str:
        """Draw the generation of a copy that is to be put."""
        return self._new_token()

    async def put(self, kind: str, puts: Mapping[str, Put]) -> dict[str, PutResult]:
        """Never AGAIN. All ids are stored in one transaction, or none if it raises."""
        refused = self._refused_adds(kind, puts)
        if refused is not None:
            return refused

        def job(file: apsw.Connection) -> dict[str, PutResult]:
            tables = own_tables(kind)
            bounds = self._bounds
            if bounds is None:
                return tables.put(file, puts, self._clock())
            bounds.count(file, kind)
            results = tables.put(file, puts, self._clock())
            stored = {
                id_: puts[id_].copy
                for id_, result in results.items()
                if result.outcome is PutOutcome.STORED
            }
            if bounds.make_room(file, kind, stored):
                self._shrink_soon()
            return results

        return await self.run(job, urgent=False)

    def _refused_adds(self, kind: str, puts: Mapping[str, Put]) -> dict[str, PutResult] | None:
        """The results of adds that are all refused by what is stored now; None: the writer decides.

        A refusal writes nothing, so it needs neither the writer nor the file's lock.
        """
        for put in puts.values():
            if put.when is not When.NO_LIVE_COPY:
                return None
        try:
            records = self.read_now(kind, list(puts))
        except StoreError:  # the writer waits longer for a lock than a read does
            return None
        now = self._clock()
        results: dict[str, PutResult] = {}
        for id_, put in puts.items():
            record = records.get(id_)
            refusal = None if record is None else put_refusal(put, record.copy, now)
            if refusal is None:
                return None
            results[id_] = refusal
        return results

    def _shrink_soon(self) -> None:
        """Drop copies in slices, each its own job; other writes run in between."""
        bounds = self._bounds
        writer = self._writer

        def job(file: apsw.Connection) -> None:
            self._is_shrinking = False
            if bounds is not None and bounds.shrink(file):
                self._shrink_soon()

        if writer is not None and not self._is_shrinking:
            self._is_shrinking = writer.put(job)

    def _write_uses(self) -> None:
        """Write the readers' notes in groups; notes that cannot be written are dropped."""
        self._write_uses_at = time.monotonic() + WRITTEN_EVERY
        if self._bounds is not None and self._writer is not None:
            for job in self._bounds.uses():
                self._writer.put(job)

    async def renew(self, kind: str, leases: Sequence[Lease], lease_for: float) -> set[str]:
        tables = own_tables(kind)

        def job(file: apsw.Connection) -> set[str]:
            return tables.renew(file, leases, lease_for, self._clock())

        return await self.run(job, urgent=False)

    async def release(self, kind: str, leases: Sequence[Lease], failures: Failures = None) -> None:
        await self.run(
            lambda file: own_tables(kind).release(file, leases, failures or {}), urgent=False
        )

    async def invalidate(self, kind: str, ids: Sequence[str], *, soft: bool = False) -> None:
        await self.run(lambda file: own_tables(kind).invalidate(file, ids, soft=soft))

    async def invalidate_tag(self, tag: str, *, soft: bool = False) -> list[tuple[str, str]]:
        """Invalidate in slices, each a job of its own: other writers pass between them.

        One of them may store a value that was made of an entry which is still to come. So if there
        is more than one slice, all are invalidated once more.
        """
        reached, slices = await self._invalidate_tag_once(tag, soft=soft)
        if slices > 1:
            reached |= (await self._invalidate_tag_once(tag, soft=soft))[0]
        return list(reached)

    async def _invalidate_tag_once(
        self, tag: str, *, soft: bool
    ) -> tuple[dict[tuple[str, str], None], int]:
        """Invalidate what has the tag; return what was reached, and in how many slices."""
        reached: dict[tuple[str, str], None] = {}
        slices = 0
        after: After = FIRST
        job = partial(steps.invalidate_tag, tag=tag, soft=soft, size=SLICE)
        while after is not None:
            keys, after = await self.run(partial(job, after=after))
            reached.update(dict.fromkeys(keys))
            slices += 1
        return reached, slices

    async def delete(self, kind: str, ids: Sequence[str]) -> None:
        await self.run(lambda file: own_tables(kind).delete(file, ids))

    async def evict(self, before: float) -> int:
        """Evict in slices, each its own job."""
        dropped = 0
        for kind in await self.run(own_kinds, writes=False):
            evict = own_tables(kind).evict
            start: str | None = ""
            while start is not None:
                job = partial(evict, start=start, before=before, size=SLICE)
                number, start = await self.run(job, urgent=False)
                dropped += number
        return dropped

    async def stats(self) -> StoreStats:
        """Count in slices, with writers in between; the count of a large file is kept for 10 s."""
        now = self._clock()
        if self._counted is not None and 0 <= now - self._counted[0] < COUNTED_FOR:
            return self._counted[1]
        job = partial(steps.count_slice, now=now, size=STRETCH)
        stats, after = await self.run(partial(job, after=None), writes=False)
        is_large = after is not None
        while after is not None:
            more, after = await self.run(partial(job, after=after), writes=False)
            stats = replace(
                more, copies=stats.copies + more.copies, leases=stats.leases + more.leases
            )
        self._counted = (now, stats) if is_large else None
        return stats

    async def entries(
        self, kind: str | None = None, search: str = "", after: After = None, limit: int = 100
    ) -> list[StoredEntry]:
        """Along the tables' own order, in slices."""
        checked_limit(limit)
        entries: list[StoredEntry] = []
        kinds = await self.run(own_kinds, writes=False)
        for each, first in steps.listed_kinds(kinds, kind, after):
            listed = own_tables(each).listed
            start: str | None = first
            while start is not None and len(entries) < limit:
                left = limit - len(entries)
                job = partial(listed, start=start, search=search, limit=left, size=STRETCH)
                page, start = await self.run(job, writes=False)
                entries += page
        return entries

    async def run(
        self, job: Callable[[apsw.Connection], T], *, writes: bool = True, urgent: bool = True
    ) -> T:
        """Run a step in a transaction: on the writer's thread, or here if this thread may wait."""
        if THIS_THREAD.has_turn:
            writer = self._opened()
            with outside():
                return writer.run_here(job, writes=writes, urgent=urgent)
        return await self._opened().run(job, writes=writes, urgent=urgent)


def _select(
    execute: Execute, sql: Statements, pairs: Sequence[tuple[str, str | None]]
) -> list[Row]:
    """Padded to a power of two with pairs that match nothing: few statements to prepare."""
    size = 1 << (len(pairs) - 1).bit_length()
    bindings = [part for pair in pairs for part in pair]
    bindings += [None] * (2 * (size - len(pairs)))
    return execute(sql.many(size), bindings).fetchall()


def _closed(_sql: str, _bindings: Sequence[Any]) -> apsw.Cursor:
    raise NotOpen(STORE_CLOSED)
