"""F13: a cached feed of 100 topics of 5 KB against the bare rows, decoded or not, and a peer."""

import asyncio
import gc
import json
import random
import string
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from statistics import median
from typing import cast

import apsw
import diskcache
import msgspec

from benchmarks import tried
from benchmarks.harness import Figures, Progress, Row, Section
from stillfresh.systems.feed import FeedCache, FeedEngine, FeedSource, Topic

__all__ = ["section"]

NOW = 1_700_000_000
TOPICS = 100
BODY = 4_800
DAYS = 7
ROUNDS = 101

TYPED = "a list, from the file, as typed topics"
AGAIN = "the same list again, nothing written since"
RAW = "a list as raw JSON, read again, its rows as before"
RAW_AGAIN = "the same list as raw JSON again, nothing written since"
FIRST_RAW = "a list as raw JSON, from the file, its rows never seen"
BARE_TYPED = "the bare rows, decoded by msgspec"
BARE_KEPT = "the bare rows, decoded by msgspec, and their bytes kept"
BARE_LOADS = "the bare rows, decoded by json.loads"
BARE_JOINED = "the bare rows' bytes, joined to an array"
BARE_BYTES = "the bare rows' bytes"
DISKCACHE = "diskcache, the list as one value"
ROWS = """
    SELECT topic_json FROM feed_topics
    WHERE created_at >= ? AND deleted = 0 ORDER BY created_at DESC
"""
BYTES = ROWS.replace("topic_json", "CAST(topic_json AS BLOB)")
KEPT = ROWS.replace("topic_json", "topic_uuid, CAST(topic_json AS BLOB), cached_at")


class Nowhere:
    """Nothing is asked of it: every list is fresh."""

    async def day_index(self, day: object, category: object) -> list[Topic]:
        raise AssertionError(f"{day}, {category}: not fresh")


NOWHERE = cast("FeedSource", Nowhere())


def prose(number: int, size: int) -> str:
    """Words, and a new paragraph now and then."""
    dice, words = random.Random(number), []
    while size > 0:
        words.append("".join(dice.choices(string.ascii_lowercase, k=dice.randint(2, 10))))
        words.append("\n\n" if dice.random() < 1 / 60 else " ")
        size -= len(words[-2]) + 1
    return "".join(words)


def topic(number: int, age: int, body: int) -> Topic:
    text = prose(number, body)
    return Topic(
        f"{number:032x}", "alice", f"Topic {number}", NOW - age, body=text, category_id="general"
    )


def filled(path: Path, topics: Iterable[Topic]) -> None:
    """As another implementation would: the seed's tables, by plain SQL."""
    FeedCache.open(path, clock=lambda: NOW).close()
    encode = msgspec.json.Encoder().encode
    connection = apsw.Connection(str(path))
    connection.execute("BEGIN")
    connection.executemany(
        "INSERT INTO feed_topics VALUES (?, ?, ?, ?, 0, ?)",
        ((it.topic_uuid, encode(it).decode(), "general", it.created_at, NOW) for it in topics),
    )
    connection.execute("INSERT INTO feed_cache_meta VALUES ('index:all:7', ?)", (NOW,))
    connection.execute("COMMIT")
    connection.close()


def outdate(cache: FeedCache) -> None:
    """As if something else had been written to the file."""
    for reader in cache._idle:
        for found in reader._lists.values():
            found.version = None


def forget_all(cache: FeedCache) -> None:
    for reader in cache._idle:
        reader._lists.clear()
        reader._known.clear()
        reader.known_bytes = 0


def nothing() -> None:
    """No preparation."""


