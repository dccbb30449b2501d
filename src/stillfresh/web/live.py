"""`WS /v1/live`: what a viewer looks at, pushed when it changes (G3, G4).

A plain ASGI app: lets viewers in, knows who is here, and lets them go. One viewer is `session.py`.
"""

import asyncio
import inspect
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import Any, Final
from urllib.parse import parse_qs

import msgspec
from starlette.types import Receive, Scope, Send

from stillfresh.clock import Clock
from stillfresh.coordinator import Hub
from stillfresh.durations import Duration, seconds
from stillfresh.errors import ConfigError, NotOpen, StillfreshError, shown
from stillfresh.web.frames import Frames
from stillfresh.web.messages import Notice
from stillfresh.web.replies import header
from stillfresh.web.rest import Authenticate
from stillfresh.web.rules_live import Close, Limits, is_allowed_origin
from stillfresh.web.session import House, Session
from stillfresh.web.standing import SignInFailed, SignInUnavailable

MAX_BAD: Final = 10
RATE, BURST = 100.0, 1_000.0
"""Messages a second, and at once: who scrolls sends one a frame, sixty a second, and a network
that held them up delivers those of several seconds together."""
SIGN_IN_TIMEOUT: Final = 5.0
CHECK_EVERY: Final = 45.0
LOOKED_EVERY: Final = 5.0
"""Seconds between two looks for tokens to check: with the hook's 5 s, a revoked token is noticed
within a minute."""
CHECKS_AT_ONCE: Final = 100
UNCONFIRMED_FOR: Final = 300.0
"""Seconds that viewers stay signed in while the hook fails."""
STATS_EVERY: Final = 1.0
GRACE: Final = 2.0
"""Seconds that viewers have to read what is left when we close."""

logger = logging.getLogger(__name__)


