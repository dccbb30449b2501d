"""DynamoDB and S3 on this machine: real servers on free ports, ended by their own process id."""

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from stillfresh import Clock
from stillfresh.stores.dynamodb import DynamoStore

ROOT = Path(__file__).parent.parent.parent
SERVERS = ROOT / ".venv" / "servers"
MINISTACK = SERVERS / "ministack" / "bin" / "ministack"
WEED = Path(sys.executable).with_name("weed")
ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": "AKIDSTILLFRESH",
    "AWS_SECRET_ACCESS_KEY": "secret",
    "AWS_DEFAULT_REGION": "eu-central-1",
    "AWS_EC2_METADATA_DISABLED": "true",
}
BUCKET = "pages"
WAIT = 60.0


def dynoxide() -> Path | None:
    """The one that was built for this platform, if it is installed."""
    return next(iter(sorted((SERVERS / "node_modules" / "@dynoxide").glob("*/dynoxide"))), None)


def missing() -> str:
    """What is not installed, in words; empty if everything is."""
    if dynoxide() is None:
        return "no DynamoDB server here: run make test, with npm installed"
    return "" if MINISTACK.exists() else "no S3 server here: run make test"


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


def answers(url: str) -> bool:
    """Any HTTP answer will do: a refusal is one."""
    try:
        urllib.request.urlopen(url, timeout=1).close()  # noqa: S310 (our own server)
    except urllib.error.HTTPError as exc:
        exc.close()
        return exc.code < 500
    except OSError:
        return False
    return True


@contextmanager
def running(command: list[str], url: str, **environment: str) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, **environment},
    )
    try:
        deadline = time.monotonic() + WAIT
        while not answers(url):
            assert process.poll() is None, f"{command[0]} ended with {process.returncode}"
            assert time.monotonic() < deadline, f"{command[0]} does not answer"
            time.sleep(0.02)
        yield process
    finally:
        process.kill()
        process.wait(WAIT)


@contextmanager
def dynamodb(port: int | None = None, file: Path | None = None) -> Iterator[str]:
    """The address of a DynamoDB server; with a file, what it holds survives it."""
    port, binary = port or free_port(), dynoxide()
    assert binary is not None, missing()
    url = f"http://127.0.0.1:{port}"
    kept = [] if file is None else ["--db-path", str(file)]
    with running([str(binary), "serve", "--host", "127.0.0.1", "--port", str(port), *kept], url):
        yield url


@contextmanager
def quick_s3(folder: Path) -> Iterator[str]:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    own = {"BIND_HOST": "127.0.0.1", "GATEWAY_PORT": str(port), "HOME": str(folder)}
    with running([str(MINISTACK)], url, **own):
        yield url


@contextmanager
def seaweed_s3(folder: Path) -> Iterator[str]:
    """S3 on real storage: master, volume, filer and gateway in one process."""
    port, *others = (free_port() for _ in range(4))
    keys = {"accessKey": ENVIRONMENT["AWS_ACCESS_KEY_ID"], "secretKey": "secret"}
    who = {"name": "tests", "credentials": [keys], "actions": ["Admin", "Read", "Write", "List"]}
    config = folder / "s3.json"
    config.write_text(json.dumps({"identities": [who]}))
    (folder / "data").mkdir()
    command = [str(WEED), "server", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", f"-dir={folder}/data"]
    command += ["-filer", "-s3", f"-s3.port={port}", f"-s3.config={config}"]
    command += ["-master.volumeSizeLimitMB=64", "-master.telemetry=false"]
    names = ("master", "volume", "filer")
    command += [f"-{name}.port={other}" for name, other in zip(names, others, strict=True)]
    url = f"http://127.0.0.1:{port}"
    with running(command, url):
        yield url


@dataclass(frozen=True)
class Aws:
    """Both addresses; each table of a test is its own."""

    endpoint: str
    s3_endpoint: str
    bucket: str = BUCKET

    def address(self, table: str, **options: str) -> str:
        given = {"bucket": self.bucket, "endpoint": self.endpoint, "s3_endpoint": self.s3_endpoint}
        return f"dynamodb://{table}?{urlencode({**given, **options})}"

    def store(self, table: str, clock: Clock = time.time, **options: Any) -> DynamoStore:
        given: Mapping[str, Any] = {
            "bucket": self.bucket,
            "endpoint": self.endpoint,
            "s3_endpoint": self.s3_endpoint,
            **options,
        }
        return DynamoStore(table, clock=clock, **given)


def new_name() -> str:
    return f"t-{uuid.uuid4().hex}"


@contextmanager
def both(folder: Path, *, real_storage: bool = False) -> Iterator[Aws]:
    with ExitStack() as stack:
        s3 = stack.enter_context(seaweed_s3(folder) if real_storage else quick_s3(folder))
        yield Aws(stack.enter_context(dynamodb()), s3)
