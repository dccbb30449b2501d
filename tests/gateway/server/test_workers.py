"""G14, G17: `stillfresh serve --workers N` in real processes: one port, store and `/metrics`."""

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from urllib.parse import quote

import httpx
import pytest

from tests.kit.processes import ROOT
from tests.kit.serve import CLI, Proxy

COUNT = 3
FRESH = "?cache-control=max-age%3D600"
READS = re.compile(r'stillfresh_reads_total\{resource="page",.*\} (\d+)')
OTHERS = [
    re.compile(r'stillfresh_http_responses_total\{part="pages",status="200"\} (\d+)'),
    re.compile(r'stillfresh_objective_met_total\{resource="page"\} (\d+)'),
]
ENTRIES = re.compile(r'stillfresh_entries\{resource="page"\} (\d+)')


def until(holds: Callable[[], bool]) -> bool:
    """Whether it came to be so in time."""
    end = time.monotonic() + 20
    while time.monotonic() < end:
        if holds():
            return True
        time.sleep(0.01)
    return False


def workers_of(parent: int) -> list[int]:
    """The processes that it has now; those that ended and were not waited for are there as well."""
    told = Path(f"/proc/{parent}/task/{parent}/children").read_text()
    return [int(pid) for pid in told.split()]


class Gateway:
    """`serve --workers 3`, and a way to ask one of them."""

    def __init__(self, stack: ExitStack, folder: Path, *options: str) -> None:
        store = f"sqlite:///{folder / 'pages.db'}"
        self.proxy = Proxy(stack, "--store", store, "--workers", str(COUNT), *options)
        self.parent = self.proxy.process.pid
        self.port = int(self.proxy.url.rpartition(":")[2])
        self._stack = stack
        assert until(lambda: len(self.workers()) == COUNT)

    def workers(self) -> list[int]:
        return workers_of(self.parent)

    def connection(self, worker: int) -> http.client.HTTPConnection:
        """One that this worker has accepted: the others cannot, for the moment."""
        made = http.client.HTTPConnection("127.0.0.1", self.port)
        self._stack.callback(made.close)
        others = [pid for pid in self.workers() if pid != worker]
        assert until(lambda: self._is_accepted(made, others))
        assert made.sock is not None
        made.sock.settimeout(20)
        return made

    def _is_accepted(self, made: http.client.HTTPConnection, others: list[int]) -> bool:
        """Not yet, if it waits for one of the others, which may be just opening the store."""
        for pid in others:
            os.kill(pid, signal.SIGSTOP)
        made.close()
        made.timeout = 0.5
        try:
            return get(made, "/healthz") == '{"status":"alive"}'
        except TimeoutError:
            return False
        finally:
            for pid in others:
                os.kill(pid, signal.SIGCONT)

    def connections(self) -> list[http.client.HTTPConnection]:
        """One to each, when the one that a test killed is replaced."""
        assert until(lambda: len(self.workers()) == COUNT)
        return [self.connection(worker) for worker in self.workers()]


def ask(
    connection: http.client.HTTPConnection, path: str, method: str = "GET", **fields: str
) -> tuple[str, str]:
    """The answer's `Cache-Status`, and its text."""
    connection.request(method, path, headers={k.replace("_", "-"): v for k, v in fields.items()})
    answer = connection.getresponse()
    return answer.headers.get("cache-status", ""), answer.read().decode()


def get(connection: http.client.HTTPConnection, path: str) -> str:
    return ask(connection, path)[1]


def reads(connections: list[http.client.HTTPConnection]) -> int:
    """As the last of them tells it, after each has told its own."""
    told = [get(it, "/metrics") for it in connections]
    return sum(int(count) for count in READS.findall(told[-1]))


def others(connection: http.client.HTTPConnection) -> list[int]:
    """Pages sent, and reads that met the objective; each worker has told its own."""
    text = get(connection, "/metrics")
    return [int(it.findall(text)[0]) for it in OTHERS]


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    with ExitStack() as stack:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("STILLFRESH_PAGES__OBJECTIVE", "99% of reads younger than 1d")
            made = Gateway(stack, tmp_path_factory.mktemp("workers"))
        yield made


def action(gateway: Gateway, name: str, path: str) -> str:
    """An operator's, on the entry of this page."""
    id_ = f"{gateway.proxy.url}{path}"
    return f"/_stillfresh/api/entries/page/{quote(id_, safe='')}/{name}"