class Live:
    """An ASGI websocket app over a hub; `push` speaks to one viewer, `snapshot` counts all."""

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
        for name, number in (
            ("max_message", max_message),
            ("max_subscriptions", max_subscriptions),
            ("max_connections", max_connections),
        ):
            _check_number(name, number)
        if isinstance(origins, str):
            raise ConfigError(f"origins: takes a list of origins; write [{origins!r}]")
        limits = Limits(
            max_message=max_message,
            max_subscriptions=max_subscriptions,
            max_bad=MAX_BAD,
            rate=RATE,
            burst=BURST,
            heartbeat=seconds(heartbeat, name="heartbeat", positive=True),
            patience=seconds(patience, name="patience", positive=True),
            sign_in_timeout=SIGN_IN_TIMEOUT,
            check_every=CHECK_EVERY,
            unconfirmed_for=UNCONFIRMED_FOR,
        )
        self._authenticate = authenticate
        self._origins = frozenset(origins)
        self._stats = stats
        self._is_operator = is_operator
        self._max_connections = max_connections
        self._clock = clock
        self._sleep = sleep
        self._sessions: set[Session] = set()
        self._by_viewer: dict[str, set[Session]] = {}
        self._watching_stats: set[Session] = set()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._nobody = asyncio.Event()
        self._is_closing = False
        self._is_hook_failing = False
        self._house = House(
            hub=hub,
            own_kinds=tuple(filter(hub.is_per_viewer, hub.kinds)),
            frames=Frames(),
            limits=limits,
            clock=clock,
            viewer_of=self._viewer_of,
            is_operator=self._may_see_stats,
            moved=self._moved,
            figures=self._show_stats,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if (await receive())["type"] != "websocket.connect":
            return
        if (refusal := self._refusal(scope)) is not None:
            await _refuse(scope, send, *refusal)
            return
        query = parse_qs(scope.get("query_string", b"").decode("latin-1"))
        together = query.get("batch") == ["1"]
        try:
            session = Session(self._house, scope, together=together)
        except NotOpen:
            await _refuse(scope, send, 503, "closed")
            return
        self._sessions.add(session)
        self._keep("pulse", self._check_pulses)
        if self._authenticate is not None:
            self._keep("tokens", self._check_tokens)
        try:
            await send({"type": "websocket.accept"})
            await session.run(receive, send)
        except OSError:  # gone before it was here
            pass
        finally:
            self._forget(session)

    def push(self, viewer_id: str, notice: Notice) -> int:
        """To that viewer's connections, of which the number is returned; the newest of each kind
        and game, where a connection does not keep up."""
        if not isinstance(notice, Notice):
            raise ConfigError(
                f"push: takes a YourTurnNews, InvalidatedNews or GameStateNews, not {shown(notice)}"
            )
        told = self._by_viewer.get(viewer_id, set())
        for session in told:
            if not session.outbox.notify(notice):
                session.end(Close.SILENT, "too much was left unread", within=0)
        return len(told)

    def snapshot(self) -> dict[str, Any]:
        """How many are connected, signed in, and looking at what."""
        subscriptions: Counter[str] = Counter(dict.fromkeys(self._house.hub.kinds, 0))
        for session in self._sessions:
            subscriptions.update(session.viewing.connection.sizes)
        return {
            "connections": len(self._sessions),
            "signed_in": sum(map(len, self._by_viewer.values())),
            "subscriptions": dict(subscriptions),
        }

    def tick(self) -> None:
        """Look after every session once; a timer does it four times a heartbeat, or more often."""
        now = self._clock()
        for session in tuple(self._sessions):
            session.check_pulse(now)
            session.check_standing(now)

    async def check_tokens(self) -> None:
        """Check every token whose turn it is, some at once; a timer does it every 5 s (G12)."""
        now = self._clock()
        due = [session for session in self._sessions if session.standing.is_due(now)]
        waiting = iter(due)

        async def check_one_after_another() -> None:
            for session in waiting:
                await session.check_token()

        async with asyncio.TaskGroup() as group:
            for _ in due[:CHECKS_AT_ONCE]:
                group.create_task(check_one_after_another())

    async def close(self) -> None:
        """Everybody is told to come again, and nothing of ours runs any more."""
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

    def _refusal(self, scope: Scope) -> tuple[int, str] | None:
        origin, host = header(scope, b"origin"), header(scope, b"host")
        if not is_allowed_origin(origin, host, self._origins):
            return 403, "pages of this origin may not connect"
        if self._is_closing or len(self._sessions) >= self._max_connections:
            return 503, "no place; try again later"
        return None

    def _forget(self, session: Session) -> None:
        session.viewing.connection.close()
        self._sessions.discard(session)
        self._watching_stats.discard(session)
        if not self._sessions:
            self._nobody.set()

    def _moved(self, session: Session, before: str | None, now: str | None) -> None:
        if before is not None and (of_viewer := self._by_viewer.get(before)) is not None:
            of_viewer.discard(session)
            if not of_viewer:
                del self._by_viewer[before]
        if now is not None:
            self._by_viewer.setdefault(now, set()).add(session)

    async def _viewer_of(self, token: str) -> str | None:
        """What the application's hook says, in time."""
        if self._authenticate is None:
            raise SignInFailed("nobody can sign in here")
        try:
            async with asyncio.timeout(self._house.limits.sign_in_timeout):
                found = self._authenticate(token)
                viewer_id = await found if inspect.isawaitable(found) else found
            _check_viewer(viewer_id)
        except Exception as exc:
            if not self._is_hook_failing:  # once, not for each viewer every minute
                logger.exception("authenticate failed")
            self._is_hook_failing = True
            raise SignInUnavailable("signing in failed; try again later") from exc
        self._is_hook_failing = False
        return viewer_id

    def _may_see_stats(self, scope: Scope, token: str | None) -> bool:
        return (
            self._stats is not None
            and self._is_operator is not None
            and self._is_operator(scope, token)
        )

    def _show_stats(self, session: Session) -> None:
        self._watching_stats.add(session)
        self._keep("stats", self._send_stats)

    def _keep(self, name: str, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Running while somebody is here."""
        if name not in self._tasks:
            task = self._tasks[name] = asyncio.get_running_loop().create_task(work())
            task.add_done_callback(lambda _: self._tasks.pop(name, None))

    async def _check_pulses(self) -> None:
        while self._sessions:
            await self._sleep(min(self._house.limits.heartbeat / 4, LOOKED_EVERY))
            self.tick()

    async def _check_tokens(self) -> None:
        while self._sessions:
            await self._sleep(LOOKED_EVERY)
            await self.check_tokens()

    async def _send_stats(self) -> None:
        while self._watching_stats and self._stats is not None:
            try:
                figures = {"type": "stats", **await self._stats()}
                text = msgspec.json.encode(figures).decode()
            except StillfreshError as exc:
                logger.warning("the figures could not be taken: %s", exc)
            else:
                for session in self._watching_stats:
                    if session.viewing.connection.is_visible:
                        session.outbox.show_figures(text)
            await self._sleep(STATS_EVERY)


async def _refuse(scope: Scope, send: Send, status: int, reason: str) -> None:
    """Before it is accepted: by HTTP where the server can, else by a close, which is a 403."""
    try:
        if "websocket.http.response" not in scope.get("extensions", {}):
            await send({"type": "websocket.close", "code": Close.FULL.value, "reason": reason})
            return
        headers = [(b"content-type", b"text/plain; charset=utf-8"), (b"retry-after", b"5")]
        await send({"type": "websocket.http.response.start", "status": status, "headers": headers})
        await send({"type": "websocket.http.response.body", "body": reason.encode()})
    except OSError:  # gone already
        pass


def _check_viewer(viewer_id: object) -> None:
    if viewer_id is not None and (not isinstance(viewer_id, str) or not viewer_id):
        raise ConfigError(f"authenticate: gives a viewer's id or None, not {shown(viewer_id)}")


def _check_number(name: str, number: object) -> None:
    if not isinstance(number, int) or isinstance(number, bool) or number < 1:
        raise ConfigError(f"{name}: a whole number of 1 or more, not {shown(number)}")
