"""`stillfresh stats`: how much a store holds, or what a running gateway counts."""

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
from stillfresh.stores import capabilities_of
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
        report = asyncio.run(_report_of(target))
        if watch and not is_json:
            click.clear()
        if is_json:
            print_json(report, by_line=watch)
        else:
            _print(report, before)
        if not watch:
            return
        before = report
        time.sleep(pause)


async def _report_of(target: str) -> dict[str, Any]:
    """The document that `stats --json` prints."""
    report = {"at": time.time(), "target": without_password(target)}
    if target.startswith(("http://", "https://")):
        return {**report, **_counts_of(await _metrics(target))}
    async with opened(target) as store:
        return {**report, "store": sizes(await capabilities_of(store).require_statistics().stats())}


async def _metrics(url: str) -> str:
    client = extra("stillfresh.http.client", "web")
    token = os.environ.get("STILLFRESH_TOKEN")
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    base = str(client.checked_url(url, "URL")).rstrip("/")
    async with client.httpx2.AsyncClient(timeout=WITHIN, headers=headers) as http:
        try:
            response = await http.get(f"{base}/metrics")
        except client.request_errors() as exc:
            raise StillfreshError(f"{base}: no gateway answers: {error_text(exc)}") from exc
    if response.status_code == 401:
        raise ConfigError(f"{base}: the gateway wants its token; set STILLFRESH_TOKEN")
    if response.status_code != 200 or "stillfresh_" not in response.text:
        raise StillfreshError(f"{base}/metrics: not a gateway (HTTP {response.status_code})")
    return str(response.text)


def _counts_of(metrics: str) -> dict[str, Any]:
    """The numbers of `/metrics`, by kind and for the whole gateway."""
    kinds: dict[str, dict[str, float]] = {}
    whole = {"connections": 0.0, "bypassed": 0.0}
    for line in metrics.splitlines():
        sample = SAMPLE.fullmatch(line)
        if sample is None:
            continue
        name = sample[1]
        labels = dict(LABEL.findall(sample[2] or ""))
        number = float(sample[3])
        counts = kinds.setdefault(labels.get("resource", ""), dict.fromkeys(SUMMED, 0.0))
        if name == "reads":
            is_hit = labels["origin"] in HITS
            counts["reads"] = counts.get("reads", 0.0) + number
            counts["hits"] = counts.get("hits", 0.0) + (number if is_hit else 0.0)
        elif name in SUMMED:
            counts[name] += number
        elif name in whole:
            whole[name] += number
    kinds.pop("", None)  # samples of the whole gateway name no resource
    return {**whole, "kinds": kinds}


def sizes(stats: StoreStats) -> dict[str, int]:
    """The counts of a store; a feed also has topics and comments."""
    fields = structs.asdict(stats).items()
    return {name: value for name, value in fields if name != "costs" and value is not None}


def size_rows(store_sizes: Mapping[str, int]) -> Iterator[tuple[str, str]]:
    for name, number in store_sizes.items():
        yield name, size_text(number) if name in SIZES else f"{number:,}"


def _print(report: dict[str, Any], before: dict[str, Any] | None) -> None:
    """Print tables. `before`: the report of the last look, from which reads per second follow."""
    store_sizes = report.get("store")
    if store_sizes is not None:
        print_table(("", ""), [("store", report["target"]), *size_rows(store_sizes)])
        return
    whole = [(name, f"{report[name]:,.0f}") for name in ("connections", "bypassed")]
    print_table(("", ""), [("gateway", report["target"]), *whole])
    click.echo()
    head = ["kind", "reads", "hits", *SUMMED]
    if before:
        head.insert(2, "reads/s")
    rows = []
    for kind, counts in sorted(report["kinds"].items()):
        reads = counts.get("reads", 0.0)
        share = f"{100 * counts['hits'] / reads:.1f} %" if reads else "-"
        row = [kind, f"{reads:,.0f}", share, *(f"{counts[name]:,.0f}" for name in SUMMED)]
        if before:
            passed = max(report["at"] - before["at"], 0.001)
            reads_before = before["kinds"].get(kind, {}).get("reads", reads)
            row.insert(2, f"{(reads - reads_before) / passed:,.1f}")
        rows.append(row)
    print_table(head, rows, right=head[1:])
