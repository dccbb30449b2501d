"""How a Redis store announces changes: each step publishes a message in its own script.

Every bucket has a sharded channel, `<prefix>:v2:{by}:!`, on the node of its keys. A message is `P`,
the generation and the member; `V` and the member; `T` and a tag; or `!` and a beat. A server sends
messages in the order of its steps, so one beat proves all channels of one connection.
"""

import asyncio
from collections.abc import Sequence
from itertools import count
from secrets import token_hex
from typing import Final

from redis.asyncio.connection import AbstractConnection
from redis.exceptions import RedisError

from stillfresh.errors import StoreError
from stillfresh.stores.channel import A_TAG, ServerChannel, Tell
from stillfresh.stores.redis.cluster import Cluster
from stillfresh.stores.redis.layout import (
    BEAT,
    CHANNEL,
    NAME,
    PUBLISHED,
    TAGGED,
    Keyspace,
    unpadded,
)
from stillfresh.stores.redis.link import Link
from stillfresh.stores.redis.replies import LOST
from stillfresh.stores.server import error_text

SLICE: Final = 100
"""Messages that are handled in one turn of the loop."""


class RedisChannel(ServerChannel):
    """One connection to each server that holds buckets."""

    def __init__(self, link: Link | Cluster, keyspace: Keyspace, tell: Tell, within: float) -> None:
        super().__init__("the Redis server", tell, within)
        self._link = link
        self._keyspace = keyspace
        self._doors: list[bytes] = []
        """A channel of each server, for its beats."""

    async def open(self) -> None:
        names = [base + CHANNEL for base in self._keyspace.bases]
        try:
            async with asyncio.timeout(self._within):
                for server, channels in (await self._link.holders(names)).items():
                    connection = await server.dedicated()
                    self._connections.append(connection)
                    await _subscribe(connection, channels)
                    self._doors.append(channels[0])
        except (*LOST, RedisError) as exc:
            raise StoreError(f"the Redis server refuses a subscription: {error_text(exc)}") from exc
        self._readers = [
            asyncio.create_task(self._read(connection)) for connection in self._connections
        ]

    async def beat(self) -> None:
        """Through each server, and back on its connection."""
        tokens = [BEAT + token_hex(8).encode() for _ in self._doors]
        beats = zip(self._doors, tokens, strict=True)
        sent = self._link.run([("SPUBLISH", door, token) for door, token in beats])
        await self._come_back(tokens, sent)

    async def _read(self, connection: AbstractConnection) -> None:
        try:
            for number in count(1):
                if not number % SLICE:  # messages that have arrived are read without a pause
                    await asyncio.sleep(0)
                match await connection.read_response():
                    case [b"smessage", _, bytes() as message]:
                        self._hear(message)
                    case _:  # unsubscribed: its slot has moved
                        return
        except (*LOST, RedisError):
            return
        finally:
            self._came.set()

    def _hear(self, message: bytes) -> None:
        if message[:1] == BEAT:
            self._hear_beat(message)
            return
        if message[:1] == TAGGED:
            self._tell(A_TAG, message[1:].decode(errors="surrogatepass"), None)
            return
        is_published = message[:1] == PUBLISHED
        name = self._keyspace.name(message[1 + NAME * is_published :])
        if name is not None:
            self._tell(*name, unpadded(message[1 : 1 + NAME]) if is_published else None)


async def _subscribe(connection: AbstractConnection, channels: Sequence[bytes]) -> None:
    """One command for each channel: in a cluster they belong to different slots."""
    commands = [("SSUBSCRIBE", channel) for channel in channels]
    await connection.send_packed_command(connection.pack_commands(commands))
    for _ in channels:
        await connection.read_response()
