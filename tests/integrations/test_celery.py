"""E20 in Celery: the program of docs/celery.md, in a real worker with two children."""

import importlib.util
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from flask import Flask

from stillfresh.integrations.flask import Fresh
from tests.kit.sync import Calling, until

PAGE = Path(__file__).parents[2] / "docs" / "celery.md"
WORKER = """
from shop import celery, database, prices

(database / "used-1").write_text("1")
prices("used-1")  # the cache is open before the pool forks
celery.conf.update(
    broker_transport_options={
        "data_folder_in": "queue", "data_folder_out": "queue", "control_folder": "control",
        "polling_interval": 0.05,
    },
    result_backend="file://results",
    broker_connection_retry_on_startup=False,
)
"""


class Site:
    """A web process, which is this one, and a worker, in a folder that both share."""

    def __init__(self, folder: Path, shop: Any, worker: "subprocess.Popen[bytes]") -> None:
        self.folder = folder
        self.shop = shop
        self.worker = worker

    def price(self, sku: str, cents: int) -> None:
        (self.folder / sku).write_text(f"{cents}")

    def has_received(self, task: Any) -> bool:
        return f"[{task.id}] received" in (self.folder / "log").read_text()

    def pipe(self, sku: str) -> Path:
        """In place of the price: who loads it waits until the test writes."""
        os.mkfifo(self.folder / sku)
        return self.folder / sku

    def children(self) -> set[int]:
        """Forked by whatever thread of the worker."""
        threads = Path(f"/proc/{self.worker.pid}/task").glob("*/children")
        return {int(pid) for it in threads for pid in it.read_text().split()}

    def child_that_reads(self, file: Path) -> int:
        [child] = [
            pid
            for pid in self.children()
            for fd in Path(f"/proc/{pid}/fd").iterdir()
            if fd.is_symlink() and os.readlink(fd) == f"{file}"  # noqa: PTH115 (of /proc)
        ]
        return child


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with running(tmp_path_factory.mktemp("shop")) as site:
        yield site


@contextmanager
def running(folder: Path) -> Iterator[Site]:
    [program] = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    (folder / "shop.py").write_text(program)
    (folder / "worker.py").write_text(WORKER)
    for name in ("queue", "control", "results"):
        (folder / name).mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.syspath_prepend(folder)
        patch.setenv("SHOP_STORE", f"sqlite:///{folder}/shop.db")
        patch.setenv("SHOP_BROKER", "filesystem://")
        patch.setenv("SHOP_DATABASE", f"{folder}")
        spec = importlib.util.spec_from_file_location("shop", folder / "shop.py")
        assert spec is not None
        assert spec.loader is not None
        shop = importlib.util.module_from_spec(spec)
        patch.setitem(sys.modules, "shop", shop)
        spec.loader.exec_module(shop)
        exec(WORKER, {})  # noqa: S102 (our own)
        command = ["celery", "-A", "worker", "worker", "--concurrency", "2", "--loglevel", "INFO"]
        with (folder / "log").open("w") as log:
            worker = subprocess.Popen(
                [sys.executable, "-m", *command], stdout=log, stderr=log, start_new_session=True
            )
        try:
            until(lambda: " ready." in (folder / "log").read_text())
            yield Site(folder, shop, worker)
        finally:
            os.killpg(worker.pid, signal.SIGKILL)  # Celery's own shutdown takes five seconds
            worker.wait(30)
            shop.cache.close()


class TestE20Celery:
    def test_a_celery_task_and_the_web_process_share_copies(self, site: Site) -> None:
        """And the other way round; a warmed price is there for the next visitor."""
        site.price("tea-1", 199)
        assert site.shop.prices("tea-1") == 199
        (site.folder / "tea-1").unlink()
        assert site.shop.label.delay("tea-1").get(timeout=20) == "tea-1 costs 199"
        site.price("tea-2", 299)
        site.shop.warm.delay("tea-2").get(timeout=20)
        (site.folder / "tea-2").unlink()
        assert site.shop.prices("tea-2") == 299

    def test_a_celery_task_invalidates_by_tag_after_a_write(self, site: Site) -> None:
        """By tag; a page of the web process that shows it is told by the same tag."""
        app, fresh = Flask("shop"), Fresh(cache=site.shop.cache)
        fresh.init_app(app)

        @app.get("/coffee")
        @fresh.view("1h", tags="maker:coffee")
        def coffee() -> str:
            return f"{site.shop.prices('coffee-1')}"

        site.price("coffee-1", 500)
        assert app.test_client().get("/coffee").text == "500"
        site.price("coffee-1", 550)
        assert app.test_client().get("/coffee").text == "500"
        site.shop.reprice.delay("coffee", 600).get(timeout=20)
        assert app.test_client().get("/coffee").text == "600"

    def test_web_processes_and_workers_share_one_load(self, site: Site) -> None:
        """Two tasks and two visitors want a price that nobody has: it is read once."""
        pipe = site.pipe("rum-1")
        tasks = [site.shop.label.delay("rum-1") for _ in range(2)]
        visitors = [Calling(site.shop.prices, "rum-1") for _ in range(2)]
        with pipe.open("w") as price:  # a second reader would get nothing, and fail
            until(lambda: all(map(site.has_received, tasks)))
            price.write("1999")
        assert [it.result() for it in visitors] == [1999, 1999]
        assert {it.get(timeout=20) for it in tasks} == {"rum-1 costs 1999"}

    def test_a_load_in_a_killed_worker_is_done_by_another(self, tmp_path: Path) -> None:
        """In the middle of its load: whoever wants the price waits for the lease, no longer."""
        with running(tmp_path) as site:
            before, pipe = site.children(), site.pipe("gin-1")
            site.shop.label.delay("gin-1")
            with pipe.open("w"):
                killed = site.child_that_reads(pipe)
                visitor = Calling(site.shop.prices, "gin-1")
                began = time.monotonic()
                os.kill(killed, signal.SIGKILL)
                until(lambda: killed not in site.children())
            with pipe.open("w") as price:  # opened when the visitor loads it
                took = time.monotonic() - began
                price.write("777")
            assert visitor.result() == 777
            assert 0.5 < took < 20  # the lease is for two seconds, and is renewed every third of it
            until(lambda: len(site.children()) == len(before))

    def test_a_soft_time_limit_inside_a_loader_is_a_failed_load(self, site: Site) -> None:
        """The task gets LoadFailed, and the child goes on."""
        site.pipe("ale-1")  # to which nobody writes
        task = site.shop.label.apply_async(["ale-1"], soft_time_limit=1)
        with pytest.raises(Exception, match="loading failed: SoftTimeLimitExceeded"):
            task.get(timeout=20)
        site.price("ale-2", 350)
        assert site.shop.label.delay("ale-2").get(timeout=20) == "ale-2 costs 350"