class TestG17Workers:
    def test_all_workers_answer_from_one_store(self, gateway: Gateway) -> None:
        """What one of them has loaded is a hit in all, and the site is asked once."""
        one, *others = gateway.connections()
        first, again = ask(one, f"/one{FRESH}"), [ask(it, f"/one{FRESH}") for it in others]
        assert first[0].startswith("stillfresh; fwd=miss; stored")
        assert all(status.startswith("stillfresh; hit") for status, _ in again)
        assert {text for _, text in again} == {first[1]}
        assert gateway.proxy.count("/one") == 1

    @pytest.mark.parametrize("name", ["invalidate", "delete"])
    def test_an_action_on_a_page_in_one_worker_is_seen_by_all(
        self, gateway: Gateway, name: str
    ) -> None:
        """At once, and also where a worker has the ready answer to these very bytes at hand."""
        path = f"/{name}{FRESH}"
        connections = gateway.connections()
        for connection in connections:
            assert [get(connection, path) for _ in range(3)] == [f"/{name} 1"] * 3
        said = get_action(connections[0], action(gateway, name, path))
        assert "said" in said, said
        assert [get(it, path) for it in reversed(connections)] == [f"/{name} 2"] * COUNT
        assert gateway.proxy.count(f"/{name}") == 2

    def test_a_page_is_refreshed_once_for_all_workers(self, gateway: Gateway) -> None:
        """A page's next reader, in whichever worker, brings the new copy for every worker."""
        path, connections = f"/refresh{FRESH}", gateway.connections()
        assert {get(it, path) for it in connections} == {"/refresh 1"}
        get_action(connections[0], action(gateway, "refresh", path))
        assert until(lambda: get(connections[2], path) == "/refresh 2")
        assert {get(it, path) for it in connections} == {"/refresh 2"}
        assert gateway.proxy.count("/refresh") == 2

    def test_a_post_through_one_worker_invalidates_the_page_in_all(self, gateway: Gateway) -> None:
        """RFC 9111 §4.4: a POST that succeeds invalidates its own URL, for every worker."""
        path, connections = f"/changed{FRESH}", gateway.connections()
        assert {get(it, path) for it in connections} == {"/changed 1"}
        ask(connections[1], path, "POST")
        assert {get(it, path) for it in connections} == {"/changed 3"}


def get_action(connection: http.client.HTTPConnection, path: str) -> str:
    return ask(connection, path, "POST", x_stillfresh="1")[1]


