"""G14: docs/monitoring.md, the alert rules and the Grafana dashboard name what `/metrics` has."""

import asyncio
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import promql_parser as promql
import pytest
import yaml
from starlette.responses import PlainTextResponse

from stillfresh.engine import Lag, Origin
from stillfresh.freshness import Verdict
from stillfresh.gateway import gateway
from stillfresh.gateway.response_counts import PARTS
from stillfresh.pages import IsrMiddleware, PageCache
from stillfresh.pages.upstream import Upstream
from stillfresh.stores.memory import MemoryStore
from stillfresh.systems.coordinator import Kind
from tests.kit.gateway import client_of
from tests.kit.held_store import SteppedStore
from tests.kit.processes import ROOT

PAGE = ROOT / "docs" / "monitoring.md"
GRAFANA = ROOT / "deploy" / "grafana" / "stillfresh.json"
ALERTS = ROOT / "deploy" / "prometheus" / "alerts.yml"
SAMPLE = re.compile(r"(stillfresh_\w+)(?:\{(.*)\})? [\d.e+-]+")
OF_A_HISTOGRAM = re.compile("_(bucket|sum|count)$")
OF_PROMETHEUS = {"job", "instance"}
"""Labels that it adds to every sample."""
VALUES = {
    "origin": set(map(str, Origin)),
    "verdict": set(map(str, Verdict)),
    "part": set(PARTS),
    "status": {"200", "404", "500", "503"},
}
"""Some of `status`; what an expression asks for must match one of them."""


@dataclass
class Metric:
    """A name, as `/metrics` describes it or as a page does."""

    type: str
    labels: set[str] = field(default_factory=set)


def told(text: str) -> dict[str, Metric]:
    """What stands in `/metrics`, by name."""
    found = {name: Metric(kind) for name, kind in re.findall(r"# TYPE (\w+) (\w+)", text)}
    for line in text.splitlines():
        if line.startswith("#"):
            continue
        sample = SAMPLE.fullmatch(line)
        assert sample is not None, line
        name = sample[1] if sample[1] in found else OF_A_HISTOGRAM.sub("", sample[1])
        found[name].labels |= set(re.findall(r'(\w+)="', sample[2] or "")) - {"le"}
    return found


def documented() -> dict[str, Metric]:
    rows = re.findall(
        r"^\| `(stillfresh_\w+)` \| (\w+) \| (.*?) ?\| ", PAGE.read_text(), re.MULTILINE
    )
    return {name: Metric(kind, set(re.findall(r"`(\w+)`", labels))) for name, kind, labels in rows}


def expressions(path: Path) -> Iterator[str]:
    if path == PAGE:
        yield from re.findall(r"^```promql\n(.*?)^```$", path.read_text(), re.MULTILINE | re.DOTALL)
    elif path == ALERTS:
        for group in yaml.safe_load(path.read_text())["groups"]:
            yield from (rule["expr"] for rule in group["rules"])
    else:
        for panel in json.loads(path.read_text())["panels"]:
            for target in panel.get("targets", ()):
                yield target["expr"].replace("$__rate_interval", "1m").replace("$job", "a")


def parts(expression: str) -> list[promql.Expr]:
    found: list[promql.Expr] = []
    promql.walk(promql.parse(expression), found.append)
    return found


def check(expression: str, known: dict[str, Metric]) -> None:
    """Every name, label and value in it exists; what is grouped by is a label of its metrics."""
    grouped, labels = set[str](), set[str]()
    for part in parts(expression):
        if isinstance(part, promql.AggregateExpr) and part.modifier is not None:
            grouped |= set(part.modifier.labels)
        if not isinstance(part, promql.VectorSelector):
            continue
        name = str(part.name)
        if name == "up":
            continue
        metric = known.get(name)
        own = OF_PROMETHEUS.copy()
        if metric is None:
            metric = known[OF_A_HISTOGRAM.sub("", name)]
            assert metric.type == "histogram", name
            own |= {"le"} if name.endswith("_bucket") else set()
        else:
            assert metric.type != "histogram", name
        labels |= metric.labels | own
        for asked in part.matchers.matchers:
            assert asked.name in metric.labels | own, f"{name}: {asked.name}"
            some = VALUES.get(asked.name)
            assert some is None or any(re.fullmatch(asked.value, it) for it in some), asked.value
            for value in (
                asked.value.split("|") if asked.name in {"origin", "verdict", "part"} else ()
            ):
                assert value in VALUES[asked.name], value
    assert grouped <= labels, grouped - labels


@pytest.fixture(scope="module")
def described() -> dict[str, Metric]:
    return documented()


