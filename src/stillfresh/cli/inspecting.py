"""`stillfresh inspect` and `stillfresh explain`: what is in a store, and why (G10, E12)."""

import asyncio
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any, Final

import click
from msgspec import structs

from stillfresh.cli.output import (
    age_text,
    as_json,
    moment_text,
    plain,
    print_json,
    print_table,
    size_text,
    working,
)
from stillfresh.cli.places import about_names, looked_into, pages_of, say
from stillfresh.cli.program import TEXT, Command
from stillfresh.engine import Explanation
from stillfresh.engine.explain import PAGE, Listed, listed
from stillfresh.engine.explain import explain as explained
from stillfresh.errors import without_password
from stillfresh.freshness import Verdict
from stillfresh.stores.contract import MOST_LISTED, Record, StoreStats

VERDICTS: Final = tuple(Verdict)
COUNTED: Final = 10_000
AT_ONCE: Final = MOST_LISTED


@dataclass
class Inspected:
    stats: StoreStats
    entries: list[Listed] = field(default_factory=list)
    """The first ones."""
    kinds: dict[str, Counter[str]] = field(default_factory=dict)
    counted: int = 0
    is_complete: bool = True

    def count(self, page: list[Listed], shown: int) -> None:
        self.counted += len(page)
        self.entries += page[: max(0, shown - len(self.entries))]
        for entry in page:
            counts = self.kinds.setdefault(entry.kind, Counter())
            counts[entry.verdict] += 1
            counts["bytes"] += entry.size or 0


@click.command(
    cls=Command,
    examples=[
        "stillfresh inspect sqlite:///site.db",
        "stillfresh inspect redis://localhost:6379/0 --kind page --search /blog/ --limit 50",
        "stillfresh inspect site.db --all --json",
    ],
)
@click.argument("store")
@click.option("--kind", type=TEXT, help="Only entries of this kind.")
@click.option("--search", default="", type=TEXT, help="Only entries with this text in their id.")
@click.option(
    "--limit", default=20, show_default=True, help="Entries to list.", type=click.IntRange(0)
)
@click.option("--all", "is_all", is_flag=True, help=f"Count them all, not the first {COUNTED:,}.")
@as_json
def inspect(
    *, store: str, kind: str | None, search: str, limit: int, is_all: bool, is_json: bool
) -> None:
    """Show what is in STORE, and how fresh it is.

    How much, by kind and verdict, and which entries. Only reads, also while other processes use
    the store. Redis is walked over in slices; DynamoDB is scanned, which costs about half a read
    unit for every 4 KB of rows.
    """
    most = None if is_all else max(COUNTED, limit)
    with working("Counting entries:") as advance:
        seen = asyncio.run(_look(store, kind, search, shown=limit, most=most, advance=advance))
    if is_json:
        print_json(_inspected(store, seen))
        return
    _print_summary(store, seen)
    if limit:
        click.echo()
        _print_entries(seen.entries)


async def _look(
    address: str,
    kind: str | None,
    search: str,
    *,
    shown: int,
    most: int | None,
    advance: Any,  # noqa: ANN401
) -> Inspected:
    async with looked_into(address) as store:
        seen = Inspected(await store.stats())
        async for page in pages_of(store, kind, search, AT_ONCE):
            seen.count(listed(page, time.time()), shown)
            advance(len(page))
            if most is not None and seen.counted >= most:
                seen.is_complete = len(page) < AT_ONCE
                break
    return seen


def _inspected(address: str, seen: Inspected) -> dict[str, Any]:
    return {
        "store": without_password(address),
        "copies": seen.stats.copies,
        "leases": seen.stats.leases,
        "bytes": seen.stats.bytes,
        **_more(seen.stats),
        "counted": seen.counted,
        "complete": seen.is_complete,
        "kinds": {
            kind: {name: counts[name] for name in (*VERDICTS, "bytes")}
            for kind, counts in sorted(seen.kinds.items())
        },
        "entries": seen.entries,
    }


def _more(stats: StoreStats) -> dict[str, int]:
    """What one kind of store counts besides: a feed its topics and comments."""
    common = StoreStats.__struct_fields__
    return {name: value for name, value in structs.asdict(stats).items() if name not in common}


def _print_summary(address: str, seen: Inspected) -> None:
    stats = seen.stats
    print_table(
        ("", ""),
        [
            ("store", without_password(address)),
            ("copies", f"{stats.copies:,}"),
            ("leases", f"{stats.leases:,}"),
            ("bytes", size_text(stats.bytes)),
            *((name, f"{number:,}") for name, number in _more(stats).items()),
        ],
    )
    if seen.kinds:
        click.echo()
        head = ("kind", *VERDICTS, "values")
        rows = [
            (kind, *(f"{counts[verdict]:,}" for verdict in VERDICTS), size_text(counts["bytes"]))
            for kind, counts in sorted(seen.kinds.items())
        ]
        print_table(head, rows, right=head[1:])
    if not seen.is_complete:
        click.echo(f"Of the first {seen.counted:,} entries; --all counts them all.")


