"""Servers that tests in several places share: one of each for a worker, ended with it."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache

import pytest
from valkey_server import Server, binary_of, free_port, serving


@pytest.fixture(scope="session")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Server]]:
    """By name, each started when it is first asked for."""
    with ExitStack() as stack:

        @cache
        def server_of(name: str) -> Server:
            binary = binary_of(name)
            if binary is None:
                pytest.skip(f"this machine has no {name}-server")
            is_cluster = name == "valkey-cluster"
            cluster = ["--cluster-enabled", "yes", "--cluster-port", str(free_port())]
            options = cluster if is_cluster else []
            server = stack.enter_context(serving(binary, tmp_path_factory.mktemp(name), *options))
            if is_cluster:
                server.take_all_slots()
            return server

        yield server_of


@pytest.fixture(scope="session")
def valkey(servers: Callable[[str], Server]) -> Server:
    return servers("valkey")
