"""The connections to one Redis server: round trips, limited in time, and errors translated.

With Sentinels, each new connection asks them where the primary is.
"""

import asyncio
import re
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, Final, TypeAlias

from redis.asyncio.connection import AbstractConnection, Connection, ConnectionPool
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import (
    AskError,
    AuthenticationError,
    ClusterCrossSlotError,
    ClusterError,
    NoScriptError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
)
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from stillfresh.errors import ConfigError, NotOpen, StoreError
from stillfresh.stores.breaker import TRIED_AGAIN
from stillfresh.stores.redis.heard import AGAIN, HeardStamps, ReadCommand
from stillfresh.stores.redis.layout import GLANCE, Command
from stillfresh.stores.redis.lua import BY_SHA
from stillfresh.stores.redis.replies import LOST
from stillfresh.stores.redis.streams import OpenConnection
from stillfresh.stores.redis.threads import ThreadConnections, end_first_request, exchange
from stillfresh.stores.server import ServerLink, error_text, slices
from stillfresh.turns import THIS_THREAD, outside

NEVER: Final = Retry(NoBackoff(), 0)
"""The client library must not repeat a step that may have been done."""
OF_A_CLUSTER: Final = (AskError, ClusterError, ClusterCrossSlotError)
NO_CLUSTER: Final = "its cluster mode is on; write redis+cluster://host:6379 instead of redis://"
SIGN_IN: Final = "user and password belong in the address: redis://user:password@host:6379/0"
FULL: Final = "its memory is full: raise maxmemory, or shorten fresh_for, stale_for and error_for"
NO_DATABASE: Final = "DB index is out of range"
WAIT: Final = "WAIT"
ASKING: Final = ("ASKING",)
"""Sent before a command to the cluster node that a key moves to."""
Address: TypeAlias = tuple[str, int]
POLICY: Final = re.compile(rb"maxmemory_policy:([a-z-]+)")
LIFE: Final = re.compile(rb"^(?:run_id|master_replid):([0-9a-f]+)", re.MULTILINE)
"""Ids that change when a server is started again, and when a replica becomes the primary. Stamps
that were heard before that do not count any more."""
ABOUT: Final = ("INFO", "server", "memory", "cluster", "replication")
MEMORY: Final = ("INFO", "memory")
DROPS_KEYS: Final = "this Redis server drops keys: a plain read cannot tell of tags"
LOOK_EVERY: Final = 1.0
"""Seconds after which the next request asks once more whether the server drops keys."""


class Sentinels:
    """Finds the primary of `service`.

    If a server does not answer or refuses writes, all connections are closed, and the next asks
    again.
    """

    def __init__(self, addresses: Sequence[Address], service: str, timeout: float) -> None:
        self._addresses = list(addresses)
        self._service = service
        self._each = timeout / len(self._addresses)
        """Seconds for one Sentinel, so that all can be asked before the caller gives up."""

    async def connected(self, factory: ConnectionPool) -> AbstractConnection:
        """A connection of the factory to the server that says that it is the primary."""
        host, port = await self._primary()
        options = {**factory.connection_kwargs, "host": host, "port": port}
        connection: AbstractConnection = factory.connection_class(**options)
        try:
            await connection.connect()  # type: ignore[no-untyped-call]
            await connection.send_command("ROLE")
            _check_primary(await connection.read_response(), f"{host}:{port}")
        except BaseException:
            await connection.disconnect(nowait=True)
            raise
        return connection

    async def _primary(self) -> Address:
        """The address from the first Sentinel that knows it, which is asked first the next time."""
        why = ""
        for address in tuple(self._addresses):
            name = f"the Sentinel {address[0]}:{address[1]}"
            try:
                async with asyncio.timeout(self._each):
                    primary = await self._ask(address)
            except (*LOST, RedisError) as exc:
                why = f"{name} did not answer ({error_text(exc)})"
                continue
            if primary is not None:
                self._addresses.remove(address)
                self._addresses.insert(0, address)
                host, port = primary
                return host.decode(), int(port)
            why = f"{name} knows no service {self._service!r}"
        raise RedisConnectionError(f"no Sentinel names the primary; {why}")

    async def _ask(self, address: Address) -> list[bytes] | None:
        """The host and the port of the primary, if the Sentinel knows the service."""
        sentinel = Connection(host=address[0], port=address[1], retry=NEVER, protocol=2)
        try:
            await sentinel.connect()  # type: ignore[no-untyped-call]
            await sentinel.send_command("SENTINEL", "get-master-addr-by-name", self._service)
            primary: list[bytes] | None = await sentinel.read_response()
            return primary
        finally:
            await sentinel.disconnect(nowait=True)


