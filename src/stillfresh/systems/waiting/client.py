"""WaitingClient: a WaitingCache connected to the games' service, by HTTP and WebSocket.

Needs the `web` extra. Moves go over the socket, not over HTTP. So when a socket is lost, no move is
under way any more, and a new socket may tell the cache that nothing is pending.

One task runs: it connects, reads messages until the connection is lost, pauses, and connects again.
A new connection counts as joined only after the service has answered which game is on screen: from
then on no message about it is missed.
"""

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Final, Self

import msgspec

from stillfresh.backoff import spread
from stillfresh.durations import Duration, seconds
from stillfresh.errors import ConfigError, NotOpen, StillfreshError, needs, without_secrets
from stillfresh.http.client import Endpoint, checked_url, new_client
from stillfresh.http.fields import checked_headers
from stillfresh.systems.waiting.cache import WaitingCache
from stillfresh.systems.waiting.messages import (
    EVENTS,
    WAITING_LONGEST,
    Command,
    Connected,
    Move,
    MoveMade,
    News,
    WatchFailed,
    WatchGame,
    encode,
    read_news,
)
from stillfresh.systems.waiting.model import (
    GameId,
    GameState,
    Invalidated,
    MoveFailed,
    Opened,
    YourTurn,
)
from stillfresh.systems.waiting.rules import version_on_screen
from stillfresh.systems.waiting.rules_refetch import retry_pause

with needs("web", "stillfresh.systems.waiting.client"):
    from websockets.asyncio.client import ClientConnection, connect
    from websockets.exceptions import InvalidStatus, WebSocketException

__all__ = ["WaitingClient"]

logger = logging.getLogger(__name__)

MOST_BYTES: Final = 1_048_576
"""Bytes of a response: five ids are expected."""


class _WaitingGames(msgspec.Struct):
    game_ids: list[str]


_read_answer = msgspec.json.Decoder(_WaitingGames).decode


