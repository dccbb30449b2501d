"""A script that asks a slow API, and is run again and again: by hand, or by cron.

Use it when each run asks for the same things. The copies are in a file beside the script, so that a
second run asks for nothing that is still fresh, and an API that is down stops no run for a day.
"""

from stillfresh import SyncCache

cache = SyncCache("sqlite:///rates.db")


@cache.cached("rate", fresh_for="10m", error_for="1d")
def rate(currency: str) -> float:
    return {"EUR": 1.0, "CHF": 0.93}[currency]  # ask your API here


with cache:
    print(100 * rate("CHF"))  # 93.0
    print(rate.get("CHF").verdict)  # fresh
