"""A cache for code without an event loop: threads share one load, and a forked child goes on alone.

Run it: `python examples/threads.py`. It takes about a second.
"""

import os
import tempfile
import threading
import time

from stillfresh import SyncCache

folder = tempfile.TemporaryDirectory()
cache = SyncCache(f"sqlite:///{folder.name}/prices.db")
loads: list[str] = []


@cache.batched("price", fresh_for="1m", stale_for="1h")
def prices(skus: list[str]) -> dict[str, int]:
    """A slow upstream; it runs in the thread of a caller that waits."""
    loads.append(threading.current_thread().name)
    time.sleep(0.2)
    return dict.fromkeys(skus, 1000)


def main() -> None:
    threads = [threading.Thread(target=prices, args=("sku-1",)) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(f"sixteen threads, one cold key: {len(loads)} load, in {loads[0].partition(' ')[0]}")

    prices.put("sku-1", 1200)
    print(f"put after a write: {prices('sku-1')}, {prices.get('sku-1').verdict}", flush=True)

    pid = os.fork()
    if pid == 0:  # in the child
        print(f"a forked child reads the same store: {prices('sku-1')}", flush=True)
        prices.invalidate("sku-1")
        os._exit(0)
    os.waitpid(pid, 0)
    print(f"and what it invalidated is loaded again here: {prices('sku-1')}")
    cache.close()
    folder.cleanup()


if __name__ == "__main__":
    main()
