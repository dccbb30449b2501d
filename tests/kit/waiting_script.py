"""The waiting rules of the browser's script, run in Node, on the states and events of Python.

What both share is JSON: a state of Python becomes an object with names in camelCase, an event an
object with its type.
"""

import json
import re
import subprocess
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Final, TypeAlias

import msgspec

from stillfresh.systems.waiting.model import Event, Refetch, State, Step
from tests.kit.processes import ROOT

__all__ = ["BROWSER", "Script", "as_json_step", "running_script"]

BROWSER: Final = ROOT / "src" / "stillfresh" / "gateway" / "static"
WORKER: Final = ROOT / "tests" / "kit" / "workers" / "waiting_rules.mjs"

JsonStep: TypeAlias = dict[str, Any]


class Script:
    """A Node process that takes the steps of the rules."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process

    def steps(self, state: State, events: Iterable[Event]) -> list[JsonStep]:
        """What the script makes of the events, one after another."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        question = {"state": as_json(state), "events": [as_json_event(event) for event in events]}
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        steps: list[JsonStep] = json.loads(self._process.stdout.readline())
        return steps


@contextmanager
def running_script(node: str) -> Iterator[Script]:
    command = [node, str(WORKER), str(BROWSER / "stillfresh-waiting.js")]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield Script(process)
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(30) == 0


def as_json_step(step: Step) -> JsonStep:
    """As the script has it, after a way through JSON."""
    effects = ["refetch" if isinstance(effect, Refetch) else "pause" for effect in step.effects]
    return {"state": as_json(step.state), "effects": effects}


def as_json(value: Any) -> Any:
    """Names in camelCase, tuples as arrays."""
    if isinstance(value, msgspec.Struct):
        value = msgspec.structs.asdict(value)
    if isinstance(value, dict):
        return {camel_case(name): as_json(part) for name, part in value.items()}
    if isinstance(value, tuple):
        return [as_json(part) for part in value]
    return value


def as_json_event(event: Event) -> dict[str, Any]:
    name = re.sub(r"(?<!^)(?=[A-Z])", "_", type(event).__name__).lower()
    fields = as_json(event)
    fields.pop("reason", None)
    return {"type": name, **fields}


def camel_case(name: str) -> str:
    return re.sub(r"_(\w)", lambda match: match[1].upper(), name)
