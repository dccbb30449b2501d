"""A run of a scenario as plain data: lanes, messages, bars, moments, and the steps of the story."""

from dataclasses import asdict, dataclass, field
from typing import Any, Final

import msgspec

from stillfresh.lab.replay.scenarios import Play
from stillfresh.testing.simulator.faults import planned
from stillfresh.testing.simulator.record import (
    STORE,
    UPSTREAM,
    WORLD_LANE,
    LaneSpan,
    Message,
    Moment,
    RunRecorder,
)
from stillfresh.testing.simulator.simulate import refuse_running_loop, run

ENDINGS: Final = {
    "published": "ends with its publication",
    "voided": "is voided",
    "released": "is given back",
}
"""What the story says of the end of a lease."""


@dataclass(slots=True)
class StoryLine:
    """One line of the story, at one time."""

    at: float
    what: str
    text: str
    is_right: bool = True


@dataclass(slots=True)
class ReplayHistory:
    """Everything that the page shows. Lanes are indices into `lanes`."""

    title: str
    story: str
    seed: int
    lanes: list[str]
    until: float
    messages: list[dict[str, Any]] = field(default_factory=list)
    spans: list[dict[str, Any]] = field(default_factory=list)
    moments: list[dict[str, Any]] = field(default_factory=list)
    steps: list[StoryLine] = field(default_factory=list)
    law_at: float | None = None
    """The first moment at which a publication without a live lease reached the store."""
    broken: str | None = None
    """The promise that was broken first."""
    reads: int = 0
    """Reads that were judged."""
    left_out: int = 0
    """Items beyond what a page can show."""

    def encoded(self) -> bytes:
        return msgspec.json.encode(asdict(self))


def replayed(play: Play, seed: int) -> ReplayHistory:
    """Run it, and describe what happened. The same seed gives the same history.

    Call it from plain code: the simulator runs an event loop of its own.
    """
    refuse_running_loop("replayed()")
    recorder = RunRecorder()
    result = run(play.scenario, planned(seed, play.faults), recorder, play.store_class)
    processes = sorted(
        {message.origin for message in recorder.messages}
        | {message.target for message in recorder.messages}
        | {span.lane for span in recorder.spans}
        | {moment.lane for moment in recorder.moments}
    )
    numbers = [number for number in processes if number > STORE]
    places = {number: at for at, number in enumerate([*numbers, STORE, UPSTREAM])}
    lanes = [*(f"process {number}" for number in numbers), "store", "upstream"]
    until = last_time(recorder)
    history = ReplayHistory(play.title, play.story, seed, lanes, until)
    history.reads = result.reads
    history.left_out = recorder.left_out
    if result.broken is not None:
        history.broken = f"{result.broken.promise}: {result.broken.what}"
    history.messages = [message_of(message, places) for message in recorder.messages]
    history.spans = [span_of(span, places, until) for span in recorder.spans]
    history.moments = [
        moment_of(moment, places) for moment in recorder.moments if moment.lane != WORLD_LANE
    ]
    laws = [moment.at for moment in recorder.moments if moment.what == "law"]
    history.law_at = laws[0] if laws else None
    history.steps = sorted(steps_of(recorder), key=lambda step: step.at)
    return history


def last_time(recorder: RunRecorder) -> float:
    """When the picture ends: a lease that runs out later is cut there."""
    times = [moment.at for moment in recorder.moments]
    times += [message.sent for message in recorder.messages]
    times += [message.arrived for message in recorder.messages if message.arrived is not None]
    times += [span.begun for span in recorder.spans]
    return max(times, default=0.0) + 0.3


def message_of(message: Message, places: dict[int, int]) -> dict[str, Any]:
    lanes = {"origin": places[message.origin], "target": places[message.target]}
    return {**msgspec.structs.asdict(message), **lanes}


def span_of(span: LaneSpan, places: dict[int, int], until: float) -> dict[str, Any]:
    ended = until if span.ended is None else min(span.ended, until)
    return {**msgspec.structs.asdict(span), "lane": places[span.lane], "ended": ended}


def moment_of(moment: Moment, places: dict[int, int]) -> dict[str, Any]:
    return {**msgspec.structs.asdict(moment), "lane": places[moment.lane]}


def steps_of(recorder: RunRecorder) -> list[StoryLine]:
    """The story in words, in no order. An answer is told when it is sent, with the step."""
    steps = [StoryLine(span.begun, span.what, f"{span.text}.") for span in recorder.spans]
    steps += [
        StoryLine(span.ended, "lease", f"The lease of process {span.lane} {ENDINGS[span.ending]}.")
        for span in recorder.spans
        if span.what == "lease" and span.ended is not None and span.ending
    ]
    for message in recorder.messages:
        if message.origin == STORE:
            continue
        process = f"process {message.origin}"
        if message.arrived is None:
            steps.append(StoryLine(message.sent, "lost", f"{process} sends {message.text}: lost."))
            continue
        steps.append(StoryLine(message.sent, "message", f"{process} sends {message.text}."))
        if message.mark == "late":
            late = f"{message.text} arrives after {process} has given up."
            steps.append(StoryLine(message.arrived, "late", late))
        elif message.mark == "twice":
            twice = f"{message.text} of {process} arrives a second time."
            steps.append(StoryLine(message.arrived, "twice", twice))
    for moment in recorder.moments:
        verdict = f", {moment.verdict}" if moment.verdict else ""
        text = f"{moment.text}{verdict}."
        steps.append(StoryLine(moment.at, moment.what, text, moment.is_right))
    for step in steps:
        step.text = step.text[:1].upper() + step.text[1:]
    return steps
