"""What the tests of the command line share: calling it, and a store to look into."""

import asyncio
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from click.testing import CliRunner, Result

from stillfresh.cli import main
from stillfresh.stores.contract import Ask, Copy, Failure, Lease, Store
from stillfresh.stores.sqlite import SqliteStore

COMMAND = [sys.executable, "-W", "error", "-m", "stillfresh"]


def stillfresh(*arguments: str, **options: Any) -> "subprocess.CompletedProcess[str]":
    """As a process, in a terminal of nobody's."""
    return subprocess.run(
        [*COMMAND, *arguments],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        **options,
    )


@contextmanager
def interruptible(command: Sequence[str]) -> "Iterator[subprocess.Popen[str]]":
    """A process that SIGINT ends.

    A shell starts background jobs with SIGINT ignored, and children inherit that.
    """
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        signal.signal(signal.SIGINT, before)
        try:
            yield process
        finally:
            process.kill()


def call(*arguments: str) -> Result:
    """In this process: the same, without the second that an interpreter takes."""
    return CliRunner().invoke(main, arguments)


def said(*arguments: str) -> str:
    """What it printed, having succeeded."""
    result = call(*arguments)
    assert (result.exit_code, result.stderr) == (0, ""), result.output
    return result.stdout


async def put(
    store: Store, kind: str, ids: Iterable[str], policy: Any, at: float, *tags: str
) -> None:
    """A copy of each, as it was at that time."""
    asks = [Ask(id_, tags=tags) for id_ in ids]
    grants = await store.acquire(kind, asks, 10)
    leases = [grant for grant in grants.values() if isinstance(grant, Lease)]
    assert len(leases) == len(asks)
    copies = {lease.id: (lease, Copy(lease.token, at, policy, b"value")) for lease in leases}
    assert await store.publish(kind, copies) == set()


async def fail(store: Store, kind: str, id_: str, failure: Failure) -> None:
    (lease,) = (await store.acquire(kind, [Ask(id_)], 10)).values()
    assert isinstance(lease, Lease)
    await store.release(kind, [lease], {id_: failure})


def filled(path: Path, work: Any) -> Path:
    """A SQLite store in which `work(store)` has been done."""

    async def do() -> None:
        store = SqliteStore(path)
        await store.open()
        try:
            await work(store)
        finally:
            await store.close()

    asyncio.run(do())
    return path


def neighbours(path: Path) -> dict[str, bytes]:
    """The file and what lies beside it, but for the lock that openers share."""
    files = [file for file in path.parent.iterdir() if file.is_file() and file.suffix != ".lock"]
    return {file.name: file.read_bytes() for file in files}
