"""`WS /v1/live`: a viewer's items, pushed when they change.

A plain ASGI app: it accepts viewers, knows all sessions, and closes them. One viewer is
`session.py`.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import Any, Final, get_args
from urllib.parse import parse_qs

import msgspec

from stillfresh.checks import checked_whole
from stillfresh.clock import Clock
from stillfresh.durations import Duration, seconds
from stillfresh.errors import ConfigError, NotOpen, StillfreshError, shown
from stillfresh.gateway.live.hub import Hub
from stillfresh.gateway.live.messages import Close, ServerMessage, encode, is_allowed_origin
from stillfresh.gateway.live.outbox import Frames
from stillfresh.gateway.live.session import Receive, Scope, Send, Session
from stillfresh.gateway.live.sign_in import Authenticate, Tokens

LOOKED_EVERY: Final = 5.0
"""Seconds between two looks for tokens to check."""
CHECKS_AT_ONCE: Final = 100
STATS_EVERY: Final = 1.0
GRACE: Final = 2.0
"""Seconds for viewers to read the rest when the app closes."""
RESERVED: Final = {message.__struct_config__.tag for message in get_args(ServerMessage)} | {
    "stats",
    "state",
}
"""Names of messages, and of the client's own events, that applications may not use."""

logger = logging.getLogger(__name__)


