"""Hub: the subscriptions of many viewers over one cache (C14).

Each kind is a resource of the engine, watched by whoever is connected: an id that any number of
viewers look at is refreshed once, and once for all processes that share the store (E5). A kind that
is per viewer is keyed by viewer and id, and is never shown to another.
"""

from collections.abc import Callable, Iterable
from typing import Any

from stillfresh.coordinator.connection import Connection
from stillfresh.coordinator.hub_kinds import by_name, key_of, resource_for
from stillfresh.coordinator.model import Kind
from stillfresh.engine import Answer, Cache, Resource
from stillfresh.engine.keys import checked_id, checked_text
from stillfresh.errors import ConfigError, shown


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
        self._kinds = by_name(kinds)
        self._resources = {name: resource_for(cache, kind) for name, kind in self._kinds.items()}
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

    def named(self, kind: str, id_: object, viewer_id: str | None) -> tuple[Kind, str, str]:
        """The kind, the id and its key, all checked: what is refused leaves no trace."""
        known, text = self.kind(kind, viewer_id), checked_text(kind, id_, str)
        return known, text, checked_id(kind, key_of(known, text, viewer_id))

    def resource(self, name: str) -> Resource[str, Any]:
        return self._resources[name]

    async def get(self, kind: str, id: str, viewer_id: str | None = None) -> Answer[Any]:  # noqa: A002 (as it is called)
        """One view, as this viewer sees it, without a connection; loaded if there is none."""
        _, _, key = self.named(kind, id, viewer_id)
        return await self._resources[kind].get(key)

    async def get_many(
        self, kind: str, ids: Iterable[str], viewer_id: str | None = None
    ) -> dict[str, Answer[Any]]:
        """Many of one kind; one whose load failed has `error`."""
        keys = {self.named(kind, id_, viewer_id)[2]: id_ for id_ in ids}
        self.kind(kind, viewer_id)
        answers = await self._resources[kind].get_many(list(keys))
        return {keys[key]: answer for key, answer in answers.items()}
