"""S6: `stillfresh table create|describe` against real servers, each once as a process."""

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from stillfresh.stores.contract import Store
from stillfresh.testing import ManualClock
from tests.kit.cli import call, said, stillfresh

if TYPE_CHECKING:
    from tests.kit.servers.aws import Aws


def at(aws: "Aws") -> list[str]:
    return ["--endpoint", aws.endpoint, "--s3-endpoint", aws.s3_endpoint]


async def opened(store: Store) -> None:
    await store.open()
    await store.close()


class TestS6TableCommands:
    def test_create_makes_a_table_and_a_bucket(self, aws: "Aws") -> None:
        """TTL is on, the bucket is there, a store works on them; a second time changes nothing."""
        create = ("table", "create", "made-here", "--bucket", "made-here-too", *at(aws))
        made = stillfresh(*create)
        assert made.returncode == 0, made.stderr
        assert made.stdout == said(*create)
        lines = [line.split(maxsplit=1) for line in made.stdout.splitlines()]
        assert ["table", "made-here"] in lines
        assert ["status", "ACTIVE"] in lines
        assert "ttl attribute   ttl\n" in made.stdout
        assert "bucket exists   True\n" in made.stdout
        asyncio.run(opened(aws.store("made-here", ManualClock(), bucket="made-here-too")))

    def test_describe_shows_them(self, aws: "Aws") -> None:
        """By name, or by a store's whole address."""
        table = aws.new_table()
        by_name = stillfresh("table", "describe", table, "--bucket", aws.bucket, *at(aws))
        assert by_name.returncode == 0, by_name.stderr
        assert by_name.stdout == said("table", "describe", aws.address(table))
        assert "ttl attribute   -\n" in by_name.stdout

    def test_create_leaves_a_table_that_is_there_as_it_is(self, aws: "Aws") -> None:
        """TTL deletes rows: it is turned on for a table that this command has made."""
        assert "ttl attribute   -\n" in said("table", "create", aws.new_table(), *at(aws))

    def test_the_name_may_come_from_the_environment(
        self, aws: "Aws", monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """As for the schema's other users."""
        table = aws.new_table()
        monkeypatch.setenv("FACETHEORY_CACHE_TABLE_NAME", table)
        assert table in said("table", "describe", *at(aws))
        assert table in said("table", "describe", aws.address(""))

    def test_says_in_a_sentence_what_is_wrong(self, aws: "Aws") -> None:
        """No trace of the inside: a missing table, other keys, a bad address, no name."""
        other = aws.new_table(id="HASH")
        for arguments, says in {
            ("describe", "not-there", *at(aws)): "there is no such table",
            ("create", other, *at(aws)): "they must be pk (HASH, S) and sk (RANGE, S)",
            ("describe", "dynamodb://t?colour=red"): "takes each once",
            ("describe",): "Missing argument 'TABLE'",
            ("describe", "dynamodb://?bucket=b"): "FACETHEORY_CACHE_TABLE_NAME",
            ("create", aws.address("t", tenant="a#b")): "tenant: must be",
        }.items():
            answer = call("table", *arguments)
            assert answer.exit_code != 0
            assert says in answer.stderr
            assert "Traceback" not in answer.stderr

    def test_names_its_own_option_for_the_region(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Not only the address's."""
        monkeypatch.delenv("AWS_DEFAULT_REGION", raising=False)
        monkeypatch.setenv("AWS_CONFIG_FILE", "/dev/null")
        assert "--region" in call("table", "describe", "t").stderr

    @pytest.mark.parametrize(("missing", "extra"), [("click", "cli"), ("aiobotocore", "aws")])
    def test_a_missing_library_is_named(self, missing: str, extra: str) -> None:
        """With the extra that brings it."""
        script = f"""
import runpy, sys
sys.modules[{missing!r}] = None
sys.argv = ["stillfresh", "table", "describe", "t"]
runpy.run_module("stillfresh.cli", run_name="__main__")
"""
        answer = subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False
        )
        assert answer.returncode == 1
        assert f"stillfresh[{extra}]" in answer.stderr
        assert "Traceback" not in answer.stderr

    def test_is_installed_as_a_command(self) -> None:
        """`stillfresh`, beside the interpreter."""
        command = Path(sys.executable).with_name("stillfresh")
        answer = subprocess.run(
            [command, "--version"], capture_output=True, text=True, timeout=60, check=True
        )
        assert answer.stdout.startswith("stillfresh")
