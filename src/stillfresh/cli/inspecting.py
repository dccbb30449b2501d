"""`stillfresh inspect` and `stillfresh explain`: what is in a store, and why."""

import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Final

import click

from stillfresh.cli.counting import size_rows, sizes
from stillfresh.cli.places import about_names, opened, say
from stillfresh.cli.program import (
    TEXT,
    age_text,
    as_json,
    command,
    moment_text,
    plain,
    print_json,
    print_table,
    size_text,
    working,
)
from stillfresh.engine.explain import PAGE, Listed, listed
from stillfresh.engine.explain import explain as explained
from stillfresh.errors import without_password
from stillfresh.freshness import Verdict
from stillfresh.stores import capabilities_of
from stillfresh.stores.contract import MOST_LISTED, Record, StoredEntry, StoreStats

VERDICTS: Final = tuple(Verdict)
COUNTED: Final = 10_000
AT_ONCE: Final = MOST_LISTED
TERMS: Final = ("fresh_for", "stale_for", "error_for")


@dataclass
class Inspected:
    """What `inspect` found: statistics, the first entries, and counts by kind."""

    stats: StoreStats
    entries: list[Listed] = field(default_factory=list)
    """The first ones."""
    kinds: dict[str, Counter[str]] = field(default_factory=dict)
    counted: int = 0
    is_complete: bool = False

    def count(self, page: list[Listed], shown: int) -> None:
        self.counted += len(page)
        self.entries += page[: max(0, shown - len(self.entries))]
        for entry in page:
            counts = self.kinds.setdefault(entry.kind, Counter())
            counts[entry.verdict] += 1
            counts["bytes"] += entry.size or 0


@command(
    "stillfresh inspect sqlite:///site.db",
    "stillfresh inspect redis://localhost:6379/0 --kind page --search /blog/ --limit 50",
    "stillfresh inspect site.db --all --json",
)
@click.argument("store")
@click.option("--kind", type=TEXT, help="Only entries of this kind.")
@click.option("--search", default="", type=TEXT, help="Only entries with this text in their id.")
@click.option(
    "--limit", default=20, show_default=True, help="Entries to list.", type=click.IntRange(0)
)
@click.option("--all", "is_all", is_flag=True, help=f"Count them all, not the first {COUNTED:,}.")
@as_json
async def inspect(
    *, store: str, kind: str | None, search: str, limit: int, is_all: bool, is_json: bool
) -> None:
    """Show what is in STORE, and how fresh it is.

    Counts entries by kind and verdict, and lists the first ones. It only reads, and other processes
    can use the store meanwhile. Redis is walked over in slices. DynamoDB is scanned, which costs
    about a read unit for every 4 KB of rows.
    """
    most = max(COUNTED, limit)
    after: tuple[str, str] | None = None
    hint: str | None = None
    with working("Counting entries:") as advance:
        async with opened(store) as looked_at:
            can = capabilities_of(looked_at)
            listing = can.require_listing()
            seen = Inspected(await can.require_statistics().stats())
            while not seen.is_complete and (is_all or seen.counted < most):
                page = await listing.entries(kind, search, after, AT_ONCE)
                seen.count(listed(page, time.time()), limit)
                advance(len(page))
                seen.is_complete = len(page) < AT_ONCE
                after = (page[-1].kind, page[-1].id) if page else None
            if kind is not None and not search and not seen.counted:
                hint = await about_names(looked_at, kind)
    say(hint, is_json=is_json)
    if is_json:
        print_json(_inspected(store, seen))
        return
    _print_summary(store, seen)
    if limit:
        click.echo()
        _print_entries(seen.entries)


def _inspected(address: str, seen: Inspected) -> dict[str, Any]:
    return {
        "store": without_password(address),
        **sizes(seen.stats),
        "counted": seen.counted,
        "complete": seen.is_complete,
        "kinds": {
            kind: {name: counts[name] for name in (*VERDICTS, "bytes")}
            for kind, counts in sorted(seen.kinds.items())
        },
        "entries": seen.entries,
    }


def _print_summary(address: str, seen: Inspected) -> None:
    print_table(("", ""), [("store", without_password(address)), *size_rows(sizes(seen.stats))])
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
    rows = []
    for entry in entries:
        left = "-"
        if entry.fresh_until is not None and entry.verdict is Verdict.FRESH:
            left = age_text(entry.fresh_until - now)
        rows.append(
            (
                entry.kind,
                entry.id,
                entry.verdict,
                age_text(entry.age),
                left,
                size_text(entry.size),
                _notes(entry),
            )
        )
    head = ("kind", "id", "verdict", "age", "fresh for", "size", "")
    print_table(head, rows, right=head[3:6])


def _notes(entry: Listed) -> str:
    notes: list[str] = []
    if entry.absent:  # a page that is absent is each visitor's own
        notes.append("not shared" if entry.kind == PAGE else "absent upstream")
    if entry.invalidated:
        notes.append("invalidated")
    if entry.held_until is not None:
        notes.append("being loaded")
    if entry.failures:
        times = "once" if entry.failures == 1 else f"{entry.failures} times"
        notes.append(f"failed {times}: {entry.error}")
    return ", ".join(notes)


@command(
    "stillfresh explain sqlite:///site.db price sku-1",
    "stillfresh explain redis://localhost:6379/0 page https://example.org/pricing",
    """stillfresh explain site.db forecast '["oslo",3]' --json""",
    "stillfresh explain site.db price -- -1",
)
@click.argument("store")
@click.argument("kind", type=TEXT)
@click.argument("id_", metavar="ID", type=TEXT)
@as_json
async def explain(*, store: str, kind: str, id_: str, is_json: bool) -> None:
    """Say why one entry is as it is.

    And what the next read of it will do.

    ID is the id that `stillfresh inspect` lists: the key; for a cached function its arguments as
    JSON; for a page its whole URL. Write -- before an id that begins with -.
    """
    async with opened(store) as looked_at:
        records = await looked_at.read(kind, [id_])
        hint = None if records else await about_names(looked_at, kind)
    record = records.get(id_, Record())
    now = time.time()
    explanation = explained(kind, id_, record, now, loading_here=False, in_memory=False)
    value = None if record.copy is None else record.copy.value
    size = len(value) if isinstance(value, bytes) else None
    (entry,) = listed([StoredEntry(kind, id_, record, size)], now)
    terms = dict.fromkeys(TERMS) if record.copy is None else asdict(record.copy.policy)
    say(hint, is_json=is_json)
    if is_json:
        print_json({**asdict(entry), **terms, "text": explanation.text})
        return
    click.echo(plain(explanation.text))
    if record.copy is not None or record.failure is not None:
        click.echo()
        print_table(("", ""), _rows(entry, terms, now))


def _rows(
    entry: Listed, terms: Mapping[str, float | None], now: float
) -> Iterator[tuple[str, str]]:
    yield "verdict", entry.verdict
    if entry.fetched_at is not None:
        yield "fetched at", moment_text(entry.fetched_at, now)
        until = "invalidated" if entry.invalidated else moment_text(entry.fresh_until, now)
        yield "fresh until", until
        for name in TERMS:
            yield name.replace("_", " "), age_text(terms[name])
        yield "size", size_text(entry.size)
    if entry.held_until is not None:
        yield "lease until", moment_text(entry.held_until, now)
    if entry.failures:
        yield "failures", f"{entry.failures}: {entry.error}"
        yield "retry at", moment_text(entry.retry_at, now)
