"""`stillfresh invalidate` and `stillfresh evict`: what they reach is counted."""

import time
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Final

import click

from stillfresh.cli.places import about_names, opened, say
from stillfresh.cli.program import TEXT, as_json, command, print_json, working
from stillfresh.stores import capabilities_of
from stillfresh.stores.contract import Store

SLICE: Final = 500
"""Ids in one step, so that others' writes pass between them."""


@command(
    "stillfresh invalidate sqlite:///site.db price sku-1 sku-2",
    "stillfresh invalidate redis://localhost:6379/0 --tag eu --soft",
    "stillfresh invalidate redis://localhost:6379/0 --tag path:/pricing",
    "stillfresh invalidate site.db --kind price --all",
    "stillfresh invalidate site.db price -- -1",
)
@click.argument("store")
@click.argument("kind", required=False, type=TEXT)
@click.argument("ids", nargs=-1, metavar="[ID]...", type=TEXT)
@click.option(
    "--tag", "tags", multiple=True, type=TEXT, help="Every entry with this tag; repeatable."
)
@click.option("--kind", "whole_kind", type=TEXT, help="With --all: every entry of this kind.")
@click.option("--all", "is_all", is_flag=True, help="All entries of the --kind.")
@click.option("--soft", is_flag=True, help="Serve the old copies until they are refreshed.")
@as_json
async def invalidate(
    *,
    store: str,
    kind: str | None,
    ids: Sequence[str],
    tags: Sequence[str],
    whole_kind: str | None,
    is_all: bool,
    soft: bool,
    is_json: bool,
) -> None:
    """Invalidate entries: by their ids, by a tag, or all of a kind.

    Every process that uses STORE sees it at its next read (or after its memory_for). Loads that are
    under way cannot store the old value.
    ID is the id that `stillfresh inspect` lists. For pages, write --tag path:/pricing, or
    --tag tag:NAME for a tag that you or the site gave them.
    """
    ways = [bool(ids), bool(tags), is_all]
    if sum(ways) != 1 or (kind is None) is bool(ids) or (whole_kind is not None) is not is_all:
        raise click.UsageError("name KIND and ID..., or --tag TAG, or --kind KIND --all.")
    named_kind = kind or whole_kind or ""
    with working("Invalidating:") as advance:
        async with opened(store, to_change=True) as changed:
            if tags:
                entries = [await changed.invalidate_tag(tag, soft=soft) for tag in tags]
                count = len(set(chain.from_iterable(entries)))
            elif ids:
                count = len(await changed.read(named_kind, ids))
                # All of the ids: one that is not in the store may be loading.
                await changed.invalidate(named_kind, ids, soft=soft)
            else:
                count = await _invalidate_kind(changed, named_kind, advance, soft=soft)
            hint = None
            if not count and tags:
                hint = f"no entry has the tag {' or '.join(tags)}"
            elif not count:
                hint = await about_names(changed, named_kind)
    say(hint, is_json=is_json)
    _tell("invalidated", count, is_json=is_json)


async def _invalidate_kind(
    store: Store, kind: str, advance: Callable[[int], None], *, soft: bool
) -> int:
    listing = capabilities_of(store).require_listing()
    count = 0
    async for page in listing.walk(kind):
        for first in range(0, len(page), SLICE):
            ids = [entry.id for entry in page[first : first + SLICE]]
            await store.invalidate(kind, ids, soft=soft)
            advance(len(ids))
        count += len(page)
    return count


@command("stillfresh evict sqlite:///site.db")
@click.argument("store")
@as_json
async def evict(*, store: str, is_json: bool) -> None:
    """Delete entries that can no longer be served.

    A cache on SQLite or PostgreSQL does this itself, every hour. On Redis the server does it. On
    DynamoDB the command reads the whole table, and also deletes bodies that no row refers to.
    """
    with working("Evicting"):
        async with opened(store, to_change=True) as changed:
            can = capabilities_of(changed)
            if can.statistics is not None:
                # A store that evicts by itself would not notice that its server is away.
                await can.statistics.stats()
            count = await can.require_eviction().evict(time.time())
    _tell("evicted", count, is_json=is_json)


def _tell(done: str, count: int, *, is_json: bool) -> None:
    if is_json:
        print_json({done: count})
    else:
        click.echo(f"{count:,} {'entry' if count == 1 else 'entries'} {done}")
