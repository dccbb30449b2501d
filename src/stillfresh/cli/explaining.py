"""`stillfresh explain`: why one entry is as it is, and what a read of it would do (G10, E12)."""

import asyncio
import time
from dataclasses import asdict
from typing import Any

import click

from stillfresh.cli.hints import about_names, say
from stillfresh.cli.output import (
    age_text,
    as_json,
    moment_text,
    plain,
    print_json,
    print_table,
    size_text,
)
from stillfresh.cli.places import looked_into
from stillfresh.cli.program import TEXT, Command
from stillfresh.engine.explain import explain as explained
from stillfresh.engine.model import Explanation
from stillfresh.stores.contract import Record


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
        print_json(_document(told, record))
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


def _document(told: Explanation, record: Record) -> dict[str, Any]:
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
