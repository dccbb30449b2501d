"""From what was measured on one machine to a large fleet: the calculation of docs/scale.md.

Each line names the figures that it comes from. Nothing here is measured.
"""

from math import ceil

from benchmarks.harness import Figures
from benchmarks.report import table

__all__ = ["calculation"]

GATEWAYS, KEYS, VIEWERS = 1_000, 10**8, 10**6
LOOKS, IN_USE, FRESH_FOR = 20, 10**7, 300
NODE_BYTES, BUSY = 24e9, 0.7
"""What one server is given: of 32 GB of memory, and of one core."""
CLUSTER, MOST_PRIMARIES = "Valkey cluster", 32
"""All keys are in 32 buckets, and a primary without a bucket has nothing to do."""
SHARED, OWN = "the same 200 ids", "5 ids of their own"
LEAST = 0.05
"""µs: a cost below it is lost in the differences between two runs."""
UPDATES = VIEWERS * LOOKS / FRESH_FOR
LOADS = IN_USE / FRESH_FOR
WATCHED = VIEWERS * LOOKS // GATEWAYS


class Fleet:
    """The lines, from figures at the size of the fleet, or the largest that was measured."""

    def __init__(self, figures: dict[str, dict[str, Figures]]) -> None:
        self._figures = figures
        self.rows: list[list[str]] = []

    def of(self, part: str, name: str, at: int = 0) -> float:
        by_size = self._figures.get(part, {}).get(name, {})
        largest = max(by_size, key=int, default="")
        return by_size.get(str(at), by_size.get(largest, float("nan")))

    def line(self, what: str, source: str, comes_to: str) -> None:
        self.rows.append([what, source, comes_to])

    def traffic(self) -> None:
        self.line("loads", f"{IN_USE:,} keys in use / {FRESH_FOR} s", f"{LOADS:,.0f} / s")
        seen = f"{VIEWERS:,} viewers × {LOOKS} ids / {FRESH_FOR} s"
        self.line("reads of the store by gateways that watch", seen, f"{UPDATES:,.0f} / s")
        size = self.of("viewers", f"bytes of an update | {SHARED}")
        sent = f"{UPDATES:,.0f} / s, {UPDATES * size / 1e6:,.0f} MB/s"
        self.line("updates to viewers", f"{seen}, {size:,.0f} bytes each", sent)
        told = f"{LOADS * GATEWAYS / 1e6:,.0f} million / s"
        self.line("messages of changes", f"every load is told to {GATEWAYS:,} gateways", told)
        size = self.of("processes", f"bytes of a message | {CLUSTER}")
        sent = f"{LOADS * GATEWAYS * size / 1e6:,.0f} MB/s"
        self.line("traffic of these messages", f"{size:,.0f} bytes each on {CLUSTER}", sent)

    def store(self, name: str, held: str) -> None:
        """`held`: the store whose bytes of an entry were measured."""
        each = self.of("keys", f"bytes of an entry of 200 bytes | {held}")
        size = f"{KEYS * each / 1e9:,.0f} GB"
        self.line(f"{name}: size", f"{KEYS:,} × {each:,.0f} bytes of an entry", size)
        load = self.of("processes", f"CPU of the server, µs (loads) | {name}")
        read = self.of("processes", f"CPU of the server, µs (reads) | {name}")
        work = (LOADS * load + UPDATES * read) / 1e6
        costs = f"{load:,.0f} µs a load, {read:,.0f} µs a read"
        self.line(f"{name}: loads and reads", costs, f"{work:,.1f} cores")
        tell = self.of("processes", f"CPU of the server for a message, µs | {name}")
        push = LOADS * GATEWAYS * tell / 1e6
        if tell < LEAST:
            self.line(f"{name}: messages", "less than could be measured for each", "not known")
            return
        self.line(f"{name}: messages", f"{tell:.2f} µs for each that is sent", f"{push:,.0f} cores")
        if name == CLUSTER:
            by_size, by_work = KEYS * each / NODE_BYTES, work / BUSY
            most = "24 GB and 70 % of one core each"
            silent = f"{most}; no gateway listens"
            self.line(f"{name}: primaries", most, servers(by_size, by_work + push / BUSY))
            self.line(f"{name}: primaries, no messages", silent, servers(by_size, by_work))

    def gateway(self) -> None:
        each, rate = "one of 1,000 gateways", UPDATES / GATEWAYS
        held = VIEWERS // GATEWAYS
        few, many = (
            self.of("viewers", f"CPU of an update, µs | {it}", held) for it in (SHARED, OWN)
        )
        costs = (
            f"{rate:,.0f} / s × {few:.1f} µs (viewers share ids) to {many:,.0f} µs (they do not)"
        )
        core = f"{rate * few / 1e4:.2f} to {rate * many / 1e4:.1f} % of a core"
        self.line(f"{each}: updates", costs, core)
        renew = self.of("watched", "refresh of all, µs of CPU a key | memory")
        core = f"{WATCHED / FRESH_FOR * renew / 1e4:.1f} % of a core"
        costs = f"{WATCHED:,} watched keys / {FRESH_FOR} s × {renew:,.0f} µs"
        self.line(f"{each}: refreshes", costs, core)
        hear = self.of("processes", f"CPU of a listener for a message, µs | {CLUSTER}")
        core = f"{LOADS * hear / 1e4:,.0f} % of a core"
        self.line(f"{each}: messages heard", f"{LOADS:,.0f} / s × {hear:.1f} µs", core)
        kept = self.of("watched", "bytes of a watched key | memory")
        size = self.of("viewers", f"bytes of a connection | {SHARED}", held)
        parts = f"{held:,} × {size:,.0f} bytes a connection, {WATCHED:,} × {kept:,.0f} bytes a key"
        self.line(f"{each}: memory", parts, f"{(held * size + WATCHED * kept) / 1e6:,.0f} MB")


def servers(*shares: float) -> str:
    """How many primaries; the layout has work for no more than `MOST_PRIMARIES`."""
    found = max(shares)
    if found != found:  # noqa: PLR0124 (not measured)
        return "?"
    return f"{ceil(found):,}" + (", of 32 at most" if found > MOST_PRIMARIES else "")


def calculation(figures: dict[str, dict[str, Figures]]) -> str:
    """A table of what the fleet needs."""
    fleet = Fleet(figures)
    fleet.traffic()
    fleet.store(CLUSTER, "Valkey")
    fleet.store("PostgreSQL", "PostgreSQL")
    fleet.gateway()
    return table(["what", "from", "comes to"], fleet.rows)