class TestG14OneMetrics:
    def test_any_worker_reports_the_sum_of_all_workers(self, gateway: Gateway) -> None:
        """So do the dashboard's numbers; each counts its own reads, and only those."""
        connections = gateway.connections()
        get(connections[0], f"/summed{FRESH}")
        before, more = reads(connections), others(connections[-1])
        for connection in connections:
            for _ in range(5):
                get(connection, f"/summed{FRESH}")
        assert reads(connections) == reads(connections[::-1]) == before + 5 * COUNT
        assert others(connections[0]) == [it + 5 * COUNT for it in more]
        for connection in connections:
            (pages,) = (
                row
                for row in json.loads(get(connection, "/_stillfresh/api/stats"))["resources"]
                if row["kind"] == "page"
            )
            assert sum(pages["reads"].values()) == before + 5 * COUNT

    def test_a_worker_that_is_killed_is_replaced_and_its_counts_stay(
        self, gateway: Gateway
    ) -> None:
        """SIGKILL: others answer meanwhile, and no counter goes backwards."""
        connections, before = gateway.connections(), gateway.workers()
        for connection in connections:
            get(connection, f"/killed{FRESH}")
        told, more = reads(connections), others(connections[0])
        os.kill(before[1], signal.SIGKILL)
        assert until(lambda: len(set(gateway.workers()) - set(before)) == 1)
        assert reads([connections[0], connections[2]]) == told
        assert len(gateway.workers()) == COUNT  # nor is there a zombie
        (new,) = set(gateway.workers()) - set(before)
        connection = gateway.connection(new)
        assert reads([connection]) == told
        assert others(connection) == more
        assert gateway.proxy.says(f"(process {before[1]}) ended by signal 9; another one starts")

    def test_entries_of_a_dead_worker_are_not_counted(self, gateway: Gateway) -> None:
        """Of the pages in memory, those of the living count."""
        connections, workers = gateway.connections(), gateway.workers()
        for number in range(50):
            get(connections[0], f"/held{number}{FRESH}")
        reads(connections)
        before = int(ENTRIES.findall(get(connections[2], "/metrics"))[0])
        os.kill(workers[0], signal.SIGKILL)
        assert until(
            lambda: int(ENTRIES.findall(get(connections[2], "/metrics"))[0]) <= before - 50
        )

    def test_a_stopped_worker_does_not_delay_the_metrics(self, gateway: Gateway) -> None:
        """SIGSTOP: its numbers are those that it told last."""
        connections, workers = gateway.connections(), gateway.workers()
        told = reads(connections)
        os.kill(workers[0], signal.SIGSTOP)
        try:
            began = time.monotonic()
            assert reads(connections[1:]) == told
            assert time.monotonic() - began < 10
        finally:
            os.kill(workers[0], signal.SIGCONT)

    def test_counters_never_go_backwards_while_workers_are_killed(self, gateway: Gateway) -> None:
        """While workers are killed one after the other, whichever of them answers."""
        told, is_over = list[int](), threading.Event()

        def load() -> None:
            while not is_over.is_set():
                with suppress(httpx.HTTPError):  # cut off with its worker
                    gateway.proxy.client.get(f"/load{FRESH}", headers={"connection": "close"})

        def look() -> None:
            made = http.client.HTTPConnection("127.0.0.1", gateway.port, timeout=20)
            with closing(made), suppress(OSError, http.client.HTTPException):
                told.append(reads([made]))

        loading = threading.Thread(target=load)
        loading.start()
        try:
            assert until(lambda: len(gateway.workers()) == COUNT)
            for pid in gateway.workers():
                looked = len(told) + 3
                os.kill(pid, signal.SIGKILL)
                while len(told) < looked:
                    look()
                assert until(lambda: len(gateway.workers()) == COUNT)
        finally:
            is_over.set()
            loading.join()
        assert told == sorted(told)


class TestG17Ending:
    def test_running_requests_are_answered_after_sigterm(self, tmp_path: Path) -> None:
        """SIGTERM to the parent: nobody new is let in, all workers end, and it ends with 0."""
        with ExitStack() as stack:
            gateway = Gateway(stack, tmp_path)
            slow, answers = gateway.connection(gateway.workers()[2]), list[str]()
            asking = threading.Thread(
                target=lambda: answers.append(get(slow, f"/slow{FRESH}&takes=2"))
            )
            asking.start()
            assert until(lambda: gateway.proxy.count("/slow") == 1)
            workers = gateway.workers()
            os.kill(workers[0], signal.SIGSTOP)  # it ends all the same
            gateway.proxy.process.send_signal(signal.SIGTERM)
            assert until(lambda: is_closed(gateway.port))
            assert answers == []
            asking.join()
            assert gateway.proxy.process.wait(20) == 0
            assert (answers, gateway.proxy.log()) == (["/slow 1"], "")

    def test_a_second_ctrl_c_ends_the_gateway_at_once(self, tmp_path: Path) -> None:
        """A request under way is answered with 503, and nothing is said of it."""
        with ExitStack() as stack:
            gateway = Gateway(stack, tmp_path)
            slow, answers = gateway.connection(gateway.workers()[1]), list[str]()
            asking = threading.Thread(
                target=lambda: answers.append(get(slow, f"/slow{FRESH}&takes=60"))
            )
            asking.start()
            assert until(lambda: gateway.proxy.count("/slow") == 1)
            gateway.proxy.process.send_signal(signal.SIGINT)
            assert until(lambda: is_closed(gateway.port))
            gateway.proxy.process.send_signal(signal.SIGINT)
            assert gateway.proxy.process.wait(20) == 0
            asking.join()
            assert [json.loads(it)["code"] for it in answers] == ["ending"]
            assert gateway.proxy.log() == ""

    def test_no_worker_outlives_its_parent(self, tmp_path: Path) -> None:
        """SIGKILL to the parent: the workers notice, and let the port go."""
        with ExitStack() as stack:
            gateway = Gateway(stack, tmp_path)
            gateway.proxy.process.kill()
            assert until(lambda: is_closed(gateway.port))


