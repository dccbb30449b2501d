"""`stillfresh stats`: how much a store holds, or what a running gateway counts (G18)."""

import asyncio
import os
import re
import time
from collections.abc import Iterator, Mapping
from typing import Any, Final

import click
from msgspec import structs

from stillfresh.cli.places import opened
from stillfresh.cli.program import (
    TEXT,
    as_json,
    command,
    extra,
    print_json,
    print_table,
    size_text,
)
from stillfresh.durations import seconds
from stillfresh.errors import ConfigError, StillfreshError, error_text, without_password
from stillfresh.stores.contract import StoreStats

WITHIN: Final = 10.0
SAMPLE: Final = re.compile(r"stillfresh_(\w+?)(?:_total)?(?:\{(.*)\})? (\S+)")
LABEL: Final = re.compile(r'(\w+)="([^"]*)"')
SUMMED: Final = ("loads", "failed", "entries", "watched")
HITS: Final = ("memory", "store")
SIZES: Final = ("bytes", "held", "evicted")


@command(
    "stillfresh stats site.db",
    "stillfresh stats http://127.0.0.1:8080 --watch",
    "stillfresh stats http://127.0.0.1:8080 --watch --every 10s --json",
)
@click.argument("target", metavar="STORE|URL", type=TEXT)
@click.option("--watch", is_flag=True, help="Repeat until Ctrl-C.")
@click.option("--every", default="2s", show_default=True, help="With --watch: how often.")
@as_json
def stats(*, target: str, watch: bool, every: str, is_json: bool) -> None:
    """Show how much a store holds, or what a gateway counts.

    For a STORE: copies, leases and bytes. For the URL of a running gateway: reads, the share of
    reads that needed no load, loads and failures, of all its workers together. If the gateway has
    a token, set STILLFRESH_TOKEN. With --watch the command also shows reads per second, and --json
    prints one line each time.
    """
    pause = seconds(every, name="--every", positive=True)
    before: dict[str, Any] | None = None
    while True:
        found = asyncio.run(_looked(target))
        if watch and not is_json:
            click.clear()
        if is_json:
            print_json(found, by_line=watch)
        else:
            _print(found, before)
        if not watch:
            return
        before = found
        time.sleep(pause)


async def _looked(target: str) -> dict[str, Any]:
    named = {"at": time.time(), "target": without_password(target)}
    if target.startswith(("http://", "https://")):
        return {**named, **counted(await _metrics(target))}
    async with opened(target) as store:
        return {**named, "store": sizes(await store.stats())}


async def _metrics(url: str) -> str:
    client = extra("stillfresh.http.client", "web")
    token = os.environ.get("STILLFRESH_TOKEN")
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    base = str(client.checked_url(url, "URL")).rstrip("/")
    async with client.httpx2.AsyncClient(timeout=WITHIN, headers=headers) as asking:
        try:
            answer = await asking.get(f"{base}/metrics")
        except client.request_errors() as exc:
            raise StillfreshError(f"{base}: no gateway answers: {error_text(exc)}") from exc
    if answer.status_code == 401:
        raise ConfigError(f"{base}: the gateway wants its token; set STILLFRESH_TOKEN")
    if answer.status_code != 200 or "stillfresh_" not in answer.text:
        raise StillfreshError(f"{base}/metrics: not a gateway (HTTP {answer.status_code})")
    return str(answer.text)


def counted(text: str) -> dict[str, Any]:
    """The numbers of `/metrics`, by kind and for the whole gateway."""
    kinds: dict[str, dict[str, float]] = {}
    whole = {"connections": 0.0, "bypassed": 0.0}
    for found in filter(None, map(SAMPLE.fullmatch, text.splitlines())):
        name, labels, number = found[1], dict(LABEL.findall(found[2] or "")), float(found[3])
        kind = kinds.setdefault(labels.get("resource", ""), dict.fromkeys(SUMMED, 0.0))
        if name == "reads":
            kind["reads"] = kind.get("reads", 0.0) + number
            is_hit = labels["origin"] in HITS
            kind["hits"] = kind.get("hits", 0.0) + (number if is_hit else 0.0)
        elif name in SUMMED:
            kind[name] += number
        elif name in whole:
            whole[name] += number
    kinds.pop("", None)
    return {**whole, "kinds": kinds}


def sizes(stats: StoreStats) -> dict[str, int]:
    """The counts of a store; a feed also has topics and comments."""
    named = structs.asdict(stats).items()
    return {name: value for name, value in named if name != "costs" and value is not None}


def size_rows(found: Mapping[str, int]) -> Iterator[tuple[str, str]]:
    for name, number in found.items():
        yield name, size_text(number) if name in SIZES else f"{number:,}"


def _print(found: dict[str, Any], before: dict[str, Any] | None) -> None:
    if (held := found.get("store")) is not None:
        print_table(("", ""), [("store", found["target"]), *size_rows(held)])
        return
    whole = [(name, f"{found[name]:,.0f}") for name in ("connections", "bypassed")]
    print_table(("", ""), [("gateway", found["target"]), *whole])
    click.echo()
    head = ("kind", "reads", *(("reads/s",) if before else ()), "hits", *SUMMED)
    passed = max(found["at"] - before["at"], 0.001) if before else 0.0
    rows = []
    for kind, it in sorted(found["kinds"].items()):
        share = f"{100 * it['hits'] / it['reads']:.1f} %" if it.get("reads") else "-"
        reads = it.get("reads", 0.0)
        speed = []
        if before:
            speed = [f"{(reads - before['kinds'].get(kind, {}).get('reads', reads)) / passed:,.1f}"]
        rows.append(
            (kind, f"{reads:,.0f}", *speed, share, *(f"{it[name]:,.0f}" for name in SUMMED))
        )
    print_table(head, rows, right=head[1:])
