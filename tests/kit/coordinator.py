"""What the coordinator's tests share: a nexus held in the hand, and a way to wait."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import apsw

from stillfresh.systems.coordinator import Database, TtlConfig, TtlController, TtlCoordinator
from stillfresh.testing import ManualClock
from tests.kit.gates import Gated

START = 1_700_000_000.0
VIEWER = "viewer"


def post(id_: str, version: int = 1, **more: Any) -> dict[str, Any]:
    """A whole post as Nexus shows it."""
    author, own = id_.split(":")
    return {
        "details": {"author": author, "id": own, "content": f"version {version}"},
        "counts": {"tags": 0, "replies": 0, "reposts": version},
        "relationships": {"replied": None, "reposted": None, "mentioned": []},
        "tags": [],
        "bookmark": None,
        **more,
    }


def user(id_: str, version: int = 1) -> dict[str, Any]:
    """A whole user as Nexus shows it."""
    return {
        "details": {"id": id_, "name": f"version {version}"},
        "counts": {"posts": version},
        "relationship": {"following": False, "followed_by": False, "muted": False},
        "tags": [],
    }


def reposting(id_: str, original: str) -> dict[str, Any]:
    author, own = original.split(":")
    uri = f"pubky://{author}/pub/pubky.app/posts/{own}"
    return post(id_, relationships={"replied": None, "reposted": uri, "mentioned": []})


class Nexus(Gated):
    """Answers with the version of the moment; can be held up, fail, and know nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.posts: list[list[str]] = []
        self.users: list[list[str]] = []
        self.viewers: list[str | None] = []
        self.version = 1
        self.failing: set[str] = set()
        self.absent: set[str] = set()
        self.special: dict[str, Any] = {}

    async def posts_by_ids(self, post_ids: list[str], viewer_id: str | None) -> list[Any]:
        self.posts.append(list(post_ids))
        return await self._answer(post_ids, viewer_id, post)

    async def users_by_ids(self, user_ids: list[str], viewer_id: str | None) -> list[Any]:
        self.users.append(list(user_ids))
        return await self._answer(user_ids, viewer_id, user)

    async def _answer(
        self, ids: list[str], viewer_id: str | None, made: Callable[[str, int], Any]
    ) -> list[Any]:
        self.viewers.append(viewer_id)
        version = self.version
        await self.called()
        if self.failing & set(ids):
            raise ConnectionError("one of them is poison")
        return [self.special.get(id_, made(id_, version)) for id_ in ids if id_ not in self.absent]


@dataclass
class Site:
    """A coordinator on a real file, its nexus and its clock."""

    folder: Path
    clock: ManualClock
    nexus: Nexus
    controller: TtlController
    ttl: TtlCoordinator
    told: list[tuple[str, str, list[str]]] = field(default_factory=list)

    @property
    def file(self) -> Path:
        return self.folder / "app.db"

    def rows(self, table: str) -> dict[str, int]:
        """As another program reads them."""
        with apsw.Connection(str(self.file), flags=apsw.SQLITE_OPEN_READONLY) as connection:
            rows = connection.execute(
                f"SELECT id, last_updated_at FROM {table} WHERE last_updated_at IS NOT NULL"
            ).fetchall()
        return {str(id_): int(updated_at) for id_, updated_at in rows}  # type: ignore[arg-type]

    def write(self, sql: str, *values: Any) -> None:
        """As another process writes."""
        connection = apsw.Connection(str(self.file))
        connection.execute(sql, values)
        connection.close()

    def write_row(self, kind: str, id_: str, row: int) -> None:
        """As another process publishes: a view of nobody, asked for at that time."""
        times = "id, last_updated_at, generation, fresh_for, stale_for, error_for"
        self.write(f"REPLACE INTO {kind} VALUES (?, X'00')", id_)
        self.write(f"REPLACE INTO {kind}_ttl({times}) VALUES (?, ?, 'g', 0, 0, 0)", id_, row)

    def queued(self, kind: str = "post") -> tuple[str, ...]:
        return self.ttl.snapshot().queued[kind]

    def subscribed(self, kind: str = "post") -> dict[str, int]:
        return dict(self.ttl.snapshot().subscribed[kind])

    async def version(self, id_: str, kind: str = "post") -> int | None:
        view = await self.controller.get(kind, id_)
        if view is None:
            return None
        return int(view["counts"]["reposts" if kind == "post" else "posts"])


def made(folder: Path, clock: ManualClock, config: TtlConfig | None = None, **options: Any) -> Site:
    nexus = Nexus()
    database = Database(folder / "app.db")
    controller = TtlController(nexus=nexus, database=database, clock=clock)
    ttl = TtlCoordinator(controller, config or TtlConfig(), **options)
    site = Site(folder, clock, nexus, controller, ttl)
    controller.on_updated(lambda kind, ids: site.told.append(("updated", kind, ids)))
    controller.on_absent(lambda kind, ids: site.told.append(("absent", kind, ids)))
    return site


def milliseconds(clock: ManualClock) -> int:
    return round(clock() * 1000)
