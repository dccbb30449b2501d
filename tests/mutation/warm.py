"""Tests that were imported and collected once, run again and again with other code (T12).

One process collects the tests. For each change it forks a child, which puts the changed code into
the functions that are there already, and runs the tests that it is given. So a change costs no
more than its tests. Code that runs on import cannot be changed so: `trial.py` starts anew for it.
"""

import gc
import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from types import CodeType, FunctionType
from typing import NamedTuple

import pytest

from tests.mutation.trial import FORK, QUIET, Stopping, Trial, at_home, quietly


class Order(NamedTuple):
    """A changed source (or none), the tests to run, and where the result goes."""

    source: str
    text: str
    tests: list[str]
    each: float
    """After how many seconds a test hangs."""
    work: float
    """After how many seconds of a core it runs in a circle."""
    found: Path


class Warm:
    """The process that has collected the tests."""

    def __init__(self, copy: Path, files: list[str]) -> None:
        self._copy, self._files = copy, files
        self._here, there = FORK.Pipe()
        self.process = FORK.Process(target=self._collect, args=(there,))
        self.process.start()
        there.close()
        with suppress(EOFError):
            self._here.recv()

    def trial(self, order: Order, limit: float) -> Trial:
        self._here.send(tuple(order))  # there, classes of the tests are others
        return Trial(order.found, limit, self._here.recv())

    def end(self) -> None:
        self._here.close()
        self.process.join()

    def _collect(self, pipe: Connection) -> None:
        self._here.close()
        os.setpgrp()
        quietly(self._copy / "collected.txt")
        at_home(self._copy)
        options = [*self._files, *QUIET, "--continue-on-collection-errors"]
        pytest.main(options, plugins=[Serving(pipe)])


class Serving:
    """Takes the place of pytest's own loop over the tests."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        gc.unfreeze()  # what was frozen after the collection is not among all objects
        gc.collect()
        functions = [it for it in gc.get_objects() if type(it) is FunctionType]
        gc.freeze()
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        self._pipe.send(len(session.items))
        with suppress(EOFError):
            while True:
                order = Order(*self._pipe.recv())
                pid = os.fork()
                if not pid:
                    self._pipe.close()
                    run(session, order, functions)
                self._pipe.send(pid)
        return True


def run(session: pytest.Session, order: Order, functions: list[FunctionType]) -> None:
    """In the child, which ends here."""
    try:
        os.setpgrp()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGPROF, lambda *_: pytest.fail("Timeout: it works without end"))
        quietly(order.found.with_suffix(".txt"))
        stopping = Stopping(order.tests, order.each, order.found.with_suffix(".started"))
        if order.source and not changed(functions, order.source, order.text):
            order.found.write_text("{}")
            return
        session.config.pluginmanager.register(stopping)
        items = [item for item in session.items if item.nodeid in stopping.order]
        items.sort(key=lambda item: stopping.order[item.nodeid])
        try:
            for item, following in zip(items, [*items[1:], None], strict=True):
                item.add_marker(pytest.mark.timeout(order.each))
                signal.setitimer(signal.ITIMER_PROF, order.work)
                session.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
                if stopping.found():
                    break
            order.found.write_text(stopping.told())
        finally:  # which stops the servers of the tests
            signal.setitimer(signal.ITIMER_PROF, 0)
            session.config.hook.pytest_sessionfinish(session=session, exitstatus=0)
    finally:
        os._exit(0)


def changed(functions: list[FunctionType], source: str, text: str) -> int:
    """Give the functions of a source their new code; how many were different."""
    file = str(Path(source).resolve())
    new = {(it.co_qualname, it.co_firstlineno): it for it in codes(compile(text, file, "exec"))}
    count = 0
    for function in functions:
        old = function.__code__
        code = new.get((old.co_qualname, old.co_firstlineno), old)
        if old.co_filename == file and code != old and code.co_freevars == old.co_freevars:
            function.__code__ = code
            count += 1
    return count


def codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from codes(constant)