def is_closed(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) != 0


def ended(*options: str, cwd: Path) -> "subprocess.CompletedProcess[str]":
    """It could not start: what it said, and its exit code."""
    command = [*CLI, "--upstream", "http://127.0.0.1:1", *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, cwd=cwd)


class TestG17Mistakes:
    def test_a_failed_start_with_workers_is_one_line(self, tmp_path: Path) -> None:
        """A port that is taken, a store that cannot be opened: one line, as with one worker."""
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = str(taken.getsockname()[1])
            shared = ("--store", "sqlite:///x.db", "--workers", "3")
            told = [ended("--port", port, *shared, cwd=tmp_path)]
        bad = ("--store", "sqlite:////proc/none/x.db", "--workers", "3")
        told.append(ended("--port", "0", *bad, cwd=tmp_path))
        assert [it.returncode for it in told] == [1, 1]
        lines = [it.stderr.splitlines() for it in told]
        assert [len(it) for it in lines] == [1, 1], lines
        assert f"cannot listen on 127.0.0.1:{port}: another program" in lines[0][0]
        assert "/proc/none" in lines[1][0]

    @pytest.mark.parametrize(
        ("how", "says", "code"),
        [
            ("os.kill(os.getpid(), 9)", "5 workers in a row ended before they were ready", 1),
            ("raise ConfigError('no such thing')", "ConfigError: no such thing", 1),
            ("raise StillfreshError('away')", "StillfreshError: away", 1),
            ("work = open('/nowhere/at/all')", "StillfreshError: .*No such file", 1),
        ],
    )
    def test_an_error_of_a_starting_worker_is_raised_and_a_death_is_retried(
        self, how: str, says: str, code: int
    ) -> None:
        """An error is raised at once, as it is; a death is tried again, and then given up."""
        script = f"""
import os, socket
from stillfresh import ConfigError, StillfreshError
from stillfresh.gateway.server import WorkerNumbers, Workers
def work(worker):
    {how}
with socket.create_server(("127.0.0.1", 0)) as listener:
    Workers(listener, WorkerNumbers(2, 10), work, lambda: print("ready")).run()
"""
        command = [sys.executable, "-W", "error", "-c", script]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=60, check=False, cwd=ROOT
        )
        assert (done.stdout, done.returncode) == ("", code)
        assert re.search(says, done.stderr.splitlines()[-1]), done.stderr
        assert done.stderr.count("starts in") == (4 if "kill" in how else 0)

    def test_pauses_between_restarts_grow_while_a_worker_keeps_dying(self) -> None:
        """The others go on, and the parent with them."""
        script = """
import os, signal, socket, time
from stillfresh.gateway.server import WorkerNumbers, Workers
def work(worker):
    if worker.place:
        raise SystemExit(3)
    worker.ready()
    time.sleep(1)
    os.kill(os.getppid(), signal.SIGTERM)
    time.sleep(60)
with socket.create_server(("127.0.0.1", 0)) as listener:
    Workers(listener, WorkerNumbers(2, 10), work, lambda: print("ready")).run()
"""
        command = [sys.executable, "-W", "error", "-c", script]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=60, check=False, cwd=ROOT
        )
        assert (done.stdout, done.returncode) == ("ready\n", 0)
        pauses = [float(it) for it in re.findall(r"exit code 3; .* in ([\d.]+) s", done.stderr)]
        assert pauses[:3] == [0.1, 0.2, 0.4]


class TestG14Held:
    def test_a_worker_counts_as_alive_when_it_has_written_its_numbers(self) -> None:
        """What the one before held in its place is not held again while the next one starts."""
        script = """
import os, signal, socket, sys
from stillfresh.gateway.server import WorkerNumbers, Workers
def work(worker):
    if not worker.shared_numbers.read(0):
        worker.shared_numbers.write(0, b"held")
        worker.ready()
        os._exit(1)
    print(worker.shared_numbers.read_all())
    os.kill(os.getppid(), signal.SIGTERM)
with socket.create_server(("127.0.0.1", 0)) as listener:
    Workers(listener, WorkerNumbers(1, 10), work, lambda: None).run()
"""
        command = [sys.executable, "-W", "error", "-c", script]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=60, check=False, cwd=ROOT
        )
        assert (done.stdout, done.returncode) == ("[(b'held', False)]\n", 0), done.stderr
