"""S6, S11: `stillfresh table create|describe` against real servers, each once as a process."""

import asyncio
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from stillfresh import Policy
from stillfresh.stores.contract import Ask, Copy, Lease, Store
from stillfresh.stores.urls import store_for
from stillfresh.testing import ManualClock
from tests.kit.cli import call, said, stillfresh

if TYPE_CHECKING:
    from tests.kit.servers.aws import Aws
    from tests.kit.servers.postgres import PostgresServer


def at(aws: "Aws") -> list[str]:
    return ["--endpoint", aws.endpoint, "--s3-endpoint", aws.s3_endpoint]


async def opened(store: Store) -> None:
    await store.open()
    await store.close()


class TestS6TableCommands:
    def test_table_create_makes_a_table_and_a_bucket(self, aws: "Aws") -> None:
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

    def test_table_describe_shows_table_and_bucket(self, aws: "Aws") -> None:
        """By name, or by a store's whole address."""
        table = aws.new_table()
        by_name = stillfresh("table", "describe", table, "--bucket", aws.bucket, *at(aws))
        assert by_name.returncode == 0, by_name.stderr
        assert by_name.stdout == said("table", "describe", aws.address(table))
        assert "ttl attribute   -\n" in by_name.stdout

    def test_table_create_leaves_an_existing_table_as_it_is(self, aws: "Aws") -> None:
        """TTL deletes rows: it is turned on for a table that this command has made."""
        assert "ttl attribute   -\n" in said("table", "create", aws.new_table(), *at(aws))

    def test_the_table_name_may_come_from_the_environment(
        self, aws: "Aws", monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """As for the schema's other users."""
        table = aws.new_table()
        monkeypatch.setenv("FACETHEORY_CACHE_TABLE_NAME", table)
        assert table in said("table", "describe", *at(aws))
        assert table in said("table", "describe", aws.address(""))

    def test_mistakes_of_the_table_command_are_one_sentence(self, aws: "Aws") -> None:
        """No trace of the inside: a missing table, other keys, a bad address, no name."""
        other = aws.new_table(id="HASH")
        for arguments, says in {
            ("describe", "not-there", *at(aws)): "there is no such table",
            ("create", other, *at(aws)): "they must be pk (HASH, S) and sk (RANGE, S)",
            ("describe", "dynamodb://t?colour=red"): "takes each once",
            ("describe",): "Missing argument 'TABLE'",
            ("describe", "dynamodb://?bucket=b"): "FACETHEORY_CACHE_TABLE_NAME",
            ("create", aws.address("t", tenant="a#b")): "tenant: must be",
            ("create", aws.address("t", pk="md5")): "pk: must be sha256 or raw",
        }.items():
            answer = call("table", *arguments)
            assert answer.exit_code != 0
            assert says in answer.stderr
            assert "Traceback" not in answer.stderr

    def test_a_missing_region_error_names_the_option(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Not only the address's."""
        monkeypatch.delenv("AWS_DEFAULT_REGION", raising=False)
        monkeypatch.setenv("AWS_CONFIG_FILE", "/dev/null")
        assert "--region" in call("table", "describe", "t").stderr

    @pytest.mark.parametrize(("missing", "extra"), [("click", "cli"), ("aiobotocore", "aws")])
    def test_the_table_command_names_a_missing_library(self, missing: str, extra: str) -> None:
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
        assert answer.returncode == 2
        assert f"stillfresh[{extra}]" in answer.stderr
        assert "Traceback" not in answer.stderr

    def test_stillfresh_is_installed_as_a_command(self) -> None:
        """`stillfresh`, beside the interpreter."""
        command = Path(sys.executable).with_name("stillfresh")
        answer = subprocess.run(
            [command, "--version"], capture_output=True, text=True, timeout=60, check=True
        )
        assert answer.stdout.startswith("stillfresh")


class TestS11TableCommands:
    def test_table_create_makes_a_postgres_schema_that_works(
        self, postgres: "PostgresServer"
    ) -> None:
        """Once as a process; a second time changes only what it is told to change."""
        url = postgres.new_database()
        missing = call("inspect", url)
        assert missing.exit_code == 1
        assert "`stillfresh table create`" in missing.stderr
        made = stillfresh("table", "create", f"{url}?tenant=acme", "--unlogged")
        assert made.returncode == 0, made.stderr
        shown = "schema stillfresh version 2 is unlogged True pushes True"
        assert " ".join(made.stdout.split()) == shown
        assert made.stdout == said("table", "create", url) == said("table", "describe", url)
        changed = said("table", "create", url, "--logged", "--no-push", "--json")
        assert json.loads(changed) == {
            "schema": "stillfresh", "version": 2, "is_unlogged": False, "pushes": False
        }  # fmt: skip

    def test_all_commands_work_on_a_postgres_store(self, postgres: "PostgresServer") -> None:
        """inspect, explain, invalidate, evict and stats, as on every store."""
        url = postgres.new_store()
        asyncio.run(published(store_for(url, time.time)))
        assert "sku-1" in said("inspect", url)
        assert "fresh" in said("explain", url, "price", "sku-1")
        said("invalidate", url, "price", "sku-1")
        assert "expired" in said("explain", url, "price", "sku-1")
        said("evict", url)
        assert json.loads(said("inspect", url, "--json"))

    def test_table_options_of_another_store_are_refused(self, postgres: "PostgresServer") -> None:
        """An option of DynamoDB with PostgreSQL, and the other way round."""
        for arguments, says in {
            (
                "create",
                postgres.address,
                "--bucket",
                "b",
            ): "--bucket is for a dynamodb:// store only",
            ("create", "dynamodb://t?bucket=b", "--unlogged"): "for a postgresql:// store only",
            ("create", "postgresql://host?sslmod=x"): "sslmod",
        }.items():
            answer = call("table", *arguments)
            assert answer.exit_code == 2
            assert says in answer.stderr


async def published(store: Store) -> None:
    await store.open()
    lease = (await store.acquire("price", [Ask("sku-1")], 10))["sku-1"]
    assert isinstance(lease, Lease)
    copy = Copy(lease.token, time.time(), Policy(60, 60, 60), b"1")
    await store.publish("price", {"sku-1": (lease, copy)})
    await store.close()
