"""A recording as it is replayed: for each kind its reads and changes in order, and its loads.

The file is read line by line, and twice. The first pass counts the reads. If there are more than
`most`, the second pass takes only the lines of some keys, which bounds the memory. Whether a key is
taken depends on a hash of its id, so all its reads and loads are taken or none.
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
"""Reads that are replayed for each policy: one or two seconds of work."""
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

    def add(self, line: RecordedUse | RecordedLoad, share: float) -> None:
        """Add a line, with this share of its keys."""

        def sample(ids: tuple[str, ...]) -> tuple[str, ...]:
            return tuple(id_ for id_ in ids if crc32(id_.encode()) < share * 2**32)

        ids = sample(line.ids)
        if not ids:
            return
        if isinstance(line, RecordedUse):
            self.events.append(replace(line, ids=ids))
            return
        load = replace(
            line,
            ids=ids,
            size=line.size * len(ids) / len(line.ids),
            failed=sample(line.failed),
            absent=sample(line.absent),
        )
        self.loads.append(load)

    def finish(self, seconds: float, share: float) -> None:
        """Sort the lines: several processes may have written them."""
        self.seconds = seconds
        self.share = share
        self.events.sort(key=lambda event: event.at)
        self.loads.sort(key=lambda load: load.at)
        for load in self.loads:
            for id_ in load.ids:
                self._by_id.setdefault(id_, []).append(load)

    @property
    def keys_per_load(self) -> float:
        """The mean number of keys in a load, counting keys that were not recorded."""
        keys = sum(len(load.ids) for load in self.loads)
        if not keys:
            return 1.0
        return keys / sum(len(load.ids) / load.of for load in self.loads)

    @property
    def value_size(self) -> float:
        """Bytes of a value, on average."""
        values = sum(len(load.ids) - len(load.failed) - len(load.absent) for load in self.loads)
        if not values:
            return 0.0
        return sum(load.size for load in self.loads) / values

    @property
    def recorded_terms(self) -> tuple[float, float]:
        """The times that most loads gave, or else those of the kind."""
        counts = Counter(load.terms[:2] for load in self.loads if load.terms is not None)
        if not counts:
            return self.kind.fresh_for, self.kind.stale_for
        [(terms, _)] = counts.most_common(1)
        return terms

    def load_at(self, at: float, id_: str | None = None) -> RecordedLoad | None:
        """The load that began last before this time, of this key or of any."""
        loads = self.loads if id_ is None else self._by_id.get(id_, ())
        if not loads:
            return None
        place = bisect_right(loads, at + ROUNDED, key=lambda load: load.at) - 1
        return loads[max(0, place)]


def traffic_of(file: str | Path, most: int = MOST_READS) -> tuple[dict[str, Traffic], int | None]:
    """Return the traffic of each kind, and the number of a last line that was cut off.

    Of a recording with more than `most` reads, only those of some keys are taken. Raises
    ConfigError for any other mistake in the file.
    """
    path = Path(file)
    uses = sum(len(line.ids) for _, line in _lines(path) if isinstance(line, RecordedUse))
    sampled_share = min(1.0, most / max(1, uses))
    kinds: dict[str, Traffic] = {}
    recorded_share = 1.0
    cut_line = None
    first = inf
    last = -inf
    for number, line in _lines(path):
        if line is None:
            cut_line = number
        elif isinstance(line, RecordingHead):
            recorded_share = line.share
        elif isinstance(line, RecordedKind):
            kinds.setdefault(line.kind, Traffic(line))
        else:
            first = min(first, line.at)
            last = max(last, line.at)
            kinds[line.kind].add(line, sampled_share)
    used = {name: traffic for name, traffic in kinds.items() if traffic.events}
    for traffic in used.values():
        traffic.finish(max(0.001, last - first), recorded_share * sampled_share)
    return used, cut_line


def _lines(path: Path) -> Iterator[tuple[int, Line | None]]:
    """The lines with their numbers; None for a last line that was cut off."""
    number = 0
    kinds: set[str] = set()
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
            raise ConfigError(
                f"version {line.version}; this stillfresh reads version {VERSION}: record again"
            )
    elif isinstance(line, RecordedKind):
        kinds.add(line.kind)
    elif line.kind not in kinds:
        raise ConfigError("it names a kind that no earlier line declares")
