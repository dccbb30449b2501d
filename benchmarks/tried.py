"""What was tried for targets that were missed: the one place to edit; rows refer to these by name.

Shown in the first table of docs/benchmarks.md, for a row that misses its target in that run.
"""

__all__ = [
    "COLD_BATCH",
    "COLLECTION",
    "FEED_LOADS",
    "FEED_TYPED",
    "HTTP_HIT",
    "HTTP_NEXT",
    "LIVE_P99",
    "MEMORY_ENTRY",
    "PAGE_MEMORY",
    "PUBLISH",
    "SERVE_HIT",
    "SQLITE_READ",
    "WATCHED_CPU",
]

LIVE_P99 = (
    "what comes within 10 ms is one frame, encoded once, and sent in turns of 50 viewers "
    "([0320](decisions/0320-live-viewers.md)); gateway, upstream and all viewers "
    "share two cores here, and a faster machine kept it with 92 ms"
)
MEMORY_ENTRY = (
    "five layouts, and an entry that is its own end ([0301](decisions/0301-ttl-cache.md)): "
    "0.51 to 0.53 by size"
)
COLD_BATCH = (
    "one state, one lease request, one call and one publication for the keys of a batch, verdict "
    "and end judged once for copies that share time and terms, no guard over a load that answers "
    "at once; about ten calls of our own a key are left, of eighteen"
)
SERVE_HIT = (
    "a hit is answered from a memo of request heads, in the protocol itself and with one write; "
    "nginx shares the two cores with the load, and another machine showed 1.61 ×"
)
SQLITE_READ = (
    "read on the caller's thread, statements prepared once, plans kept stable (QPSG), the value "
    "not decoded where its generation is the one in memory, the entry looked up once"
)
PUBLISH = (
    "one transaction for all, `executemany` for the values; without a savepoint, with sorted ids "
    "and lighter rows it was no faster; the rest is the lease of each, checked in the same "
    "transaction, and the way to the writer's thread and back"
)
FEED_TYPED = (
    "rows are decoded in the loop itself: 1.09 × of the instructions of the bare rows (callgrind; "
    "1.11 before); the rest is memory: topics and the bytes of their rows are kept, so that an "
    "unchanged row is not decoded again, where the bare rows use again what they have just freed "
    "(the next row's contender keeps the bytes: 0.92 × of the instructions, more time)"
)
PAGE_MEMORY = (
    "one key of a tag is kept without a dict of its own; terms, hosts, tags, keys of rows, names "
    "of fields and `Cache-Control` are shared; what is left for a page is its entry, its row, the "
    "request that leads to it, and its header fields"
)
FEED_LOADS = (
    "less work for each row, one array of all rows decoded at once, and arrays made by SQLite "
    "(both slower: half a megabyte is copied once more); the bare rows decoded by `msgspec` alone, "
    "with nothing kept, take 0.49 to 0.58 of `json.loads` here, so that this target leaves no time "
    "for anything else"
)
HTTP_HIT = (
    "a hit from memory is one lookup by the request's line and two sends, its header fields "
    "made twice a second, its body not copied: one microsecond more than the bare app, of forty "
    "that the server takes"
)
HTTP_NEXT = f"{HTTP_HIT}; bound by the server's own rate, the row above"
WATCHED_CPU = (
    "batches of 20, one lane for all ids instead of a timer each, half the look-ups in the lane; "
    "the requests alone are a twelfth of what is left, the event loop and its tasks a quarter, no "
    "other line more than an eighth; what the rules ask for each id (lease, publication, copy, "
    "memory, lane, telling) is alone more than a tenth of TanStack Query's CPU, in Python here, in "
    "compiled JavaScript there ([0321](decisions/0321-coordinator.md))"
)
COLLECTION = (
    "what stores hold is not tracked by the collector; of each key the entry and its answer are "
    "left. Without answers it takes 0.7 of the time, without both 0.2, but a cycle through a "
    "user's value, an error's traceback or a clock would then never be freed, and a hit takes an "
    "eighth longer, since an entry would have to be a struct; with millions of entries call "
    "`gc.freeze()` when they are loaded"
)
