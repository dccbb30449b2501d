"""The PostgreSQL store: it maps the contract to calls of the server's functions.

A statement whose answer was lost is sent again, so a statement may arrive late or twice. The
lease's token is the fence of loads. Puts, invalidations and deletions carry the newest stamp that
this process has heard (`heard.py`): the server does nothing to an entry that has changed since, and
says so. A request for a lease may also arrive after its caller has given up; `GivenUpRequests`
recognises such a lease.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from secrets import token_hex
from typing import Any, Final, NamedTuple

from msgspec.structs import replace

from stillfresh.checks import checked_whole
from stillfresh.clock import Clock
from stillfresh.durations import Duration
from stillfresh.errors import ConfigError, StoreError, shown
from stillfresh.stores.capabilities import ReadsInThreads, WaitsInThreads
from stillfresh.stores.contract import (
    ACTS_ONCE,
    UNREAD,
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
    Put,
    PutOutcome,
    PutResult,
    Record,
    Superseded,
)
from stillfresh.stores.given_up import GivenUpRequests
from stillfresh.stores.postgres.channel import PgChannel
from stillfresh.stores.postgres.heard import LastHeard
from stillfresh.stores.postgres.link import PgLink
from stillfresh.stores.postgres.listing import FIRST, count, list_entries
from stillfresh.stores.postgres.schema import (
    ASKER,
    CHANGED,
    GOOD_FOR,
    HELD_UNTIL,
    LONGEST_KEY,
    SCHEMA,
    TOKEN,
    Row,
    SortedIds,
    checked_schema,
    id_of,
    key_of,
    name_of,
    quoted,
    record_of,
)
from stillfresh.stores.postgres.short import (
    ShortForms,
    StampFence,
    is_plain,
    news_of,
    put_arguments,
)
from stillfresh.stores.server import SLICE, ServerStore, slices
from stillfresh.stores.versions import NO_VERSION

TIMEOUT: Final = 1.0
MAX_CONNECTIONS: Final = 10
MOST_FAILURES: Final = (1 << 63) - 1
PERSISTENCE: Final = 10.0
"""Seconds for which entries that others keep changing are invalidated or deleted again."""
WAS_STORED: Final = (PutOutcome.STORED, PutOutcome.REPLACED)


class LeaseRow(NamedTuple):
    """The answer to a request for one lease."""

    outcome: str
    epoch: int
    row: Row
    """The record's."""


class EntryRow(NamedTuple):
    """The row of one entry."""

    kind: bytes
    key: bytes
    id: bytes | None
    """The whole id, if it is too long for a key."""


