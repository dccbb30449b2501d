"""From a user's store to one under proof: its own namespace, and a proxy in front."""

import asyncio
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Final
from urllib.parse import parse_qsl, quote, urlencode, urlsplit, urlunsplit
from uuid import uuid4

from stillfresh.errors import ConfigError, StoreError
from stillfresh.lab.prove.history import DOUBLED, KEPT, LOST, RECOVERED
from stillfresh.lab.prove.nginx import NGINX, nginx_stage
from stillfresh.lab.prove.proxy import HOST, Proxy, faults_of_connections
from stillfresh.lab.prove.stage import Fault, Stage
from stillfresh.lab.prove.worker import KIND
from stillfresh.stores import running, split_tenant, store_for

PORTS: Final = {"redis": 6379, "valkey": 6379, "postgresql": 5432, "postgres": 5432}
MEANING: Final = {
    LOST: "The store acknowledged an invalidation, and lost it: the old copy was served again. "
    "Redis and Valkey replicate asynchronously, so a failover loses what the replica had not yet "
    "received; with ?wait_replicas=1 the caller gets an error instead. A server that restarts "
    "without its last writes does the same: see its appendfsync.",
    DOUBLED[1]: "Two processes held the lease of one key: the store forgot a lease that it gave.",
    KEPT: "The store acknowledged a copy, and later gave back an older one: a failover or a "
    "restart lost writes.",
    RECOVERED: "Within 60 seconds not every process could read and publish: can the store be "
    "reached, may it be written to, and has it room?",
}
"""What a broken promise means for a store."""


@contextmanager
def proving(address: str, peer: str = "") -> Iterator[Stage]:
    """The store, and the faults of its connections; entries of the proof are deleted at the end."""
    if peer == NGINX:  # it keeps its pages itself
        with nginx_stage() as stage:
            yield stage
        return
    bare, tenant = split_tenant(address)
    if tenant is not None:
        raise ConfigError("tenant: a proof has its own; leave '?tenant=' out")
    if bare.startswith("memory:"):
        raise ConfigError("memory:// is in one process; name a store that processes share")
    own_tenant = f"prove-{uuid4().hex[:12]}"
    option = f"{'&' if '?' in bare else '?'}tenant={own_tenant}"
    with ExitStack() as stack:
        url = bare
        faults: dict[str, Fault] = {}
        server = tcp_place(bare)
        if server is not None:
            proxy = stack.enter_context(Proxy(*server))
            url = through(bare, proxy.port)
            faults = faults_of_connections(proxy, "the store")
        is_far = bare.startswith("dynamodb:")
        stage = Stage(
            url + option,
            faults,
            count=8 if is_far else 32,
            pace=0.02 if is_far else 0.004,
            peer=peer,
            moves_clock=False,
            may_forget=True,
        )
        try:
            asyncio.run(_delete_entries(bare + option, stage))
        except StoreError as exc:
            hint = "" if bare.startswith("sqlite:") else "; is it running, and is the port right?"
            raise StoreError(f"{exc}{hint}") from exc
        try:
            yield stage
        finally:
            try:
                asyncio.run(_delete_entries(bare + option, stage))
            except StoreError as exc:
                stage.left = f"the entries of {own_tenant} could not be deleted, and expire: {exc}"


async def _delete_entries(url: str, stage: Stage) -> None:
    async with running(store_for(url, time.time)) as store:
        await store.delete(KIND, stage.keys)


def tcp_place(url: str) -> tuple[str, int] | None:
    """The server behind a proxy; None if no proxy is possible: files, TLS, several servers."""
    parts = urlsplit(url)
    options = dict(parse_qsl(parts.query))
    if parts.scheme == "dynamodb":
        endpoint = urlsplit(options.get("endpoint", ""))
        if endpoint.scheme == "http" and endpoint.hostname:
            return endpoint.hostname, endpoint.port or 80
        return None
    if parts.scheme not in PORTS or parts.hostname is None:
        return None
    has_several_hosts = "," in parts.netloc or "host" in options
    checks_certificate = options.get("sslmode", "").startswith("verify")
    if has_several_hosts or checks_certificate:
        return None
    return parts.hostname, parts.port or PORTS[parts.scheme]


def through(url: str, port: int) -> str:
    """The same address, with a proxy in place of its server."""
    parts = urlsplit(url)
    place = f"{HOST}:{port}"
    if parts.scheme == "dynamodb":
        options = dict(parse_qsl(parts.query)) | {"endpoint": f"http://{place}"}
        return urlunsplit(parts._replace(query=urlencode(options, quote_via=quote)))
    user, at_sign, _ = parts.netloc.rpartition("@")
    return urlunsplit(parts._replace(netloc=f"{user}{at_sign}{place}"))