class Link(ServerLink):
    """The client library's connections to one server, and steps over them."""

    is_cluster: ClassVar = False  # one reply may bring keys of several slots
    failures = (*LOST, RedisError)
    lost = LOST

    def __init__(
        self,
        url: str,
        *,
        most: int,
        timeout: float,
        options: Mapping[str, Any],
        wait_replicas: int = 0,
        node: str = "",
        sentinels: Sentinels | None = None,
        bases: Sequence[bytes] = (),
        has_threads: bool = False,
    ) -> None:
        """`node`: its name in a cluster. `sentinels`: they say where the server is.

        `bases`: what the keys of each bucket begin with. `has_threads`: threads may use it, too.
        """
        super().__init__(f"the Redis server {node}".rstrip(), most=most, timeout=timeout)
        self._factory: ConnectionPool = ConnectionPool.from_url(
            url,
            retry=NEVER,
            socket_timeout=None,
            socket_connect_timeout=None,
            protocol=2,
            **options,
        )
        self._threads: ThreadConnections | None = None
        if has_threads:
            self._threads = ThreadConnections(
                url, most=most, timeout=timeout, options=options, greet=self._greet_in_thread
            )
        self._node = node
        self._sentinels = sentinels
        self._wait: Sequence[Command] = ()  # sent after a change that replicas must confirm
        if wait_replicas:
            self._wait = [(WAIT, wait_replicas, max(1, round(timeout * 500)))]
        self._about: object = None  # the server's INFO
        self.drops_keys = False  # any of them when it is full, a tag's set too
        self._policy_checked_at = 0.0
        """By the monotonic clock: when the server last said whether it drops keys."""
        self.held_bases: Callable[[], Sequence[bytes]] = lambda: bases
        """The buckets whose stamps a new connection asks for."""
        self._base_size = len(bases[0]) if bases else 0
        self._life: tuple[list[bytes], HeardStamps] | None = None
        """The server's life, and what was heard in it, of the last connection."""

    async def send(self, commands: Sequence[Command]) -> list[Any]:
        """One round trip; a command that the server refused has its error as reply.

        TimeoutError if the first reply (with connecting) or any next one takes too long. A long
        answer may take its time while parts arrive, and so may the requests before this one.
        """

        if THIS_THREAD.has_turn:
            with outside():
                return self.send_in_thread(commands)
        return await self._once(partial(self._talk, commands))

    async def _talk(self, commands: Sequence[Command], connection: OpenConnection) -> list[Any]:
        sent = self._as_sent(commands, connection.stamps)
        replies = await connection.exchange(sent, self._timeout)
        connection.end_first_request()
        return self._note_replies(commands, replies, connection.stamps)

    def send_in_thread(self, commands: Sequence[Command]) -> list[Any]:
        """The same round trip on a blocking connection, while this thread waits."""
        if self._threads is None:
            raise NotOpen("threads have no connections to this server")

        def talk(connection: Any) -> list[Any]:  # noqa: ANN401 (the library's own)
            sent = self._as_sent(commands, connection.stamps)
            replies = exchange(connection, sent)
            if connection.reply_by is not None:
                end_first_request(connection, self._timeout)
            return self._note_replies(commands, replies, connection.stamps)

        return self._threads.exchange(talk)

    def _greet_in_thread(self, connection: Any) -> HeardStamps:  # noqa: ANN401
        bases = self.held_bases()
        return self._note_greeting(bases, exchange(connection, _greeting(bases)))

    def texts_in_thread(self, keys: list[bytes]) -> list[bytes | None]:
        """The strings of these keys, in one attempt."""
        return list(self._read_in_thread(ReadCommand(("MGET", *keys))))

    def glance_in_thread(self, key: bytes) -> bytes | None:
        """How the string of this key begins, in one attempt."""
        text: bytes | None = self._read_in_thread(ReadCommand(("GETRANGE", key, 0, GLANCE - 1)))
        return text

    def _read_in_thread(self, command: ReadCommand) -> Any:  # noqa: ANN401 (whatever the server says)
        """The reply to one read.

        StoreError if that fails, and if the server drops keys: a plain read cannot tell whether the
        set of a tag was dropped.
        """
        began = time.monotonic()
        if self._breaker.is_open:
            raise StoreError(f"{self._server_name} is unavailable: {self._why}; {TRIED_AGAIN}")
        is_policy_known = began - self._policy_checked_at < LOOK_EVERY
        if self.drops_keys and is_policy_known:
            raise StoreError(DROPS_KEYS)
        try:
            (reply,) = checked(self.send_in_thread([command]))
        except LOST as exc:
            if isinstance(exc, RedisTimeoutError | TimeoutError):
                self._note_failure(began, exc)
            raise self._store_error(exc) from exc
        if self.drops_keys:
            raise StoreError(DROPS_KEYS)
        return reply

    def _as_sent(self, commands: Sequence[Command], stamps: HeardStamps) -> list[Command]:
        """The commands with the stamps that were heard.

        Once a second, ask with them whether the server drops keys.
        """
        sent = [stamps.filled(command, drops_keys=self.drops_keys) for command in commands]
        if time.monotonic() - self._policy_checked_at >= LOOK_EVERY:
            sent.insert(0, MEMORY)
        return sent

    def _note_replies(
        self, commands: Sequence[Command], replies: list[Any], stamps: HeardStamps
    ) -> list[Any]:
        """Note the stamps and the memory policy; return the replies to the commands."""
        if len(replies) > len(commands):
            self._note_memory_policy(replies.pop(0))
        for command, reply in zip(commands, replies, strict=True):
            stamps.hear(command, reply)
        return replies

    def _note_memory_policy(self, about: object) -> None:
        """Read from INFO whether the server drops keys, which may be switched on at any time.

        If the server does not say, assume that it does.
        """
        self.drops_keys = not isinstance(about, bytes) or drops_keys(about)
        self._policy_checked_at = time.monotonic()

    async def _connect(self) -> OpenConnection:
        """A new connection. It asks for the stamps of the server's buckets, and for its time."""
        async with asyncio.timeout(self._timeout) as limit:
            connection = OpenConnection(await self._new_connection(), limit.when())
            bases = self.held_bases()
            try:
                replies = await connection.exchange(_greeting(bases), self._timeout)
            except BaseException:
                await connection.disconnect(nowait=True)
                raise
        connection.stamps = self._note_greeting(bases, replies)
        return connection

    def _note_greeting(self, bases: Sequence[bytes], replies: Sequence[Any]) -> HeardStamps:
        """The stamps that count on a new connection, by the server's replies to its greeting."""
        about, now, *counters = replies
        self._about = about
        self._note_memory_policy(about)
        stamps = self._stamps_of_life(about)
        if isinstance(now, list):
            stamps.note_time(int(now[0]) + int(now[1]) / 1e6)
        for base, counter in zip(bases, counters, strict=True):
            if isinstance(counter, bytes) and counter.isdigit():
                stamps.note_stamp(base, int(counter))
        return stamps

    def _stamps_of_life(self, about: object) -> HeardStamps:
        """The stamps of the server's present life; none yet if it does not say which it is."""
        life = LIFE.findall(about) if isinstance(about, bytes) else []
        if self._life is None or not life or self._life[0] != life:
            self._life = (life, HeardStamps(self._base_size))
        return self._life[1]

    def _store_error(self, error: Exception) -> StoreError:
        if isinstance(error, LOST):
            return StoreError(f"{self._server_name} is unavailable: {error_text(error)}")
        return refused(error, self._node, self._factory.connection_kwargs.get("db"))

    async def _new_connection(self) -> AbstractConnection:
        if self._sentinels is not None:
            return await self._sentinels.connected(self._factory)
        connection: AbstractConnection = self._factory.make_connection()  # type: ignore[no-untyped-call]
        await connection.connect()  # type: ignore[no-untyped-call]
        return connection

    async def drop_idle(self, *, nowait: bool = True) -> None:
        """Close idle connections; in a thread only the threads' own, the others are the loop's."""
        if self._threads is not None:
            self._threads.drop_idle()
        if not THIS_THREAD.has_turn:
            await super().drop_idle(nowait=nowait)

    async def close(self) -> None:
        if self._threads is not None:
            self._threads.close()
        await super().close()

    @property
    def is_away(self) -> bool:
        """True if it did not answer the last time."""
        return self._breaker.is_open

    async def servers(self) -> "list[Link]":
        return [self]

    async def holders(self, keys: Sequence[bytes]) -> "dict[Link, list[bytes]]":
        """The server of each of these keys."""
        return {self: list(keys)}

    async def dedicated(self) -> AbstractConnection:
        """A connection for the caller, which closes it."""
        try:
            async with asyncio.timeout(self._timeout):
                return await self._new_connection()
        except (*LOST, RedisError) as exc:
            raise self._store_error(exc) from exc

    async def _hello(self) -> None:
        try:
            checked(await self.send([("PING",)]))
        except AuthenticationError as exc:  # later, another password is as good as no answer
            raise refused(exc, self._node) from exc
        _check_mode(self._about, self._node)

    async def run(
        self,
        commands: Sequence[Command],
        *,
        resend_as: Sequence[Command] = (),
        urgent: bool = False,
        lasting: bool = False,
        partly: bool = False,
        before_resend: Callable[[], None] | None = None,
    ) -> list[Any]:
        """Send the commands, return the replies. If replies are lost, send `resend_as` instead.

        Urgent: sent even while the server is unavailable. Lasting: replicas must confirm it, if
        `wait_replicas` says so. Partly, in a cluster: the replies of an unavailable node are
        StoreErrors, if another node answered. `before_resend` is called before commands are sent
        again because their replies were lost.
        """
        del partly  # of one server; accepted because `Cluster.run` has the same signature
        resend = partial(_commands_again, resend_as or commands, before_resend)
        replies = await self.replies(commands, resend=resend, urgent=urgent, lasting=lasting)
        return checked(replies, self._node)

    async def replies(
        self,
        commands: Sequence[Command],
        *,
        resend: Callable[[], Sequence[Command]] | None = None,
        urgent: bool = False,
        lasting: bool = False,
    ) -> list[Any]:
        """Like `run`, but a command that the server refused has its error as reply.

        `resend` is called only if replies were lost, and returns the commands to send then.
        """
        replies: list[Any] = []
        wait = self._wait if lasting else ()

        for part in _requests(commands):
            first = partial(self._send_part, commands, part, wait)
            again = first
            if resend is not None:
                again = partial(self._resend_part, resend, part, wait)
            part_replies = await self._try_twice(first, again, urgent=urgent)
            for reply in part_replies:
                if isinstance(reply, ReadOnlyError):
                    await self.drop_idle()  # no longer the primary: find the new one
                    break
            replies += _check_confirmation(part_replies, wait)
        return replies

    def _send_part(
        self, commands: Sequence[Command], part: slice, wait: Sequence[Command]
    ) -> Awaitable[list[Any]]:
        return self._send_with_scripts([*commands[part], *wait])

    def _resend_part(
        self, resend: Callable[[], Sequence[Command]], part: slice, wait: Sequence[Command]
    ) -> Awaitable[list[Any]]:
        return self._send_part(resend(), part, wait)

    async def _send_with_scripts(self, commands: Sequence[Command]) -> list[Any]:
        """Send the commands. If a restarted server has lost the scripts, load them again."""
        replies = await self.send(commands)
        undone = [at for at, reply in enumerate(replies) if isinstance(reply, NoScriptError)]
        if undone:
            texts = {BY_SHA[commands[at][1]].text for at in undone}
            await self.send([("SCRIPT", "LOAD", text) for text in texts])
            undone += [at for at, command in enumerate(commands) if command[0] == WAIT]
            again = await self.send([commands[at] for at in undone])
            for at, reply in zip(undone, again, strict=True):
                replies[at] = reply
        return replies


