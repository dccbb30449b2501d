"""What one viewer of `WS /v1/live` looks at, as they say it (G3)."""

import logging
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from stillfresh.coordinator import Connection, Hub
from stillfresh.errors import ConfigError, StoreError
from stillfresh.web.messages import Error, Route, Subscribe, Unsubscribe, Visible
from stillfresh.web.rules_live import Limits
from stillfresh.web.rules_rest import NO_ID, is_id

logger = logging.getLogger(__name__)


class Complain(Protocol):
    """Tells the viewer what was refused."""

    def __call__(self, error: Error, /, *, is_bad: bool) -> None: ...


class Viewing:
    """A connection to the hub, and another one when the viewer becomes somebody else."""

    def __init__(
        self, hub: Hub, limits: Limits, tell: Callable[[], object], complain: Complain
    ) -> None:
        self._hub = hub
        self._tell = tell
        self._complain = complain
        self._path: str | None = None
        self._most = min(limits.max_subscriptions, hub.max_subscriptions)
        self.connection: Connection = hub.connect(tell=tell)

    async def look(self, message: Subscribe | Unsubscribe | Visible | Route) -> None:
        match message:
            case Subscribe(items):
                await self._subscribe(items)
            case Unsubscribe(items):
                self._unsubscribe(items)
            case Visible(visible):
                self.connection.set_visible(visible)
            case Route(path):
                self._go_to(path)

    def become(self, viewer_id: str | None) -> None:
        """What is for all stays subscribed; what was another viewer's does not."""
        before = self.connection
        if before.viewer_id == viewer_id:
            return
        self.connection = self._hub.connect(viewer_id, visible=before.is_visible, tell=self._tell)
        self.connection.take_over(before)
        before.close()

    async def _subscribe(self, items: Sequence[Sequence[Any]]) -> None:
        viewer_id = self.connection.viewer_id
        had: dict[str, dict[str, float | None]] = {}
        too_many: dict[tuple[str, str], None] = {}
        refused = {kind for kind in {item[0] for item in items} if not self._may_see(kind)}
        for kind, id_, *since in items:
            if kind in refused or not self._is_right(kind, id_):
                continue
            if self._is_full() and not self.connection.has(kind, id_):
                too_many[kind, id_] = None
            elif self._enter(kind, id_):
                had.setdefault(kind, {})[id_] = since[0] if since else None
        if too_many:
            why = f"a viewer has at most {self._most:,} subscriptions"
            error = Error("too_many_subscriptions", why, items=tuple(too_many))
            self._complain(error, is_bad=False)
        for kind, ids in had.items():
            try:
                await self._show(kind, ids, viewer_id)
            except StoreError as exc:
                logger.warning("what there is of %s could not be read: %s", kind, exc)

    async def _show(self, kind: str, ids: dict[str, float | None], viewer_id: str | None) -> None:
        """Show it again to a viewer that became somebody else meanwhile; nothing private then."""
        shown = None
        while shown is not self.connection:
            shown = self.connection
            if self._hub.is_per_viewer(kind) and shown.viewer_id != viewer_id:
                return
            await shown.show(kind, ids)

    def _may_see(self, kind: str) -> bool:
        if kind not in self._hub.kinds:
            there = ", ".join(self._hub.kinds) or "none"
            unknown = Error("unknown_kind", f"no such kind; there are: {there}", kind[:100])
            self._complain(unknown, is_bad=True)
            return False
        if self._hub.is_per_viewer(kind) and self.connection.viewer_id is None:
            needed = Error("sign_in_needed", "its views differ by viewer: sign in first", kind)
            self._complain(needed, is_bad=False)
            return False
        return True

    def _is_right(self, kind: str, id_: str) -> bool:
        if not is_id(id_):
            self._complain(Error("bad_id", NO_ID, kind, id_[:100]), is_bad=True)
            return False
        return True

    def _enter(self, kind: str, id_: str) -> bool:
        if self.connection.has(kind, id_):  # a screen shows it or does not: never twice
            return True
        try:
            self.connection.subscribe(kind, id_)
        except ConfigError as exc:
            self._complain(Error("bad_id", str(exc), kind, id_), is_bad=True)
            return False
        return True

    def _is_full(self) -> bool:
        return self.connection.size >= self._most

    def _unsubscribe(self, items: Sequence[Sequence[Any]]) -> None:
        """Of what was never subscribed: nothing, whatever it is."""
        for kind, id_, *_ in items:
            if kind in self._hub.kinds and self.connection.has(kind, id_):
                self.connection.unsubscribe(kind, id_)

    def _go_to(self, path: str) -> None:
        """C8: the first path, and the same one, reset nothing."""
        before, self._path = self._path, path
        if before not in {None, path}:
            self.connection.reset()
