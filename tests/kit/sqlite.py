"""A SQLite store in a test: opened, filled, and looked at from another process."""

import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

from stillfresh import Clock, Policy
from stillfresh.stores.contract import Ask, Copy, Lease, Record
from stillfresh.stores.sqlite import SqliteStore
from stillfresh.testing import ManualClock

__all__ = ["NOW", "POLICY", "elsewhere", "neighbours", "opened", "publish", "value"]

NOW: Final = 1_700_000_000.0
POLICY: Final = Policy(30, 60, 90)


@asynccontextmanager
async def opened(path: Path, clock: Clock | None = None) -> AsyncIterator[SqliteStore]:
    store = SqliteStore(path, clock=clock or ManualClock(NOW))
    await store.open()
    try:
        yield store
    finally:
        await store.close()


async def publish(
    store: SqliteStore,
    *ids: str,
    value: bytes = b"value",
    kind: str = "post",
    tags: tuple[str, ...] = (),
) -> str:
    """Publishes the value for each; the last one's generation."""
    generation = ""
    records = store.read_now(kind, ids)
    asks = [Ask(id_, seen(records.get(id_, Record())), tags) for id_ in ids]
    copies = {}
    for id_, lease in (await store.acquire(kind, asks, 10)).items():
        assert isinstance(lease, Lease), lease
        copies[id_] = (lease, Copy(lease.token, NOW, POLICY, value))
        generation = lease.token
    assert await store.publish(kind, copies) == set()
    return generation


def seen(record: Record) -> str | None:
    return record.copy.generation if record.copy is not None else None


def value(store: SqliteStore, id_: str = "a", kind: str = "post") -> object:
    """The value that is read now; `...` if there is none."""
    copy = store.read_now(kind, [id_]).get(id_, Record()).copy
    return ... if copy is None else copy.value


def neighbours(path: Path) -> set[str]:
    """What lies beside the file, but for the lock that openers share."""
    return {file.name for file in path.parent.iterdir()} - {path.name, f"{path.name}.lock"}


def elsewhere(script: str, *arguments: object) -> None:
    """In another process: opening the file in this one would drop SQLite's locks."""
    command = [sys.executable, "-c", script, *map(str, arguments)]
    subprocess.run(command, check=True, timeout=30)