def _commands_again(
    commands: Sequence[Command], before_resend: Callable[[], None] | None
) -> Sequence[Command]:
    if before_resend is not None:
        before_resend()
    return commands


def _requests(commands: Sequence[Command]) -> Iterable[slice]:
    """The parts of the commands that are sent together; one command is sent as it is."""
    if len(commands) == 1:
        return (slice(1),)
    sizes = [sum(len(part) for part in command if isinstance(part, bytes)) for command in commands]
    return slices(sizes, lambda at: commands[at - 1] == ASKING)


def _greeting(bases: Sequence[bytes]) -> list[Command]:
    """What a new connection asks: about the server, its time, and the stamps of its buckets."""
    return [ABOUT, ("TIME",), *(("HGET", base + b"+", "n") for base in bases)]


def is_away(error: StoreError) -> bool:
    """True if no server answered; the step may have been done."""
    return error.__cause__ is None or isinstance(error.__cause__, LOST)


def _check_primary(role: Sequence[object], name: str) -> None:
    if role[0] != b"master":
        raise RedisConnectionError(f"{name} is a replica by now, and the Sentinels do not know yet")


def _check_mode(about: object, node: str) -> None:
    """Raise if `INFO` says that the address is of the wrong kind: a cluster node, or none."""
    if isinstance(about, bytes) and not node and b"cluster_enabled:1" in about:
        raise ConfigError(f"the Redis server at this address is a node of a cluster: {NO_CLUSTER}")
    if isinstance(about, bytes) and node and b"cluster_enabled:0" in about:
        advice = "its cluster mode is off; write redis:// instead of redis+cluster://"
        raise ConfigError(f"the Redis server {node} is not a node of a cluster: {advice}")


