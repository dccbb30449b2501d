"""One cache for several machines: a web server, a worker and a cron job on one Redis.

Use it when a change in one process must be seen by all others at their next read, and when all of
them together should ask the upstream only once. Set CACHE to the address of your Redis.
"""

import os

from stillfresh import SyncCache

ADDRESS = os.environ.get("CACHE", "redis://localhost:6379/0")
web = SyncCache(ADDRESS)
worker = SyncCache(ADDRESS)  # usually on another machine, in a program of its own
names = {7: "Ann"}  # your database


def name(user: int) -> str:
    return names[user]


name_in_web = web.cached("name", fresh_for="1h")(name)
name_in_worker = worker.cached("name", fresh_for="1h")(name)

with web, worker:
    print(name_in_web(7))  # Ann
    names[7] = "Anna"  # first write, then invalidate
    name_in_worker.of(7).invalidate()
    print(name_in_web(7))  # Anna