class PostgresStore(ServerStore[PgLink, str], ReadsInThreads, WaitsInThreads):
    """Entries in PostgreSQL, opened by its address, `postgresql://user@host/database`.

    `hosts` are libpq connection strings of the servers that may be the primary. Leases are judged
    by the server's clock, unless `clock` is given. Caches on one `schema` are one cache. `timeout`
    ends a step that takes longer, with a StoreError.
    """

    _list = staticmethod(list_entries)
    _count = staticmethod(count)
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
        self._given_up = GivenUpRequests(ASKER)
        self._short = ShortForms(self._place)
        most = checked_whole("max_connections", max_connections)
        self._new_link = partial(PgLink, hosts, self._place, most=most, timeout=self._timeout)

    async def _call(
        self,
        function: str,
        *arguments: Any,  # noqa: ANN401 (whatever the function takes)
        resent_arguments: Callable[[], Sequence[Any]] | None = None,
        urgent: bool = False,
        short: str | None = None,
    ) -> list[Row]:
        """Call a function of the schema, or run its short form.

        `resent_arguments` is that of the link's `run`.
        """
        statement = short or self._statement(function, len(arguments))
        return await self._opened().run(statement, arguments, resent_arguments, urgent=urgent)

    def _statement(self, function: str, count: int) -> str:
        """The call of a function with so many arguments."""
        places = ", ".join(f"${number}" for number in range(1, count + 1))
        return f"SELECT * FROM {quoted(self._place)}.{function}({places})"  # noqa: S608 (checked)

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
        last_heard = self._last_heard()
        for names in _cut(ids):
            for row in await self._opened().run(*self._reading(kind, names, known)):
                id_ = names.by_key[row[0]]
                record = record_of(row, known.get(id_))
                last_heard.hear_stamp(row[CHANGED])
                if record is None:
                    continue
                if record.held_until is not None and self._is_left_behind(row):
                    record = replace(record, held_until=None)
                    if record == Record():
                        continue
                records[id_] = record
        return records

    def _reading(
        self, kind: str, names: SortedIds, known: Mapping[str, str]
    ) -> tuple[str, tuple[Any, ...]]:
        """The statement that reads these ids, and its arguments."""
        if len(names.ids) == 1 and self._opened().has_own_sessions:
            return self._short.read, (known.get(names.ids[0]), _kind(kind), names.keys[0])
        generations = [known.get(id_) for id_ in names.ids] if known else []
        return self._statement("read", 3), (generations, _kind(kind), names.keys)

    def read_in_thread(
        self, kind: str, ids: Sequence[str], known: Generations = None
    ) -> dict[str, Record]:
        """A read that fails here goes the general way, which tries it again.

        A lease that a request of this process left behind stays in its record: what is served does
        not depend on it, and what is loaded goes the general way.
        """
        known = known or {}
        records = {}
        for names in _cut(ids):
            for row in self._opened().read_in_thread(*self._reading(kind, names, known)):
                id_ = names.by_key[row[0]]
                record = record_of(row, known.get(id_))
                if record is not None:
                    records[id_] = record
        return records

    async def acquire(self, kind: str, asks: Sequence[Ask], lease_for: float) -> dict[str, Grant]:
        """If sent again, the server recognises this request's lease, or grants a new token.

        A lease that a request of this process left behind is taken at once: the server gives it to
        its own asker.
        """
        grants: dict[str, Grant] = {}
        by_id = {ask.id: ask for ask in asks}
        for names in _cut(list(by_id)):
            askers = {id_: token_hex(ASKER // 2) for id_ in names.ids}
            rows = await self._ask_for_leases(kind, names, by_id, askers, lease_for)
            left_behind = {
                id_: answer.row[TOKEN][:ASKER]
                for id_, answer in rows.items()
                if answer.outcome == "held" and self._is_left_behind(answer.row)
            }
            if left_behind:
                left_ids = SortedIds(list(left_behind))
                taken = await self._ask_for_leases(kind, left_ids, by_id, left_behind, lease_for)
                rows |= taken
                for id_, answer in taken.items():
                    if answer.outcome == "lease":
                        self._given_up.take(left_behind[id_], lease_for)
            grants.update((id_, _grant(id_, answer)) for id_, answer in rows.items())
        return {id_: grants[id_] for id_ in by_id}

    async def _ask_for_leases(
        self,
        kind: str,
        names: SortedIds,
        by_id: Mapping[str, Ask],
        askers: Mapping[str, str],
        lease_for: float,
    ) -> dict[str, LeaseRow]:
        """The server's answer for each id.

        Askers whose request may still take a lease are remembered.
        """
        ordered = [by_id[id_] for id_ in names.ids]
        arguments = (
            [askers[id_] for id_ in names.ids],
            float(lease_for),
            _kind(kind),
            names.keys,
            names.long,
            [ask.seen for ask in ordered],
            [ask.failures for ask in ordered],
            [ask.take_over for ask in ordered],
            *names.tagged({ask.id: ask.tags for ask in ordered}),
            self._now(),
        )

        def resent_arguments() -> Sequence[Any]:
            self._given_up.note_sent_again(askers.values(), lease_for)
            return arguments

        try:
            answer = await self._call("acquire", *arguments, resent_arguments=resent_arguments)
        except BaseException:
            self._given_up.give_up(askers.values(), lease_for)
            raise
        rows: dict[str, LeaseRow] = {}
        for outcome, epoch, *row in answer:
            id_ = names.by_key[row[0]]
            rows[id_] = LeaseRow(outcome, epoch, tuple(row))
            self._last_heard().hear_stamp(epoch)
            if outcome != "lease":
                self._given_up.note_end(askers[id_])
        return rows

    def _is_left_behind(self, row: Row) -> bool:
        """True if the lease in a record's row is one under which nobody loads."""
        token = row[TOKEN]
        return token is not None and self._given_up.is_left_behind(token)

    async def publish(
        self, kind: str, copies: Mapping[str, tuple[Lease, Copy]], tags: LateTags = None
    ) -> set[str]:
        """After a lost answer, the generation may show whether the copy was stored.

        If it does not, the id is `unsure`.
        """
        superseded = set(copies)
        sent_again: set[str] = set()
        late = tags or {}
        sizes = {id_: _size(copy) for id_, (_, copy) in copies.items()}
        for names in _cut(list(copies), sizes):
            pairs = [copies[id_] for id_ in names.ids]
            arguments = (
                _kind(kind),
                names.keys,
                [lease.token for lease, _ in pairs],
                *_columns([copy for _, copy in pairs]),
                [copy.version or None for _, copy in pairs],
                [lease.epoch for lease, _ in pairs],
                [id_ in late for id_ in names.ids],
                *names.tagged(late),
            )
            first = (*arguments, False, self._now())
            again = (*arguments, True, self._now())
            resent_arguments = partial(_note_sent_again, sent_again, names.ids, again)
            rows = await self._call("publish", *first, resent_arguments=resent_arguments)
            for key, stamp in rows:
                superseded.discard(names.by_key[key])
                self._last_heard().hear_stamp(stamp)
            for lease, _ in pairs:
                self._given_up.note_end(lease.token)
        return Superseded(superseded, superseded & sent_again)

    async def put(self, kind: str, puts: Mapping[str, Put]) -> dict[str, PutResult]:
        """AGAIN if an entry changed after what this process has heard; then it has heard of it.

        If the answer gets lost, the same statement is sent again. The server knows each put by its
        generation, and answers that it was stored, or stored and replaced.
        """
        # Read once: what a new connection hears later must not let an earlier attempt act.
        fence = StampFence(self._last_heard().life, self._last_heard().stamp, self._good_until())
        results: dict[str, PutResult] = {}
        if len(puts) == 1:
            for row in await self._put_in_short(kind, puts, fence):
                return {id_: self._put_result(row) for id_ in puts}
        sent_again: set[str] = set()
        sizes = {id_: _size(put.copy) for id_, put in puts.items()}
        for names in _cut(list(puts), sizes):
            ordered = [puts[id_] for id_ in names.ids]
            arguments = (
                _kind(kind),
                names.keys,
                names.long,
                *_columns([put.copy for put in ordered]),
                [put.copy.value is UNREAD for put in ordered],
                [put.copy.version or None for put in ordered],
                [put.when.value for put in ordered],
                [put.seen for put in ordered],
                [int(put.seen_mark) for put in ordered],
                [put.tags is not None for put in ordered],
                [put.late is not None for put in ordered],
                *_tag_columns(names, puts),
                *fence,
                self._now(),
            )
            resent_arguments = partial(_note_sent_again, sent_again, names.ids, arguments)
            for row in await self._call("put", *arguments, resent_arguments=resent_arguments):
                results[names.by_key[row[0]]] = self._put_result(row)
        for id_ in sent_again:
            if puts[id_].when in ACTS_ONCE and not results[id_].is_stored:
                raise StoreError(
                    f"{kind} {shown(id_)}: the PostgreSQL server did not answer at first, and it "
                    f"does not show whether the value was stored; read it, and try again"
                )
        return results

    async def _put_in_short(
        self, kind: str, puts: Mapping[str, Put], fence: StampFence
    ) -> list[Row]:
        """The row of one plain put that was stored; none if the general way must be taken."""
        link = self._opened()
        ((id_, put),) = puts.items()
        key = name_of(id_)
        if not link.has_own_sessions or not is_plain(put) or len(key) > LONGEST_KEY:
            return []
        name = _kind(kind)
        arguments = put_arguments(name, key, put, fence, now=self._now())
        news = news_of(name, key, put.copy.generation) if link.pushes else None
        return await self._call("put", *arguments, news, short=self._short.put)

    def _put_result(self, row: Row) -> PutResult:
        _, name, version, stamp, life, now = row[:6]
        outcome = PutOutcome(name)
        form = NO_VERSION if version is None else bytes(version)
        if outcome is PutOutcome.AGAIN:
            self._last_heard().hear(life, stamp, now)
        if outcome not in WAS_STORED:
            return PutResult(outcome, form)
        self._last_heard().hear_stamp(stamp)
        return PutResult(outcome, form, stamp)

    async def renew(self, kind: str, leases: Sequence[Lease], lease_for: float) -> set[str]:
        tokens = {lease.id: lease.token for lease in leases}
        lost = set(tokens)
        for names in _cut(list(tokens)):
            rows = await self._call(
                "renew",
                _kind(kind),
                names.keys,
                [tokens[id_] for id_ in names.ids],
                float(lease_for),
                self._now(),
            )
            lost -= {names.by_key[key] for (key,) in rows}
        return lost

    async def release(self, kind: str, leases: Sequence[Lease], failures: Failures = None) -> None:
        tokens = {lease.id: lease.token for lease in leases}
        by_id = failures or {}
        for names in _cut(list(tokens)):
            ordered = [by_id.get(id_) for id_ in names.ids]
            counts = [
                None if failure is None else min(failure.count, MOST_FAILURES)
                for failure in ordered
            ]
            retries = [None if failure is None else float(failure.retry_at) for failure in ordered]
            errors = [None if failure is None else name_of(failure.error) for failure in ordered]
            await self._call(
                "release",
                _kind(kind),
                names.keys,
                [tokens[id_] for id_ in names.ids],
                counts,
                retries,
                errors,
            )
        for lease in leases:
            self._given_up.note_end(lease.token)

    async def invalidate(self, kind: str, ids: Sequence[str], *, soft: bool = False) -> None:
        """One step voids the lease and marks the copy; a hard mark stays hard."""
        mark = int(Mark.SOFT if soft else Mark.HARD)
        for names in _cut(ids):
            await self._void("invalidate", _rows(kind, names), mark)

    async def invalidate_tag(self, tag: str, *, soft: bool = False) -> list[tuple[str, str]]:
        """Invalidate the tag in slices.

        Every id that was leased with the tag before is in the answer, except that after a lost
        answer ids that had nothing but a lease are voided and missing in it.

        Until a statement is committed, others see its entries as they were. A value may be made of
        one of them under a lease that was taken meanwhile, which the statement does not see. So if
        there was an entry, all are invalidated once more.
        """
        mark = int(Mark.SOFT if soft else Mark.HARD)
        reached = await self._invalidate_tag_once(tag, mark)
        if reached:
            reached |= await self._invalidate_tag_once(tag, mark)
        return list(reached)

    async def _invalidate_tag_once(self, tag: str, mark: int) -> dict[tuple[str, str], None]:
        """Invalidate the tag in one slice after another; return what was reached."""
        name = name_of(tag)
        reached: dict[tuple[str, str], None] = {}
        after = FIRST
        while True:
            last_heard = self._last_heard()
            ((*columns, again_kinds, again_keys, stamp, life, now),) = await self._call(
                "invalidate_tag",
                key_of(name),
                name,
                mark,
                *after,
                SLICE,
                last_heard.life,
                last_heard.stamp,
                self._now(),
                urgent=True,
            )
            last_heard.hear(life, stamp, now)
            rows = [EntryRow(*row) for row in _rows_of(*columns)]
            changed_since = set(_rows_of(again_kinds, again_keys))
            await self._void("invalidate", [row for row in rows if row[:2] in changed_since], mark)
            reached.update(dict.fromkeys(filter(None, map(_name, rows))))
            if len(rows) < SLICE:
                return reached
            after = rows[-1][:2]

    async def delete(self, kind: str, ids: Sequence[str]) -> None:
        if len(ids) == 1 and await self._is_deleted_in_short(kind, ids[0]):
            return
        for names in _cut(ids):
            await self._void("delete", _rows(kind, names))

    async def _is_deleted_in_short(self, kind: str, id_: str) -> bool:
        """True if one id was deleted; False if the general way must be taken."""
        link = self._opened()
        key = name_of(id_)
        if not link.has_own_sessions or len(key) > LONGEST_KEY:
            return False
        name = _kind(kind)
        heard = link.heard
        news = news_of(name, key) if link.pushes else None
        arguments = (name, key, self._now(), heard.life, heard.stamp, news)
        rows = await self._call("delete", *arguments, urgent=True, short=self._short.delete)
        for stamp, *_ in rows:
            heard.hear_stamp(stamp)
        return bool(rows)

    async def _void(self, function: str, rows: Sequence[EntryRow], *options: object) -> None:
        """Invalidate or delete, and ask again for entries that others changed meanwhile.

        The server leaves out entries that have changed since this process heard from it. So a
        statement that arrives late does nothing to what came after it.
        """
        give_up_at = time.monotonic() + PERSISTENCE
        while rows:
            last_heard = self._last_heard()
            columns = [list(column) for column in zip(*rows, strict=True)]
            arguments = (*columns, *options, last_heard.life, last_heard.stamp, self._now())
            answer = await self._call(function, *arguments, urgent=True)
            ((again_kinds, again_keys, stamp, life, now),) = answer
            last_heard.hear(life, stamp, now)
            changed_since = set(_rows_of(again_kinds, again_keys))
            rows = [row for row in rows if row[:2] in changed_since]
            if rows and time.monotonic() > give_up_at:
                raise StoreError(
                    f"{len(rows)} entries were changed again and again for {PERSISTENCE:g} s, and "
                    f"the PostgreSQL store could not {function} them; try again"
                )

    async def evict(self, before: float) -> int:
        """Along the table's order, in slices; other steps run in between."""
        dropped = 0
        after = list(FIRST)
        while after[0] is not None:
            arguments = (float(before), *after, SLICE, self._now())
            ((number, *after),) = await self._call("evict", *arguments)
            dropped += number
        return dropped

    def _last_heard(self) -> LastHeard:
        return self._opened().heard

    def _good_until(self) -> float:
        if self._clock is None:
            return self._last_heard().good_until()
        return float(self._clock()) + GOOD_FOR


def _kind(kind: str) -> bytes:
    name = name_of(kind) if kind else b""
    if not name or len(name) > LONGEST_KEY:
        raise ConfigError(f"kind: must have 1 to {LONGEST_KEY} bytes, not {shown(kind)}")
    return name


def _cut(ids: Sequence[str], sizes: Mapping[str, int] | None = None) -> Iterator[SortedIds]:
    """Slices for one statement each."""
    lengths = [0 if sizes is None else sizes[id_] for id_ in ids]
    return (SortedIds(ids[part]) for part in slices(lengths, lambda _: False))


def _rows(kind: str, names: SortedIds) -> list[EntryRow]:
    name = _kind(kind)
    return [EntryRow(name, key, id_) for key, id_ in zip(names.keys, names.long, strict=True)]


def _name(row: EntryRow) -> tuple[str, str] | None:
    """The kind and the id; None if the row is damaged."""
    kind = id_of(row.kind, None)
    id_ = id_of(row.key, row.id)
    return None if kind is None or id_ is None else (kind, id_)


def _rows_of(*columns: Sequence[bytes | None] | None) -> list[tuple[Any, ...]]:
    """Rows of columns that the server sent as arrays; an array without elements is None."""
    return list(zip(*(column or () for column in columns), strict=True))


def _size(copy: Copy) -> int:
    return len(copy.value) if isinstance(copy.value, bytes) else 0


def _columns(copies: Sequence[Copy]) -> tuple[list[Any], ...]:
    """The columns of copies, from the generation to the value."""
    return (
        [copy.generation for copy in copies],
        [float(copy.fetched_at) for copy in copies],
        [copy.policy.fresh_for for copy in copies],
        [copy.policy.stale_for for copy in copies],
        [copy.policy.error_for for copy in copies],
        [int(copy.mark) for copy in copies],
        [copy.value if isinstance(copy.value, bytes) else None for copy in copies],
    )


def _tag_columns(
    names: SortedIds, puts: Mapping[str, Put]
) -> tuple[list[bytes], list[bytes], list[bool]]:
    """All tags of puts, the key that has each, and whether it came with the value."""
    tags, tagged = names.tagged({id_: puts[id_].tags or () for id_ in names.ids})
    late, late_tagged = names.tagged({id_: puts[id_].late or () for id_ in names.ids})
    are_late = [False] * len(tags) + [True] * len(late)
    return tags + late, tagged + late_tagged, are_late


def _note_sent_again(
    sent_again: set[str], ids: Iterable[str], arguments: Sequence[Any]
) -> Sequence[Any]:
    """Called when a statement is sent again: note its ids; the arguments to send."""
    sent_again.update(ids)
    return arguments


def _grant(id_: str, answer: LeaseRow) -> Grant:
    row = answer.row
    match answer.outcome:
        case "lease":
            return Lease(id_, row[TOKEN], row[HELD_UNTIL], answer.epoch)
        case "held":
            return Held(row[HELD_UNTIL])
        case _:
            return Newer(record_of(row) or Record())
