"""A plain cached function, as any program has one: the demo shows it with its source."""

import httpx2

from stillfresh.engine import Cache, Function


def rates_of(cache: Cache, http: httpx2.AsyncClient) -> Function[[str], float]:
    @cache.cached("rate", fresh_for="10s", stale_for="1h", error_for="1d")
    async def rate(currency: str) -> float:
        response = await http.get(f"/rates/{currency}")
        return float(response.raise_for_status().json())

    return rate
