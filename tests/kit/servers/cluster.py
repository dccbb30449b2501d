"""A real Valkey cluster of three primaries with a replica each, and a real Sentinel set (S9).

The same server program as everywhere: cluster nodes and Sentinels are modes of it.
"""

import re
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from redis import Redis
from redis.crc import key_slot
from redis.exceptions import RedisError

from tests.kit.servers.valkey import DEADLINE, HOST, Server, binary_of, free_port, serving

__all__ = ["ClusterServers", "Move", "SentinelServers", "clustered", "watched_over"]

SLOTS = 16_384
NODE_TIMEOUT = 1_000
"""Milliseconds until a silent node is taken for dead."""


def until(is_so: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + DEADLINE
    while not is_so():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def bus_port(node: Server) -> str:
    """Where nodes talk to each other."""
    return node.options[node.options.index("--cluster-port") + 1]


class ClusterServers:
    """Nodes 0 to 2 began as primaries, 3 to 5 as their replicas."""

    def __init__(self, nodes: list[Server]) -> None:
        self.nodes = nodes
        self.clients = [Redis(host=HOST, port=node.port) for node in nodes]

    @property
    def url(self) -> str:
        nodes = ",".join(f"{HOST}:{node.port}" for node in self.nodes[:3])
        return f"redis+cluster://{nodes}"

    def form(self) -> None:
        first = self.nodes[0]
        share = SLOTS // 3
        for node in self.nodes[1:]:
            first.command("CLUSTER MEET", HOST, str(node.port), bus_port(node))
        for number, node in enumerate(self.nodes[:3]):
            last = SLOTS - 1 if number == 2 else (number + 1) * share - 1
            node.command("CLUSTER ADDSLOTSRANGE", str(number * share), str(last))
        until(lambda: all(self._knows_all(node) for node in self.nodes), "the nodes do not meet")
        for primary, replica in zip(self.nodes[:3], self.nodes[3:], strict=True):
            replica.command("CLUSTER REPLICATE", self.name(primary))
        until(self.is_whole, "the cluster does not form")

    def _knows_all(self, node: Server) -> bool:
        lines = node.command("CLUSTER NODES").splitlines()
        return sum("connected" in line for line in lines) == len(self.nodes)

    def name(self, node: Server) -> str:
        return node.command("CLUSTER MYID").splitlines()[1]

    def is_whole(self) -> bool:
        """Every node answers, agrees on the slots, and every replica is in step."""
        infos = [node.command("CLUSTER INFO") for node in self.nodes]
        roles = [node.command("INFO replication") for node in self.nodes]
        in_step = [role for role in roles if "role:master" in role or "link_status:up" in role]
        ready = [
            info for info in infos if "cluster_state:ok" in info and f"assigned:{SLOTS}" in info
        ]
        return len(ready) == len(in_step) == len(self.nodes)

    def primary_of(self, key: bytes) -> Server:
        """The live node that serves the key."""
        slot = key_slot(key)
        for node in self.nodes:
            if node.process is not None and slot in self._slots_of(node):
                return node
        raise AssertionError(f"nobody serves slot {slot}")

    def _slots_of(self, node: Server) -> set[int]:
        """The slots that a node takes for its own; none if it is a replica."""
        slots = set[int]()
        for line in node.command("CLUSTER NODES").splitlines():
            fields = line.split()
            if len(fields) > 2 and "myself" in fields[2] and "master" in fields[2]:
                for slot_range in fields[8:]:
                    first, _, last = slot_range.partition("-")
                    if first.isdecimal():
                        slots.update(range(int(first), int(last or first) + 1))
        return slots

    def take_slot(self, slot: int) -> None:
        """Take the slot from the node that has it. `mend` gives it to a primary again.

        A node that has forgotten the slot learns it anew from a message that the holder sent
        before it forgot, so they are told until none knows it.
        """
        for node in self.nodes:
            node.command("CONFIG SET cluster-require-full-coverage no")
        until(lambda: self._forget_slots(slot), "the nodes do not forget the slot")

    def _forget_slots(self, *slots: int) -> bool:
        """Tell every node to forget these slots; say whether no node knew one of them."""
        numbers = [str(slot) for slot in slots]
        replies = [
            node.command("CLUSTER DELSLOTS", number) for node in self.nodes for number in numbers
        ]
        return not any(reply.startswith("+OK") for reply in replies)

    def client(self, node: Server) -> "Redis":
        return self.clients[self.nodes.index(node)]

    def begin_moving(self, slot: int, old: Server, new: Server) -> None:
        """From now on keys of the slot may be on either."""
        new.command("CLUSTER SETSLOT", str(slot), "IMPORTING", self.name(old))
        old.command("CLUSTER SETSLOT", str(slot), "MIGRATING", self.name(new))

    def move_keys(self, slot: int, old: Server, new: Server, *keys: bytes) -> None:
        """These, or all that the old node has."""
        client = self.client(old)
        names = keys or client.cluster("GETKEYSINSLOT", slot, 10_000)
        for key in names:
            client.execute_command("MIGRATE", HOST, new.port, key, 0, 5_000)  # type: ignore[no-untyped-call]

    def end_moving(self, slot: int, new: Server) -> None:
        for node in (new, *self.nodes):
            if node.process is not None:
                node.command("CLUSTER SETSLOT", str(slot), "NODE", self.name(new))

    def primaries(self) -> list[Server]:
        """Of the live nodes, those that take themselves for one."""
        live = [node for node in self.nodes if node.process is not None]
        return [node for node in live if "role:master" in node.command("INFO replication")]

    def mend(self) -> None:
        """Undo what a test did, also one that failed half-way, and wait until all is well."""
        for node in self.nodes:
            if node.process is None:
                node.start()
            node.go_on()
        self._end_moves()
        self._give_back_slots()
        for node in self.nodes:
            node.command("CONFIG SET cluster-replica-no-failover no")
            node.command("CONFIG SET cluster-require-full-coverage yes")
        until(self.is_whole, "the cluster does not heal")

    def _end_moves(self) -> None:
        """Let slots that are half-way stay where they were: each test has keys of its own."""
        for node in self.nodes:
            for slot in re.findall(r"\[(\d+)-[<>]-", node.command("CLUSTER NODES")):
                node.command("CLUSTER SETSLOT", slot, "STABLE")

    def _give_back_slots(self) -> None:
        """Give the slots that no node has to a primary."""
        owned = set[int]().union(*map(self._slots_of, self.nodes))
        missing = sorted(set(range(SLOTS)) - owned)
        if not missing:
            return
        self._forget_slots(*missing)
        self.primaries()[0].command("CLUSTER ADDSLOTS", *map(str, missing))


class Move:
    """The slot of one key on its way from its node to another."""

    def __init__(self, cluster: ClusterServers, key: bytes) -> None:
        self.cluster = cluster
        self.key = key
        self.slot = key_slot(key)
        self.old = cluster.primary_of(key)
        self.new = next(node for node in cluster.primaries() if node is not self.old)

    def begin(self, *keys: bytes) -> None:
        """Some of its keys have gone over already."""
        self.cluster.begin_moving(self.slot, self.old, self.new)
        self.keys(*keys)

    def keys(self, *keys: bytes) -> None:
        """The keys that the old node still has go over."""
        left = self.cluster.client(self.old).cluster("GETKEYSINSLOT", self.slot, 10_000)
        for key in {*keys}.intersection(name.encode() for name in left):
            self.cluster.move_keys(self.slot, self.old, self.new, key)

    def end(self) -> None:
        self.cluster.move_keys(self.slot, self.old, self.new)
        self.cluster.end_moving(self.slot, self.new)


@contextmanager
def clustered(folder: Path) -> Iterator[ClusterServers]:
    binary = binary_of("valkey")
    assert binary is not None
    with ExitStack() as stack:
        nodes = []
        for number in range(6):
            place = folder / str(number)
            place.mkdir()
            options = ["--cluster-enabled", "yes", "--cluster-node-timeout", str(NODE_TIMEOUT)]
            options += ["--cluster-port", str(free_port())]
            options += ["--repl-ping-replica-period", "1", "--repl-diskless-sync-delay", "0"]
            nodes.append(stack.enter_context(serving(binary, place, *options)))
        cluster = ClusterServers(nodes)
        for client in cluster.clients:
            stack.callback(client.close)
        cluster.form()
        yield cluster


class SentinelServers:
    """A primary, a replica, and three Sentinels that watch over them."""

    service = "shop"

    def __init__(self, primary: Server, replica: Server, ports: list[int]) -> None:
        self.primary = primary
        self.replica = replica
        self.ports = ports

    @property
    def url(self) -> str:
        places = ",".join(f"{HOST}:{port}" for port in self.ports)
        return f"redis+sentinel://{places}/{self.service}"

    def primaries(self) -> set[int]:
        """The ports that the Sentinels name as the primary's."""
        ports = set[int]()
        for port in self.ports:
            with Redis(host=HOST, port=port) as client:
                ports.add(client.sentinel_get_master_addr_by_name(self.service)[1])
        return ports


@contextmanager
def watched_over(folder: Path) -> Iterator[SentinelServers]:
    binary = binary_of("valkey")
    assert binary is not None
    with ExitStack() as stack:
        places = [folder / name for name in ("primary", "replica")]
        for place in places:
            place.mkdir()
        primary = stack.enter_context(serving(binary, places[0]))
        replica = stack.enter_context(
            serving(
                binary,
                places[1],
                "--replicaof",
                f"{HOST} {primary.port}",
                "--repl-diskless-sync-delay",
                "0",
            )
        )
        sentinels = SentinelServers(primary, replica, [free_port() for _ in range(3)])
        for port in sentinels.ports:
            config = folder / f"sentinel-{port}.conf"
            config.write_text(
                f"port {port}\nbind {HOST}\ndir {folder}\nlogfile sentinel-{port}.log\n"
                f"sentinel monitor {sentinels.service} {HOST} {primary.port} 2\n"
                f"sentinel down-after-milliseconds {sentinels.service} 500\n"
                f"sentinel failover-timeout {sentinels.service} 3000\n"
            )
            process = subprocess.Popen([str(binary), str(config), "--sentinel"])
            stack.callback(process.wait, timeout=DEADLINE)
            stack.callback(process.kill)
        clients = [Redis(host=HOST, port=port) for port in sentinels.ports]
        for client in clients:
            stack.callback(client.close)

        def is_known(client: "Redis") -> bool:
            try:
                about = client.sentinel_master(sentinels.service)
            except (OSError, RedisError):
                return False
            assert isinstance(about, dict)
            return bool(about["num-slaves"] == 1 and about["num-other-sentinels"] == 2)

        until(lambda: all(map(is_known, clients)), "the Sentinels do not find each other")
        yield sentinels
