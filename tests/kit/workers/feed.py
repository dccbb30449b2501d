"""One of several processes on one feed file, told by stdin, telling by stdout."""

import asyncio
import json
import sys
from collections.abc import Sequence
from datetime import date
from pathlib import Path

from stillfresh.systems.feed import Comment, FeedCache, FeedEngine, Topic
from tests.kit.feed import Network, comment, is_loading, said, topic, uuids


def tell(what: object) -> None:
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


async def told() -> list[str]:
    line: str = await asyncio.to_thread(sys.stdin.readline)
    return line.split()


class Shared(Network):
    """Notes every call in a file that all processes share; waits until it is told to go on."""

    log: Path
    go: asyncio.Event

    def _note(self, what: str) -> None:
        with self.log.open("a") as log:
            log.write(what + "\n")

    async def day_index(self, day: date, category: str | None) -> Sequence[Topic]:
        self._note(f"day {day}")
        await self.go.wait()
        return await super().day_index(day, category)

    async def comments(self, uuid: str) -> Sequence[Comment]:
        self._note(f"comments {uuid}")
        await self.go.wait()
        return await super().comments(uuid)


async def operate(cache: FeedCache) -> None:
    """Does what it is told, one line at a time."""
    tell("ready")
    while words := await told():
        match words:
            case ["put", uuid]:
                cache.put_topics([topic(uuid)], "index:all:7")
                tell("done")
            case ["delete", uuid]:
                tell(cache.delete_topic(uuid))
            case ["comments", uuid, *ids]:
                cache.put_comments(uuid, [comment(id_, uuid) for id_ in ids])
                tell("done")
            case ["all"]:
                tell(uuids(cache.get_topics_all(0)))
            case ["said", uuid]:
                tell(said(cache.get_comments(uuid) or []))


async def visit(cache: FeedCache, log: str, *there: str) -> None:
    """Reads the feed; goes on with its fetch when told; then what it reads, and its events."""
    network = Shared()
    network.log = Path(log)
    network.go = asyncio.Event()
    engine = FeedEngine(cache, network)
    events: list[str] = []
    engine.on_updated(lambda event: events.append(event.cache_key))
    first = asyncio.create_task(engine.get_all())
    tell("began")
    if there:
        await told()
        tell(uuids((await first).topics))
    while (words := await told()) != ["end"]:
        match words:
            case ["go", *upstream]:
                network.topics = {uuid: recent(uuid) for uuid in upstream}
                network.go.set()
                tell(uuids((await first).topics))
            case ["read"]:
                tell(uuids((await engine.get_all()).topics))
            case ["settle"]:
                while await is_loading(engine):
                    await asyncio.sleep(0.01)
                tell(events)
    await engine.close()


def recent(uuid: str) -> Topic:
    """Of today, by the machine's clock."""
    return Topic(topic_uuid=uuid, author="ann", title=uuid, created_at=int(NOW_REAL))


NOW_REAL = float(sys.argv[3]) if len(sys.argv) > 3 else 0.0


async def main(command: str, path: str, _: str, *arguments: str) -> None:
    with FeedCache.open(path) as cache:
        await (visit(cache, *arguments) if command == "visit" else operate(cache))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
