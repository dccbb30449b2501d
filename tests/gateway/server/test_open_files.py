"""I37: the server raises its limit of open files, and says when it runs out."""

import errno
import logging
import os
import resource
import socket
import sys
import textwrap
from contextlib import ExitStack
from typing import Any

import pytest

from stillfresh.gateway.server.open_files import OpenFiles, raise_limit
from stillfresh.testing import ManualClock
from tests.kit.serve import Proxy, raw_site

LIMITED = """
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, ({soft}, {hard}))
from stillfresh.cli import main
main()
"""
PAGE = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nok"
NO_MORE = "no more files can be opened"


def limited(soft: int, hard: int) -> list[str]:
    """`stillfresh serve` with these limits of open files."""
    return [sys.executable, "-c", textwrap.dedent(LIMITED.format(soft=soft, hard=hard)), "serve"]


def limits_of(pid: int) -> tuple[int, int]:
    """The limits of a running process."""
    return resource.prlimit(pid, resource.RLIMIT_NOFILE)


class TestI37OpenFiles:
    @pytest.mark.skipif(not hasattr(resource, "prlimit"), reason="only Linux shows them")
    def test_the_limit_of_open_files_is_raised_to_the_hard_limit(self) -> None:
        """The soft limit becomes the hard one."""
        with ExitStack() as stack:
            site = raw_site(stack, lambda _: PAGE)
            proxy = Proxy(stack, upstream=site, program=limited(64, 300))
            assert limits_of(proxy.process.pid) == (300, 300)

    def test_the_log_says_when_no_more_files_can_be_opened(self) -> None:
        """Connections beyond the limit are dropped, and those that end make room again."""
        with ExitStack() as stack:
            site = raw_site(stack, lambda _: PAGE)
            proxy = Proxy(stack, upstream=site, program=limited(64, 64))
            port = int(proxy.url.rpartition(":")[2])
            with ExitStack() as crowd:
                for _ in range(100):
                    visitor = socket.create_connection(("127.0.0.1", port), timeout=30)
                    crowd.enter_context(visitor)
                assert proxy.says(NO_MORE)
                assert "(the limit is 64)" in proxy.log()
                assert "LimitNOFILE" in proxy.log()
            assert proxy.log().count(NO_MORE) == 1

    def test_reaching_the_limit_of_open_files_is_logged_once_a_minute(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        """A process that stays at its limit does not fill its log."""

        def fail(_: int) -> int:
            raise OSError(errno.EMFILE, "Too many open files")

        monkeypatch.setattr(os, "dup", fail)
        clock = ManualClock()
        files = OpenFiles(clock)
        with caplog.at_level(logging.ERROR):
            for _ in range(61):
                files.look(0)
                clock.advance(1.0)
        assert [NO_MORE in it for it in caplog.messages] == [True, True]

    def test_an_unlimited_hard_limit_that_is_refused_falls_back_to_10240(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """macOS says that there is none, and allows 10,240."""
        asked: list[int] = []

        def refuse_most(_: int, limits: tuple[int, int]) -> None:
            asked.append(limits[0])
            if limits[0] != 10_240:
                raise ValueError("not allowed")

        endless = (256, resource.RLIM_INFINITY)
        monkeypatch.setattr(resource, "getrlimit", lambda _: endless)
        monkeypatch.setattr(resource, "setrlimit", refuse_most)
        assert raise_limit() == 10_240
        assert asked == [resource.RLIM_INFINITY, 1_048_576, 65_536, 10_240]

    def test_a_limit_of_open_files_that_cannot_be_raised_stays(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def refuse(*_: Any) -> None:
            raise OSError(errno.EPERM, "no")

        monkeypatch.setattr(resource, "getrlimit", lambda _: (256, 20_000))
        monkeypatch.setattr(resource, "setrlimit", refuse)
        assert raise_limit() == 256
