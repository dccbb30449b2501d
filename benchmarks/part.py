"""`python -m benchmarks.part MODULE[:FUNCTION]`: one section in a process of its own.

Says a line of JSON for each step, and the section as the last. What the servers that it starts
print goes to the error output, so that nothing but those lines is on the other.
"""

import importlib
import os
import signal
import sys
from typing import BinaryIO

import msgspec

from benchmarks.harness import Section

__all__ = ["Step"]


class Step(msgspec.Struct):
    """What it is doing, or what came of it."""

    doing: str = ""
    section: Section | None = None


def say(out: BinaryIO, step: Step) -> None:
    out.write(msgspec.json.encode(step) + b"\n")
    out.flush()


def main(module: str) -> None:
    for ending in (signal.SIGINT, signal.SIGTERM):
        signal.signal(ending, signal.default_int_handler)
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    name, _, function = module.partition(":")
    made = getattr(importlib.import_module(name), function or "section")
    section = made(lambda text: say(out, Step(text)))
    say(out, Step(section=section))


if __name__ == "__main__":
    main(sys.argv[1])
