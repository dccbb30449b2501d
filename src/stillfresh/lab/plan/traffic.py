"""A recording as it is replayed: for each kind its reads and changes in order, and its loads.

Read line by line, so that memory is bounded by what is kept: of more reads than `most`, those of
some keys.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator
from math import inf
from pathlib import Path
from typing import Final
from zlib import crc32

import msgspec
from msgspec.structs import replace

from stillfresh.engine.recordings import (
    VERSION,
    Line,
    RecordedKind,
    RecordedLoad,
    RecordedUse,
    RecordingHead,
)
from stillfresh.errors import ConfigError, shown

MOST_READS: Final = 20_000
"""That are replayed for each policy: about a second or two of work."""
ROUNDED: Final = 0.002
"""Seconds."""
DECODER: Final[msgspec.json.Decoder[Line]] = msgspec.json.Decoder(Line)
NO_RECORDING: Final = "not a recording of stillfresh; make one with `stillfresh serve --record`"


class Traffic:
    """What was done to the keys of one kind; `seconds`: the length of the whole recording."""

    def __init__(self, kind: RecordedKind) -> None:
        self.kind = kind
        self.events: list[RecordedUse] = []
        self.loads: list[RecordedLoad] = []
        self.seconds = 0.0
        self.share = 1.0
        """The share of all keys that is in it."""
        self._by_id: dict[str, list[RecordedLoad]] = {}

    def add(self, line: RecordedUse | RecordedLoad, kept: float) -> None:
        """Add a share of its keys."""

        def some(ids: tuple[str, ...]) -> tuple[str, ...]:
            return tuple(it for it in ids if crc32(it.encode()) < kept * 2**32)

        if not (ids := some(line.ids)):
            return
        if isinstance(line, RecordedUse):
            self.events.append(replace(line, ids=ids))
            return
        size, failed, absent = line.size * len(ids) / len(line.ids), line.failed, line.absent
        line = replace(line, ids=ids, size=size, failed=some(failed), absent=some(absent))
        self.loads.append(line)

    def finish(self, seconds: float, share: float) -> None:
        """Sort: several processes may have written it."""
        self.seconds, self.share = seconds, share
        self.events.sort(key=lambda it: it.at)
        self.loads.sort(key=lambda it: it.at)
        for load in self.loads:
            for id_ in load.ids:
                self._by_id.setdefault(id_, []).append(load)

    @property
    def keys_per_load(self) -> float:
        """Over all calls, also of keys that were not recorded: each key counts its part."""
        keys = sum(len(it.ids) for it in self.loads)
        return keys / sum(len(it.ids) / it.of for it in self.loads) if keys else 1.0

    @property
    def value_size(self) -> float:
        """Bytes of a value, on average."""
        values = sum(len(it.ids) - len(it.failed) - len(it.absent) for it in self.loads)
        return sum(it.size for it in self.loads) / values if values else 0.0

    @property
    def recorded_terms(self) -> tuple[float, float]:
        """The times that most loads gave, or else those of the kind."""
        own = Counter(it.terms[:2] for it in self.loads if it.terms is not None)
        return own.most_common(1)[0][0] if own else (self.kind.fresh_for, self.kind.stale_for)

    def load_at(self, at: float, id_: str | None = None) -> RecordedLoad | None:
        """The load that began last before this time, of this key or of any."""
        found = self.loads if id_ is None else self._by_id.get(id_, ())
        place = bisect_right(found, at + ROUNDED, key=lambda it: it.at) - 1
        return found[max(0, place)] if found else None


def traffic_of(file: str | Path, most: int = MOST_READS) -> tuple[dict[str, Traffic], int | None]:
    """By kind, and the number of a last line that was cut off; ConfigError for any other mistake.

    At most about so many reads: of a longer recording, those of fewer keys.
    """
    path, kinds, cut, share = Path(file), dict[str, Traffic](), None, 1.0
    uses = (len(it.ids) for _, it in _lines(path) if isinstance(it, RecordedUse))
    kept = min(1.0, most / max(1, sum(uses)))
    first, last = inf, -inf
    for number, line in _lines(path):
        if line is None:
            cut = number
        elif isinstance(line, RecordingHead):
            share = line.share
        elif isinstance(line, RecordedKind):
            kinds.setdefault(line.kind, Traffic(line))
        else:
            first, last = min(first, line.at), max(last, line.at)
            kinds[line.kind].add(line, kept)
    used = {name: it for name, it in kinds.items() if it.events}
    for traffic in used.values():
        traffic.finish(max(0.001, last - first), share * kept)
    return used, cut


def _lines(path: Path) -> Iterator[tuple[int, Line | None]]:
    """None: the last one, which has no end."""
    number, kinds = 0, set[str]()
    with path.open("rb") as file:
        for number, text in enumerate(file, 1):
            if not text.endswith(b"\n") and number > 1:
                yield number, None
                return
            try:
                line = DECODER.decode(text)
                _check(line, number, kinds)
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as exc:
                why = f"not a line of a recording: {exc}" if number > 1 else NO_RECORDING
                raise ConfigError(f"{path}: line {number}: {why}: {shown(text[:60])}") from exc
            except ConfigError as exc:
                raise ConfigError(f"{path}: line {number}: {exc}") from None
            yield number, line
    if not number:
        raise ConfigError(f"{path}: is empty; record again")


def _check(line: Line, number: int, kinds: set[str]) -> None:
    if isinstance(line, RecordingHead) is not (number == 1):
        raise ConfigError(NO_RECORDING if number == 1 else "another recording begins here")
    if isinstance(line, RecordingHead):
        if line.version != VERSION:
            said = f"version {line.version}; this stillfresh reads version {VERSION}"
            raise ConfigError(f"{said}: record anew")
    elif isinstance(line, RecordedKind):
        kinds.add(line.kind)
    elif line.kind not in kinds:
        raise ConfigError("its kind is not on a line before it")
