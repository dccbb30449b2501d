"""How an id is stored in Redis: one string for everything about it, and sets for its tags.

Every id belongs to one of `BUCKETS` buckets, named in its key as a hash tag, and so do the sets
that say which ids of that bucket have a tag: a step on an id, its tags included, stays in one hash
slot. The string begins with `HEAD` bytes of fixed fields, so that a script changes a lease or a
mark in place however long the value is; then come the tags, the error and the value.

Once an entry has been changed, its first tag is not a tag. It holds the `EXTRA` fields: the stamp
of the last change, the ids of the last four copies that were replaced, and the version. Releases
without the step `put` take it for a tag, so they can still read, invalidate and delete the entry. A
string that they wrote has no such tag: its last change is not known.

A string without copy, lease and failure is the trace of a deletion: nothing is there for readers.

Pure: bytes in, records out. The scripts read the same fields (`scripts.py`).
"""

from collections.abc import Sequence
from math import isfinite
from re import compile as pattern
from struct import Struct
from typing import Any, Final, NamedTuple, TypeAlias
from zlib import crc32

from msgspec.structs import replace

from stillfresh.errors import ConfigError, shown
from stillfresh.stores.contract import (
    UNREAD,
    Copy,
    Failure,
    Grant,
    Held,
    Lease,
    Mark,
    Newer,
    Record,
    Unread,
    policy_of,
)
from stillfresh.stores.versions import INTEGER, NO_VERSION, TEXT

BUCKETS: Final = (  # noqa: SIM905 (as a list it would take 32 lines)
    "6u by 25 f9 0n db o2 gg 8c 06 4g 4v ed m1 fa 2m "
    "k4 ca 4h x5 63 ez 2s yk z6 6k ab i7 c9 0p gy 40"
).split()
"""Their names. Each is in the middle of its 32nd part of a cluster's slots, so that primaries which
divide the slots evenly divide the buckets, too. An invalidation by tag visits each."""
NAME: Final = 36
"""Bytes of a token or a generation, padded with zeros."""
ASKER: Final = 20
"""Bytes of a new token that the caller draws; the server adds 16 digits."""
NOBODY: Final = bytes(NAME)
MAGIC: Final = b"SF\0\1"
VALUE: Final = 1
ABSENT: Final = 2

FIELDS: Final = Struct(f">4sBBdddd{NAME}sd{NAME}sIdII")
COPY: Final = Struct(f">4sBBdddd{NAME}s")
GENERATION_AT: Final = COPY.size - NAME
"""The byte at which the copy's generation begins."""
KIND_FIELD: Final = 1
GENERATION_FIELD: Final = 7
LEASE_FIELD: Final = 8
TAGS_SIZE_FIELD: Final = 12
ERROR_SIZE_FIELD: Final = 13
"""Numbers of fields among `FIELDS`. The kind is VALUE, ABSENT, or 0 if there is no copy. From
LEASE_FIELD on: the lease's end and token, the failures, when to retry, and the two sizes."""
FAILURE: Final = Struct(">Id")
NUMBER: Final = Struct(">d")
LENGTH: Final = Struct(">I")
HEAD: Final = FIELDS.size
EXTRA: Final = Struct(">I4sd32s")
"""A length, `EXTRA_MARK`, the stamp of the last change, and the ids of four replaced copies.
The length counts what follows it, with the version behind these fields."""
EXTRA_MARK: Final = b"\0SF2"
EXTRA_AT: Final = HEAD + LENGTH.size
CHANGED_AT: Final = EXTRA_AT + len(EXTRA_MARK)
FULL_HEAD: Final = HEAD + EXTRA.size
"""The fixed fields of an entry that has been changed."""
SHORT_ID: Final = 8
"""Bytes of a generation by which a replaced copy is remembered."""
NONE_REPLACED: Final = bytes(4 * SHORT_ID)
LAST_STAMP: Final = 3_000_000_000_000_000
"""No stamp is as high before the year 2065: they begin with the microsecond of their birth."""
SIZES: Final = Struct(">III4s")
"""The sizes of the tags, of the error and of the extra fields, and the mark of the latter."""
NO_LEASE: Final = bytes(NUMBER.size + NAME + FAILURE.size)
"""No lease and no failure."""
HOW: Final = Struct(">BBBBBHI")
"""Of a put: the size of the base, its condition, whether value, tags and late tags stay, and the
sizes of version and tags that it brings."""
LATE: Final = 0xFFFFFFFF
"""In place of a tag's length: here the lease's tags end, and those of the copy begin."""
LATE_TAGS: Final = LENGTH.pack(LATE)
MOST_FAILURES: Final = 0xFFFFFFFF
"""The largest number that the field holds."""
GLANCE: Final = 512
"""Bytes that hold everything but the value, unless an error or the tags are very long."""

