"""E8: docs/postgres.md is true: its programs run on a real server."""

import re
import subprocess
import sys
from pathlib import Path

from tests.kit.outbox import PRODUCTS, database_at
from tests.kit.processes import ROOT
from tests.kit.servers.postgres import PostgresServer

PAGE = (ROOT / "docs" / "postgres.md").read_text()
BLOCKS = dict(re.findall(r"^```py\n# (\S+)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL))
TRY_APP = """
from fastapi.testclient import TestClient
with TestClient(app):
    print(*cache.lags)
print(*cache.lags)
"""


def test_e8_the_programs_in_the_docs_run(postgres: PostgresServer, tmp_path: Path) -> None:
    """As they stand; the FastAPI app has a consumer while it lives."""
    address = postgres.new_database()
    with database_at(address, PRODUCTS, "INSERT INTO products VALUES (1, 'tea')"):
        assert ran(BLOCKS["shop.py"], address, tmp_path) == "tea\ngreen tea\n"
        assert ran(BLOCKS["app.py"] + TRY_APP, address, tmp_path) == "shop\n\n"


def ran(source: str, address: str, folder: Path) -> str:
    command = [sys.executable, "-c", source]
    done = subprocess.run(
        command,
        cwd=folder,
        env={"DATABASE": address},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout
