"""The PostgreSQL store: the contract as calls of the server's functions (S1, S2, S11)."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from secrets import token_hex
from typing import Any, Final

from stillfresh.checks import checked_whole
from stillfresh.clock import Clock
from stillfresh.durations import Duration
from stillfresh.errors import ConfigError, shown
from stillfresh.stores.contract import (
    Ask,
    Copy,
    Failures,
    Generations,
    Grant,
    Held,
    LateTags,
    Lease,
    Mark,
    Newer,
    Record,
    Superseded,
)
from stillfresh.stores.postgres.channel import PgChannel
from stillfresh.stores.postgres.link import PgLink
from stillfresh.stores.postgres.listing import FIRST, count, list_entries
from stillfresh.stores.postgres.schema import (
    ASKER,
    LONGEST_KEY,
    SCHEMA,
    Row,
    SortedIds,
    checked_schema,
    key_of,
    name_of,
    quoted,
    record_of,
    text_of,
)
from stillfresh.stores.server import SLICE, ServerStore, slices

TIMEOUT: Final = 1.0
MAX_CONNECTIONS: Final = 10
MOST_FAILURES: Final = (1 << 63) - 1


class PostgresStore(ServerStore[PgLink, str]):
    """Entries in PostgreSQL, opened by its address, `postgresql://user@host/database`.

    `hosts` are libpq connection strings of the servers that may be the primary. Leases are judged
    by the server's clock, unless `clock` is given. Caches on one `schema` are one cache. `timeout`
    ends a step that takes longer, with a StoreError.
    """

    _list, _count = staticmethod(list_entries), staticmethod(count)
    _listening = PgChannel

    def __init__(
        self,
        *hosts: str,
        schema: str = SCHEMA,
        timeout: Duration = TIMEOUT,
        max_connections: int = MAX_CONNECTIONS,
        clock: Clock | None = None,
    ) -> None:
        super().__init__(checked_schema(schema), timeout, clock)
        most = checked_whole("max_connections", max_connections)
        self._new_link = partial(PgLink, hosts, self._place, most=most, timeout=self._timeout)

    async def _call(
        self,
        function: str,
        *given: Any,  # noqa: ANN401 (whatever the function takes)
        settle: Callable[[], Sequence[Any]] | None = None,
        urgent: bool = False,
    ) -> list[Row]:
        places = ", ".join(f"${number}" for number in range(1, len(given) + 1))
        statement = f"SELECT * FROM {quoted(self._place)}.{function}({places})"  # noqa: S608 (checked)
        return await self._opened().run(statement, given, settle, urgent=urgent)

    def _now(self) -> float | None:
        """The time that the functions use; None: the server's own."""
        return None if self._clock is None else float(self._clock())

    async def read(
        self, kind: str, ids: Sequence[str], known: Generations = None, lag: float = 0.0
    ) -> dict[str, Record]:
        """A value is sent only if the caller does not know its generation."""
        del lag
        records: dict[str, Record] = {}
        known = known or {}
        for names in _cut(ids):
            given = [known.get(id_) for id_ in names.ids] if known else []
            for row in await self._call("read", _kind(kind), names.keys, given):
                id_ = names.by_key[row[0]]
                records[id_] = record_of(row, known.get(id_))
        return records

    async def acquire(self, kind: str, asks: Sequence[Ask], lease_for: float) -> dict[str, Grant]:
        """S8: if sent again, the server recognises this request's lease, or grants a new token."""
        grants: dict[str, Grant] = {}
        by_id = {ask.id: ask for ask in asks}
        for names in _cut(list(by_id)):
            ordered = [by_id[id_] for id_ in names.ids]
            rows = await self._call(
                "acquire",
                _kind(kind),
                names.keys,
                names.long,
                [ask.seen for ask in ordered],
                [ask.failures for ask in ordered],
                [ask.take_over for ask in ordered],
                *names.tagged({ask.id: ask.tags for ask in ordered}),
                token_hex(ASKER // 2),
                float(lease_for),
                self._now(),
            )
            for outcome, token, epoch, *row in rows:
                id_ = names.by_key[row[0]]
                grants[id_] = _grant(id_, outcome, (token, row[7], epoch), tuple(row))
        return {id_: grants[id_] for id_ in by_id}

    async def publish(
        self, kind: str, copies: Mapping[str, tuple[Lease, Copy]], tags: LateTags = None
    ) -> set[str]:
        """After a lost answer, the generation shows whether it was done, or nothing does (S2)."""
        superseded, asked_again, late = set(copies), set[str](), tags or {}
        sizes = {
            id_: len(copy.value) if isinstance(copy.value, bytes) else 0
            for id_, (_, copy) in copies.items()
        }
        for names in _cut(list(copies), sizes):
            pairs = [copies[id_] for id_ in names.ids]
            given = (
                _kind(kind),
                names.keys,
                [lease.token for lease, _ in pairs],
                [copy.generation for _, copy in pairs],
                [float(copy.fetched_at) for _, copy in pairs],
                [copy.policy.fresh_for for _, copy in pairs],
                [copy.policy.stale_for for _, copy in pairs],
                [copy.policy.error_for for _, copy in pairs],
                [int(copy.mark) for _, copy in pairs],
                [copy.value if isinstance(copy.value, bytes) else None for _, copy in pairs],
                [lease.epoch for lease, _ in pairs],
                [id_ in late for id_ in names.ids],
                *names.tagged(late),
            )
            first, again = ((*given, is_again, self._now()) for is_again in (False, True))
            settle = partial(_noted, asked_again, names.ids, again)
            rows = await self._call("publish", *first, settle=settle)
            superseded -= {names.by_key[key] for (key,) in rows}
        return Superseded(superseded, superseded & asked_again)

    async def renew(self, kind: str, leases: Sequence[Lease], lease_for: float) -> set[str]:
        tokens = {lease.id: lease.token for lease in leases}
        lost = set(tokens)
        for names in _cut(list(tokens)):
            given = [tokens[id_] for id_ in names.ids]
            rows = await self._call(
                "renew", _kind(kind), names.keys, given, float(lease_for), self._now()
            )
            lost -= {names.by_key[key] for (key,) in rows}
        return lost

    async def release(self, kind: str, leases: Sequence[Lease], failures: Failures = None) -> None:
        tokens = {lease.id: lease.token for lease in leases}
        for names in _cut(list(tokens)):
            found = [(failures or {}).get(id_) for id_ in names.ids]
            await self._call(
                "release",
                _kind(kind),
                names.keys,
                [tokens[id_] for id_ in names.ids],
                [None if it is None else min(it.count, MOST_FAILURES) for it in found],
                [None if it is None else float(it.retry_at) for it in found],
                [None if it is None else name_of(it.error) for it in found],
            )

    async def invalidate(self, kind: str, ids: Sequence[str], *, soft: bool = False) -> None:
        """One step voids the lease and marks the copy; a hard mark stays hard."""
        mark = int(Mark.SOFT if soft else Mark.HARD)
        for names in _cut(ids):
            kinds = [_kind(kind)] * len(names.keys)
            await self._call("invalidate", kinds, names.keys, names.long, mark, urgent=True)

    async def invalidate_tag(self, tag: str, *, soft: bool = False) -> list[tuple[str, str]]:
        """In slices: no id can be leased with the tag and not be named.

        If an answer got lost, ids that had nothing but a lease are voided, and missing in it.
        """
        mark, name = int(Mark.SOFT if soft else Mark.HARD), name_of(tag)
        reached: list[tuple[str, str]] = []
        after = FIRST
        while True:
            given = (key_of(name), name, mark, *after, SLICE)
            rows = await self._call("invalidate_tag", *given, urgent=True)
            reached += [(text_of(kind), text_of(id_ or key)) for kind, key, id_ in rows]
            if len(rows) < SLICE:
                return reached
            after = rows[-1][:2]

    async def delete(self, kind: str, ids: Sequence[str]) -> None:
        for names in _cut(ids):
            await self._call("delete", _kind(kind), names.keys, names.long, urgent=True)

    async def evict(self, before: float) -> int:
        """Along the table's order, in slices; other steps run in between."""
        dropped, after = 0, list(FIRST)
        while after[0] is not None:
            ((number, *after),) = await self._call("evict", float(before), *after, SLICE)
            dropped += number
        return dropped


def _kind(kind: str) -> bytes:
    if not kind or len(name := name_of(kind)) > LONGEST_KEY:
        raise ConfigError(f"kind: must have 1 to {LONGEST_KEY} bytes, not {shown(kind)}")
    return name


def _cut(ids: Sequence[str], sizes: Mapping[str, int] | None = None) -> Iterator[SortedIds]:
    """Slices for one statement each."""
    lengths = [0 if sizes is None else sizes[id_] for id_ in ids]
    return (SortedIds(ids[some]) for some in slices(lengths, lambda _: False))


def _noted(asked_again: set[str], ids: Iterable[str], given: Sequence[Any]) -> Sequence[Any]:
    asked_again.update(ids)
    return given


def _grant(id_: str, outcome: str, lease: tuple[str, float, int], row: Row) -> Grant:
    match outcome:
        case "lease":
            return Lease(id_, *lease)
        case "held":
            return Held(row[7])
        case _:
            return Newer(record_of(row))
