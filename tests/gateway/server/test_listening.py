"""The socket on which a server listens."""

import asyncio
import socket

from stillfresh.gateway.server import bound


async def test_answers_of_two_parts_are_sent_at_once_on_any_event_loop() -> None:
    """Else the second part waits until the client acknowledges the first one."""
    has_no_delay = asyncio.get_running_loop().create_future()

    def connected(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        accepted = writer.get_extra_info("socket")
        has_no_delay.set_result(accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        writer.close()

    with bound("127.0.0.1", 0) as listener:
        async with await asyncio.start_server(connected, sock=listener):
            _, client = await asyncio.open_connection(*listener.getsockname())
            assert await has_no_delay
            client.close()
            await client.wait_closed()
