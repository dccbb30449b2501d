"""Hub: the subscriptions of many viewers over one cache (C14).

Each kind is a resource of the engine, watched by whoever is connected: an id that any number of
viewers look at is refreshed once, and once for all processes that share the store (E5). A kind that
is per viewer is keyed by viewer and id, and is never shown to another.
"""

import asyncio
from collections.abc import Callable, Iterable
from typing import Any, Final

from stillfresh.coordinator.connection import Connection, HubUpdate, joined, parts
from stillfresh.coordinator.model import Kind
from stillfresh.engine import Cache, Resource
from stillfresh.engine.keys import checked_text
from stillfresh.engine.results import ABSENT, results_of
from stillfresh.errors import ConfigError, shown

__all__ = ["Connection", "Hub", "HubUpdate"]

KEPT_FOR: Final = "1d"
"""An old view is shown while its refresh runs, or fails, for so long."""


class Hub:
    """`Hub(cache, kinds=[Kind("price", fetch=…, fresh_for="30s")])`, one for a process."""

    def __init__(
        self, cache: Cache, *, kinds: Iterable[Kind], max_subscriptions: int = 1_000
    ) -> None:
        if not isinstance(max_subscriptions, int) or max_subscriptions < 1:
            raise ConfigError(
                f"max_subscriptions: a whole number of 1 or more, not {shown(max_subscriptions)}"
            )
        self.max_subscriptions = max_subscriptions
        self._kinds = _by_name(kinds)
        self._resources = {name: _resource(cache, kind) for name, kind in self._kinds.items()}
        self._connections: set[Connection] = set()

    def connect(
        self,
        viewer_id: str | None = None,
        *,
        visible: bool = True,
        tell: Callable[[], object] | None = None,
    ) -> Connection:
        """A viewer has come, or a guest; `with hub.connect("ann") as connection:`

        `tell` is called when there is something to `take`.
        """
        if viewer_id is not None:
            viewer_id = checked_text("viewer_id", viewer_id, str)
        connection = Connection(
            self, viewer_id, visible=visible, tell=tell, closed=self._connections.discard
        )
        self._connections.add(connection)
        return connection

    def __len__(self) -> int:
        """How many are connected."""
        return len(self._connections)

    @property
    def kinds(self) -> tuple[str, ...]:
        return tuple(self._kinds)

    def kind(self, name: str, viewer_id: str | None) -> Kind:
        """Refuses what this viewer may not look at."""
        if not isinstance(name, str) or (kind := self._kinds.get(name)) is None:
            known = ", ".join(self._kinds) or "none"
            raise ConfigError(f"kind {shown(name)}: not declared; there are: {known}")
        if kind.per_viewer and viewer_id is None:
            raise ConfigError(f"kind {name!r}: differs by viewer, and a guest is none; sign in")
        return kind

    def is_per_viewer(self, name: str) -> bool:
        """Whether its views differ by viewer."""
        return self._kinds[name].per_viewer

    def resource(self, name: str) -> Resource[str, Any]:
        return self._resources[name]


def _by_name(kinds: Iterable[Kind]) -> dict[str, Kind]:
    found = list(kinds) if isinstance(kinds, Iterable) and not isinstance(kinds, str) else [None]
    if not all(isinstance(kind, Kind) for kind in found):
        raise ConfigError(f"kinds: takes a list of Kind(...), not {shown(kinds)}")
    by_name: dict[str, Kind] = {}
    for kind in found:
        if kind.name in by_name:
            raise ConfigError(f"kinds: two are named {kind.name!r}; each has a name of its own")
        by_name[kind.name] = kind
    return by_name


def _resource(cache: Cache, kind: Kind) -> Resource[str, Any]:
    async def shared(ids: list[str]) -> dict[str, Any]:
        return await kind.fetch(ids)  # type: ignore[return-value]  # the engine checks what it is

    async def per_viewer(keys: list[str]) -> dict[str, Any]:
        """One request for each viewer among them; one that fails, fails its own."""
        asked: dict[str, list[str]] = {}
        for viewer_id, id_ in map(parts, keys):
            asked.setdefault(viewer_id, []).append(id_)
        answers = await asyncio.gather(
            *(_fetched(kind, ids, viewer_id) for viewer_id, ids in asked.items()),
            return_exceptions=True,
        )
        return {
            joined(viewer_id, id_): found
            for (viewer_id, ids), answer in zip(asked.items(), answers, strict=True)
            for id_, found in _each(ids, answer).items()
        }

    declare = cache.batched(
        kind.name,
        fresh_for=kind.fresh_for,
        stale_for=KEPT_FOR,
        error_for=KEPT_FOR,
        max_batch=kind.max_batch,
    )
    return declare(per_viewer if kind.per_viewer else shared)


async def _fetched(kind: Kind, ids: list[str], viewer_id: str) -> dict[str, object]:
    """Called and checked in a task of its own: nothing that it raises is another viewer's."""
    return results_of(kind.name, ids, await kind.fetch(list(ids), viewer_id))


def _each(ids: list[str], answer: dict[str, object] | BaseException) -> dict[str, object]:
    if isinstance(answer, BaseException):
        return dict.fromkeys(ids, answer)
    return {id_: found for id_, found in answer.items() if found is not ABSENT}