CHANNEL: Final = b"!"
"""Behind the base of a bucket: its channel."""
PUBLISHED: Final = b"P"
VOIDED: Final = b"V"
TAGGED: Final = b"T"
BEAT: Final = b"!"
"""How messages on a channel begin (`channel.py`)."""
KIND: Final = pattern(r"[a-z][a-z0-9_]*")
PREFIX: Final = pattern(r"[A-Za-z0-9_.:-]{1,64}")
GLOB: Final = pattern(rb"[*?\[\]\\^-]")
"""Characters with a meaning in a SCAN pattern."""
MARKS: Final = tuple(Mark)

Command: TypeAlias = tuple[Any, ...]
"""Bytes, texts and whole numbers."""


class RedisKey(NamedTuple):
    """The key of one id, and what a script needs to find its tags."""

    key: bytes
    base: bytes
    member: bytes


class Keyspace:
    """The keys of one prefix: `<prefix>:v2:{by}:<kind>:<id>` and `<prefix>:v2:{by}:#<tag>`."""

    def __init__(self, prefix: str) -> None:
        if not isinstance(prefix, str) or not PREFIX.fullmatch(prefix):
            raise ConfigError(
                f"prefix: must be 1 to 64 letters, digits or any of _ . : -, not {shown(prefix)}"
            )
        self.bases = [f"{prefix}:v2:{{{name}}}:".encode() for name in BUCKETS]
        self.every = f"{prefix}:v2:{{*".encode()
        """Matches all our keys."""

    def of(self, kind: str, ids: Sequence[str]) -> list[RedisKey]:
        if not KIND.fullmatch(kind):
            raise ConfigError(f"kind: must be [a-z][a-z0-9_]*, not {shown(kind)}")
        members = [f"{kind}:{id_}".encode(errors="surrogatepass") for id_ in ids]
        bases = [self.bases[crc32(member) % len(BUCKETS)] for member in members]
        return [
            RedisKey(base + member, base, member)
            for base, member in zip(bases, members, strict=True)
        ]

    def pattern(self, kind: str | None, search: str) -> bytes:
        """Matches the keys of all listed entries, and perhaps some others."""
        kinds = "[a-z]*" if kind is None else f"{kind}:*"
        escaped_search = GLOB.sub(rb"\\\g<0>", search.encode(errors="surrogatepass"))
        return b"%b??}:%b%b*" % (self.every[:-1], kinds.encode(), escaped_search)

    def member(self, key: bytes) -> bytes:
        return key[len(self.bases[0]) :]

    def name(self, member: bytes) -> tuple[str, str] | None:
        """The kind and the id; None if it is not a key of ours."""
        try:
            kind, _, id_ = member.decode(errors="surrogatepass").partition(":")
        except UnicodeDecodeError:
            return None
        return (kind, id_) if KIND.fullmatch(kind) else None

    def tagged(self, tag: str) -> list[tuple[bytes, bytes]]:
        """For each bucket its base, and the key of the set of ids that have the tag."""
        name = tag.encode(errors="surrogatepass")
        return [(base, base + b"#" + name) for base in self.bases]


def base_of(key: bytes) -> bytes:
    """What all keys of the same bucket begin with."""
    return key[: key.index(b"}:") + 2]


def announced(base: bytes, letter: bytes, about: bytes) -> Command:
    """The command that sends a message to all listeners of a bucket."""
    return ("SPUBLISH", base + CHANNEL, letter + about)


def padded(token: str | None) -> bytes:
    """A token as the string holds it; all zeros if there is none."""
    name = (token or "").encode()
    if len(name) > NAME:
        raise ConfigError(f"token: at most {NAME} bytes, not {shown(token)}")
    return name.ljust(NAME, b"\0")


