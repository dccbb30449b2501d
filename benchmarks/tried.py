"""What was tried for targets that were missed: the one place to edit; rows refer to these by name.

Shown in the first table of docs/benchmarks.md, for a row that misses its target in that run.
"""

__all__ = [
    "COLD_BATCH",
    "COLD_MANY",
    "COLLECTION",
    "DJANGO_MISSING",
    "DJANGO_REDIS",
    "DJANGO_SQLITE",
    "FEED_LOADS",
    "FEED_TYPED",
    "HTTP_HIT",
    "HTTP_NEXT",
    "KEY_MEMORY",
    "LIVE_DIFFERENT",
    "LIVE_P99",
    "MEMORY_ENTRY",
    "MISS",
    "MISS_BATCHED",
    "MISS_WAITS",
    "PAGE_MEMORY",
    "POSTGRES_PUT",
    "PUBLISH",
    "REDIS_GET",
    "REDIS_PUT",
    "REDIS_SERVER",
    "SERVE_HIT",
    "SQLITE_CACHED",
    "SQLITE_PUT",
    "SQLITE_READ",
    "SQLITE_ROW",
    "SYNC_MISS",
    "SYNC_PUT",
    "WATCHED_CPU",
    "WATCHED_REFRESH",
]

LIVE_P99 = (
    "what comes within 10 ms is one frame, encoded once, and sent in turns of 50 viewers "
    "([0320](decisions/0320-live-viewers.md)); gateway, upstream and all viewers "
    "share two cores here, and a faster machine kept it with 92 ms"
)
LIVE_DIFFERENT = (
    "viewers are not sorted for each id, and a session's news of one moment are one frame; but "
    "each viewer has frames of its own, encoded and written one by one, where viewers of the same "
    "ids share one: 18 % of a core instead of 2 %, in bursts, since all ids were first asked for "
    "at one moment. On a machine that was busy with other work it was 1.04 to 1.08 ×: there both "
    "waited"
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
MISS = (
    "a load begins inside its reader's call, as a task of its own; no turn of the loop is planned "
    "for an empty queue; loads, waiters and rows are structs; arguments are bound without "
    "`inspect`; what only some loads need stands behind one test, and a load that waited leaves "
    "its list without a callback. 93 Python calls are left of two hundred, a seventh of them "
    "asyncio's for the task on Python 3.11. The rest is flat: the end of a load takes a sixth, the "
    "request for the lease a tenth, an empty task 2 µs of 28, and the garbage collector nothing "
    "that can be measured"
)
MISS_WAITS = (
    "as above; a load that waits also has its place in the list of running loads, a guard whose "
    "task begins only after two turns of the loop, and a future for its reader"
)
KEY_MEMORY = (
    "one token for the keys of a batch, nothing in a row or an entry for a lease, a failure or "
    "tags that most keys do not have, answers that the collector does not track, values without "
    "the encoder's spare room, one number for all sizes that are equal; left are the entry (112 "
    "bytes), its answer (96) and copy (64), the row (48) and its key (109), the encoded value "
    "(36), and two places in dicts (105); a key that is loaded alone has a token (63) and "
    "times (48) of its own"
)
COLD_MANY = (
    "one lease request, one call and one publication for all keys; a key still has a work, an "
    "answer for its caller and one for memory, a lease and a row of its own: cashews stores a "
    "value in one dict"
)
SERVE_HIT = (
    "a hit is answered from a memo of request heads, in the protocol itself and with one write; "
    "nginx shares the two cores with the load, and another machine showed 1.61 ×"
)
OTHER_HEADS = (
    "one regular expression over the whole head and three searches find the request by its line "
    "and the fields that count (7 µs); the page's fields are written once a second; constant bytes "
    "for every request, nothing read at all, are 1.6 to 2.1 ×"
)
OTHER_PATHS = (
    "as for one page, but each page's head is written anew in each second in which it is asked "
    "for; the rest are misses: each path is loaded once"
)
PASSED_ON = (
    "no reference cycles, and no collections of them; a reader of answers of our own in place of "
    "h11, one timer for each wait, no task that watches a client of a short exchange; a bare proxy "
    "with httptools on both sides, with a task and a time-out for each request, reaches 0.59 ×: "
    "the rest is the decision which page it is and whether it may be kept, and messages through "
    "six layers"
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
    "neither what stores hold nor entries are tracked by the collector, nor are answers whose "
    "value leads nowhere, such as text and numbers: with ints no object is left to visit for a "
    "key. It still passes over the dict of entries and the list of the eviction, 0.06 µs for each "
    "entry. A value that is a list or a dict is an object of its own, and its answer with it; with "
    "millions of entries call `gc.freeze()` when they are loaded"
)
SQLITE_PUT = (
    "a thread takes the writer's turn and commits by itself, so no other thread is asked; the step "
    "runs in its caller's task (CPU of a put: 102 → 76 µs in a thread, 140 → 92 µs on a loop); "
    "what is left is half the engine's work around the step and half the file's. Writing on the "
    "event loop's thread was tried, and so were other pauses for a locked file "
    "([0309](decisions/0309-sqlite-store.md#where-a-puts-time-goes))"
)

POSTGRES_PUT = (
    "one prepared statement without the client library's cursors, read in the loop's callback, "
    "with one timer for many statements; the server makes the table's checks anew for each "
    "statement that writes, a deletion of nothing writes its fence (65 µs of the server's CPU, "
    "where a `DELETE` that finds nothing takes 12), and the engine's work around the step is the "
    "rest "
    "([0310](decisions/0310-postgresql.md#one-exchange-for-event-loops-and-threads-and-short-forms))"
)
REDIS_GET = (
    "replies are read by a reader of our own instead of the library's streams, and a value that "
    "memory has is not sent; one timer for many exchanges, no shield, and no second judgement of a "
    "copy that the server confirms: 2.0 → 1.2 × in CPU, 511 → 366 calls "
    "([0308](decisions/0308-redis-store.md"
    "#one-timer-for-many-exchanges-and-a-short-way-for-a-copy-that-memory-has))"
)
REDIS_PUT = (
    "one script, one round trip; context managers as classes, no slices for one value, one timer "
    "for many exchanges, no shield: 2.3–2.65 → 1.9 × in CPU; the rest is the engine around the "
    "step (the fence before and after, memory, watchers, the task that closing waits for), spread "
    "over 518 calls"
)
REDIS_SERVER = (
    "PUT has five arguments, four commands and no helper that it does not need. In a pipeline, an "
    "EVALSHA that does nothing takes the server 2.2 times a `SET`, one with the same four commands "
    "and no rule 7 times (a tenth of it is the announcement), ours 13 times; so the floor of a "
    "script is above the target of `put_many`"
)
SYNC_PUT = (
    "in the calling thread, on a blocking connection with a reader of our own: 3.8–4.2 → 3.3 × in "
    "CPU, 502 → 406 calls where redis-py takes 223; the rest as for the async put "
    "([0314](decisions/0314-event-loops-threads-and-forks.md))"
)
SYNC_MISS = (
    "the whole load runs in the calling thread, in the first step of its task: 15 → 9 × in CPU; "
    "one timer for the guards of all threads, and no future, lock or task list for a loader that "
    "runs in its caller's thread: 9 → 7.5 ×; what is left out of the async miss: → 6.8 ×. Left are "
    "the async engine's own miss (half), its task, the turn, the contexts, and signals, which are "
    "held around the engine and let through around the loader (a seventh: without that, Ctrl-C "
    "could hang every thread)"
)
MISS_BATCHED = f"{MISS}; a batch of one key waits for the end of the turn, for others (E4)"
WATCHED_REFRESH = (
    "keys that become due together are read, leased, loaded and published in one batch, from one "
    "lane for all of them ([0302](decisions/0302-loads-and-freshness.md))"
)
SQLITE_CACHED = "arguments are bound by a plan that is made once, without `inspect` at each call"
SQLITE_ROW = (
    "one key is read inline in its own thread or turn; a batch shares the statement, the clock, "
    "the search of memory and the context of its call among its keys, which is most of a read"
)
DJANGO_SQLITE = (
    "the calling thread writes and commits by itself: 10–24 → 6–10 ×; an existing key is refused "
    "by a read: 8 → 5 ×. FileBasedCache looks at one file, without a transaction, so that the "
    "engine's work around the step is most of the rest"
)
DJANGO_REDIS = (
    "one script and one round trip (`incr`: two, a read and a put that is stored only if nobody "
    "changed the number meanwhile), on a blocking connection in the calling thread: 4–17 → 3–4 × "
    "in CPU, `incr` 6 ×; the rest is the engine's work around the step, in Python, where "
    "django-redis sends one command ([0314](decisions/0314-event-loops-threads-and-forks.md)). "
    "`get` is one plain `MGET`, 0.9 to 1.15 × in CPU"
)
DJANGO_MISSING = (
    "both are one read in the calling thread; memory is touched only for values that were found, "
    "so what is left is noise"
)
