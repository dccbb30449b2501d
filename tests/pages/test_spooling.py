"""I33: what slow visitors have not read yet is in memory up to a limit, then in a file."""

import asyncio
import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from stillfresh.pages import spooling
from stillfresh.pages.spooling import Spool, SpoolRoom
from tests.kit.serve import KeptSite, Proxy

PART = 65_536
BIG = 50_000_000
MEGABYTE = 1_000_000
HEAD = b"HTTP/1.1 200 OK\r\nCache-Control: private\r\nContent-Length: %d\r\n\r\n"


@pytest.fixture(autouse=True)
def _small_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spooling, "MOST_IN_MEMORY", 300)
    monkeypatch.setattr(spooling, "MOST_IN_MEMORY_OF_ALL", 500)
    monkeypatch.setattr(spooling, "FROM_FILE", 70)


def part_of(number: int) -> bytes:
    return b"%04d" % number * 25


async def read_all(spool: Spool) -> bytes:
    parts = []
    while part := await spool.next():
        parts.append(part)
    return b"".join(parts)


async def fill(spool: Spool, count: int) -> None:
    for number in range(count):
        await spool.add(part_of(number))
    spool.end()


def is_empty(room: SpoolRoom) -> bool:
    return room.in_memory == room.in_files == 0


class Steps:
    """Threads whose steps end when a test lets them, all in one turn of the loop."""

    def __init__(self) -> None:
        self._begun: list[tuple[asyncio.Future[Any], Callable[..., Any], tuple[Any, ...]]] = []

    def begin(
        self, _executor: None, step: Callable[..., Any], *arguments: Any
    ) -> asyncio.Future[Any]:
        future = asyncio.get_running_loop().create_future()
        self._begun.append((future, step, arguments))
        return future

    async def end(self, count: int) -> None:
        """End so many steps, as soon as they have begun, in the order in which they began."""
        while len(self._begun) < count:
            await asyncio.sleep(0)
        results = [step(*arguments) for _, step, arguments in self._begun]
        begun = [future for future, _, _ in self._begun]
        self._begun.clear()
        for future, result in zip(begun, results, strict=True):
            future.set_result(result)