def unpadded(name: bytes) -> str:
    return name.rstrip(b"\0").decode()


def packed_tags(tags: Sequence[str]) -> bytes:
    names = [tag.encode(errors="surrogatepass") for tag in dict.fromkeys(tags)]
    return b"".join(LENGTH.pack(len(name)) + name for name in names)


def unpacked_tags(packed: bytes) -> list[bytes]:
    """The tags in these bytes, as far as they can be read if another program has cut them."""
    names: list[bytes] = []
    at = 0
    while at + LENGTH.size <= len(packed):
        (length,) = LENGTH.unpack_from(packed, at)
        if length == LATE:  # after it come the tags of the copy
            at += LENGTH.size
            continue
        names.append(packed[at + LENGTH.size : at + LENGTH.size + length])
        at += LENGTH.size + length
    return names


def stored_tags(text: bytes) -> list[bytes]:
    """The tags of the id whose string begins like this; none if it is not ours."""
    if len(text) < HEAD or not text.startswith(MAGIC):
        return []
    tags_size = FIELDS.unpack_from(text)[TAGS_SIZE_FIELD]
    try:
        extra_size = _extra_size(text, tags_size)
    except ValueError:
        return []
    return unpacked_tags(text[HEAD + extra_size : HEAD + tags_size])


def _extra_size(text: bytes, tags_size: int) -> int:
    """How many bytes the first tag takes if it holds the extra fields; 0 if it does not.

    ValueError if another program has made it longer than all tags, or cut the string behind it.
    """
    if text[EXTRA_AT:CHANGED_AT] != EXTRA_MARK or tags_size < EXTRA.size:
        return 0
    size = LENGTH.size + int(LENGTH.unpack_from(text, HEAD)[0])
    if len(text) < FULL_HEAD or not EXTRA.size <= size <= tags_size:
        raise ValueError(size)
    return size


def stamp_of(text: bytes) -> int:
    """The stamp of the last change of the id whose string begins like this; 0: not known."""
    if len(text) < FULL_HEAD or text[EXTRA_AT:CHANGED_AT] != EXTRA_MARK:
        return 0
    stamp = number(text[CHANGED_AT : CHANGED_AT + NUMBER.size])
    return int(stamp) if 0 < stamp < LAST_STAMP else 0


def replaced_by(text: bytes | None) -> bytes:
    """The ids of the last four copies that were replaced; zeros where there were fewer."""
    if text is None or len(text) < FULL_HEAD or text[EXTRA_AT:CHANGED_AT] != EXTRA_MARK:
        return NONE_REPLACED
    return text[CHANGED_AT + NUMBER.size : FULL_HEAD]


def copy_fields(copy: Copy) -> bytes:
    kind = ABSENT if copy.value is None else VALUE
    policy = copy.policy
    times = (copy.fetched_at, policy.fresh_for, policy.stale_for, policy.error_for)
    return COPY.pack(MAGIC, kind, copy.mark, *times, padded(copy.generation))


def put_front(copy: Copy, tags_size: int) -> bytes:
    """The string of a put up to its stamp, without a lease and a failure."""
    extra_size = EXTRA.size + len(copy.version)
    sizes = SIZES.pack(extra_size + tags_size, 0, extra_size - LENGTH.size, EXTRA_MARK)
    return copy_fields(copy) + NO_LEASE + sizes


def put_tags(text: bytes) -> list[bytes]:
    """The tags that a put brings, from its string without a stamp.

    The stored size of the tags counts the extra fields and the version, which come before them.
    """
    all_size, _, extra_size, _ = SIZES.unpack_from(text, HEAD - 2 * LENGTH.size)
    version_size = LENGTH.size + extra_size - EXTRA.size
    tags_size = all_size - EXTRA.size - version_size
    tags_at = CHANGED_AT + version_size
    return unpacked_tags(text[tags_at : tags_at + tags_size])


def failure_fields(failure: Failure | None) -> tuple[bytes, bytes]:
    """The numbers and the text of a failure; both empty if there is none."""
    if failure is None:
        return b"", b""
    numbers = FAILURE.pack(min(failure.count, MOST_FAILURES), failure.retry_at)
    return numbers, failure.error.encode(errors="surrogatepass")


