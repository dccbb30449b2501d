"""What a whole run consists of, how long each part takes, and how much is left."""

from collections.abc import Sequence
from dataclasses import dataclass, field

__all__ = ["PARTS", "Pace", "Part"]


@dataclass(frozen=True, slots=True)
class Part:
    """One section, measured in a process of its own by `section` of a module."""

    name: str
    title: str
    module: str
    seconds: float
    """How long it takes on two cores, with nothing else running."""
    limit: float = 1200.0
    """Seconds after which it is ended: it hangs."""


PARTS = (
    Part("ttl_cache", "TtlCache (M11)", "benchmarks.ttl_cache", 155),
    Part("engine", "The engine and SQLite (E14, S4)", "benchmarks.engine", 70),
    Part("sqlite", "SQLite writers (S14)", "benchmarks.sqlite_store", 45),
    Part("misses", "Misses, and what a key takes (E39, E41, G24)", "benchmarks.misses", 65),
    Part("sync", "Threads (E20)", "benchmarks.sync", 10),
    Part("redis", "Redis (S5)", "benchmarks.redis_store", 8),
    Part("postgres", "PostgreSQL (S11)", "benchmarks.postgres_store", 60),
    Part("postgres_sync", "PostgreSQL in threads (S14)", "benchmarks.postgres_sync", 20),
    Part("django", "Django (E20, S14)", "benchmarks.django_cache", 40),
    Part("disk_cache", "DiskCache (D2)", "benchmarks.disk_cache", 20),
    Part("codecs", "Codecs (D3)", "benchmarks.codecs", 20),
    Part("http_clients", "HTTP clients (D1)", "benchmarks.http_clients", 40),
    Part("dynamodb", "DynamoDB and S3 (S6)", "benchmarks.dynamodb", 25),
    Part("coordinator", "TTL coordinator (C6)", "benchmarks.coordinator", 190),
    Part("feed", "Feed Cache (F13)", "benchmarks.feed", 30),
    Part("waiting", "Longest-Waiting (W14)", "benchmarks.waiting", 2),
    Part("browsers", "Pages as browsers ask (I36)", "benchmarks.pages_browsers", 110),
    Part("pages", "Pages (I16)", "benchmarks.pages", 185),
    Part("live", "Live updates (G4)", "benchmarks.live", 30),
    Part("growth", "Growth (E28)", "benchmarks.growth", 150),
    Part("behaviours", "Behaviours (T6)", "benchmarks.behaviours", 170),
)


@dataclass
class Pace:
    """Where a run is, and how long the rest will take at the speed so far."""

    parts: Sequence[Part]
    began: float
    """Of the run."""
    taken: list[float] = field(default_factory=list)
    """Seconds, for each part that has ended."""

    @property
    def total(self) -> float:
        return sum(part.seconds for part in self.parts)

    def done(self, now: float) -> float:
        """Of `total`: ended parts whole, the present one at most nine tenths of it."""
        ended = sum(part.seconds for part in self.parts[: len(self.taken)])
        if len(self.taken) == len(self.parts):
            return ended
        present = now - self.began - sum(self.taken)
        return ended + min(present / self._slowness, 0.9 * self.parts[len(self.taken)].seconds)

    def left(self, now: float) -> float:
        return (self.total - self.done(now)) * self._slowness

    @property
    def _slowness(self) -> float:
        """This machine now, to what was expected."""
        expected = sum(part.seconds for part in self.parts[: len(self.taken)])
        return max(0.5, sum(self.taken) / expected) if expected else 1.0
