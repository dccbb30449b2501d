"""A process that asks a Django cache for a value that takes time to make: `URL LOG`.

Four threads ask at once. Every call of the function adds a line to LOG.
"""

import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import django
from django.conf import settings

from tests.kit.shop import BACKEND


def main(url: str, log: str) -> None:
    settings.configure(CACHES={"default": {"BACKEND": BACKEND, "LOCATION": url}}, USE_TZ=True)
    django.setup()
    from django.core.cache import caches  # noqa: PLC0415 (after settings)

    def make() -> str:
        with Path(log).open("a") as lines:
            lines.write("made\n")
        time.sleep(0.3)
        return "made"

    def ask(_: int) -> str:
        start.wait()
        value: str = caches["default"].get_or_set("slow", make)
        return value

    start = threading.Barrier(4)
    print("ready", flush=True)
    sys.stdin.readline()
    with ThreadPoolExecutor(4) as pool:
        print(*pool.map(ask, range(4)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