def number(reply: bytes) -> float:
    """A time, exact to the last bit."""
    seconds: float = NUMBER.unpack(reply)[0]
    return seconds


def is_enough(glance: bytes | None, known: str) -> bool:
    """True if the first `GLANCE` bytes are enough for a reader that knows this generation."""
    if glance is None or len(glance) < GLANCE:
        return True
    fields = FIELDS.unpack_from(glance)
    value_at = HEAD + fields[TAGS_SIZE_FIELD] + fields[ERROR_SIZE_FIELD]
    return bool(fields[GENERATION_FIELD] == padded(known)) and value_at <= GLANCE


def record_of(
    data: bytes | None, known: str | None = None, *, errors: str = "surrogatepass"
) -> Record | None:
    """The record of a string, without the value if its generation is known.

    None if nothing is there, as in the trace of a deletion; and for a string that is not ours, or
    that another program changed so that it says nothing valid.
    """
    if not data or len(data) < HEAD or not data.startswith(MAGIC):
        return None
    try:
        return _record(data, known, errors)
    except (IndexError, ValueError):
        return None


def _record(data: bytes, known: str | None, errors: str) -> Record | None:
    fields = FIELDS.unpack_from(data)
    held_until, token, failures, retry_at, tags_size, error_size = fields[LEASE_FIELD:]
    has_copy = fields[KIND_FIELD] != 0
    if not (has_copy or failures) and token == NOBODY:
        return None
    error_at = HEAD + tags_size
    value_at = error_at + error_size
    copy = _copy(fields, data, value_at, known) if has_copy else None
    failure = None
    if failures and isfinite(retry_at):
        message = data[error_at:value_at].decode(errors=errors)
        failure = Failure(failures, retry_at, message)
    lease_ends = held_until if token != NOBODY and isfinite(held_until) else None
    return Record(copy, lease_ends, failure)


def listed(glance: bytes, length: int) -> tuple[Record, int | None] | None:
    """An entry from the first bytes of a string of that length; None: not ours."""
    record = record_of(glance, errors="replace")  # an error's text may be cut
    if record is None:
        return None
    copy = record.copy
    if copy is None or copy.value is None:
        return record, None
    fields = FIELDS.unpack_from(glance)
    size = max(0, length - HEAD - fields[TAGS_SIZE_FIELD] - fields[ERROR_SIZE_FIELD])
    return replace(record, copy=replace(copy, value=UNREAD)), size


def _copy(fields: tuple[Any, ...], data: bytes, value_at: int, known: str | None) -> Copy:
    _, kind, mark, fetched_at, fresh_for, stale_for, error_for, name = fields[:LEASE_FIELD]
    generation = name.rstrip(b"\0").decode("ascii")
    if kind not in {VALUE, ABSENT}:
        raise ValueError(kind)
    value: bytes | Unread | None = None
    if kind == VALUE:
        value = UNREAD if generation == known else data[value_at:]
    policy = policy_of(fresh_for, stale_for, error_for)
    version = _version(data, fields[TAGS_SIZE_FIELD])
    return Copy(generation, _finite(fetched_at), policy, value, MARKS[mark], version)


def _version(data: bytes, tags_size: int) -> bytes:
    extra_size = _extra_size(data, tags_size)
    if extra_size <= EXTRA.size:
        return NO_VERSION
    version = data[FULL_HEAD : HEAD + extra_size]
    if version[:1] not in {INTEGER, TEXT}:
        raise ValueError(version)
    return version


def _finite(seconds: float) -> float:
    if not isfinite(seconds):
        raise ValueError(seconds)
    return seconds


def asker_of(text: bytes) -> str:
    """The asker of the lease in the string that begins like this; empty if there is none."""
    token = text[COPY.size + NUMBER.size :][:ASKER]
    return token.decode(errors="replace") if token.rstrip(b"\0") else ""


def grant_of(id_: str, reply: Sequence[bytes]) -> Grant:
    """The reply of ACQUIRE."""
    match reply[0]:
        case b"lease":
            return Lease(id_, unpadded(reply[2]), number(reply[1]), int(reply[3]))
        case b"held":
            return Held(number(reply[1]))
        case _:
            return Newer(record_of(reply[1]) or Record())
