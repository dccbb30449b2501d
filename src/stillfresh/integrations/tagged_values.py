"""Values that are bytes already, stored with their tags.

A put replaces the tags of an entry. So that a later change of the entry knows them, the tags are
stored in front of the value. Keys bring their tags along.
"""

from collections.abc import Callable
from contextlib import suppress
from typing import Final, TypeAlias

from msgspec import DecodeError, msgpack

from stillfresh.engine import Answer
from stillfresh.sync import SyncCache, SyncResource

BytesChange: TypeAlias = Callable[[Answer[bytes] | None], object]
"""What `update` calls with the present answer."""
NEVER_ENDS: Final = 100 * 365 * 86_400.0
"""Seconds that an entry without an end is fresh for."""

TAGGED: Final = b"\xc1"
"""No msgpack value begins with it."""

_pack = msgpack.Encoder().encode
_unpack = msgpack.Decoder(tuple[tuple[str, ...], bytes]).decode


class TaggedKey(str):
    """A key, and the tags that its entry gets."""

    __slots__ = ("tags",)

    def __new__(cls, name: str, tags: tuple[str, ...]) -> "TaggedKey":
        key = super().__new__(cls, name)
        key.tags = tags
        return key

    tags: tuple[str, ...]


class OtherTags(Exception):
    """The entry has other tags than its lease would get."""


class BlockingCache(SyncCache):
    """A SyncCache that may be called on an event loop. It blocks the loop, as others' caches do.

    A template rendered by an async view of Django reads its fragments that way.
    """

    def check_caller(self) -> None:
        """Any thread may wait."""


class Bytes:
    """The codec of the resource: its values are bytes already."""

    @staticmethod
    def encode(value: bytes) -> bytes:
        return value

    decode = encode


def tags_of_key(key: str) -> tuple[str, ...]:
    """The `tags` function of the resource."""
    return key.tags if isinstance(key, TaggedKey) else ()


def with_tags(data: bytes, tags: tuple[str, ...]) -> bytes:
    """The value with its tags."""
    if tags or data.startswith(TAGGED):
        return TAGGED + _pack((tags, data))
    return data


def without_tags(data: bytes) -> tuple[tuple[str, ...], bytes]:
    """The tags, and the value. Raises an error for bytes that `with_tags` did not write."""
    if not data.startswith(TAGGED):
        return (), data
    return _unpack(data[1:])


def tags_of(data: bytes) -> tuple[str, ...]:
    """The tags that were stored with the value; none if the bytes cannot be read."""
    try:
        tags, _ = without_tags(data)
    except (DecodeError, UnicodeDecodeError):
        return ()
    return tags


def update_with_its_tags(
    resource: SyncResource[str, bytes], name: str, change: BytesChange
) -> None:
    """Change an entry and keep its tags.

    The lease of an update replaces the entry's tags, and they are known only after the entry was
    read. So the update starts again with the tags that it read, until they agree.
    """
    tags: tuple[str, ...] = ()

    def change_if_same_tags(answer: Answer[bytes] | None) -> object:
        nonlocal tags
        stored_tags = () if answer is None else tags_of(answer.value)
        if stored_tags != tags:
            tags = stored_tags
            raise OtherTags
        return change(answer)

    while True:
        with suppress(OtherTags):
            resource.update(TaggedKey(name, tags), change_if_same_tags)
            return
