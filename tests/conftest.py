"""How Hypothesis and the garbage collector run here, and the servers that the tests of one worker
share: started for the first who asks, ended with the worker."""

import gc
import logging
import os
import shutil
import subprocess
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

from tests.kit.servers.valkey import Server, binary_of, serving

if TYPE_CHECKING:
    from tests.kit.servers.aws import Aws
    from tests.kit.servers.postgres import PostgresServer

# How long an example takes says how busy the machine is, and nothing about the code. The same
# examples every time, so that a failure is the change's own; STILLFRESH_EXPLORE=1 draws others.
settings.register_profile(
    "test",
    deadline=None,
    derandomize="STILLFRESH_EXPLORE" not in os.environ,
    suppress_health_check=[HealthCheck.too_slow],
)
# `make proof` chooses it: other examples in every run, and ten times as many.
settings.register_profile(
    "proof",
    settings.get_profile("test"),
    derandomize=False,
    max_examples=10 * settings.get_profile("test").max_examples,
)
settings.load_profile("test")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Modules and tests stay to the end. The garbage collector would look through half a million
    objects again and again, and find nothing: while they are made, and in every `gc.collect()` of
    a test, which would take most of a second."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(
    item: pytest.Item, nextitem: pytest.Item | None
) -> Generator[None, object, object]:
    """What a file's tests leave behind (imports, fixtures, reports) stays to the end too. A run of
    the simulator collects garbage at its end, and would look through all of it each time."""
    result = yield
    if nextitem is not None and nextitem.path != item.path:
        gc.collect()
        gc.freeze()
    return result


@pytest.fixture(autouse=True)
def _usual_log_level() -> None:
    """A program of a guide may set levels, or a library that it uses. The next tests, which look
    at what is logged, see what a program sees by default."""
    logging.getLogger().setLevel(logging.WARNING)
    logging.getLogger("stillfresh").setLevel(logging.NOTSET)


@pytest.fixture(scope="session")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Server]]:
    """By name, each started when it is first asked for."""
    with ExitStack() as stack:

        @cache
        def server_of(name: str) -> Server:
            binary = binary_of(name)
            if binary is None:
                pytest.skip(f"this machine has no {name}-server")
            return stack.enter_context(serving(binary, tmp_path_factory.mktemp(name)))

        yield server_of


@pytest.fixture(scope="session")
def valkey(servers: Callable[[str], Server]) -> Server:
    return servers("valkey")


@pytest.fixture(scope="session")
def postgres() -> "Iterator[PostgresServer]":
    from tests.kit.servers.postgres import postgres_serving  # noqa: PLC0415 (the same)

    with postgres_serving() as server:
        yield server


@pytest.fixture(scope="session")
def aws(tmp_path_factory: pytest.TempPathFactory) -> "Iterator[Aws]":
    """DynamoDB and S3."""
    from tests.kit.servers import aws as aws_servers  # noqa: PLC0415 (a second of imports that most tests do not need)

    if why := aws_servers.missing():
        pytest.skip(why)
    folder = tmp_path_factory.mktemp("aws")
    with pytest.MonkeyPatch.context() as patch, aws_servers.both(folder) as aws:
        for name, value in aws_servers.ENVIRONMENT.items():
            patch.setenv(name, value)
        for name in ("PATIENCE", "CONNECT_TIMEOUT", "READ_TIMEOUT"):  # busy is not unavailable
            patch.setattr(f"stillfresh.stores.aws.{name}", 30.0)
        yield aws


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A filesystem of its own, with four megabytes of room."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount_command, umount = shutil.which("mount"), shutil.which("umount")
    if os.geteuid() != 0 or mount_command is None:
        pytest.skip("a small filesystem needs root and mount")
    mount = [mount_command, "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(disk)]
    if subprocess.run(mount, check=False, capture_output=True).returncode != 0:
        pytest.skip("mounting is not allowed here")
    try:
        yield disk
    finally:
        subprocess.run([str(umount), str(disk)], check=True)
