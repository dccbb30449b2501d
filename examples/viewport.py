"""Half an hour of scrolling through a feed: what the coordinator asks for, and what polling would.

Run it: `python examples/viewport.py`. The clock is a manual one, so it takes a second.
"""

import asyncio
import random
import tempfile
from pathlib import Path
from typing import Any

from stillfresh.systems.coordinator import Database, TtlConfig, TtlController, TtlCoordinator
from stillfresh.testing import ManualClock

FEED = [f"author-{number % 40}:{number}" for number in range(300)]
ON_SCREEN = 12
TICK = 5


class Nexus:
    """A server that counts its likes."""

    def __init__(self) -> None:
        self.likes = 0

    async def posts_by_ids(self, post_ids: list[str], viewer_id: str | None) -> list[Any]:
        self.likes += 1
        return [self.post(id_, viewer_id) for id_ in post_ids]

    def post(self, id_: str, viewer_id: str | None) -> dict[str, Any]:
        author, own = id_.split(":")
        details = {"author": author, "id": own, "seen_by": viewer_id}
        return {"details": details, "counts": {"likes": self.likes}}

    async def users_by_ids(self, user_ids: list[str], viewer_id: str | None) -> list[Any]:
        return [{"details": {"id": id_, "seen_by": viewer_id}} for id_ in user_ids]


async def scroll(minutes: int = 30) -> None:
    clock = ManualClock(1_700_000_000)
    dice = random.Random(7)  # noqa: S311 (a walk, no secret)
    with tempfile.TemporaryDirectory() as folder:
        database = Database(Path(folder) / "app.db")
        controller = TtlController(nexus=Nexus(), database=database, clock=clock)
        async with controller, TtlCoordinator(controller, TtlConfig()) as ttl:
            ttl.sign_in("viewer")
            ttl.set_visible(True)
            polls = await walk(ttl, clock, dice, minutes)
            report(ttl, polls, minutes)


async def walk(ttl: TtlCoordinator, clock: ManualClock, dice: random.Random, minutes: int) -> int:
    """A page of posts at a time, now and then a few further; returns what polling would ask."""
    top = 0
    polls = 0
    screen: set[str] = set()
    for _ in range(minutes * 60 // TICK):
        if dice.random() < 0.3:
            top = max(0, min(len(FEED) - ON_SCREEN, top + dice.randint(-6, 12)))
        shown = set(FEED[top : top + ON_SCREEN])
        for id_ in screen - shown:
            ttl.unsubscribe_post(composite_post_id=id_)
        for id_ in shown - screen:
            ttl.subscribe_post(composite_post_id=id_)
        screen = shown
        polls += len(screen)
        await ttl.tick()
        clock.advance(TICK)
    return polls


def report(ttl: TtlCoordinator, polls: int, minutes: int) -> None:
    state = ttl.snapshot()
    made_count = state.requests_made
    saved_count = state.requests_saved
    print(f"{minutes} minutes of scrolling, {ON_SCREEN} posts on screen, a look every {TICK} s")
    print(f"  polling each post on screen:  {polls:6,} requests")
    print(f"  one request for each refresh: {made_count + saved_count:6,} requests")
    print(f"  the coordinator, in batches:  {made_count:6,} requests made, {saved_count:,} saved")


if __name__ == "__main__":
    asyncio.run(scroll())