class WaitingClient:
    """A `WaitingCache` over HTTP: `async with WaitingClient("http://…", headers=…) as client:`.

    `client.cache` has the order. `timeout` is for a request, and for the wait for a connection.
    """

    def __init__(
        self,
        url: str,
        *,
        headers: Mapping[str, str] | None = None,
        timeout: Duration = "10s",
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
        dice: Callable[[], float] = random.random,
    ) -> None:
        self._url = str(checked_url(url, may_sign_in=True)).rstrip("/")
        self._server = without_secrets(self._url)
        self._headers = checked_headers(headers or {})
        self._timeout = seconds(timeout, name="timeout", positive=True)
        self._sleep = sleep
        self._dice = dice
        self.cache = WaitingCache(self._fetch, sleep=sleep)
        self._http = new_client(self._timeout, idle_connections=1)
        self._endpoint = Endpoint(
            self._http,
            self._url + WAITING_LONGEST,
            timeout=timeout,
            max_bytes=MOST_BYTES,
            headers=headers,
        )
        self._socket: ClientConnection | None = None
        self._task: asyncio.Task[None] | None = None
        self._is_closed = False
        self._joined = asyncio.Event()
        """Connected, or closed: there is nothing to wait for."""
        self._rejoining: ClientConnection | None = None
        self._looking: tuple[str, asyncio.Future[bool]] | None = None
        self._failures = 0

    async def __aenter__(self) -> Self:
        if self._task is not None:
            raise ConfigError("this WaitingClient is open already, or closed; make another one")
        self._task = asyncio.create_task(self._run(), name="stillfresh-waiting-client")
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._task is not None  # noqa: S101 (entered)
        self._is_closed = True
        self._joined.set()
        self._task.cancel()
        await asyncio.wait([self._task])
        await self.cache.close()
        await self._http.aclose()

    @property
    def is_connected(self) -> bool:
        """True if the service's events arrive. Otherwise the order is the last one known."""
        return self._socket is not None

    @property
    def _game_on_screen(self) -> GameId | None:
        screen = self.cache.state.screen
        return None if screen is None else screen.game_id

    async def look(self, game_id: str) -> bool:
        """Show a game; return whether it is our turn.

        Without a connection, it waits for one, at most `timeout`. Raises StillfreshError if there
        is none then.
        """
        if self._task is not None:
            with suppress(TimeoutError):  # what is missing is said below
                async with asyncio.timeout(self._timeout):
                    await self._joined.wait()
        self._connection()
        self._end_look(StillfreshError(f"{game_id} was looked at instead"))
        looking: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._looking = game_id, looking
        try:
            await self._send(WatchGame(game_id))
        except BaseException:
            self._looking = None
            if not looking.cancel():
                looking.exception()  # what is raised here tells it
            raise
        return await looking

    async def move(self, game_id: str, *, keeps_turn: bool = False) -> None:
        """Play. The game leaves the list at once, before the service confirms the move."""
        self._connection()
        version = version_on_screen(self.cache.state.screen, game_id)
        self.cache.move_sent(game_id, version)
        await self._send(Move(game_id, version, keeps_turn))

    async def _fetch(self) -> list[str]:
        return _read_answer(await self._endpoint.ask()).game_ids

    def _connection(self) -> ClientConnection:
        """The socket. Raises NotOpen if there is none."""
        if self._task is None or self._is_closed:
            raise NotOpen("this WaitingClient is not open; use it within async with")
        if self._socket is None:
            raise NotOpen(
                f"not connected to {self._server} yet; the client keeps trying, so call again later"
            )
        return self._socket

    async def _send(self, command: Command) -> None:
        try:
            await self._connection().send(encode(command).decode())
        except WebSocketException as exc:
            raise NotOpen(f"the connection to {self._server} was lost") from exc

    async def _run(self) -> None:
        while True:
            try:
                await self._session()
            except InvalidStatus as exc:
                logger.warning("%s refuses the connection: %s", self._server, exc)
            except (OSError, EOFError, WebSocketException) as exc:
                logger.info("the connection to %s was lost: %r", self._server, exc)
            except Exception:
                logger.exception("%s sent an invalid message", self._server)
            finally:
                self._hang_up()
            self._failures += 1
            await self._sleep(spread(retry_pause(self._failures), self._dice))

    async def _session(self) -> None:
        address = "ws" + self._url.removeprefix("http") + EVENTS
        async with connect(address, additional_headers=self._headers) as socket:
            async for text in socket:
                await self._hear(socket, read_news(text))

    async def _join(self, socket: ClientConnection) -> None:
        """From here on no message is missed; earlier ones may have been."""
        self._failures = 0
        if self._game_on_screen is None:
            self._use(socket)
        else:
            self._rejoining = socket
            await socket.send(encode(WatchGame(str(self._game_on_screen))).decode())

    def _use(self, socket: ClientConnection) -> None:
        """From here on moves go over this socket: those of the last one are not pending."""
        self._socket = socket
        self._rejoining = None
        self.cache.reconnected()
        self._joined.set()

    def _hang_up(self) -> None:
        self._socket = self._rejoining = None
        if not self._is_closed:
            self._joined.clear()
        self._end_look(NotOpen(f"the connection to {self._server} was lost"))

    def _end_look(self, result: bool | StillfreshError) -> None:
        """Tell the caller that looks, if there is one and it was not cancelled."""
        looking = self._looking
        self._looking = None
        if looking is None:
            return
        _, waiting_caller = looking
        if waiting_caller.done():
            return
        if isinstance(result, bool):
            waiting_caller.set_result(result)
        else:
            waiting_caller.set_exception(result)

    async def _hear(self, socket: ClientConnection, news: News) -> None:
        match news:
            case Connected():
                await self._join(socket)
            case Opened() | WatchFailed():
                self._show(news)
            case MoveMade():  # the state of the game on screen has come before
                if news.goes_on and news.game_id != self._game_on_screen:
                    self.cache.move_failed(news.game_id)  # otherwise it would be pending for ever
            case YourTurn() | Invalidated() | GameState() | MoveFailed():
                if isinstance(news, MoveFailed):
                    logger.info("the move in %s was refused: %s", news.game_id, news.reason)
                self.cache.hear(news)

    def _show(self, news: Opened | WatchFailed) -> None:
        """The service shows a game, or says why it cannot."""
        if isinstance(news, Opened):
            self.cache.hear(news)
        if self._rejoining is not None:
            self._use(self._rejoining)
        if self._looking is None or self._looking[0] != news.game_id:
            return
        if isinstance(news, Opened):
            self._end_look(news.my_turn)
        else:
            self._end_look(StillfreshError(news.reason))
