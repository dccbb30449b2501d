"""E12: the statistics as a Prometheus server reads them."""

import re

from stillfresh import Cache, Resource, prometheus_text
from stillfresh.testing import ManualClock
from tests.kit.engine import Price

OF_ONE = r'(resource="price"|step="\w+")(,(origin|verdict|le)="[\w.+]+")*'
LABELS = OF_ONE + r'|version="[\w.]+",python="[\w.+]+"'
LINE = re.compile(rf"stillfresh_\w+\{{({LABELS})\}} \d+(\.\d+)?")


class TestE12Prometheus:
    async def test_every_line_is_help_type_or_a_sample(
        self, cache: Cache, prices: Resource[str, Price], clock: ManualClock, url: str
    ) -> None:
        """Reads by origin and verdict, counters, gauges, a histogram of age at serving."""
        await prices("a")
        clock.advance(20)
        await prices("a")
        near = "memory" if url == "memory://" else "store"
        lines = prometheus_text(await cache.stats()).splitlines()
        assert all(line.startswith("# ") or LINE.fullmatch(line) for line in lines)
        for sample in (
            'stillfresh_reads_total{resource="price",origin="loaded",verdict="fresh"} 1',
            f'stillfresh_reads_total{{resource="price",origin="{near}",verdict="fresh"}} 1',
            'stillfresh_loads_total{resource="price"} 1',
            'stillfresh_queued{resource="price"} 0',
            'stillfresh_watched{resource="price"} 0',
            'stillfresh_failing{resource="price"} 0',
            'stillfresh_age_seconds_bucket{resource="price",le="0.1"} 1',
            'stillfresh_age_seconds_bucket{resource="price",le="30"} 2',
            'stillfresh_age_seconds_bucket{resource="price",le="+Inf"} 2',
            'stillfresh_age_seconds_sum{resource="price"} 20.000',
            'stillfresh_age_seconds_count{resource="price"} 2',
        ):
            assert sample in lines
