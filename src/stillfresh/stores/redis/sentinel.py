"""The primary that Sentinels name (S9): each new connection asks them."""

import asyncio
from collections.abc import Sequence

from redis.asyncio.connection import AbstractConnection, Connection, ConnectionPool
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError

from stillfresh.stores.redis.link import LOST, NEVER, Address


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
        said = ""
        for address in tuple(self._addresses):
            name = f"the Sentinel {address[0]}:{address[1]}"
            try:
                async with asyncio.timeout(self._each):
                    found = await self._asked(address)
            except (*LOST, RedisError) as exc:
                said = f"{name} did not answer ({exc!r})"
                continue
            if found is not None:
                self._addresses.remove(address)
                self._addresses.insert(0, address)
                return found[0].decode(), int(found[1])
            said = f"{name} knows no service {self._service!r}"
        raise RedisConnectionError(f"no Sentinel names the primary; {said}")

    async def _asked(self, address: Address) -> list[bytes] | None:
        sentinel = Connection(host=address[0], port=address[1], retry=NEVER, protocol=2)
        try:
            await sentinel.connect()  # type: ignore[no-untyped-call]
            await sentinel.send_command("SENTINEL", "get-master-addr-by-name", self._service)
            found: list[bytes] | None = await sentinel.read_response()
            return found
        finally:
            await sentinel.disconnect(nowait=True)


def _check_primary(role: Sequence[object], name: str) -> None:
    if role[0] != b"master":
        raise RedisConnectionError(f"{name} is a replica by now, and the Sentinels do not know yet")