class TestG14Monitoring:
    async def test_the_docs_list_every_metric_and_no_other(
        self, described: dict[str, Metric]
    ) -> None:
        """By name, type and labels, with everything that a gateway can have."""

        async def fetch(ids: list[str]) -> dict[str, Any]:
            return dict.fromkeys(ids, 1)

        kind = Kind(
            "price",
            fetch=fetch,
            fresh_for="1m",
            objective=("99% of reads younger than 2m", "99% of reads true within 5s"),
            check=1.0,
        )
        async with PageCache(SteppedStore(MemoryStore())) as pages:
            site = IsrMiddleware(PlainTextResponse("a page"), pages)
            app = gateway(kinds=[kind], pages=site, page_cache=pages)
            app.dashboard.numbers.site = Upstream("http://site.invalid", clock=pages.clock)
            app.cache.lags["shop"] = lambda: Lag(0.5, 30.0)
            async with client_of(app) as client:
                for _ in range(2):
                    await client.get("/v1/price/a")
                while (
                    'checked_total{resource="price"} 1' not in await app.dashboard.numbers.metrics()
                ):
                    await asyncio.sleep(0)
                await client.get("/")
                emitted = told((await client.get("/metrics")).text)
        assert described == emitted

    @pytest.mark.parametrize("path", [PAGE, ALERTS, GRAFANA], ids=lambda path: path.name)
    def test_every_promql_expression_uses_existing_metrics_and_labels(
        self, path: Path, described: dict[str, Metric]
    ) -> None:
        """PromQL that can be parsed, over names, labels and values that there are."""
        found = list(expressions(path))
        assert len(found) > 8
        for expression in found:
            check(expression, described)

    @pytest.mark.parametrize(
        "wrong",
        [
            "stillfresh_read_total",
            "sum(rate(stillfresh_read_total[5m]))",
            "stillfresh_age_seconds",
            "stillfresh_loads_total_count",
            'stillfresh_reads_total{origin="cache"}',
            'stillfresh_reads_total{origin=~"memory|cache"}',
            'stillfresh_reads_total{kind="a"}',
            "sum by (kind) (stillfresh_reads_total)",
            "sum by (le) (stillfresh_age_seconds_sum)",
            "sum(stillfresh_reads_total",
        ],
    )
    def test_the_promql_check_finds_unknown_names(
        self, wrong: str, described: dict[str, Metric]
    ) -> None:
        """A name, a label, a value, a histogram read as a number, a bracket."""
        with pytest.raises((AssertionError, KeyError, ValueError)):
            check(wrong, described)

    def test_the_docs_explain_every_alert(self) -> None:
        """By its name; each has a severity and a summary, whose labels the expression keeps."""
        rules = [
            it for group in yaml.safe_load(ALERTS.read_text())["groups"] for it in group["rules"]
        ]
        assert {it["alert"] for it in rules} == set(
            re.findall(r"`(Stillfresh\w+)`", PAGE.read_text())
        )
        for rule in rules:
            assert rule["labels"]["severity"] in {"page", "ticket"}
            named = set(re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"]))
            by = {
                label
                for part in parts(rule["expr"])
                if isinstance(part, promql.AggregateExpr) and part.modifier is not None
                for label in part.modifier.labels
            }
            assert named <= by | ({"instance"} if rule["alert"] == "StillfreshDown" else set())

    def test_the_panels_of_grafana_have_numbers_and_places_of_their_own(self) -> None:
        """None lies over another; legends name labels that the expression keeps."""
        panels = json.loads(GRAFANA.read_text())["panels"]
        assert len({it["id"] for it in panels}) == len(panels)
        places = [
            (x, y)
            for it in panels
            for x in range(it["gridPos"]["x"], it["gridPos"]["x"] + it["gridPos"]["w"])
            for y in range(it["gridPos"]["y"], it["gridPos"]["y"] + it["gridPos"]["h"])
        ]
        assert len(set(places)) == len(places)
        assert max(x for x, _ in places) < 24
        for panel in panels:
            for target in panel.get("targets", ()):
                for label in re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]):
                    assert re.search(rf"by \([^)]*\b{label}\b", target["expr"]), target["expr"]

    def test_every_documented_query_has_a_grafana_panel(self) -> None:
        """The same expression, for the chosen jobs and over Grafana's own window."""
        drawn = {re.sub(r'job=~"a",?|\{\}|\[\w+\]|\s', "", it) for it in expressions(GRAFANA)}
        drawn = {it.replace("{}", "") for it in drawn}
        asked = {re.sub(r"\[\w+\]|\s", "", it) for it in expressions(PAGE)}
        assert asked <= drawn
