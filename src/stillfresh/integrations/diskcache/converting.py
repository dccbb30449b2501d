"""Takes the plain values of an old diskcache directory over into a DiskCache.

diskcache stores text, bytes and numbers as they are, and pickles everything else. Pickled keys and
values are not read at all, because reading them could run code: they are counted and named. The old
directory is only read.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from enum import IntEnum
from os import PathLike
from pathlib import Path
from typing import Any, Final, NamedTuple

import apsw
from msgspec import Struct, field

from stillfresh.errors import ConfigError, shown
from stillfresh.integrations.diskcache.cache import OLD_FILE_NAME, CachedItem, DiskCache


class Mode(IntEnum):
    """How diskcache says that it has stored a value."""

    RAW = 1
    BINARY_FILE = 2
    TEXT_FILE = 3
    PICKLED = 4


SHARDS: Final = f"[0-9][0-9][0-9]/{OLD_FILE_NAME}"
"""The files of a FanoutCache."""
MOST_NAMED: Final = 1_000
BATCH_ENTRIES: Final = 200
BATCH_BYTES: Final = 4_000_000
BESIDE: Final = 200
"""Bytes that an entry counts for besides its value."""
NOT_TEXT: Final = object()
"""In place of a text that is not UTF-8."""
COLUMNS: Final = ("key", "raw", "expire_time", "tag", "mode", "filename", "value")
ROWS: Final = "SELECT rowid, {} FROM Cache ORDER BY rowid".format(  # noqa: S608 (our own names)
    # A text that is not UTF-8 would end the iteration, so texts are read as bytes.
    ", ".join(
        f"typeof({name}) = 'text', iif(typeof({name}) = 'text', CAST({name} AS BLOB), {name})"
        for name in COLUMNS
    )
)

PICKLED_KEY: Final = "its key is pickled"
PICKLED_VALUE: Final = "its value is pickled"
LOST_FILE: Final = "its file cannot be read"
OUTSIDE: Final = "its file is not in the directory"
ODD_TEXT: Final = "its text is not UTF-8"
ODD_END: Final = "its end is not a number"
UNKNOWN_MODE: Final = "it is stored in a way that diskcache 5 does not know"


class LeftOut(NamedTuple):
    """An entry that was not taken over."""

    name: str
    """Its key, or the number of its row if the key cannot be read."""
    reason: str


class Conversion(Struct):
    """What became of the entries of an old directory."""

    taken: int = 0
    """Entries that the new cache has now."""
    expired: int = 0
    """Entries whose end had come."""
    present: int = 0
    """Entries whose keys the new cache had already; its own were kept."""
    reasons: Counter[str] = field(default_factory=Counter)
    """How many entries were left out, by reason."""
    left_out: list[LeftOut] = field(default_factory=list)
    """The first 1,000 entries that were left out."""

    def leave_out(self, name: str, reason: str) -> None:
        """Count an entry that is not taken over, and name it."""
        self.reasons[reason] += 1
        if len(self.left_out) < MOST_NAMED:
            self.left_out.append(LeftOut(name, reason))


class Unplain(Exception):
    """An entry cannot be taken over; the text is the reason."""


def convert(
    directory: str | PathLike[str],
    cache: DiskCache,
    progress: Callable[[int], object] | None = None,
) -> Conversion:
    """Copy text, bytes and numbers of an old diskcache directory into `cache`.

    Keeps their ends and tags. Reads nothing that is pickled. Entries that `cache` has already stay
    as they are, so it can be called again. `progress` is called with how many more entries were
    looked at. Raises ConfigError if there is no cache of diskcache in the directory.
    """
    conversion = Conversion()
    batch: list[tuple[Any, CachedItem]] = []
    batch_bytes = 0
    now = cache.clock()
    for file in old_files(directory):
        for row in _rows(file):
            try:
                key, item = _entry(row, file.parent)
            except Unplain as why:
                conversion.leave_out(_name(row), str(why))
            else:
                if item.expire_time is not None and item.expire_time <= now:
                    conversion.expired += 1
                else:
                    batch.append((key, item))
                    batch_bytes += BESIDE + _length(item.value)
            if progress is not None:
                progress(1)
            if len(batch) >= BATCH_ENTRIES or batch_bytes >= BATCH_BYTES:
                _store(cache, batch, conversion)
                batch = []
                batch_bytes = 0
    _store(cache, batch, conversion)
    return conversion


def old_files(directory: str | PathLike[str]) -> list[Path]:
    """The file of a Cache, or those of a FanoutCache. Raises ConfigError if there is none."""
    root = Path(directory)
    file = root / OLD_FILE_NAME
    files = [file] if file.exists() else sorted(root.glob(SHARDS))
    if not files:
        raise ConfigError(f"{directory}: there is no {OLD_FILE_NAME} of diskcache")
    return files


def _rows(file: Path) -> Iterator[tuple[Any, ...]]:
    try:
        connection = apsw.Connection(str(file), flags=apsw.SQLITE_OPEN_READONLY)
        with closing(connection):
            connection.set_busy_timeout(60_000)
            for row_number, *parts in connection.execute(ROWS):
                texts = zip(parts[::2], parts[1::2], strict=True)
                yield row_number, *(_decoded(part) if is_text else part for is_text, part in texts)
    except apsw.Error as exc:
        raise ConfigError(f"{file}: not a cache of diskcache: {exc}") from exc


def _decoded(text: bytes) -> object:
    try:
        return text.decode()
    except UnicodeDecodeError:
        return NOT_TEXT


def _entry(row: tuple[Any, ...], directory: Path) -> tuple[Any, CachedItem]:
    """The entry of a row. Raises Unplain if it is not plain data."""
    _, key, is_raw, expire_time, tag, mode, file_name, value = row
    if not is_raw:
        raise Unplain(PICKLED_KEY)
    if NOT_TEXT in row:
        raise Unplain(ODD_TEXT)
    if not isinstance(expire_time, float | int | None):
        raise Unplain(ODD_END)
    match mode:
        case Mode.RAW:
            plain = value
        case Mode.BINARY_FILE:
            plain = _content(directory, file_name)
        case Mode.TEXT_FILE:
            try:
                plain = _content(directory, file_name).decode()
            except UnicodeDecodeError:
                raise Unplain(LOST_FILE) from None
        case Mode.PICKLED:
            raise Unplain(PICKLED_VALUE)
        case _:
            raise Unplain(UNKNOWN_MODE)
    return key, CachedItem(plain, expire_time, tag)


def _content(directory: Path, file_name: object) -> bytes:
    """A value in a file of its own. The name comes from the old cache, so it is checked."""
    root = directory.resolve()
    try:
        path = (root / str(file_name)).resolve()
        if not path.is_relative_to(root):
            raise Unplain(OUTSIDE)
        if not path.is_file():  # reading a pipe would wait for a writer
            raise Unplain(LOST_FILE)
        return path.read_bytes()
    except (OSError, ValueError):
        raise Unplain(LOST_FILE) from None


def _name(row: tuple[Any, ...]) -> str:
    row_number, key, is_raw, *_ = row
    return shown(key) if is_raw and key is not NOT_TEXT else f"row {row_number}"


def _length(value: object) -> int:
    return len(value) if isinstance(value, str | bytes) else 0


def _store(cache: DiskCache, batch: list[tuple[Any, CachedItem]], conversion: Conversion) -> None:
    stored = cache.add_items(batch)
    conversion.taken += stored
    conversion.present += len(batch) - stored
