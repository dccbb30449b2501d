"""From the settings of a store to the link to its servers (S5, S9)."""

from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from stillfresh.stores.redis.cluster import Address, Cluster
from stillfresh.stores.redis.link import Link
from stillfresh.stores.redis.sentinel import Sentinels


def new_link(
    url: str,
    nodes: Sequence[Address],
    service: str | None,
    bases: Sequence[bytes],
    *,
    timeout: float,
    **options: Any,  # noqa: ANN401 (the link's own)
) -> Link | Cluster:
    """To one server, to the primary that Sentinels name, or to the nodes of a cluster."""
    if service is not None:
        sentinels = Sentinels(nodes, service, timeout)
        return Link(url, sentinels=sentinels, timeout=timeout, **options)
    if not nodes:
        return Link(url, timeout=timeout, **options)

    def link(address: Address) -> Link:
        host, port = address
        node = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        user, at, _ = (parts := urlsplit(url)).netloc.rpartition("@")
        there = urlunsplit(parts._replace(netloc=f"{user}{at}{node}"))
        return Link(there, node=node, timeout=timeout, **options)

    return Cluster(nodes, link, timeout, bases)
