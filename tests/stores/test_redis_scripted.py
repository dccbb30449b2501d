"""S9, S10, E20: Sentinels, reads by threads and channels of Redis, with a scripted server."""

import asyncio
from itertools import count
from types import SimpleNamespace
from typing import Any, cast

import pytest
from redis.asyncio.connection import AbstractConnection, ConnectionPool
from redis.crc import key_slot
from redis.exceptions import AskError, MovedError, ReadOnlyError, ResponseError, TryAgainError
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from stillfresh import ConfigError, NotOpen, Policy, StoreError
from stillfresh.stores import capabilities_of
from stillfresh.stores.contract import (
    AWAY,
    UNREAD,
    Ask,
    Copy,
    Failure,
    Held,
    Lease,
    Mark,
    Newer,
    Put,
    PutOutcome,
    PutResult,
)
from stillfresh.stores.redis import RedisStore, listing, scripts
from stillfresh.stores.redis import link as redis_link
from stillfresh.stores.redis import threads as redis_threads
from stillfresh.stores.redis.channel import RedisChannel
from stillfresh.stores.redis.cluster import LOCATE_EVERY, Cluster
from stillfresh.stores.redis.heard import AGAIN, Blank, HeardStamps, PutFence, StampedCommand
from stillfresh.stores.redis.layout import (
    BUCKETS,
    FIELDS,
    GLANCE,
    HOW,
    MAGIC,
    NUMBER,
    VALUE,
    Keyspace,
    packed_tags,
    padded,
)
from stillfresh.stores.redis.link import Link, Sentinels
from stillfresh.stores.redis.replies import ReplyReader
from stillfresh.stores.redis.threads import ThreadConnections
from stillfresh.stores.urls import store_for
from stillfresh.testing import ManualClock

PLACES = [("one", 1), ("two", 2), ("three", 3)]


class Server:
    """Answers each command as the script says, by host; every connection is noted."""

    def __init__(self, **answers: Any) -> None:
        self.answers = answers
        self.asked: list[str] = []
        self.commands: list[tuple[str, ...]] = []
        self.closed: list[str] = []
        self.options: list[dict[str, object]] = []

    def connection(self, *, host: str, port: int, **options: object) -> Any:
        self.options.append(options)

        async def connect() -> None:
            self.asked.append(host)
            if isinstance(self.answers[host], OSError):
                raise self.answers[host]

        async def send(*command: str) -> None:
            self.commands.append(command)

        async def reply() -> Any:
            if isinstance(self.answers[host], Exception):
                raise self.answers[host]
            return self.answers[host]

        async def disconnect(*, nowait: bool) -> None:
            assert nowait
            self.closed.append(host)

        made = SimpleNamespace(connect=connect, send_command=send, read_response=reply)
        made.disconnect, made.port = disconnect, port
        return made


def sentinels(server: Server, monkeypatch: pytest.MonkeyPatch) -> Sentinels:
    monkeypatch.setattr(redis_link, "Connection", server.connection)
    return Sentinels(PLACES, "shop", 3.0)


async def connected(found: Sentinels, server: Server) -> Any:
    given = {"host": "", "port": 0, "db": 5}
    factory = SimpleNamespace(connection_kwargs=given, connection_class=server.connection)
    return await found.connected(cast("ConnectionPool", factory))


