"""A cluster's primaries, and which of them holds which keys (S9).

All keys of a bucket are in one slot, so the route table has 32 rows. A node that does not
hold a key names the one that does, and has done nothing: the command goes there. If a reply was
lost, the step is settled at the node that then holds the key. Replicas are never read: one that is
behind would serve invalidated copies.

While a slot moves key by key, a step may find its key on one node and the sets of its tags on the
other. It then changes nothing (`scripts.py`), and is tried again until they are together.
"""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, ClassVar, Final

from msgspec import Struct
from redis.crc import key_slot
from redis.exceptions import AskError, MovedError, ReadOnlyError, ResponseError, TryAgainError

from stillfresh.backoff import pause_after
from stillfresh.errors import STORE_CLOSED, StoreError
from stillfresh.stores.redis import lua, scripts
from stillfresh.stores.redis.heard import AGAIN, Blank, StampedCommand
from stillfresh.stores.redis.layout import TAGGED, Command, announced, stored_tags
from stillfresh.stores.redis.link import ASKING, Address, Link, checked, is_away

AT_ONCE: Final = 3  # redirections that are followed without a pause
FIRST_PAUSE: Final = 0.01
LONGEST_PAUSE: Final = 0.2
LOCATE_EVERY: Final = 0.1  # seconds between two looks at the nodes' own table
ELSEWHERE: Final = "non local key"
"""The reply of a script that found one of its keys on another node."""
KEPT_TAGS: Final = {
    it.sha for it in (scripts.ACQUIRE, scripts.PUBLISH, scripts.PUT, scripts.RENEW, scripts.RELEASE)
}
"""Steps that name tags which an earlier step stored."""
TOLD: Final = {it.sha for it in (scripts.PUBLISH, scripts.PUT, scripts.INVALIDATE, scripts.DELETE)}
"""Steps that are announced to listeners."""
MOST_OF_TAGS: Final = 200_000  # bytes: more than the tags of a key may have
KEEPS_CHANGING: Final = (
    "other processes keep changing these entries: they were not invalidated within the time-out; "
    "invalidate them again"
)


class RoutedCommand(Struct, eq=False):
    """One command on its way."""

    command: Command
    again: Command
    """The command to send if its reply was lost."""
    slot: int
    asked: Address | None = None
    """The node to ask this once, because the key has moved there already."""
    reply: Any = None
    is_done: bool = False
    lost: StoreError | None = None