async def in_turns(
    contenders: dict[str, tuple[Callable[[], object], Callable[[], Awaitable[object]]]],
) -> Figures:
    """Microseconds: (prepare, run) of each in shuffled turns; before, once the same unmeasured."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    order, dice = list(contenders), random.Random(1)
    gc.collect()
    gc.disable()
    try:
        for _ in range(ROUNDS):
            dice.shuffle(order)
            for name in order:
                prepare, run = contenders[name]
                prepare()
                await run()
                prepare()
                began = time.perf_counter_ns()
                await run()
                times[name].append((time.perf_counter_ns() - began) / 1000)
    finally:
        gc.enable()
    return {name: median(values) for name, values in times.items()}


async def lists(folder: Path) -> Figures:
    path = folder / "feed.db"
    topics = [topic(number, number * 3600, BODY) for number in range(TOPICS)]
    filled(path, topics)
    peer = diskcache.Cache(str(folder / "diskcache"))
    peer.set("feed", topics)
    bare, since = apsw.Connection(str(path)), (NOW - DAYS * 86400,)
    decode = msgspec.json.Decoder(Topic).decode
    cache = FeedCache.open(path, clock=lambda: NOW)
    engine = FeedEngine(cache, NOWHERE)

    async def decoded() -> object:
        return [decode(text) for (text,) in bare.execute(ROWS, since)]

    async def kept() -> object:
        """The least that memory in front needs: a row's bytes, to see that it is as before."""
        rows = bare.execute(KEPT, since)
        return [(decode(text), uuid, text, stored) for uuid, text, stored in rows]

    async def loaded() -> object:
        return [json.loads(text) for (text,) in bare.execute(ROWS, since)]

    async def read() -> object:
        return [text for (text,) in bare.execute(BYTES, since)]

    async def joined() -> object:
        return b"[" + b",".join([text for (text,) in bare.execute(BYTES, since)]) + b"]"

    async def unpickled() -> object:
        return peer.get("feed")

    figures = await in_turns(
        {
            TYPED: (lambda: forget_all(cache), engine.get_all),
            AGAIN: (nothing, engine.get_all),
            RAW_AGAIN: (nothing, engine.get_all_json),
            RAW: (lambda: outdate(cache), engine.get_all_json),
            FIRST_RAW: (lambda: forget_all(cache), engine.get_all_json),
            BARE_TYPED: (nothing, decoded),
            BARE_KEPT: (nothing, kept),
            BARE_LOADS: (nothing, loaded),
            BARE_BYTES: (nothing, read),
            BARE_JOINED: (nothing, joined),
            DISKCACHE: (nothing, unpickled),
        }
    )
    await engine.close()
    cache.close()
    bare.close()
    peer.close()
    return figures


async def sizes(folder: Path) -> Figures:
    """The same 100 topics in the window, in files of different sizes."""
    contenders: dict[str, tuple[Callable[[], object], Callable[[], Awaitable[object]]]] = {}
    opened: list[tuple[FeedCache, FeedEngine]] = []
    for total in (10_000, 100_000):
        path = folder / f"{total}.db"
        recent = [topic(number, number * 3600, 500) for number in range(TOPICS)]
        old = (topic(n, (DAYS + 1) * 86400 + n * 20, 500) for n in range(TOPICS, total))
        filled(path, [*recent, *old])
        cache = FeedCache.open(path, clock=lambda: NOW)
        engine = FeedEngine(cache, NOWHERE)
        opened.append((cache, engine))

        def forget(cache: FeedCache = cache) -> None:
            forget_all(cache)

        contenders[f"{total:,} topics in the file"] = (forget, engine.get_all)
    figures = await in_turns(contenders)
    for cache, engine in opened:
        await engine.close()
        cache.close()
    return figures


def section(progress: Progress) -> Section:
    with tempfile.TemporaryDirectory() as name:
        progress("feed: lists of 100 topics")
        found = asyncio.run(lists(Path(name)))
        progress("feed: 10,000 and 100,000 topics")
        size = asyncio.run(sizes(Path(name)))
    small, large = size.values()
    typed, again = found[TYPED], found[RAW_AGAIN]
    rows = [
        Row(
            "F13",
            f"{TYPED}, against {BARE_TYPED}",
            typed / found[BARE_TYPED],
            1.3,
            tried=tried.FEED_TYPED,
        ),
        Row("F13", f"{TYPED}, against {BARE_KEPT}", typed / found[BARE_KEPT]),
        Row(
            "F13",
            f"{TYPED}, against {BARE_LOADS}",
            typed / found[BARE_LOADS],
            0.5,
            tried=tried.FEED_LOADS,
        ),
        Row("F13", f"{AGAIN}: times faster", typed / found[AGAIN], 20, at_least=True),
        Row("F13", f"{RAW_AGAIN}, against {BARE_BYTES}", again / found[BARE_BYTES], 1.5),
        Row("F13", f"{RAW}, against {BARE_JOINED}", found[RAW] / found[BARE_JOINED], 1.5),
        Row("F13", f"{RAW}, against {BARE_BYTES}", found[RAW] / found[BARE_BYTES]),
        Row("F13", "a list from a file of 100,000 topics, against 10,000", large / small, 1.2),
        Row("F13", f"{TYPED}, against {DISKCACHE}", typed / found[DISKCACHE]),
    ]
    title = "Feed Cache (F13)"
    return Section(title, rows, {"100 topics of 5 KB, µs": found, "a 7-day list, µs": size})
