"""A cache's metrics in your own registry of prometheus-client, by the names of `/metrics`.

```python
REGISTRY.register(CacheCollector(cache))
```

Needs `stillfresh[prometheus]`.
"""

from collections.abc import Iterator
from functools import reduce

from stillfresh.engine import Cache, CacheStats, prometheus_text
from stillfresh.errors import ConfigError, needs, shown
from stillfresh.sync import SyncCache

with needs("prometheus", "stillfresh.integrations.prometheus"):
    from prometheus_client import Metric
    from prometheus_client.parser import text_string_to_metric_families
    from prometheus_client.registry import Collector

__all__ = ["CacheCollector"]


class CacheCollector(Collector):
    """Collects from one cache, or from several whose resources have different names.

    Use one collector for each registry: two would report the same metrics twice. Any thread may
    collect. The stores are not asked.
    """

    def __init__(self, cache: Cache | SyncCache, *others: Cache | SyncCache) -> None:
        self._caches = (cache, *others)
        for candidate in self._caches:
            if not isinstance(candidate, Cache | SyncCache):
                raise ConfigError(f"CacheCollector: takes caches, not {shown(candidate)}")

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics, for prometheus-client."""
        stats = reduce(_combine, (cache.counts() for cache in self._caches))
        yield from text_string_to_metric_families(prometheus_text(stats))


def _combine(first: CacheStats, second: CacheStats) -> CacheStats:
    """The stats of two caches as those of one."""
    steps = dict(first.store_seconds)
    for step, timing in second.store_seconds.items():
        steps[step] = steps[step] + timing if step in steps else timing
    return CacheStats(first.resources | second.resources, None, first.lags | second.lags, steps)
