"""`stillfresh inspect`: what is in a store, by kind and verdict, and its entries (G10)."""

import asyncio
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Final

import click
from msgspec.structs import asdict

from stillfresh.cli.output import age_text, as_json, print_json, print_table, size_text, working
from stillfresh.cli.places import looked_into, pages_of
from stillfresh.cli.program import TEXT, Command
from stillfresh.engine.explain import PAGE
from stillfresh.engine.listing import Listed, listed
from stillfresh.errors import without_password
from stillfresh.freshness import Verdict
from stillfresh.stores.contract import StoreStats
from stillfresh.stores.listing import MOST_LISTED

VERDICTS: Final = tuple(Verdict)
COUNTED: Final = 10_000
AT_ONCE: Final = MOST_LISTED


@dataclass
class Seen:
    """What was found in a store."""

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
        print_json(_document(store, seen))
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
) -> Seen:
    async with looked_into(address) as store:
        seen = Seen(await store.stats())
        async for page in pages_of(store, kind, search, AT_ONCE):
            seen.count(listed(page, time.time()), shown)
            advance(len(page))
            if most is not None and seen.counted >= most:
                seen.is_complete = len(page) < AT_ONCE
                break
    return seen


def _document(address: str, seen: Seen) -> dict[str, Any]:
    return {
        "store": without_password(address),
        "copies": seen.stats.copies,
        "leases": seen.stats.leases,
        "bytes": seen.stats.bytes,
        **_more(seen.stats),
        "counted": seen.counted,
        "complete": seen.is_complete,
        "kinds": {kind: _counts(counts) for kind, counts in sorted(seen.kinds.items())},
        "entries": seen.entries,
    }


def _more(stats: StoreStats) -> dict[str, int]:
    """What one kind of store counts besides: a feed its topics and comments."""
    common = StoreStats.__struct_fields__
    return {name: value for name, value in asdict(stats).items() if name not in common}


def _counts(counts: Counter[str]) -> dict[str, int]:
    return {name: counts[name] for name in (*VERDICTS, "bytes")}


def _print_summary(address: str, seen: Seen) -> None:
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
    notes = [
        _absence(entry) if entry.absent else "",
        "invalidated" if entry.invalidated else "",
        "being loaded" if entry.held_until is not None else "",
        f"failed {_times(entry.failures)}: {entry.error}" if entry.failures else "",
    ]
    return ", ".join(note for note in notes if note)


def _absence(entry: Listed) -> str:
    """A page that nobody may keep is there: each who asks is sent their own."""
    return "not shared" if entry.kind == PAGE else "absent upstream"


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"
