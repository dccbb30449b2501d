"""The stores that are tortured, each with what can be done to it (T4).

Everything is real: a file on a small disk, servers that are killed, paused and started again. What
a server is asked to keep (Valkey: `appendfsync always`) it has to give back.
"""

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Final
from unittest.mock import patch

from redis.crc import key_slot

from stillfresh.lab.prove.stage import Stage, lasting
from stillfresh.lab.prove.worker import KIND
from stillfresh.stores.redis.layout import Keyspace
from tests.kit.servers.cluster import clustered, until, watched_over
from tests.kit.servers.valkey import HOST, Server, binary_of, free_port

__all__ = ["STAGES", "NotHere", "small_disk"]

MOUNT, UMOUNT = shutil.which("mount"), shutil.which("umount")
MEGABYTES: Final = 48
PREFIX: Final = "torture"


class NotHere(Exception):
    """What this machine lacks, in words."""


@contextmanager
def small_disk(folder: Path, megabytes: int = MEGABYTES) -> Iterator[Path]:
    """A filesystem of its own; `NotHere` where nobody may mount one."""
    folder.mkdir(exist_ok=True)
    mount = [str(MOUNT), "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(folder)]
    if os.geteuid() != 0 or MOUNT is None or UMOUNT is None:
        raise NotHere("a small filesystem needs root and mount")
    if subprocess.run(mount, check=False, capture_output=True).returncode != 0:
        raise NotHere("mounting is not allowed here")
    try:
        yield folder
    finally:
        subprocess.run([UMOUNT, "--lazy", str(folder)], check=True)


def filled(disk: Path) -> None:
    """Not a byte is left."""
    with suppress(OSError), (disk / "ballast").open("wb", buffering=0) as ballast:
        while True:
            ballast.write(b"x" * (1 << 16))
    with suppress(OSError), (disk / "crumbs").open("wb", buffering=0) as crumbs:
        while True:
            crumbs.write(b"x")


def freed(disk: Path) -> None:
    for name in ("ballast", "crumbs"):
        (disk / name).unlink(missing_ok=True)


def on_disk(stack: ExitStack, folder: Path) -> tuple[Path, bool]:
    """A small one if it can be had, and whether it is."""
    try:
        return stack.enter_context(small_disk(folder / "disk")), True
    except NotHere:
        return folder, False


@contextmanager
def sqlite(folder: Path) -> Iterator[Stage]:
    with ExitStack() as stack:
        disk, is_small = on_disk(stack, folder)
        full = lasting(lambda: filled(disk), lambda: freed(disk), 1.0, 2.0)
        faults = {"a full disk": full} if is_small else {}
        yield Stage(f"sqlite:///{disk}/cache.db", faults)


@contextmanager
def valkey(folder: Path) -> Iterator[Stage]:
    binary = binary_of("valkey")
    if binary is None:
        raise NotHere("this machine has no valkey-server")
    with ExitStack() as stack:
        disk, is_small = on_disk(stack, folder)
        server = Server(binary, disk, "--appendonly", "yes", "--appendfsync", "always")
        server.start()
        stack.callback(server.stop)

        def roomy() -> None:
            """With this setting it ends itself rather than forget: somebody starts it again."""
            freed(disk)
            if server.process is not None and server.process.poll() is not None:
                server.stop()
                server.start()

        faults = {
            "the store killed": lasting(server.stop, server.start, 0.3, 1.0, 3.0),
            "the store paused": lasting(server.pause, server.go_on, 0.3, 2.0),
            "connections cut": lasting(
                lambda: server.command("CLIENT KILL TYPE normal"), lambda: None, 0.0
            ),
            "channels cut": lasting(
                lambda: server.command("CLIENT KILL TYPE pubsub"), lambda: None, 0.0
            ),
        }
        if is_small:
            faults["a full disk"] = lasting(lambda: filled(disk), roomy, 1.0, 2.0)
        yield Stage(server.url(timeout="500ms"), faults)


@contextmanager
def push(folder: Path) -> Iterator[Stage]:
    """S10: memory trusts what the server tells, and its silence for `memory_for`."""
    with valkey(folder) as stage:
        stage.memory_for = 0.3
        yield stage


@contextmanager
def cluster(folder: Path) -> Iterator[Stage]:
    """S9: three primaries with a replica each; replicas confirm every change."""
    with clustered(folder) as nodes:
        hurt: list[Server] = []

        def primary() -> Server:
            """One whose replica is in step; a dead primary is replaced by it, for good."""
            found = nodes.primaries()
            hurt.append(found[len(hurt) % len(found)])
            return hurt[-1]

        def failed_over() -> None:
            """A primary without persistence that came back sooner would come back empty."""
            until(lambda: len(nodes.primaries()) == 3, "nobody took over")
            nodes.mend()

        def move() -> None:
            """One of the slots goes to the next primary, key by key."""
            (place,) = Keyspace(PREFIX).of(KIND, [f"sku-{len(hurt)}"])
            old, new = nodes.primary_of(place.key), primary()
            if old is not new:
                slot = key_slot(place.key)
                nodes.begin_moving(slot, old, new)
                nodes.move_keys(slot, old, new)
                nodes.end_moving(slot, new)

        faults = {
            "a primary killed": lasting(lambda: primary().stop(), failed_over, 0.0, 2.0),
            "a primary paused": lasting(lambda: primary().pause(), nodes.mend, 0.3, 2.0),
            "a slot moved": lasting(move, lambda: None, 0.0),
        }
        url = f"{nodes.url}?prefix={PREFIX}&timeout=500ms&wait_replicas=1"
        yield Stage(url, faults)


@contextmanager
def sentinel(folder: Path) -> Iterator[Stage]:
    """S9: a primary and its replica, watched over by three Sentinels."""
    with watched_over(folder) as watch:
        servers = [watch.primary, watch.replica]

        def kill() -> None:
            """The primary goes last, so that the other one is the replica."""
            servers.sort(key=lambda it: "role:master" in it.command("INFO replication"))
            servers[-1].stop()

        def failed_over() -> None:
            other, dead = servers
            until(lambda: "role:master" in other.command("INFO replication"), "nobody took over")
            # A Sentinel that does not know yet would make the new primary a replica of the old one.
            until(lambda: watch.primaries() == {other.port}, "the Sentinels do not agree")
            dead.start()
            dead.command("REPLICAOF", HOST, str(other.port))
            until(lambda: "link_status:up" in dead.command("INFO replication"), "no replica")

        faults = {
            "a primary killed": lasting(kill, failed_over, 0.0, 2.0),
            "connections cut": lasting(
                lambda: [it.command("CLIENT KILL TYPE normal") for it in servers], lambda: None, 0.0
            ),
        }
        url = f"{watch.url}?prefix={PREFIX}&timeout=500ms&wait_replicas=1"
        yield Stage(url, faults)


@contextmanager
def postgres(folder: Path) -> Iterator[Stage]:
    """S11: what it has acknowledged it has to give back; memory trusts what it tells (S10)."""
    from tests.kit.servers.postgres import PostgresServer  # noqa: PLC0415 (another extra)

    server = PostgresServer("synchronous_commit=on", "max_connections=100")
    with ExitStack() as stack:
        stack.callback(server.remove)
        server.create()
        server.start()
        url = server.new_store(timeout="500ms", max_connections="4")
        cut = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid()"
        faults = {
            "the store killed": lasting(server.stop, server.start, 0.3, 1.0, 3.0),
            "the store paused": lasting(server.pause, server.go_on, 0.3, 2.0),
            "connections cut": lasting(lambda: server.execute(cut), lambda: None, 0.0),
            "channels cut": lasting(
                lambda: server.execute(f"{cut} AND query LIKE 'LISTEN%'"), lambda: None, 0.0
            ),
        }
        yield Stage(url, faults, memory_for=0.3)


@contextmanager
def dynamodb(folder: Path) -> Iterator[Stage]:
    from tests.kit.servers import aws as aws_servers  # noqa: PLC0415 (a second of imports that other stores do not need)

    if why := aws_servers.missing():
        raise NotHere(why)
    with ExitStack() as stack:
        disk, is_small = on_disk(stack, folder)
        port = free_port()
        url = f"http://127.0.0.1:{port}"
        command = [str(aws_servers.dynoxide()), "serve", "--host", "127.0.0.1", "--port", str(port)]
        command += ["--db-path", str(disk / "table.db")]
        lives = ExitStack()
        stack.callback(lives.close)
        process = lives.enter_context(aws_servers.running(command, url))
        s3 = stack.enter_context(aws_servers.quick_s3(folder))
        aws_servers.make_bucket(s3)
        aws = aws_servers.Aws(url, s3)

        def start() -> None:
            nonlocal process
            process = lives.enter_context(aws_servers.running(command, url))

        def roomy() -> None:
            freed(disk)
            if process.poll() is not None:
                start()

        faults = {
            "the store killed": lasting(lives.close, start, 0.3, 1.0, 3.0),
            "the store paused": lasting(
                lambda: process.send_signal(signal.SIGSTOP),
                lambda: process.send_signal(signal.SIGCONT),
                0.3,
                2.0,
            ),
        }
        if is_small:
            faults["a full disk"] = lasting(lambda: filled(disk), roomy, 1.0, 2.0)
        stack.enter_context(patch.dict(os.environ, aws_servers.ENVIRONMENT))
        yield Stage(aws.address(aws.new_table()), faults, count=8, pace=0.02)


STAGES: Final = {
    "sqlite": sqlite,
    "valkey": valkey,
    "push": push,
    "cluster": cluster,
    "sentinel": sentinel,
    "postgres": postgres,
    "dynamodb": dynamodb,
}