def _print_entries(entries: list[Listed]) -> None:
    if not entries:
        click.echo("No entries.")
        return
    now = time.time()
    rows = [
        (
            entry.kind,
            entry.id,
            entry.verdict,
            age_text(entry.age),
            _left(entry, now),
            size_text(entry.size),
            _notes(entry),
        )
        for entry in entries
    ]
    head = ("kind", "id", "verdict", "age", "fresh for", "size", "")
    print_table(head, rows, right=("age", "fresh for", "size"))


def _left(entry: Listed, now: float) -> str:
    if entry.fresh_until is None or entry.verdict is not Verdict.FRESH:
        return "-"
    return age_text(entry.fresh_until - now)


def _notes(entry: Listed) -> str:
    absence = "not shared" if entry.kind == PAGE else "absent upstream"  # each visitor's own page
    notes = [
        absence if entry.absent else "",
        "invalidated" if entry.invalidated else "",
        "being loaded" if entry.held_until is not None else "",
        f"failed {_times(entry.failures)}: {entry.error}" if entry.failures else "",
    ]
    return ", ".join(note for note in notes if note)


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


@click.command(
    cls=Command,
    examples=[
        "stillfresh explain sqlite:///site.db price sku-1",
        "stillfresh explain redis://localhost:6379/0 page https://example.org/pricing",
        """stillfresh explain site.db forecast '["oslo",3]' --json""",
        "stillfresh explain site.db price -- -1",
    ],
)
@click.argument("store")
@click.argument("kind", type=TEXT)
@click.argument("id_", metavar="ID", type=TEXT)
@as_json
def explain(*, store: str, kind: str, id_: str, is_json: bool) -> None:
    """Say why one entry is as it is.

    And what a read of it would do.

    ID is the id as it is stored, which `stillfresh inspect` lists: a key as text; of a cached
    function its arguments as JSON; of a page its whole URL. One that begins with - goes behind --.
    """
    record, hint = asyncio.run(_record(store, kind, id_))
    now = time.time()
    told = explained(kind, id_, record, now, loading_here=False, in_memory=False)
    say(hint, is_json=is_json)
    if is_json:
        print_json(_explained(told, record))
        return
    click.echo(plain(told.text))
    if record.copy is not None or record.failure is not None:
        click.echo()
        print_table(("", ""), _rows(told, record, now))


async def _record(address: str, kind: str, id_: str) -> tuple[Record, str | None]:
    """And a hint, where there is none."""
    async with looked_into(address) as store:
        found = (await store.read(kind, [id_])).get(id_)
        if found is not None:
            return found, None
        return Record(), await about_names(store, kind)


def _size(record: Record) -> int | None:
    value = None if record.copy is None else record.copy.value
    return len(value) if isinstance(value, bytes) else None


def _explained(told: Explanation, record: Record) -> dict[str, Any]:
    """What this process would say of itself is left out: it is none that loads."""
    fields = asdict(told)
    for name in ("loading_here", "in_memory", "resource", "key"):
        del fields[name]
    copy = record.copy
    about = {
        "kind": told.resource,
        "id": told.key,
        "absent": copy is not None and copy.value is None,
        "fetched_at": None if copy is None else copy.fetched_at,
        "size": _size(record),
        "fresh_for": None if copy is None else copy.policy.fresh_for,
        "stale_for": None if copy is None else copy.policy.stale_for,
        "error_for": None if copy is None else copy.policy.error_for,
    }
    return about | fields


def _rows(told: Explanation, record: Record, now: float) -> list[tuple[str, str]]:
    rows = [("verdict", str(told.verdict))]
    if (copy := record.copy) is not None:
        terms = copy.policy
        rows += [
            ("fetched at", moment_text(copy.fetched_at, now)),
            (
                "fresh until",
                "invalidated" if told.invalidated else moment_text(told.fresh_until, now),
            ),
            ("fresh for", age_text(terms.fresh_for)),
            ("stale for", age_text(terms.stale_for)),
            ("error for", age_text(terms.error_for)),
            ("size", size_text(_size(record))),
        ]
    if told.held_until is not None:
        rows.append(("lease until", moment_text(told.held_until, now)))
    if told.failures:
        rows.append(("failures", f"{told.failures}: {told.error}"))
        rows.append(("retry at", moment_text(told.retry_at, now)))
    return rows