class Live:
    """The WebSocket app over a hub, part of a gateway. `push` sends a message to one viewer.

    Args:
        hub: What viewers can subscribe to.
        authenticate: Returns the viewer's id for a token, or None. Without it, all are guests.
        origins: Sites whose pages may connect, besides the app's own.
        stats: Returns the figures for operators. `is_operator` says which sessions are operators.
        is_operator: Called with the connection and its token.
        max_message: The most bytes of a viewer's message.
        max_subscriptions: The most subscriptions of a viewer.
        max_connections: The most viewers at once.
        heartbeat: After this long in silence a connection is pinged; after twice that it is closed.
        patience: How long a slow viewer has to read what was sent.
        clock: Measures silence. Tests replace it.
        sleep: Called to wait. Tests replace it.
    """

    def __init__(
        self,
        hub: Hub,
        *,
        authenticate: Authenticate | None = None,
        origins: Iterable[str] = (),
        stats: Callable[[], Awaitable[dict[str, Any]]] | None = None,
        is_operator: Callable[[Scope, str | None], bool] | None = None,
        max_message: int = 131_072,
        max_subscriptions: int = 1_000,
        max_connections: int = 10_000,
        heartbeat: Duration = 25,
        patience: Duration = 20,
        clock: Clock = time.monotonic,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        if isinstance(origins, str):
            raise ConfigError(f"origins: takes a list of origins; write [{origins!r}]")
        self.hub = hub
        self.own_kinds = tuple(filter(hub.is_per_viewer, hub.kinds))
        self.max_message = checked_whole("max_message", max_message)
        most = checked_whole("max_subscriptions", max_subscriptions)
        self.max_subscriptions = min(most, hub.max_subscriptions)
        self.heartbeat = seconds(heartbeat, name="heartbeat", positive=True)
        self.patience = seconds(patience, name="patience", positive=True)
        self.clock = clock
        self.frames = Frames()
        self.tokens = Tokens(authenticate, clock)
        self._origins = frozenset(origins)
        self._stats = stats
        self._is_operator = is_operator
        self._max_connections = checked_whole("max_connections", max_connections)
        self._sleep = sleep
        self._notices: dict[type, tuple[str, ...]] = {}
        self._sessions: set[Session] = set()
        self._by_viewer: dict[str, set[Session]] = {}
        self._watching_stats: set[Session] = set()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._nobody = asyncio.Event()
        self._is_closing = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if (await receive())["type"] != "websocket.connect":
            return
        if (refusal := self._refusal(scope)) is not None:
            await _refuse(scope, send, *refusal)
            return
        query = parse_qs(scope.get("query_string", b"").decode("latin-1"))
        try:
            session = Session(self, scope, batches_frames=query.get("batch") == ["1"])
        except NotOpen:
            await _refuse(scope, send, 503, "closed")
            return
        self._sessions.add(session)
        self._keep("pulse", self._check_pulses)
        try:
            await send({"type": "websocket.accept"})
            await session.run(receive, send)
        except OSError:  # gone before it was accepted
            pass
        finally:
            self._forget(session)

    def register(self, notice: type[msgspec.Struct], *, newest_of: Iterable[str] = ()) -> None:
        """Allow `push` to send messages of this type: a Struct whose tag is their `type`.

        A viewer that reads too slowly gets only the newest of each. `newest_of` names the fields
        that tell one message from another.
        """
        is_struct = isinstance(notice, type) and issubclass(notice, msgspec.Struct)
        config = notice.__struct_config__ if is_struct else None
        is_tagged = config is not None and config.tag_field == "type" and not config.array_like
        tag = config.tag if config is not None and is_tagged else None
        if not isinstance(tag, str) or tag in RESERVED:
            raise ConfigError(
                f"register: takes a msgspec.Struct with a tag of its own as `type`, not "
                f"{shown(notice)}; reserved are: {', '.join(sorted(RESERVED))}"
            )
        names = (newest_of,) if isinstance(newest_of, str) else tuple(newest_of)
        if unknown := set(names) - set(notice.__struct_fields__):
            raise ConfigError(f"register: {tag!r} has no field {', '.join(sorted(unknown))}")
        self._notices[notice] = names

    def push(self, viewer_id: str, notice: msgspec.Struct) -> int:
        """Send a notice to all connections of a viewer; return how many there are."""
        names = self._notices.get(type(notice))
        if names is None:
            known = ", ".join(type_.__name__ for type_ in self._notices) or "none"
            raise ConfigError(
                f"push: takes a notice of a registered type ({known}), not {shown(notice)}; "
                "call register() with its type first"
            )
        key = (type(notice), *(encode(getattr(notice, name)) for name in names))
        text = encode(notice).decode()
        sessions = self._by_viewer.get(viewer_id, set())
        for session in sessions:
            if not session.outbox.put("notices", text, key):
                session.end(Close.SILENT, "too much was left unread", within=0)
        return len(sessions)

    def snapshot(self) -> dict[str, Any]:
        """Count connections, signed-in connections, and the subscriptions of each kind."""
        return {
            "connections": len(self._sessions),
            "max_connections": self._max_connections,
            "signed_in": sum(map(len, self._by_viewer.values())),
            "subscriptions": dict(self.hub.subscriptions),
        }

    def tick(self) -> None:
        """Check every session once; a timer calls it at least four times a heartbeat."""
        now = self.clock()
        for session in tuple(self._sessions):
            session.check(now)

    async def check_tokens(self) -> None:
        """Check every token that is due, some at once; a timer calls it every 5 s."""
        now = self.clock()
        due = [
            session
            for session in self._sessions
            if session.sign_in is not None and session.sign_in.is_due(now)
        ]
        waiting = iter(due)

        async def check_one_after_another() -> None:
            for session in waiting:
                await session.check_token()

        async with asyncio.TaskGroup() as group:
            for _ in due[:CHECKS_AT_ONCE]:
                group.create_task(check_one_after_another())

    async def close(self) -> None:
        """Close all connections, and tell the browsers to connect again later."""
        self._is_closing = True
        try:
            for session in tuple(self._sessions):
                session.end(Close.RESTART, "the service restarts", within=GRACE)
            while self._sessions:
                self._nobody.clear()
                await self._nobody.wait()
            tasks = tuple(self._tasks.values())
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        finally:
            self._is_closing = False

    def moved(self, session: Session, before: str | None, now: str | None) -> None:
        """A session has another viewer."""
        if before is not None and (of_viewer := self._by_viewer.get(before)) is not None:
            of_viewer.discard(session)
            if not of_viewer:
                del self._by_viewer[before]
        if now is not None:
            self._by_viewer.setdefault(now, set()).add(session)

    def show_stats(self, session: Session, scope: Scope, token: str | None) -> bool:
        """Send the operator's figures from now on; False if this viewer is not an operator."""
        if self._stats is None or self._is_operator is None or not self._is_operator(scope, token):
            return False
        self._watching_stats.add(session)
        self._keep("stats", self._send_stats)
        return True

    def _refusal(self, scope: Scope) -> tuple[int, str] | None:
        headers = {name: value.decode("latin-1") for name, value in reversed(scope["headers"])}
        if not is_allowed_origin(
            headers.get(b"origin", ""), headers.get(b"host", ""), self._origins
        ):
            return 403, "pages of this origin may not connect"
        if self._is_closing or len(self._sessions) >= self._max_connections:
            return 503, "no place; try again later"
        return None

    def _forget(self, session: Session) -> None:
        session.connection.close()
        self._sessions.discard(session)
        self._watching_stats.discard(session)
        if not self._sessions:
            self._nobody.set()

    def _keep(self, name: str, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Keep the timers running while somebody is connected."""
        if name not in self._tasks:
            task = self._tasks[name] = asyncio.get_running_loop().create_task(work())
            task.add_done_callback(lambda _: self._tasks.pop(name, None))

    async def _check_pulses(self) -> None:
        while self._sessions:
            await self._sleep(min(self.heartbeat / 4, LOOKED_EVERY))
            self.tick()
            self._keep("tokens", self.check_tokens)  # unless the last check is still under way

    async def _send_stats(self) -> None:
        while self._watching_stats and self._stats is not None:
            try:
                text = encode({"type": "stats", **await self._stats()}).decode()
            except StillfreshError as exc:
                logger.warning("the statistics could not be read: %s", exc)
            else:
                for session in self._watching_stats:
                    if session.connection.is_visible:
                        session.outbox.put("figures", text, "stats")
            await self._sleep(STATS_EVERY)


async def _refuse(scope: Scope, send: Send, status: int, reason: str) -> None:
    """Refuse before it is accepted: by HTTP if the server can, else by a close, which is a 403."""
    try:
        if "websocket.http.response" not in scope.get("extensions", {}):
            await send({"type": "websocket.close", "code": Close.FULL.value, "reason": reason})
            return
        headers = [(b"content-type", b"text/plain; charset=utf-8"), (b"retry-after", b"5")]
        await send({"type": "websocket.http.response.start", "status": status, "headers": headers})
        await send({"type": "websocket.http.response.body", "body": reason.encode()})
    except OSError:  # gone already
        pass
