"""DynamoDB and S3 on this machine: real servers on free ports, ended by their own process id."""

import asyncio
import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from aiobotocore.config import AioConfig
from aiobotocore.session import get_session
from botocore.exceptions import ClientError
from botocore.loaders import Loader, create_loader

from stillfresh import Clock
from stillfresh.stores.dynamodb import DynamoStore
from stillfresh.stores.dynamodb.rows import is_trace
from stillfresh.stores.dynamodb.schema import EPOCH, INVALIDATED
from tests.kit.servers.valkey import free_port

SERVERS = Path(sys.prefix) / "servers"
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
    port = port or free_port()
    binary = dynoxide()
    assert binary is not None, missing()
    url = f"http://127.0.0.1:{port}"
    command = [str(binary), "serve", "--host", "127.0.0.1", "--port", str(port)]
    if file is not None:
        command += ["--db-path", str(file)]
    with running(command, url):
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
    names = ("s3", "master", "volume", "filer")
    ports = {f"{name}.port{more}": free_port() for name in names for more in ("", ".grpc")}
    keys = {"accessKey": ENVIRONMENT["AWS_ACCESS_KEY_ID"], "secretKey": "secret"}
    who = {"name": "tests", "credentials": [keys], "actions": ["Admin", "Read", "Write", "List"]}
    config = folder / "s3.json"
    config.write_text(json.dumps({"identities": [who]}))
    (folder / "data").mkdir()
    command = [str(WEED), "server", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", f"-dir={folder}/data"]
    command += ["-filer", "-s3", f"-s3.config={config}"]
    command += ["-master.volumeSizeLimitMB=64", "-master.telemetry=false"]
    command += [f"-{name}={port}" for name, port in ports.items()]
    command += ["-s3.port.lance=0", "-s3.port.iceberg=0"]  # else fixed ones, 9101 and 8181
    url = f"http://127.0.0.1:{ports['s3.port']}"
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

    @asynccontextmanager
    async def raw(self, table: str) -> "AsyncIterator[Raw]":
        """The bare clients, to see and to do what others do."""
        session = get_session()
        own = {"region_name": ENVIRONMENT["AWS_DEFAULT_REGION"]}
        session.register_component("data_loader", descriptions())
        paths = AioConfig(s3={"addressing_style": "path"})
        async with (
            session.create_client("dynamodb", endpoint_url=self.endpoint, **own) as dynamodb,
            session.create_client("s3", endpoint_url=self.s3_endpoint, config=paths, **own) as s3,
        ):
            yield Raw(dynamodb, s3, table, self.bucket)

    def new_table(self, **keys: str) -> str:
        """A table as the schema has it, or of other keys."""
        named = keys or {"pk": "HASH", "sk": "RANGE"}
        name = f"t-{uuid.uuid4().hex}"
        body = {
            "TableName": name,
            "KeySchema": [{"AttributeName": key, "KeyType": kind} for key, kind in named.items()],
            "AttributeDefinitions": [{"AttributeName": k, "AttributeType": "S"} for k in named],
            "BillingMode": "PAY_PER_REQUEST",
        }
        request = urllib.request.Request(  # noqa: S310 (our own server)
            self.endpoint,
            json.dumps(body).encode(),
            {
                "X-Amz-Target": "DynamoDB_20120810.CreateTable",
                "Content-Type": "application/x-amz-json-1.0",
                "Authorization": "AWS4-HMAC-SHA256 Credential=x/20260101/us-east-1/dynamodb/"
                "aws4_request, SignedHeaders=host, Signature=x",
                "X-Amz-Date": "20260101T000000Z",
            },
        )
        urllib.request.urlopen(request, timeout=WAIT).close()  # noqa: S310 (our own server)
        return name


@cache
def descriptions() -> Loader:
    """Of the services: megabytes of JSON, which are read once."""
    loader: Loader = create_loader()
    return loader


@dataclass(frozen=True)
class Raw:
    """Rows and objects as they are."""

    dynamodb: Any
    s3: Any
    table: str
    bucket: str

    async def rows(self) -> list[dict[str, Any]]:
        """But those that belong to no entry: the epochs of tags (I26), and traces (S8)."""
        rows = [row for row in await self._scan() if row["sk"]["S"] not in {EPOCH, INVALIDATED}]
        entries = [row for row in rows if not is_trace(row)]
        return sorted(entries, key=lambda row: (row["pk"]["S"], row["sk"]["S"]))

    async def traces(self) -> list[dict[str, Any]]:
        """The rows that say only that something ended here."""
        return [row for row in await self._scan() if is_trace(row)]

    async def _scan(self) -> list[dict[str, Any]]:
        items: list[dict[str, Any]] = (await self.dynamodb.scan(TableName=self.table))["Items"]
        return items

    async def row(self, sk: str) -> dict[str, Any] | None:
        return next((row for row in await self.rows() if row["sk"]["S"] == sk), None)

    async def put(self, **attributes: str | int) -> None:
        item = {
            name: {"S": value} if isinstance(value, str) else {"N": str(value)}
            for name, value in attributes.items()
        }
        await self.dynamodb.put_item(TableName=self.table, Item=item)

    async def put_object(self, key: str, body: bytes, content_type: str = "text/html") -> None:
        await self.s3.put_object(Bucket=self.bucket, Key=key, Body=body, ContentType=content_type)

    async def objects(self) -> set[str]:
        page = await self.s3.list_objects_v2(Bucket=self.bucket, Prefix=f"{self.table}/")
        return {each["Key"] for each in page.get("Contents", ())}


def make_bucket(s3_endpoint: str) -> None:
    asyncio.run(_make_bucket(s3_endpoint))


async def _make_bucket(s3_endpoint: str) -> None:
    paths = AioConfig(s3={"addressing_style": "path"})
    own = {"region_name": "us-east-1", "config": paths, "endpoint_url": s3_endpoint}
    keys = {
        "aws_access_key_id": ENVIRONMENT["AWS_ACCESS_KEY_ID"],
        "aws_secret_access_key": "secret",
    }
    deadline = time.monotonic() + WAIT
    async with get_session().create_client("s3", **own, **keys) as s3:
        while True:
            try:
                await s3.create_bucket(Bucket=BUCKET)
                await s3.put_object(Bucket=BUCKET, Key="ready", Body=b"")
            except ClientError as exc:  # the gateway answers before the storage behind it does
                status = exc.response["ResponseMetadata"]["HTTPStatusCode"]
                if status < 500 or time.monotonic() > deadline:
                    raise
            else:
                return


@contextmanager
def both(folder: Path, *, real_storage: bool = False) -> Iterator[Aws]:
    with ExitStack() as stack:
        s3 = stack.enter_context(seaweed_s3(folder) if real_storage else quick_s3(folder))
        make_bucket(s3)
        yield Aws(stack.enter_context(dynamodb()), s3)
