"""A WSGI application for gunicorn's `preload_app`: a SyncCache that the parent has used already."""

import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from stillfresh import SyncCache

FOLDER = Path(os.environ["PRICES_FOLDER"])

cache = SyncCache(f"sqlite:///{FOLDER}/cache.db")


@cache.cached("price", fresh_for="1h")
def price(sku: str) -> str:
    """Each load is a line of a file."""
    with (FOLDER / "loads").open("a") as loads:
        loads.write(f"{sku} {os.getpid()}\n")
    time.sleep(0.3)
    return f"{sku} costs 9"


price("warm")


def app(environ: dict[str, Any], start: Callable[..., object]) -> Iterable[bytes]:
    """`/sku`: its price, and who says so."""
    text = f"{os.getpid()} {price(environ['PATH_INFO'][1:])}"
    start("200 OK", [("Content-Type", "text/plain"), ("Content-Length", str(len(text)))])
    return [text.encode()]