class TestI33Spools:
    @pytest.mark.parametrize("max_spill", [0, 150, 1_000, 100_000])
    @pytest.mark.parametrize("reads_first", [0, 2, 7])
    async def test_a_response_comes_out_as_it_came_in(
        self, max_spill: int, reads_first: int
    ) -> None:
        """From memory and file, whichever of the two sides is ahead."""
        room = SpoolRoom(max_spill)
        spool = Spool(room)
        filling = asyncio.ensure_future(fill(spool, 40))
        begun = b"".join([await spool.next() for _ in range(reads_first)])
        await asyncio.sleep(0)
        assert begun + await read_all(spool) == b"".join(map(part_of, range(40)))
        await filling
        spool.close()
        assert is_empty(room)

    async def test_the_file_begins_anew_only_when_the_last_write_is_counted(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A read and a write end in one turn of the loop, and the reader goes on first."""
        monkeypatch.setattr(spooling, "FROM_FILE", 100)
        steps = Steps()
        monkeypatch.setattr(asyncio.get_running_loop(), "run_in_executor", steps.begin)
        spool = Spool(SpoolRoom(1_000))
        for number in range(3):  # memory is full
            await spool.add(part_of(number))
        adding = asyncio.ensure_future(spool.add(part_of(3)))
        await steps.end(1)
        await adding
        texts = [await spool.next() for _ in range(3)]
        reading = asyncio.ensure_future(spool.next())
        adding = asyncio.ensure_future(spool.add(part_of(4)))
        await steps.end(2)
        texts.append(await reading)
        await adding
        spool.end()
        reading = asyncio.ensure_future(read_all(spool))
        await steps.end(1)
        assert [*texts, await reading] == [part_of(number) for number in range(5)]
        spool.close()

    async def test_a_slow_reader_makes_the_site_wait_only_when_the_files_are_full(self) -> None:
        """Memory first, then the file, then the site waits."""
        room = SpoolRoom(1_000)
        spool = Spool(room)
        for number in range(13):
            await spool.add(part_of(number))
        assert (room.in_memory, room.in_files) == (300, 1_000)
        adding = asyncio.ensure_future(spool.add(part_of(13)))
        await asyncio.wait([adding], timeout=0)
        assert not adding.done()
        text = b""
        while not adding.done():
            text += await spool.next()
            await asyncio.sleep(0)
        spool.end()
        text += await read_all(spool)
        assert text == b"".join(map(part_of, range(14)))
        spool.close()
        assert is_empty(room)

    async def test_all_responses_together_have_a_limit_in_memory(self) -> None:
        """Further ones go into their files at once."""
        room = SpoolRoom(10_000)
        spools = [Spool(room) for _ in range(5)]
        for spool in spools:
            for number in range(5):
                await spool.add(part_of(number))
            spool.end()
        assert room.in_memory == 500
        assert room.in_files == 2_000
        for spool in spools:
            assert await read_all(spool) == b"".join(map(part_of, range(5)))
            spool.close()
        assert is_empty(room)

    async def test_a_response_that_breaks_off_ends_with_its_error_after_its_bytes(self) -> None:
        """So that it does not look complete."""
        spool = Spool(SpoolRoom(100_000))
        for number in range(5):
            await spool.add(part_of(number))
        spool.end(ConnectionError("broke off"))
        text = b"".join([await spool.next() for _ in range(3)])
        while len(text) < 500:
            text += await spool.next()
        assert text == b"".join(map(part_of, range(5)))
        with pytest.raises(ConnectionError, match="broke off"):
            await spool.next()
        spool.close()

    async def test_a_full_disk_makes_the_site_wait(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The response stays whole."""

        def refuse(*_: object) -> int:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "pwrite", refuse)
        room = SpoolRoom(100_000)
        spool = Spool(room)
        filling = asyncio.ensure_future(fill(spool, 40))
        assert await read_all(spool) == b"".join(map(part_of, range(40)))
        await filling
        spool.close()
        assert is_empty(room)

    async def test_a_spool_that_is_closed_while_its_file_is_written_gives_everything_back(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The thread that writes keeps the file until it has ended."""
        may_write = threading.Event()
        write = os.pwrite

        def wait_and_write(*given: object) -> int:
            may_write.wait(20)
            return write(*given)  # type: ignore[arg-type]

        monkeypatch.setattr(os, "pwrite", wait_and_write)
        room = SpoolRoom(100_000)
        spool = Spool(room)
        filling = asyncio.ensure_future(fill(spool, 40))
        while not room.in_files:
            await asyncio.sleep(0)
        filling.cancel()
        await asyncio.wait([filling])
        under_way = list(spool._under_way)
        spool.close()
        assert is_empty(room)
        may_write.set()
        await asyncio.gather(*under_way, return_exceptions=True)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def slow_reader(stack: ExitStack, proxy: Proxy, number: int) -> socket.socket:
    """It has read the beginning of a long response, and then pauses."""
    client = stack.enter_context(socket.socket())
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
    client.settimeout(30)
    client.connect(("127.0.0.1", int(proxy.url.rpartition(":")[2])))
    client.sendall(b"GET /big%d HTTP/1.1\r\nHost: localhost\r\nX-Api-Key: 1\r\n\r\n" % number)
    assert client.recv(12, socket.MSG_WAITALL) == b"HTTP/1.1 200"
    return client


def peak_of(process_id: int) -> int:
    """The most bytes of memory that the process has had."""
    status = Path(f"/proc/{process_id}/status").read_text()
    [line] = [line for line in status.splitlines() if line.startswith("VmHWM:")]
    return int(line.split()[1]) * 1_024


class TestI33Memory:
    def test_memory_stays_flat_with_110_slow_readers_of_50_mb(self, stack: ExitStack) -> None:
        """Neither memory nor the connections to the site are theirs: files are, up to a limit."""
        big = HEAD % BIG + b"x" * BIG
        small = HEAD % 3 + b"own"
        site = KeptSite(stack, lambda request: big if b" /big" in request else small)
        options = ("--site-connections", "150", "--max-spill", str(120 * MEGABYTE))
        proxy = Proxy(stack, *options, upstream=site.url)
        assert proxy.get("/own").status_code == 200
        before = peak_of(proxy.process.pid)
        readers = [slow_reader(stack, proxy, number) for number in range(110)]
        assert proxy.get("/own").text == "own"
        for reader in readers:
            assert len(reader.recv(PART)) > 0
        assert peak_of(proxy.process.pid) - before < 165 * MEGABYTE

    def test_slow_readers_do_not_keep_the_connections_to_the_site(self, stack: ExitStack) -> None:
        """As soon as the site has sent everything, its connection serves the next visitor."""
        site = KeptSite(stack, lambda _: HEAD % (5 * MEGABYTE) + b"x" * (5 * MEGABYTE))
        options = ("--site-connections", "2", "--pool-wait", "20s")
        proxy = Proxy(stack, *options, upstream=site.url)
        for number in range(6):
            slow_reader(stack, proxy, number)
        targets = {request.split(b" ")[1] for request in site.asked}
        assert targets == {b"/big%d" % number for number in range(6)}
