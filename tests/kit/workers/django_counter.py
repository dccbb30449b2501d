"""A process that adds to one number in Django's cache: `URL TIMES`. It says "done" at the end."""

import sys

import django
from django.conf import settings

from tests.kit.shop import BACKEND


def main(url: str, times: int) -> None:
    settings.configure(CACHES={"default": {"BACKEND": BACKEND, "LOCATION": url}}, USE_TZ=True)
    django.setup()
    from django.core.cache import cache  # noqa: PLC0415 (after settings)

    cache.add("visits", 0, timeout=None)
    print("ready", flush=True)
    sys.stdin.readline()
    for _ in range(times):
        cache.incr("visits")
    print("done", flush=True)
    sys.stdin.readline()
    print(cache.get("visits"), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
