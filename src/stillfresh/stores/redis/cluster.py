"""A Redis cluster's primaries, and which of them holds which keys.

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
USES_STORED_TAGS: Final = {
    scripts.ACQUIRE.sha,
    scripts.PUBLISH.sha,
    scripts.PUT.sha,
    scripts.RENEW.sha,
    scripts.RELEASE.sha,
}
"""Steps that name tags which an earlier step stored."""
ANNOUNCED: Final = {
    scripts.PUBLISH.sha,
    scripts.PUT.sha,
    scripts.INVALIDATE.sha,
    scripts.DELETE.sha,
}
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
    ask_at: Address | None = None
    """The node to ask this once, because the key has moved there already."""
    reply: Any = None
    is_done: bool = False
    lost: StoreError | None = None
    """Why its reply was lost: the node is unavailable, and may have done the step."""


class Cluster:
    """Sends each command to the node that holds its key; used in place of one `Link`."""

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
        """The node that holds each slot that has a bucket."""
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
        links = self._links
        self._links = {}
        self._primaries = {}
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
        keys_by_node: dict[Link, list[bytes]] = {}
        for key in keys:
            keys_by_node.setdefault(self._primary(key_slot(key)), []).append(key)
        return keys_by_node

    async def run(
        self,
        commands: Sequence[Command],
        *,
        resend_as: Sequence[Command] = (),
        urgent: bool = False,
        lasting: bool = False,
        partly: bool = False,
        before_resend: Callable[[], None] | None = None,
    ) -> list[Any]:
        """The replies, in order, each from the node that holds its key."""
        pairs = zip(commands, resend_as or commands, strict=True)
        steps = [RoutedCommand(command, again, _slot(command)) for command, again in pairs]
        left = steps
        rounds = 0
        clock = asyncio.get_running_loop().time
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
            await self._round(left, urgent=urgent, lasting=lasting, before_resend=before_resend)
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
        before_resend: Callable[[], None] | None,
    ) -> None:
        """Send each command to its node, all nodes at once.

        Commands that are to be sent once more are not done afterwards, and know where to go.
        """
        groups = await self._by_node(steps)
        sends = [
            self._send(link, group, urgent, lasting, before_resend)
            for link, group in groups.items()
        ]
        # All nodes have answered before an error is raised: no send goes on behind the caller.
        for error in await asyncio.gather(*sends, return_exceptions=True):
            if error is not None:
                raise error
        for step in steps:
            if not step.is_done and step.lost is None:
                await self._redirect(step, lasting=lasting)
        if any(step.lost for step in steps):
            if before_resend is not None:
                before_resend()
            await self._locate()
            for link, group in groups.items():
                self._settle_elsewhere(link, group)

    async def _by_node(self, steps: Sequence[RoutedCommand]) -> dict[Link, list[RoutedCommand]]:
        if any(step.slot not in self._primaries for step in steps):
            await self._locate()
        groups: dict[Link, list[RoutedCommand]] = {}
        for step in steps:
            try:
                groups.setdefault(self._holder(step), []).append(step)
            except StoreError as exc:
                step.reply = exc
                step.is_done = True
        return groups

    async def _send(
        self,
        link: Link,
        steps: Sequence[RoutedCommand],
        urgent: bool,
        lasting: bool,
        before_resend: Callable[[], None] | None,
    ) -> None:
        try:
            forms = [await self._form(link, step) for step in steps]
            again = [_again(step, form) for step, form in zip(steps, forms, strict=True)]

            def resend() -> list[Command]:
                if before_resend is not None:
                    before_resend()
                for step in steps:  # also where a redirection leads
                    step.command = step.again
                return [command for form in again for command in form]

            sent = [command for form in forms for command in form]
            replies = iter(await link.replies(sent, resend=resend, urgent=urgent, lasting=lasting))
        except StoreError as exc:
            if not is_away(exc):
                raise
            for step in steps:
                step.lost = exc
            return
        for step, form in zip(steps, forms, strict=True):
            *_, step.reply = [next(replies) for _ in form]
            step.is_done = not _is_elsewhere(step.reply)
        moved = [step for step in steps if step.is_done and step.ask_at is not None]
        await self._announce_at_old_nodes(moved)

    async def _announce_at_old_nodes(self, steps: Sequence[RoutedCommand]) -> None:
        """Announce the steps once more: until a slot has moved, listeners are at its old node."""
        commands = [step.command for step in steps if step.command[1] in ANNOUNCED]
        if commands:
            await self.run([scripts.announcement_of(command) for command in commands])

    async def _form(self, link: Link, step: RoutedCommand) -> list[Command]:
        """The command as it is sent to the node.

        To a node that does not hold the slot yet, it names all its keys. The node then refuses it
        unless it has them all.
        """
        command = step.command
        if step.ask_at is None:
            return [command]
        if command[0] != lua.EVALSHA:
            return [ASKING, command]
        sha = command[1]
        key = command[3]
        tags = scripts.tags_named(command)
        if sha in USES_STORED_TAGS:
            _, text = await link.replies([ASKING, ("GETRANGE", key, 0, MOST_OF_TAGS)])
            if isinstance(text, bytes):
                tags += stored_tags(text)
        return [ASKING, scripts.with_all_keys(command, list(dict.fromkeys(tags)))]

    async def _redirect(self, step: RoutedCommand, *, lasting: bool) -> None:
        """Note where to send the command next, by the reply of the node that refused it."""
        reply = step.reply
        refusing_node = self._holder(step)  # before ask_at is cleared
        step.ask_at = None
        if isinstance(reply, MovedError):  # an AskError is one too, in the client library
            self._primaries[step.slot] = self._link(self._named(reply, refusing_node))
        elif isinstance(reply, ReadOnlyError):
            await self._locate()
        elif step.command[1] == scripts.INVALIDATE_TAG.sha:
            step.reply = await self._tag_by_members(step.command, lasting=lasting)
            step.is_done = True
        elif isinstance(reply, AskError) and not await self._keeps_counter(refusing_node, step):
            step.ask_at = self._named(reply, refusing_node)

    async def _keeps_counter(self, old: Link, step: RoutedCommand) -> bool:
        """True if a put has to wait, because its bucket's counter is still at the old node.

        The new node would begin a counter of its own, and then refuse to take over the old one.
        Where neither node has one, the new node begins it: the old one no longer can.
        """
        if step.command[1] != scripts.PUT.sha:
            return False
        counter = StampedCommand(step.command).base + b"+"
        (reply,) = await old.replies([("HGET", counter, "n")])
        return not _is_elsewhere(reply)

    def _named(self, reply: AskError, refusing_node: Link) -> Address:
        """The address that the reply names; without a host, it is the refusing node's."""
        hosts = (host for (host, _), link in self._links.items() if link is refusing_node)
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
                scripts.INVALIDATE.call([base + name], base, name, Blank.AS_OF, mark)
                for name in left
            ]
            replies = await self.run(steps, urgent=True, lasting=lasting)
            left = [name for name, reply in zip(left, replies, strict=True) if reply[0] == AGAIN]
            if left and asyncio.get_running_loop().time() > until:
                raise StoreError(KEEPS_CHANGING)
        await self.run([announced(base, TAGGED, tag)])
        return [scripts.DONE, 0, b"0", list(members), []]

    def _settle_elsewhere(self, link: Link, steps: Sequence[RoutedCommand]) -> None:
        """Settle lost replies at the nodes that hold the keys by now.

        If that is still the node which is unavailable, the step ends with the error.
        """
        for step in steps:
            if step.lost is None:
                continue
            was_redirected = step.ask_at is not None
            step.ask_at = None
            if not was_redirected and self._primaries.get(step.slot) is link:
                step.reply = step.lost
                step.is_done = True
            step.command = step.again
            step.lost = None

    def _holder(self, step: RoutedCommand) -> Link:
        if step.ask_at is not None:
            return self._link(step.ask_at)
        return self._primary(step.slot)

    def _primary(self, slot: int) -> Link:
        link = self._primaries.get(slot)
        if link is None:
            raise StoreError(f"no node of the Redis cluster holds slot {slot}")
        return link

    def _link(self, address: Address) -> Link:
        if self._is_closed:
            raise StoreError(STORE_CLOSED)
        link = self._links.get(address)
        if link is None:
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
            self._locating = asyncio.create_task(self._read_table())
            self._locating.add_done_callback(self._end_locating)
        locating = self._locating
        await asyncio.wait([locating])  # closing cancels the task, and must not cancel callers
        if locating.cancelled():
            raise StoreError(STORE_CLOSED)
        locating.result()

    def _end_locating(self, done: "asyncio.Task[None]") -> None:
        self._locating = None
        self._located_at = asyncio.get_running_loop().time()
        if not done.cancelled():
            done.exception()  # else asyncio logs it if all callers have given up

    async def _read_table(self) -> None:
        """Ask nodes for their table until each slot has a holder; the available ones first."""
        known = sorted(self._links.items(), key=lambda item: item[1].is_away)
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
            nodes = ", ".join(f"{host}:{port}" for (host, port), _ in [*known, *seeds])
            message = f"no node of the Redis cluster names its slots; asked: {nodes}"
            raise StoreError(message) from error
        self._primaries = primaries
        in_use = set(primaries.values())
        unused = [address for address, link in self._links.items() if link not in in_use]
        for address in unused:
            await self._links.pop(address).close()

    def _table(self, rows: Sequence[Any], answering_host: str) -> dict[int, Link]:
        """The holder of each slot. A node without a name is the one that answers."""
        table: dict[int, Link] = {}
        for first, last, (host, port, *_), *_ in rows:
            link = self._link(((host or b"").decode() or answering_host, port))
            table |= {slot: link for slot in self._slots if first <= slot <= last}
        return table


def _again(step: RoutedCommand, form: list[Command]) -> list[Command]:
    """The form to send if the reply was lost; a PUBLISH says so in its last argument."""
    if step.again is step.command:
        return form
    last = form[-1]
    again: Command = (*last[:-1], step.again[-1])
    if isinstance(last, StampedCommand):
        again = StampedCommand(again)
    return [*form[:-1], again]


def _slot(command: Command) -> int:
    return key_slot(command[3] if command[0] == lua.EVALSHA else command[1])


def _is_elsewhere(reply: object) -> bool:
    """True if nothing was done here."""
    return isinstance(reply, MovedError | AskError | TryAgainError | ReadOnlyError) or (
        isinstance(reply, ResponseError) and ELSEWHERE in str(reply)
    )