class TestS9Sentinels:
    async def test_the_first_that_knows_names_the_primary(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Those before it are asked and left; it is asked first the next time."""
        server = Server(one=OSError("gone"), two=None, three=[b"home", b"7"], home=[b"master"])
        found = sentinels(server, monkeypatch)
        assert (await connected(found, server)).port == 7
        assert server.asked == ["one", "two", "three", "home"]
        assert server.closed == ["one", "two", "three"]
        named = ("SENTINEL", "get-master-addr-by-name", "shop")
        assert server.commands == [named, named, ("ROLE",)]
        assert server.options == [{"retry": redis_link.NEVER, "protocol": 2}] * 3 + [{"db": 5}]
        await connected(found, server)
        assert server.asked[4:] == ["three", "home"]

    async def test_a_replica_is_no_primary(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The Sentinels do not know yet; its connection is closed."""
        server = Server(one=[b"home", b"7"], home=[b"slave"])
        with pytest.raises(RedisConnectionError, match="home:7 is a replica by now"):
            await connected(sentinels(server, monkeypatch), server)
        assert server.closed == ["one", "home"]

    @pytest.mark.parametrize(
        ("last", "words"),
        [
            (None, "the Sentinel three:3 knows no service 'shop'"),
            (ResponseError("no"), r"the Sentinel three:3 did not answer \(ResponseError: no\)"),
            (OSError("gone"), r"the Sentinel three:3 did not answer \(OSError: gone\)"),
        ],
    )
    async def test_where_none_knows_the_last_is_quoted(
        self, monkeypatch: pytest.MonkeyPatch, last: object, words: str
    ) -> None:
        """With what it said, or that it said nothing."""
        server = Server(one=None, two=None, three=last)
        said = f"no Sentinel names the primary; {words}"
        with pytest.raises(RedisConnectionError, match=said):
            await connected(sentinels(server, monkeypatch), server)

    async def test_each_has_its_share_of_the_time(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """So that all can be asked before the caller gives up."""
        limits = list[float | None]()
        real = asyncio.timeout

        def noted(seconds: float | None) -> asyncio.Timeout:
            limits.append(seconds)
            return real(seconds)

        monkeypatch.setattr(asyncio, "timeout", noted)
        server = Server(one=None, two=None, three=None)
        with pytest.raises(RedisConnectionError):
            await connected(sentinels(server, monkeypatch), server)
        assert limits == [1.0, 1.0, 1.0]


class ThreadConnection:
    """A blocking connection that is answered from a list."""

    reply_by: float | None = None
    stamps: HeardStamps
    replies: ReplyReader

    def __init__(self, answers: list[Any]) -> None:
        self._answers = answers
        self.sent: list[bytes] = []
        self.limits: list[float] = []
        self.is_closed = False

    def connect(self) -> None:
        self.sent.append(b"connect")

    @property
    def _sock(self) -> "ThreadConnection":
        return self

    def settimeout(self, seconds: float) -> None:
        assert 0 < seconds <= 1
        self.limits.append(seconds)

    def sendall(self, data: bytes) -> None:
        self.sent.append(data)

    def recv(self, _: int) -> bytes:
        answer = self._answers.pop(0)
        if isinstance(answer, BaseException) and not isinstance(answer, ResponseError):
            raise answer
        return encoded(answer)

    def is_clean(self) -> bool:
        return False

    def disconnect(self) -> None:
        self.is_closed = True


def encoded(reply: Any) -> bytes:
    """A reply as a server sends it."""
    match reply:
        case None:
            return b"$-1\r\n"
        case bytes():
            return b"$%d\r\n%b\r\n" % (len(reply), reply)
        case ResponseError():
            return b"-ERR %b\r\n" % str(reply).encode()
        case _:
            return b"*%d\r\n%b" % (len(reply), b"".join(map(encoded, reply)))


KEEPS, DROPS = (
    b"maxmemory:100\r\nmaxmemory_policy:%b\r\n" % it for it in (b"noeviction", b"allkeys-lru")
)
GREETING = (KEEPS, [b"100", b"0"])
"""About the server, and its time."""
GONE = RedisConnectionError("gone")


def reads(*answers: Any) -> tuple[Link, list[ThreadConnection]]:
    made, left = list[ThreadConnection](), list(answers)
    link = Link("redis://localhost", most=2, timeout=1, options={}, has_threads=True)

    def make(**_: object) -> ThreadConnection:
        made.append(ThreadConnection(left))
        return made[-1]

    assert link._threads is not None
    link._threads._class = make
    return link, made


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The link's clock."""
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(redis_link, "time", SimpleNamespace(monotonic=lambda: clock.now))
    return clock


class TestE20ThreadReads:
    async def test_a_connection_is_used_again(self) -> None:
        """One MGET for all keys; closing closes those that are idle."""
        link, made = reads(*GREETING, [b"1", None], [b"2"])
        assert link.texts_in_thread([b"a", b"bc"]) == [b"1", None]
        assert link.texts_in_thread([b"d"]) == [b"2"]
        (connection,) = made
        assert connection.sent[0] == b"connect"
        assert connection.sent[2] == b"*3\r\n$4\r\nMGET\r\n$1\r\na\r\n$2\r\nbc\r\n"
        await link.close()
        assert connection.is_closed
        await link.close()

    def test_only_the_first_request_of_a_connection_shares_its_time_with_the_greeting(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """However much later the next request comes, it has the whole time again."""
        ticks = count(100, 0.01)
        monkeypatch.setattr(redis_threads, "time", SimpleNamespace(monotonic=ticks.__next__))
        link, made = reads(*GREETING, [b"1"], [b"2"])
        assert link.texts_in_thread([b"a"]) == [b"1"]
        assert link.texts_in_thread([b"b"]) == [b"2"]
        (connection,) = made
        *shared, whole = connection.limits
        assert shared == sorted(shared, reverse=True)
        assert shared[-1] < shared[0] < whole == 1.0

    def test_a_connection_that_was_cut_is_no_server_that_is_away(self) -> None:
        """The general way asks once more, on a new connection."""
        link, made = reads(*GREETING, GONE, *GREETING, [b"1"])
        with pytest.raises(StoreError, match=r"server is unavailable: .*gone"):
            link.texts_in_thread([b"a"])
        assert made[0].is_closed
        assert not link.is_away
        assert link.texts_in_thread([b"a"]) == [b"1"]

    def test_a_server_that_hangs_is_left_to_the_general_way(self) -> None:
        """The next reads fail at once, until a step of that way has succeeded."""
        link, made = reads(*GREETING, RedisTimeoutError("slow"), *GREETING, [b"1"])
        with pytest.raises(StoreError, match=r"server is unavailable: .*slow"):
            link.texts_in_thread([b"a"])
        assert made[0].is_closed
        for _ in range(2):
            with pytest.raises(StoreError, match=r"unavailable: .*; stillfresh tries it again"):
                link.texts_in_thread([b"a"])
        link._note_answer()
        assert link.texts_in_thread([b"a"]) == [b"1"]
        assert len(made) == 2

    @pytest.mark.parametrize("answer", [DROPS, ResponseError("no permission")])
    def test_s15_a_server_that_drops_keys_is_looked_at_once_a_second(
        self, now: SimpleNamespace, answer: object
    ) -> None:
        """With a read; while it drops keys, the event loop reads. What it does not say, it does."""
        link, made = reads(*GREETING, [b"1"], [b"2"], answer, [b"3"], KEEPS, [b"4"])
        assert link.texts_in_thread([b"a"]) == [b"1"]
        assert link.texts_in_thread([b"a"]) == [b"2"]
        now.now += redis_link.LOOK_EVERY
        for _ in range(3):
            with pytest.raises(StoreError, match="this Redis server drops keys"):
                link.texts_in_thread([b"a"])
        now.now += redis_link.LOOK_EVERY
        assert link.texts_in_thread([b"a"]) == [b"4"]
        (connection,) = made
        looks = [it.startswith(b"*2\r\n$4\r\nINFO") for it in connection.sent[2:]]
        assert looks == [False, False, True, True]

    def test_an_interrupt_is_no_failure_of_the_server(self) -> None:
        """It is raised as it is; a connection with an unread reply is closed."""
        link, made = reads(*GREETING, KeyboardInterrupt(), *GREETING, [b"1"])
        with pytest.raises(KeyboardInterrupt):
            link.texts_in_thread([b"a"])
        assert made[0].is_closed
        assert link.texts_in_thread([b"a"]) == [b"1"]

    def test_a_thread_that_waited_while_the_server_failed_does_not_ask_it(self) -> None:
        """Otherwise the threads of a long queue would find out one by one."""
        link, made = reads(*GREETING, GONE)
        connections = cast("ThreadConnections", link._threads)

        class FailsMeanwhile:
            def take(self, timeout: float | None) -> None:
                assert timeout is None
                connections._failures += 1

            def give_back(self, _: None) -> None: ...

        connections._permits = cast("Any", FailsMeanwhile())
        with pytest.raises(StoreError, match="while this thread waited"):
            link.texts_in_thread([b"a"])
        assert made == []


class TestS10Messages:
    def test_a_message_is_news_a_tag_or_a_beat(self) -> None:
        """Of other keys nothing is told."""
        news = list[tuple[str, str, str | None]]()
        link = Link("redis://localhost", most=1, timeout=1, options={})
        channel = RedisChannel(link, Keyspace("p"), lambda *it: news.append(it), 1.0)
        channel._beats = {b"!mine"}
        for message in (
            b"P" + padded("gen") + b"post:a",
            b"Vpost:b",
            b"Teu",
            b"VNo Kind",
            b"!mine",
        ):
            channel._hear(message)
        assert news == [("post", "a", "gen"), ("post", "b", None), ("", "eu", None)]
        assert channel._beats == set()

    async def test_a_channel_that_is_refused_is_an_error_of_the_store(self) -> None:
        """And is closed."""
        closed = list[bool]()

        class Refusing:
            def pack_commands(self, commands: object) -> object:
                return commands

            async def send_packed_command(self, _: object) -> None:
                raise ResponseError("no permission")

            async def disconnect(self, *, nowait: bool) -> None:
                closed.append(nowait)

        class Server(Link):
            async def dedicated(self) -> AbstractConnection:
                return cast("AbstractConnection", Refusing())

        link = Server("redis://localhost", most=1, timeout=1, options={})
        channel = RedisChannel(link, Keyspace("p"), lambda *_: None, 20)
        with pytest.raises(
            StoreError, match="refuses a subscription: ResponseError: no permission"
        ):
            await channel.__aenter__()
        assert closed == [True]


class TestS5Connections:
    async def test_a_connection_that_cannot_be_used_is_left_at_once(self) -> None:
        """Closing it properly could take as long as the answer that did not come."""
        closed = list[bool]()

        class Gone:
            def get_protocol(self) -> None: ...

            def set_protocol(self, _: object) -> None: ...

            def is_closing(self) -> bool:
                return False

            def write(self, _: bytes) -> None:
                raise OSError("gone")

            @property
            def transport(self) -> "Gone":
                return self

        class Silent:
            _writer = Gone()

            async def disconnect(self, *, nowait: bool) -> None:
                closed.append(nowait)

        class Unanswered(Link):
            async def _new_connection(self) -> AbstractConnection:
                return cast("AbstractConnection", Silent())

        link = Unanswered("redis://localhost", most=1, timeout=1, options={})
        with pytest.raises(OSError, match="gone"):
            await link.send([("PING",)])
        assert closed == [True]


class TestS9Failover:
    async def test_a_server_that_became_a_replica_is_left(self) -> None:
        """Its idle connections are closed, so that the next step finds the new primary."""
        dropped = list[bool]()

        class Replica(Link):
            async def send(self, commands: Any) -> list[Any]:
                return [ReadOnlyError("replica")] * len(commands)

            async def drop_idle(self, *, nowait: bool = True) -> None:
                dropped.append(nowait)

        link = Replica("redis://localhost", most=1, timeout=1, options={})
        with pytest.raises(StoreError, match="refused: ReadOnlyError"):
            await link.run([("SET", b"a", b"b")])
        assert dropped == [True]


GET_A, GET_B = (("GET", it) for it in (b"{a}", b"{b}"))
SLOT_A, SLOT_B = key_slot(b"{a}"), key_slot(b"{b}")
SLOTS = [[SLOT_A, SLOT_A, [b"n1", 1]], [SLOT_B, SLOT_B, [b"n2", 1]]]


class Node:
    """One node of a cluster: what it says of the slots, and its replies, one after the other."""

    def __init__(self, name: str, table: Any) -> None:
        self.name, self.table = name, table
        self.script: list[Any] = []
        self.sent: list[Any] = []
        self.is_away = self.is_closed = self.drops_keys = False
        self.looks = 0

    async def greet(self) -> None:
        self.sent.append("greet")

    async def close(self) -> None:
        self.is_closed = True

    async def run(self, commands: Any, *, urgent: bool) -> list[Any]:
        assert (commands, urgent) == ([("CLUSTER", "SLOTS")], True)
        self.looks += 1
        if isinstance(self.table, StoreError):
            raise self.table
        return [self.table]

    async def replies(self, commands: Any, *, resend: Any, **_: bool) -> list[Any]:
        self.sent += commands
        answer = self.script.pop(0) if self.script else None
        if isinstance(answer, StoreError):
            raise answer
        assert len(resend()) == len(commands)
        return [answer if answer is not None else self.name] * len(commands)


class Nodes:
    """A cluster of two nodes, and one that joins."""

    def __init__(self, table: Any = SLOTS, *, timeout: float = 20) -> None:
        self.nodes = {(name, 1): Node(name, table) for name in ("n1", "n2", "n3")}
        self.n1, self.n2, self.n3 = self.nodes.values()
        self.cluster = Cluster(
            [("n1", 1), ("n2", 1)], cast("Any", self.nodes.__getitem__), timeout, [b"{a}", b"{b}"]
        )

    def say(self, table: Any) -> None:
        for node in self.nodes.values():
            node.table = table


def away() -> StoreError:
    error = StoreError("gone")
    error.__cause__ = OSError()
    return error


class TestS9Routes:
    async def test_each_command_goes_to_the_node_of_its_key(self) -> None:
        """And the replies come in the order of the commands."""
        its = Nodes()
        assert await its.cluster.run([GET_B, GET_A, GET_B]) == ["n2", "n1", "n2"]
        assert its.n1.sent == [GET_A]
        assert its.n2.sent == [GET_B, GET_B]
        servers = await its.cluster.servers()
        assert cast("Any", servers) == [its.n1, its.n2]
        holders = await its.cluster.holders([b"{b}x", b"{a}y"])
        assert cast("Any", holders) == {its.n2: [b"{b}x"], its.n1: [b"{a}y"]}
        assert not its.cluster.drops_keys
        its.n2.drops_keys = True
        assert its.cluster.drops_keys
        await its.cluster.close()
        assert (its.n1.is_closed, its.n2.is_closed, its.n3.is_closed) == (True, True, False)

    async def test_a_moved_slot_is_remembered(self) -> None:
        """The next command goes there at once."""
        its = Nodes()
        its.n1.script = [MovedError(f"{SLOT_A} n3:1")]
        assert await its.cluster.run([GET_A]) == ["n3"]
        assert await its.cluster.run([GET_A]) == ["n3"]
        assert its.n1.sent == [GET_A]

    async def test_a_node_without_a_name_is_where_it_was_asked(self) -> None:
        """In a redirection, and in its own table of slots."""
        its = Nodes([[SLOT_A, SLOT_B, [b"", 1]], [SLOT_B, SLOT_A, [None, 1]]])
        its.n1.script = [MovedError(f"{SLOT_A} :1")]
        assert await its.cluster.run([GET_A]) == ["n1"]
        assert its.n2.sent == its.n3.sent == []

    async def test_a_slot_that_moves_is_asked_for_once(self) -> None:
        """With ASKING before the command; the next one is asked of the old node again."""
        its = Nodes()
        its.n1.script = [AskError(f"{SLOT_A} n3:1")]
        assert await its.cluster.run([GET_A]) == ["n3"]
        assert its.n3.sent == [("ASKING",), GET_A]
        assert await its.cluster.run([GET_A]) == ["n1"]

    async def test_a_primary_that_became_a_replica_is_found_again(self) -> None:
        """By what the nodes say now."""
        its = Nodes()
        await its.cluster.servers()
        its.cluster._located_at = float("-inf")
        its.n1.script = [ReadOnlyError("replica")]
        its.say([[SLOT_A, SLOT_A, [b"n3", 1]], SLOTS[1]])
        assert await its.cluster.run([GET_A]) == ["n3"]
        assert its.n1.is_closed

    async def test_a_lost_reply_is_settled_where_the_key_is_by_now(self) -> None:
        """By the command for that; where it is still at the same node, it is lost."""
        its, again = Nodes(), ("SETTLE", b"{a}")
        await its.cluster.servers()
        its.n1.script = [away()]
        with pytest.raises(StoreError, match="gone"):
            await its.cluster.run([GET_A], resend_as=[again])
        its.cluster._located_at = float("-inf")
        its.n1.script = [away()]
        its.say([[SLOT_A, SLOT_A, [b"n3", 1]], SLOTS[1]])
        assert await its.cluster.run([GET_A], resend_as=[again]) == ["n3"]
        assert its.n3.sent == [again]

    async def test_a_part_of_the_replies_may_do(self) -> None:
        """If the caller says so, and if another node answered; a refusal is raised."""
        its = Nodes()
        await its.cluster.servers()
        its.n2.script = [away(), away(), away()]
        lost, found = await its.cluster.run([GET_B, GET_A], partly=True)
        assert (type(lost), found) == (StoreError, "n1")
        with pytest.raises(StoreError, match="gone"):
            await its.cluster.run([GET_B, GET_A])
        with pytest.raises(StoreError, match="gone"):
            await its.cluster.run([GET_B], partly=True)
        refused = StoreError("refused")
        refused.__cause__ = ResponseError("no")
        its.n2.script = [refused]
        with pytest.raises(StoreError, match="refused"):
            await its.cluster.run([GET_B, GET_A], partly=True)

    async def test_keys_that_move_for_too_long_are_an_error(self) -> None:
        """Not an endless loop."""
        its = Nodes(timeout=0.0)
        its.n1.script = [TryAgainError()] * 9
        with pytest.raises(StoreError, match="the Redis cluster is moving these keys; try again"):
            await its.cluster.run([GET_A])

    async def test_where_no_node_names_its_slots(self) -> None:
        """The error names those that were asked; a slot that nobody holds is one, too."""
        its = Nodes(StoreError("no permission"))
        with pytest.raises(StoreError, match="names its slots; asked: n1:1, n2:1"):
            await its.cluster.run([GET_A])
        its = Nodes(SLOTS[:1])
        with pytest.raises(StoreError, match=f"no node of the Redis cluster holds slot {SLOT_B}"):
            await its.cluster.run([GET_B])
        assert await its.cluster.run([GET_A]) == ["n1"]

    async def test_a_slot_that_one_node_does_not_know_is_looked_up_at_another(self) -> None:
        """Both tables together are the cluster's; who was asked first counts."""
        its = Nodes()
        its.n1.table, its.n2.table = SLOTS[:1], [[SLOT_A, SLOT_A, [b"n3", 1]], SLOTS[1]]
        assert await its.cluster.run([GET_A, GET_B]) == ["n1", "n2"]

    async def test_a_greeting_asks_the_next_node_if_one_is_away(self) -> None:
        """And is content with one that accepts us."""
        its = Nodes()
        its.n1.is_away = True
        await its.cluster.greet()
        assert (its.n1.sent, its.n2.sent) == (["greet"], ["greet"])
        its = Nodes(StoreError("no permission"))
        await its.cluster.greet()
        assert (its.n1.sent, its.n2.sent) == (["greet"], [])

    async def test_the_first_that_knows_all_slots_is_enough(self) -> None:
        """Where it does not know them all, the next one is asked, too."""
        its = Nodes()
        await its.cluster._locate()
        assert (its.n1.looks, its.n2.looks) == (1, 0)
        its = Nodes()
        its.n1.table = SLOTS[:1]
        await its.cluster._locate()
        assert (its.n1.looks, its.n2.looks) == (1, 1)

    async def test_the_table_is_not_read_too_often(self) -> None:
        """Once for callers that come together, and then for a while not."""
        its, looks = Nodes(), list[str]()
        real = its.n1.run

        async def run(commands: Any, *, urgent: bool) -> list[Any]:
            looks.append("look")
            await asyncio.sleep(0)
            return await real(commands, urgent=urgent)

        its.n1.run = run  # type: ignore[method-assign]
        await asyncio.gather(*(its.cluster.run([GET_A]) for _ in range(5)))
        await its.cluster._locate()
        assert looks == ["look"]
        its.cluster._located_at -= LOCATE_EVERY
        await its.cluster._locate()
        assert looks == ["look", "look"]


class Replies:
    """A link that answers round trips one after the other, and notes them."""

    is_cluster = drops_keys = False

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)
        self.asked: list[tuple[list[Any], dict[str, Any]]] = []

    async def run(self, commands: Any, **options: Any) -> Any:
        self.asked.append((list(commands), options))
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def close(self) -> None: ...


def a_store(link: Replies, clock: Any = lambda: 5.0, **options: Any) -> RedisStore:
    store = RedisStore("redis://localhost", clock=clock, **options)
    store._link = cast("Any", link)
    return store


def text_of(generation: str = "gen", value: bytes = b"value") -> bytes:
    head = (MAGIC, VALUE, 0, 5.0, 30.0, 60.0, 90.0, padded(generation), 0.0, padded(None))
    return FIELDS.pack(*head, 0, 0.0, 0, 0) + value


LONG = b"v" * GLANCE


class TestS5Steps:
    async def test_a_value_is_sent_only_if_it_is_not_known(self) -> None:
        """A glance at the first bytes does for a known copy; a changed one is read in full."""
        link = Replies([[text_of(value=LONG)[:GLANCE]]])
        found = await a_store(link).read("post", ["a"], {"a": "gen"})
        copy = found["a"].copy
        assert copy is not None
        assert copy.value is UNREAD
        link = Replies([[text_of("new", LONG)[:GLANCE]]], [[text_of("new", LONG)]])
        copy = (await a_store(link).read("post", ["a"], {"a": "gen"}))["a"].copy
        assert copy is not None
        assert (copy.generation, copy.value) == ("new", LONG)
        link = Replies([[text_of(), None]])
        found = await a_store(link).read("post", ["a", "b"])
        assert found.keys() == {"a"}
        assert len(link.asked) == 1

    async def test_ids_of_a_node_that_is_away_are_told(self) -> None:
        """The others are read; a key that another program has made a list is none."""
        link = Replies([StoreError("gone"), text_of()])
        link.is_cluster = True
        found = await a_store(link).read("post", ["a", "b"])
        assert (found["a"], found["b"].copy is not None) == (AWAY, True)
        wrong = StoreError("refused")
        wrong.__cause__ = ResponseError("WRONGTYPE Operation against a key")
        link = Replies(wrong, [[None]])
        assert await a_store(link).read("post", ["a"], {"a": "gen"}) == {}
        other = StoreError("refused")
        other.__cause__ = ResponseError("no permission")
        with pytest.raises(StoreError, match="refused"):
            await a_store(Replies(other)).read("post", ["a"], {"a": "gen"})
        with pytest.raises(StoreError, match="refused"):
            await a_store(Replies(wrong)).read("post", ["a"])

    async def test_a_copy_that_cannot_be_read_is_deleted_and_leased(self) -> None:
        """No caller can have seen it; one that can be read is the answer."""
        end = NUMBER.pack(7.5)
        lease = [b"lease", end, padded("t"), b"3"]
        link = Replies([[b"newer", b"XX"], [b"held", end, b"x"]], [[1, 7]], [lease])
        grants = await a_store(link).acquire("post", [Ask("a"), Ask("b", "seen", ("tag",))], 9)
        assert grants == {"a": Lease("a", "t", 7.5, 3), "b": Held(7.5)}
        assert [len(commands) for commands, _ in link.asked] == [2, 1, 1]
        first, second = link.asked[0][0]
        assert first[1] == scripts.ACQUIRE.sha
        assert "5.0" in first
        assert "9.0" in first
        assert padded("seen") in second
        assert packed_tags(["tag"]) in second
        link = Replies([[b"newer", text_of()]])
        grants = await a_store(link, None).acquire("post", [Ask("a")], 9)
        assert isinstance(grants["a"], Newer)
        assert "" in link.asked[0][0][0]

    async def test_a_node_that_is_away_grants_nothing(self) -> None:
        """The others do."""
        link = Replies([StoreError("gone"), [b"held", NUMBER.pack(7.5), b"x"]])
        assert await a_store(link).acquire("post", [Ask("a"), Ask("b")], 9) == {"b": Held(7.5)}
        options = link.asked[0][1]
        assert options.pop("before_resend") is not None
        assert options == {"urgent": False, "lasting": True, "partly": True}

    async def test_s2_a_publication_that_is_sent_again_says_so(self) -> None:
        """So that the script looks whether it was done; tags that came late go along."""
        link = Replies([[1, 7], [0]])
        lease = Lease("a", "t", 9.0, 4)
        copy, absent = (Copy("t", 5.0, Policy(30), it) for it in (b"value", None))
        both = {"a": (lease, copy), "b": (lease, absent)}
        assert await a_store(link).publish("post", both, {"a": ("eu",)}) == {"b"}
        commands, options = link.asked[0]
        assert [command[-1] for command in commands] == ["0", "0"]
        assert [command[-1] for command in options["resend_as"]] == ["1", "1"]
        assert [command[:-1] for command in options["resend_as"]] == [it[:-1] for it in commands]
        assert options["lasting"]
        assert [command[-4:-1] for command in commands] == [
            (1, packed_tags(["eu"]), 4),
            (0, b"", 4),
        ]
        assert b"value" in commands[0]
        assert b"" in commands[1]

    async def test_invalidations_and_deletions_are_urgent(self) -> None:
        """Invalidations and deletions, hard unless it is said; not renewals and releases."""
        link = Replies([[1, 7]], [[1, 7]], [[1, 7]], [1, 0], [1])
        store, lease = a_store(link), Lease("a", "t", 9.0)
        await store.invalidate("post", ["a"])
        await store.invalidate("post", ["a"], soft=True)
        await store.delete("post", ["a"])
        other = Lease("b", "u", 9.0)
        assert await store.renew("post", [lease, other], 9) == {"b"}
        await store.release("post", [lease], {"a": Failure(1, 9.0, "no")})
        urgent = [options["urgent"] for _, options in link.asked]
        lasting = [options["lasting"] for _, options in link.asked]
        assert urgent == lasting == [True, True, True, False, False]
        marks = [commands[0][-1] for commands, _ in link.asked[:2]]
        assert marks == [Mark.HARD, Mark.SOFT]
        assert b"no" in link.asked[4][0][0]

    async def test_a_tag_is_walked_in_every_bucket(self) -> None:
        """On from where each ended; an id is told once, and other keys are not."""
        end: Any = (1, 7, b"0", [], [])
        first = [(1, 7, b"7", [b"post:a", b"no key"], [])] + [end] * (len(BUCKETS) - 1)
        once_more = [end] * len(BUCKETS)
        link = Replies(first, [(1, 7, b"0", [b"post:a", b"page:b"], [])], once_more)
        reached = await a_store(link).invalidate_tag("eu")
        assert reached == [("post", "a"), ("page", "b")]
        (every, options), (rest, _), (again, _) = link.asked
        assert again == every
        assert (len(every), len(rest)) == (len(BUCKETS), 1)
        assert (every[0][-2:], rest[0][-2:]) == ((Mark.HARD, b"0"), (Mark.HARD, b"7"))
        assert options == {"urgent": True, "lasting": True}
        link = Replies([end] * len(BUCKETS))
        await a_store(link).invalidate_tag("eu", soft=True)
        assert link.asked[0][0][0][-2] == Mark.SOFT

    async def test_s8_a_page_of_a_tag_that_has_changed_is_asked_for_again(self) -> None:
        """Its other buckets go on afterwards; for ever it is not asked for."""
        end: Any = (1, 7, b"0", [], [])
        later = (1, 7, b"5", [b"post:a"], [b"post:b"])
        again: Any = (1, 7, b"0", [b"post:a", b"post:b"], [])
        once_more = [end] * len(BUCKETS)
        link = Replies([later] + [end] * (len(BUCKETS) - 1), [again], once_more)
        assert await a_store(link).invalidate_tag("eu") == [("post", "a"), ("post", "b")]
        (every, _), (rest, _), _ = link.asked
        assert rest == every[:1]
        link = Replies(*[[later] * len(BUCKETS)] * 2)
        with pytest.raises(StoreError, match="other processes keep changing these entries"):
            await a_store(link, timeout=1e-9).invalidate_tag("eu")

    async def test_s8_a_changed_key_is_invalidated_again_for_a_while(self) -> None:
        """Those that were done are not; for ever none is."""
        link = Replies([[1, 7], [AGAIN, 8]], [[1, 9]])
        await a_store(link).invalidate("post", ["a", "b"])
        assert [len(commands) for commands, _ in link.asked] == [2, 1]
        assert link.asked[1][0] == link.asked[0][0][1:]
        link = Replies([[AGAIN, 8]])
        with pytest.raises(StoreError, match="other processes keep changing these entries"):
            await a_store(link, timeout=1e-9).delete("post", ["a"])

    async def test_s13_a_put_is_one_round_trip(self) -> None:
        """Of all ids; one whose node is unavailable gets no result."""
        codes = [AGAIN, 1, 2, 3, 4, 5]
        link = Replies([*([code, 7, b"v", bytes(32), 1] for code in codes), 8, StoreError("gone")])
        store = a_store(link)
        ids = [str(number) for number in range(8)]
        copies = [Copy(store.new_generation(), 5.0, Policy(30), b"value") for _ in ids]
        results = await store.put(
            "post", {id_: Put(it) for id_, it in zip(ids, copies, strict=True)}
        )
        assert list(results.values()) == [
            PutResult(PutOutcome.AGAIN),
            PutResult(PutOutcome.STORED, b"v", 7),
            PutResult(PutOutcome.REPLACED, b"v", 7),
            PutResult(PutOutcome.KEPT, b"v"),
            PutResult(PutOutcome.MIXED, b"v"),
            PutResult(PutOutcome.REFUSED, b"v", is_empty=True),
            PutResult(PutOutcome.STORED, b"", 8),
        ]
        ((commands, options),) = link.asked
        assert options.pop("before_resend") is not None
        assert options == {"lasting": True, "partly": True}
        base = Keyspace("stillfresh").bases[0]
        assert commands[0][4] == PutFence(HOW.pack(len(base), 0, 0, 0, 1, 0, 0) + b"90000")
        assert {type(it) for it in commands} == {StampedCommand}

    async def test_the_server_drops_what_is_gone(self) -> None:
        """By its own clock; a closed store says so."""
        store = a_store(Replies(), None)
        assert await store.evict(0.0) == 0
        await store.close()
        with pytest.raises(NotOpen):
            await store.evict(0.0)

    def test_an_address_of_another_kind_is_refused(self) -> None:
        """With what is allowed; and so are numbers that there are not."""
        with pytest.raises(ConfigError, match="url: must begin with redis://"):
            RedisStore("http://localhost")
        for bad in ({"max_connections": 0}, {"wait_replicas": -1}, {"timeout": 0}):
            with pytest.raises(ConfigError):
                RedisStore("redis://localhost", **bad)  # type: ignore[arg-type]
        one_server = RedisStore("redis://localhost", wait_replicas=0)
        assert capabilities_of(one_server).threads is one_server
        assert capabilities_of(RedisStore("redis://localhost", service="shop")).threads is None

    async def test_a_tag_that_is_on_another_node_is_invalidated_id_by_id(self) -> None:
        """E6: each step is tried though the server failed a moment ago, and lasts as it is told."""
        cluster: Any = RedisStore("redis://a:1/0", nodes=[("a", 1)])._new_link()
        base, asked = Keyspace("shop").bases[0], list[tuple[int, dict[str, object]]]()

        async def run(steps: list[tuple[Any, ...]], **options: object) -> list[Any]:
            asked.append((len(steps), options))
            return answers.pop(0)

        cluster.run = run
        answers: list[list[Any]] = [[1], [[b"x", b"y"]], [[AGAIN, 7], [1, 8]], [[1, 9]], [1]]
        command = ("EVALSHA", b"", 1, base + b"#eu", base, Blank.AS_OF, b"2", b"0")
        told = await cluster._tag_by_members(command, lasting=True)
        assert told == [1, 0, b"0", [b"x", b"y"], []]
        lasting = {"urgent": True, "lasting": True}
        steps = [(1, lasting), (1, {"urgent": True}), (2, lasting), (1, lasting), (1, {})]
        assert asked == steps
        cluster._timeout = -1.0
        answers[:] = [[1], [[b"x"]], [[AGAIN, 7]]]
        with pytest.raises(StoreError, match="other processes keep changing these entries"):
            await cluster._tag_by_members(command, lasting=True)

    @pytest.mark.parametrize(
        ("url", "nodes"),
        [
            ("redis+cluster://a,b:7", [("a", 6379), ("b", 7)]),
            ("redis+sentinel://a,b:7/shop", [("a", 26379), ("b", 7)]),
            ("redis://a", []),
        ],
    )
    def test_a_port_that_is_not_named(self, url: str, nodes: list[tuple[str, int]]) -> None:
        """As each kind of server has it."""
        store = store_for(url, ManualClock())
        assert isinstance(store, RedisStore)
        assert nodes in cast("Any", store._new_link).args

    async def test_a_very_large_database_is_counted_by_its_first_part(self) -> None:
        """In so many slices; the rest is taken to be alike."""
        asked = list[str]()

        async def run(commands: list[tuple[Any, ...]]) -> list[Any]:
            asked.append(commands[0][0] if commands[0][0] == "DBSIZE" else "count")
            is_size = asked[-1] == "DBSIZE"
            return [4 * listing.SAMPLE * listing.LOOKED_AT] if is_size else [(b"7", 1, 2, 3)]

        async def servers() -> list[Any]:
            return [SimpleNamespace(run=run)]

        link: Any = SimpleNamespace(servers=servers)
        found = await listing.count(link, Keyspace("shop"), "0")
        assert asked == ["count"] * listing.SAMPLE + ["DBSIZE"]
        each = 4 * listing.SAMPLE
        assert (found.copies, found.leases, found.bytes) == (each, 2 * each, 3 * each)

    def test_a_node_has_the_user_of_the_address(self) -> None:
        """And its own host, which may be an IPv6 address."""
        store = RedisStore("redis://me:secret@a:1/0", nodes=[("a", 1)])
        cluster: Any = store._new_link()
        for host, expected in (("b", "b"), ("::1", "::1")):
            link = cluster._link((host, 7))
            given = link._factory.connection_kwargs
            assert (given["host"], given["port"]) == (expected, 7)
            assert (given["username"], given["password"]) == ("me", "secret")
        one: Any = RedisStore("redis://a:1", wait_replicas=2, timeout=4)._new_link()
        assert one._wait == [("WAIT", 2, 2_000)]
        named: Any = RedisStore("redis://a:1", nodes=[("s", 1)], service="shop")._new_link()
        assert named._sentinels is not None
