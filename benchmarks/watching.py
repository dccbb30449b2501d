"""How a run is watched: a bar with the time left on a terminal, else a line now and then."""

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, Task, TextColumn
from rich.table import Column
from rich.text import Text

from benchmarks.harness import Section
from benchmarks.plan import Pace, Part

__all__ = ["Watch", "watching"]

QUIET = 5.0
"""Seconds at least between two lines about the same part."""


def clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02}"


def came_to(section: Section, seconds: float) -> str:
    if section.failed:
        return f"{section.title}: not measured: {section.failed}"
    targets = [row.kept for row in section.rows if row.target is not None]
    kept = f"{sum(targets)} of {len(targets)} targets kept" if targets else "done"
    return f"{section.title}: {kept}, in {clock(seconds)}"


class Watch:
    """What a run tells of itself; here in plain lines."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self.pace = Pace(parts, time.monotonic())
        self._spoke = 0.0

    @property
    def present(self) -> str:
        number = len(self.pace.taken)
        return f"[{number + 1}/{len(self.pace.parts)}] {self.pace.parts[number].name}"

    @property
    def times(self) -> str:
        now = time.monotonic()
        return f"{clock(now - self.pace.began)}, {clock(self.pace.left(now))} left"

    def doing(self, text: str) -> None:
        if time.monotonic() - self._spoke > QUIET:
            self._spoke = time.monotonic()
            self.say(f"{self.present}: {text} ({self.times})")

    def ended(self, section: Section) -> None:
        seconds = time.monotonic() - self.pace.began - sum(self.pace.taken)
        self.pace.taken.append(seconds)
        self._spoke = 0.0
        self.say(came_to(section, seconds))

    def say(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)


class Left(ProgressColumn):
    """Moves the bar by the clock, and tells the time left."""

    def __init__(self, watch: Watch) -> None:
        super().__init__(Column(no_wrap=True))
        self._watch = watch

    def render(self, task: Task) -> Text:
        task.completed = self._watch.pace.done(time.monotonic())
        return Text(self._watch.times)


class BarWatch(Watch):
    """The same above a bar."""

    def __init__(self, parts: Sequence[Part], console: Console) -> None:
        super().__init__(parts)
        short = Column(no_wrap=True, overflow="ellipsis", ratio=1)
        doing = TextColumn("{task.description}", markup=False, table_column=short)
        columns = SpinnerColumn(), BarColumn(20), Left(self), doing
        self.bar = Progress(
            *columns, console=console, transient=True, expand=True, refresh_per_second=4
        )
        self._task = self.bar.add_task("starting", total=self.pace.total)

    def doing(self, text: str) -> None:
        self.bar.update(self._task, description=f"{self.present}: {text}")

    def say(self, text: str) -> None:
        self.bar.console.print(text, highlight=False)


@contextmanager
def watching(parts: Sequence[Part]) -> Iterator[Watch]:
    console = Console(stderr=True)
    if not console.is_terminal:
        yield Watch(parts)
        return
    watch = BarWatch(parts, console)
    with watch.bar:
        yield watch