def drops_keys(memory: bytes) -> bool:
    """Read `maxmemory` and its policy from `INFO`."""
    policy = POLICY.search(memory)
    return b"maxmemory:0\r\n" not in memory and policy is not None and policy[1] != b"noeviction"


def _check_confirmation(replies: list[Any], wait: Sequence[Command]) -> list[Any]:
    """The replies without that of WAIT; StoreError if too few replicas have the change."""
    for _, wanted, milliseconds in wait:
        (confirmed,) = checked(replies[-1:])
        is_change = not all(
            isinstance(reply, list) and reply[:1] == [AGAIN] for reply in replies[:-1]
        )
        if confirmed < wanted and is_change:
            raise StoreError(
                f"{confirmed} of {wanted} replicas (wait_replicas) confirmed the change within "
                f"{milliseconds} ms: it was made, and a failover may undo it"
            )
    return replies[: len(replies) - len(wait)]


def checked(replies: list[Any], node: str = "") -> list[Any]:
    for reply in replies:
        if isinstance(reply, RedisError):
            raise refused(reply, node) from reply
    return replies


def refused(error: Exception, node: str = "", database: object = None) -> StoreError:
    """The error for the caller: the server's message, and what to do about it."""
    advice = ""
    if isinstance(error, OF_A_CLUSTER) and not node:
        advice = f"; {NO_CLUSTER}"
    elif isinstance(error, AuthenticationError):
        advice = f"; {SIGN_IN}"
    elif isinstance(error, OutOfMemoryError):
        advice = f"; {FULL}"
    elif NO_DATABASE in str(error):
        advice = f"; the address names database {database}: write a lower number, such as 0"
    return StoreError(f"the Redis server refused: {error_text(error)}{advice}")