class Cluster:
    """The same `run` as `Link`, on the nodes that hold the keys."""

    is_cluster: ClassVar = True

    def __init__(
        self,
        seeds: Sequence[Address],
        new_link: Callable[[Address], Link],
        timeout: float,
        bases: Sequence[bytes],
    ) -> None:
        """`bases`: what the keys of each bucket begin with."""
        self._seeds = seeds
        self._new_link = new_link
        self._timeout = timeout
        self._bases = {base: key_slot(base) for base in bases}
        self._slots = set(self._bases.values())
        self._links: dict[Address, Link] = {}
        self._primaries: dict[int, Link] = {}
        """By slot of a bucket."""
        self._located_at = float("-inf")
        self._locating: asyncio.Task[None] | None = None
        self._is_closed = False

    @property
    def drops_keys(self) -> bool:
        """True if one of the nodes may drop any key when it is full."""
        return any(link.drops_keys for link in self._links.values())

    async def greet(self) -> None:
        """Check that a node accepts us. If none names its slots, they are asked again later."""
        for seed in self._seeds:
            link = self._link(seed)
            await link.greet()
            if not link.is_away:
                with suppress(StoreError):
                    await self._locate()
                return

    async def close(self) -> None:
        self._is_closed = True
        if self._locating is not None:
            self._locating.cancel()
            await asyncio.wait([self._locating])
        links, self._links, self._primaries = self._links, {}, {}
        for link in links.values():
            await link.close()

    async def servers(self) -> list[Link]:
        """The primaries."""
        if not self._primaries:
            await self._locate()
        return list(dict.fromkeys(self._primaries.values()))

    async def holders(self, keys: Sequence[bytes]) -> dict[Link, list[bytes]]:
        """The nodes as they say now: the channel that asks was ended by a moved slot."""
        self._located_at = float("-inf")
        await self._locate()
        found: dict[Link, list[bytes]] = {}
        for key in keys:
            found.setdefault(self._primary(key_slot(key)), []).append(key)
        return found

    async def run(
        self,
        commands: Sequence[Command],
        *,
        settle: Sequence[Command] = (),
        urgent: bool = False,
        lasting: bool = False,
        partly: bool = False,
        before_again: Callable[[], None] | None = None,
    ) -> list[Any]:
        """The replies, in order, each from the node that holds its key."""
        pairs = zip(commands, settle or commands, strict=True)
        steps = [RoutedCommand(command, again, _slot(command)) for command, again in pairs]
        left, rounds, clock = steps, 0, asyncio.get_running_loop().time
        until = clock() + self._timeout
        while left:
            if rounds >= AT_ONCE:
                pauses = rounds - AT_ONCE + 1
                await asyncio.sleep(pause_after(pauses, first=FIRST_PAUSE, longest=LONGEST_PAUSE))
            if rounds and clock() > until:
                moving = StoreError("the Redis cluster is moving these keys; try again in a moment")
                for step in left:
                    step.reply = moving
                break
            await self._round(left, urgent=urgent, lasting=lasting, before_again=before_again)
            left = [step for step in left if not step.is_done]
            rounds += 1
        lost = [step.reply for step in steps if isinstance(step.reply, StoreError)]
        if lost and not (partly and len(lost) < len(steps)):
            raise lost[0]
        return checked([step.reply for step in steps], "of the cluster")

    async def _round(
        self,
        steps: Sequence[RoutedCommand],
        *,
        urgent: bool,
        lasting: bool,
        before_again: Callable[[], None] | None,
    ) -> None:
        """Send each command to its node, all nodes at once; return those to try again."""
        groups = await self._by_node(steps)
        sends = [
            self._send(link, some, urgent, lasting, before_again) for link, some in groups.items()
        ]
        for ended in await asyncio.gather(*sends, return_exceptions=True):
            if ended is not None:
                raise ended
        for step in steps:
            if not step.is_done and step.lost is None:
                await self._redirect(step, lasting=lasting)
        if any(step.lost for step in steps):
            if before_again is not None:
                before_again()
            await self._locate()
            for link, some in groups.items():
                self._settle_elsewhere(link, some)

    async def _by_node(self, steps: Sequence[RoutedCommand]) -> dict[Link, list[RoutedCommand]]:
        if any(step.slot not in self._primaries for step in steps):
            await self._locate()
        groups: dict[Link, list[RoutedCommand]] = {}
        for step in steps:
            try:
                groups.setdefault(self._holder(step), []).append(step)
            except StoreError as exc:
                step.reply, step.is_done = exc, True
        return groups

    async def _send(
        self,
        link: Link,
        steps: Sequence[RoutedCommand],
        urgent: bool,
        lasting: bool,
        before_again: Callable[[], None] | None,
    ) -> None:
        try:
            forms = [await self._form(link, step) for step in steps]
            again = [_again(step, form) for step, form in zip(steps, forms, strict=True)]

            def settle() -> list[Command]:
                if before_again is not None:
                    before_again()
                for step in steps:  # also where a redirection leads
                    step.command = step.again
                return [command for form in again for command in form]

            sent = [command for form in forms for command in form]
            replies = iter(await link.replies(sent, settle=settle, urgent=urgent, lasting=lasting))
        except StoreError as exc:
            if not is_away(exc):
                raise
            for step in steps:
                step.lost = exc
            return
        for step, form in zip(steps, forms, strict=True):
            *_, step.reply = [next(replies) for _ in form]
            step.is_done = not _is_elsewhere(step.reply)
        await self._tell_old_nodes([it for it in steps if it.is_done and it.asked is not None])

    async def _tell_old_nodes(self, steps: Sequence[RoutedCommand]) -> None:
        """S10: until the slot has moved, listeners are subscribed at its old node."""
        done = [it.command for it in steps if it.command[1] in TOLD]
        if done:
            await self.run([scripts.told_again(it) for it in done])

    async def _form(self, link: Link, step: RoutedCommand) -> list[Command]:
        """As it is sent. To a node that does not hold the slot yet, with all its keys named.

        That node then refuses it unless it has them all.
        """
        command = step.command
        if step.asked is None:
            return [command]
        if command[0] != lua.EVALSHA:
            return [ASKING, command]
        sha, key, tags = command[1], command[3], list[bytes]()
        if sha in KEPT_TAGS:
            look = [ASKING, ("GETRANGE", key, 0, MOST_OF_TAGS)]
            _, text = await link.replies(look)
            tags = stored_tags(text) if isinstance(text, bytes) else []
        tags = list(dict.fromkeys([*scripts.tags_named(command), *tags]))
        return [ASKING, scripts.with_all_keys(command, tags)]

    async def _redirect(self, step: RoutedCommand, *, lasting: bool) -> None:
        """The node to ask, by the reply of the one that was asked."""
        reply, asked, step.asked = step.reply, self._holder(step), None
        if isinstance(reply, MovedError):  # an AskError is one too, in the client library
            self._primaries[step.slot] = self._link(self._named(reply, asked))
        elif isinstance(reply, ReadOnlyError):
            await self._locate()
        elif step.command[1] == scripts.INVALIDATE_TAG.sha:
            step.reply = await self._tag_by_members(step.command, lasting=lasting)
            step.is_done = True
        elif isinstance(reply, AskError) and not await self._keeps_counter(asked, step):
            step.asked = self._named(reply, asked)

    async def _keeps_counter(self, old: Link, step: RoutedCommand) -> bool:
        """Does a put have to wait, because its bucket's counter is still at the old node (S13)?

        The new node would begin a counter of its own, and then refuse to take over the old one.
        Where neither node has one, the new node begins it: the old one no longer can.
        """
        if step.command[1] != scripts.PUT.sha:
            return False
        counter = StampedCommand(step.command).base + b"+"
        (found,) = await old.replies([("HGET", counter, "n")])
        return not _is_elsewhere(found)

    def _named(self, reply: AskError, asked: Link) -> Address:
        """A node without a name is on the machine of the node that was asked."""
        hosts = (host for (host, _), link in self._links.items() if link is asked)
        return reply.host or next(hosts, ""), reply.port

    async def _tag_by_members(self, command: Command, *, lasting: bool) -> list[Any]:
        """The tag's set and its ids are on two nodes: invalidate each id where it is."""
        _, _, _, key, base, _, mark, _ = command
        tag = key[len(base) + 1 :]
        note = scripts.NOTE_TAG.call([base + b"@"], base, tag)
        await self.run([note], urgent=True, lasting=lasting)
        (members,) = await self.run([("SMEMBERS", key)], urgent=True)
        left = list(members)
        until = asyncio.get_running_loop().time() + self._timeout
        while left:
            steps = [
                scripts.INVALIDATE.call([base + it], base, it, Blank.AS_OF, mark) for it in left
            ]
            replies = await self.run(steps, urgent=True, lasting=lasting)
            left = [it for it, reply in zip(left, replies, strict=True) if reply[0] == AGAIN]
            if left and asyncio.get_running_loop().time() > until:
                raise StoreError(KEEPS_CHANGING)
        await self.run([announced(base, TAGGED, tag)])
        return [scripts.DONE, 0, b"0", list(members), []]

    def _settle_elsewhere(self, link: Link, steps: Sequence[RoutedCommand]) -> None:
        """Settle lost replies at the node that holds the key by now."""
        for step in steps:
            if step.lost is not None:
                is_asked, step.asked = step.asked is not None, None
                if not is_asked and self._primaries.get(step.slot) is link:
                    step.reply, step.is_done = step.lost, True
                step.command, step.lost = step.again, None

    def _holder(self, step: RoutedCommand) -> Link:
        if step.asked is not None:
            return self._link(step.asked)
        return self._primary(step.slot)

    def _primary(self, slot: int) -> Link:
        if (link := self._primaries.get(slot)) is None:
            raise StoreError(f"no node of the Redis cluster holds slot {slot}")
        return link

    def _link(self, address: Address) -> Link:
        if self._is_closed:
            raise StoreError(STORE_CLOSED)
        if (link := self._links.get(address)) is None:
            link = self._links[address] = self._new_link(address)
            link.held_bases = partial(self._bases_of, link)
        return link

    def _bases_of(self, link: Link) -> list[bytes]:
        """The buckets that a node holds, as far as it is known."""
        return [base for base, slot in self._bases.items() if self._primaries.get(slot) is link]

    async def _locate(self) -> None:
        """Read the nodes' own table: once for callers that come together, and not too often."""
        clock = asyncio.get_running_loop().time
        if self._locating is None:
            if self._primaries and clock() - self._located_at < LOCATE_EVERY:
                return
            self._locating = asyncio.create_task(self._look())
            self._locating.add_done_callback(self._located)
        locating = self._locating
        await asyncio.wait([locating])  # S5: closing cancels it, and must not cancel callers
        if locating.cancelled():
            raise StoreError(STORE_CLOSED)
        locating.result()

    def _located(self, done: "asyncio.Task[None]") -> None:
        self._locating, self._located_at = None, asyncio.get_running_loop().time()
        if not done.cancelled():
            done.exception()

    async def _look(self) -> None:
        known = sorted(self._links.items(), key=lambda it: it[1].is_away)
        seeds = [(seed, self._link(seed)) for seed in self._seeds if seed not in self._links]
        error: StoreError | None = None
        primaries: dict[int, Link] = {}
        for (host, _), link in [*known, *seeds]:
            try:
                (rows,) = await link.run([("CLUSTER", "SLOTS")], urgent=True)
            except StoreError as exc:
                error = exc
                continue
            # A node that does not know a slot's new holder names none; another node may know it.
            primaries = self._table(rows, host) | primaries
            if primaries.keys() == self._slots:
                break
        if not primaries:
            asked = ", ".join(f"{host}:{port}" for (host, port), _ in [*known, *seeds])
            message = f"no node of the Redis cluster names its slots; asked: {asked}"
            raise StoreError(message) from error
        self._primaries, in_use = primaries, {*primaries.values()}
        for address in [it for it, link in self._links.items() if link not in in_use]:
            await self._links.pop(address).close()

    def _table(self, rows: Sequence[Any], asked: str) -> dict[int, Link]:
        """A node that does not know its own name is at the address that was asked."""
        table: dict[int, Link] = {}
        for first, last, (host, port, *_), *_ in rows:
            link = self._link(((host or b"").decode() or asked, port))
            table |= {slot: link for slot in self._slots if first <= slot <= last}
        return table


def _again(step: RoutedCommand, form: list[Command]) -> list[Command]:
    """S2: as it is sent if its reply was lost; a PUBLISH says so in its last argument."""
    if step.again is step.command:
        return form
    last = form[-1]
    again = (*last[:-1], step.again[-1])
    return [*form[:-1], StampedCommand(again) if isinstance(last, StampedCommand) else again]


def _slot(command: Command) -> int:
    return key_slot(command[3] if command[0] == lua.EVALSHA else command[1])


def _is_elsewhere(reply: object) -> bool:
    """True if nothing was done here."""
    return isinstance(reply, MovedError | AskError | TryAgainError | ReadOnlyError) or (
        isinstance(reply, ResponseError) and ELSEWHERE in str(reply)
    )
