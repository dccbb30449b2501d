"""G23: a command that ends never says that it will try again."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from stillfresh.cli.program import without_promises
from stillfresh.stores import TRIED_AGAIN

NOWHERE = "127.0.0.1:1"
AWS = {
    "AWS_ACCESS_KEY_ID": "x",
    "AWS_SECRET_ACCESS_KEY": "y",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_ENDPOINT_URL": f"http://{NOWHERE}",
}
REDIS = f"redis://{NOWHERE}"
POSTGRES = f"postgresql://{NOWHERE}/x"
DYNAMODB = "dynamodb://table?bucket=bucket"
SQLITE = "sqlite:////dev/null/x.db"
WARM = ["--from", "urls.txt", "--upstream", f"http://{NOWHERE}"]


def run(folder: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """The command in a process of its own: its logging is not that of the tests."""
    (folder / "urls.txt").write_text("/a\n")
    return subprocess.run(
        [sys.executable, "-m", "stillfresh.cli", *arguments],
        env={**os.environ, **AWS},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


class TestG23OneShot:
    @pytest.mark.parametrize(
        "arguments",
        [
            ["warm", REDIS, *WARM],
            ["warm", POSTGRES, *WARM],
            ["warm", DYNAMODB, *WARM],
            ["warm", SQLITE, *WARM],
            ["table", "create", DYNAMODB],
            ["table", "create", POSTGRES],
            ["inspect", REDIS],
            ["invalidate", POSTGRES, "page", "/a"],
            ["evict", DYNAMODB],
        ],
        ids=" ".join,
    )
    def test_a_one_shot_command_does_not_promise_to_try_again(
        self, tmp_path: Path, arguments: list[str]
    ) -> None:
        """Neither in its error nor in what its parts log; it says what failed, and exits."""
        result = run(tmp_path, *arguments)
        said = result.stdout + result.stderr
        assert "again" not in said
        assert result.returncode == 1
        assert result.stderr.strip()

    @pytest.mark.parametrize(
        ("text", "left"),
        [
            (f"it is away; {TRIED_AGAIN}", "it is away"),
            ("a.db: locked; stillfresh tries it again every 2 s or sooner", "a.db: locked"),
            ("a.db: kept locked; it is tried again in a moment", "a.db: kept locked"),
            ("could not be opened, and is tried again: no file", "could not be opened: no file"),
            ("a: gone; stillfresh tries it again within 2 s: b", "a: gone: b"),
            ("other changes came first; try again", "other changes came first; try again"),
        ],
    )
    def test_promises_to_retry_are_removed_and_advice_stays(self, text: str, left: str) -> None:
        """Advice to the caller stays."""
        assert without_promises(text) == left
