"""T1: the feed: two processes on one real file, a network that fails, writes, news."""

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, date, datetime

from stillfresh.errors import LoadFailed, NotOpen, StillfreshError
from stillfresh.freshness import Verdict
from stillfresh.systems.feed import Comment, FeedCache, FeedEngine, Topic
from stillfresh.testing import Blow, Process, Promise, World

UUID = "topic"


class Network:
    """What all processes have in common: the network, and who was told what when."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.comments: list[Comment] = []
        self.topics: dict[str, Topic] = {}
        self.announced: list[tuple[float, str]] = []
        """Comments, when it had been said that what is here is old, and by which process."""
        self.written: list[tuple[float, str]] = []
        """Our own, and when they had been accepted: shown from then on, however old the rest."""
        unsound = {Blow.FULL, Blow.AWAY, Blow.JUMP}
        self.is_sound = not any(it.blow in unsound for it in world.plan.strikes) and not any(
            world.plan.skews
        )
        """The disk takes what is written, and all agree for how long it is protected (F8)."""
        self.count = 0

    def new(self) -> Comment:
        self.count += 1
        return Comment(f"c{self.count}", UUID, "ann", int(self.world.wall()))

    def missing(self, asked: float, shown: Sequence[Comment], verdict: Verdict) -> list[str]:
        """What was announced before the question and is not in an answer that says FRESH."""
        ids = {comment.comment_uuid for comment in shown}
        known = self.written + (self.announced if verdict is Verdict.FRESH else [])
        return [id_ for ended, id_ in known if ended <= asked and id_ not in ids]


class Source:
    """The way of one process to it; a `FeedSource`."""

    def __init__(self, process: Process, network: Network) -> None:
        self._process = process
        self._network = network

    async def _travel(self) -> None:
        dice = self._process.world.dice
        await asyncio.sleep(dice.choice([0.01, 0.1, 1.0, 6.0]) * dice.random())
        if dice.random() < self._process.failure_rate:
            raise ConnectionError("the network failed")

    async def day_index(self, day: date, category: str | None) -> Sequence[Topic]:
        found = [it for it in self._network.topics.values() if _day(it) == day]
        await self._travel()
        return [it for it in found if category in {None, it.category_id}]

    async def topic(self, uuid: str) -> Topic | None:
        found = self._network.topics.get(uuid)
        await self._travel()
        return found

    async def comments(self, uuid: str) -> Sequence[Comment]:
        found = list(self._network.comments) if uuid == UUID else []
        self._process.world.note(self._process, f"asks for comments: {len(found)}")
        await self._travel()
        return found

    async def create_topic(self, topic: Topic) -> None:
        await self._travel()
        self._network.topics[topic.topic_uuid] = topic

    async def delete_topic(self, uuid: str) -> None:
        await self._travel()
        self._network.topics.pop(uuid, None)

    async def add_comment(self, topic_uuid: str, comment: Comment) -> None:
        await self._travel()
        assert topic_uuid == UUID
        self._network.comments.append(comment)


def _day(topic: Topic) -> date:
    return datetime.fromtimestamp(topic.created_at, UTC).date()


async def of_a_feed(world: World) -> None:
    """F6-F10: what was announced is not missing from a fresh answer, on a real file."""
    network = Network(world)

    async def app(process: Process) -> None:
        cache = FeedCache.open(world.folder / "feed.db", clock=process.clock, fresh_for=8)
        process.at_end(cache.close)
        for _ in range(world.dice.choice([1, 2])):
            engine = FeedEngine(cache, Source(process, network))
            process.at_close(engine.close)
            async with asyncio.TaskGroup() as group:
                for _ in range(2):
                    group.create_task(read(process, engine, network))
                if world.dice.random() < 0.3:
                    group.create_task(close(world, engine))

    world.launch(app, 2)


async def close(world: World, engine: FeedEngine) -> None:
    """In the midst of everything."""
    await asyncio.sleep(world.dice.uniform(0, 10))
    await engine.close()


async def read(process: Process, engine: FeedEngine, network: Network) -> None:
    world = process.world
    for _ in world.steps(12):
        await asyncio.sleep(world.dice.choice([0, 0.05, 0.5, 3.0]))
        with suppress(NotOpen):
            await act(process, engine, network)


async def act(process: Process, engine: FeedEngine, network: Network) -> None:
    match process.world.dice.randrange(8):
        case 0:
            await comment(process, engine, network)
        case 1:
            await heard(process, engine, network)
        case 2:
            await topic(process, engine, network)
        case 3:
            await listed(engine)
        case _:
            await look(process, engine, network)


async def comment(process: Process, engine: FeedEngine, network: Network) -> None:
    """One of our own: from then on it is shown, by whoever asks (F10)."""
    new, world = network.new(), process.world
    world.note(process, f"comments {new.comment_uuid}")
    try:
        await engine.add_comment(UUID, new)
    except (ConnectionError, StillfreshError):
        return
    world.note(process, f"has commented {new.comment_uuid}")
    if network.is_sound:
        network.written.append((world.time(), new.comment_uuid))


async def heard(process: Process, engine: FeedEngine, network: Network) -> None:
    """Somebody else's: upstream has it, and tells us."""
    new, world = network.new(), process.world
    network.comments.append(new)
    world.note(process, f"hears of {new.comment_uuid}")
    try:
        await engine.on_remote_comment(UUID)
    except StillfreshError:
        return
    world.note(process, f"has heard of {new.comment_uuid}")
    network.announced.append((world.time(), new.comment_uuid))


async def topic(process: Process, engine: FeedEngine, network: Network) -> None:
    network.count += 1
    new = Topic(f"t{network.count}", "ann", "a title", int(process.world.wall()) - 5, body="text")
    with suppress(ConnectionError, StillfreshError):
        await engine.create_topic(new)


async def listed(engine: FeedEngine) -> None:
    with suppress(ConnectionError, LoadFailed):
        await engine.get_all()


async def look(process: Process, engine: FeedEngine, network: Network) -> None:
    world, asked = process.world, process.world.time()
    try:
        answer = await engine.get_comments(UUID)
    except LoadFailed:
        return
    ids = [it.comment_uuid for it in answer.comments]
    world.note(process, f"is shown {','.join(ids)}, {answer.verdict}")
    if missing := network.missing(asked, answer.comments, answer.verdict):
        world.broken(
            Promise.FRESH, f"asked at {asked:.3f}, process {process.number} misses {missing}"
        )
