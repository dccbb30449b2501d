"""A page that stays up while its upstream is down, and says so.

Use it when old data is better than an error page, as long as your users can see that it is old.
The clock is moved by hand here, so that you need not wait; leave `clock=` out in your program.
"""

import logging

from stillfresh import SyncCache
from stillfresh.testing import ManualClock

logging.getLogger("stillfresh").setLevel(logging.CRITICAL)  # the page itself says what failed
clock = ManualClock()
cache = SyncCache("memory://", clock=clock)
upstream = {"is_down": False}


@cache.cached("weather", fresh_for="10m", error_for="1d")
def weather(city: str) -> str:
    if upstream["is_down"]:
        raise ConnectionError("no route to host")
    return f"sunny in {city}"


def page(city: str) -> str:
    answer = weather.get(city)
    note = f" ({answer.age / 3600:.0f} hours ago)" if answer.error else ""
    return answer.value + note


with cache:
    print(page("Bern"))  # sunny in Bern
    upstream["is_down"] = True
    clock.advance("5h")
    print(page("Bern"))  # sunny in Bern (5 hours ago)
