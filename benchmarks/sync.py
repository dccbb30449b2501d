"""E20: what a read costs in a thread, against `TtlCache.get`; and a call of the loop thread."""

import gc
import random
import tempfile
from collections.abc import Iterable
from contextlib import ExitStack
from statistics import median

from benchmarks.harness import Contender, Figures, Progress, Row, Section
from stillfresh import SyncCache, SyncResource, TtlCache

__all__ = ["section"]

HOUR = 3600
KEY = "sku-1"
ROUNDS = 51
UNIT = "`TtlCache.get(key)`"
CALL, GET, REPORT = "`prices(key)`", "`prices.get(key)`", '`report(2026, "eu")`'
WITHIN = "`prices.get(key)` on SQLite within `memory_for`"
SQLITE, KNOWN = "`prices(key)` on SQLite", "`prices.known([key])` on SQLite"
HOP, LOAD = "a call of the loop thread", "`prices.refresh(key)`, loaded in the calling thread"


def raced(contenders: Iterable[Contender]) -> Figures:
    """As `harness.race`, without an event loop: a SyncCache would refuse to wait there."""
    loops = [(it.name, it.compiled()) for it in contenders]
    times: dict[str, list[float]] = {name: [] for name, _ in loops}
    dice = random.Random(1)
    gc.collect()
    gc.disable()
    try:
        for _ in range(ROUNDS):
            dice.shuffle(loops)
            for name, loop in loops:
                if isinstance(elapsed := loop(), float):
                    times[name].append(elapsed)
    finally:
        gc.enable()
    return {name: median(values) for name, values in times.items()}


def declared(stack: ExitStack, url: str, memory_for: int = 0) -> SyncResource[str, int]:
    cache = stack.enter_context(SyncCache(url))

    @cache.batched("price", fresh_for=HOUR, memory_for=memory_for)
    def prices(skus: list[str]) -> dict[str, int]:
        return {sku: len(sku) for sku in skus}

    prices(KEY)
    return prices


def hot(stack: ExitStack, folder: str) -> list[Contender]:
    """What is answered in the calling thread."""
    keys, memory = [KEY] * 2_000, declared(stack, "memory://")
    report = stack.enter_context(SyncCache("memory://")).cached("report", fresh_for=HOUR)(told)
    report(2026, "eu")
    held = TtlCache[str, int](HOUR)
    held.insert(KEY, 1)
    within = declared(stack, f"sqlite:///{folder}/within.db", HOUR)
    sqlite = declared(stack, f"sqlite:///{folder}/read.db")
    return [
        Contender(UNIT, "held.get(key)", {"held": held}, keys),
        Contender(CALL, "prices(key)", {"prices": memory}, keys),
        Contender(GET, "prices.get(key)", {"prices": memory}, keys),
        Contender(REPORT, 'report(2026, "eu")', {"report": report}, keys),
        Contender(WITHIN, "prices.get(key)", {"prices": within}, keys),
        Contender(SQLITE, "prices(key)", {"prices": sqlite}, keys),
        Contender(KNOWN, "prices.known([key])", {"prices": sqlite}, keys),
    ]


def told(year: int, region: str = "eu") -> str:
    return f"{region} {year}"


def called(stack: ExitStack) -> list[Contender]:
    """What is done on the loop thread."""
    keys, prices = [KEY] * 100, declared(stack, "memory://")
    return [
        Contender(HOP, 'prices.known(["none"])', {"prices": prices}, keys),
        Contender(LOAD, "prices.refresh(key)", {"prices": prices}, keys),
    ]


def section(progress: Progress) -> Section:
    """Everything E20 promises of speed."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        progress("reading a hot key in a thread")
        figures = raced(hot(stack, folder))
        progress("calling the loop thread")
        hops = raced(called(stack))
    unit = figures[UNIT]
    rows = [
        Row("E20", f"{what}, against {UNIT}", figures[what] / unit, 3)
        for what in (CALL, GET, REPORT, WITHIN)
    ]
    rows.append(
        Row("E20", f"{HOP}, against {SQLITE}", hops[HOP] / figures[SQLITE], 1, at_least=True)
    )
    microseconds = {name: it / 1000 for name, it in (figures | hops).items()}
    return Section("Threads (E20)", rows, {"a read in a thread, µs": microseconds})
