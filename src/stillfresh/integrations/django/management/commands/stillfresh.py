"""`manage.py stillfresh`: the commands of `stillfresh` for a cache of settings.CACHES."""

from argparse import REMAINDER, ArgumentParser
from importlib import import_module
from typing import Any

from django.core.management.base import BaseCommand, CommandError

from stillfresh.errors import ConfigError
from stillfresh.integrations.django.backend import backend_of


class StillfreshCommand(BaseCommand):
    """Inspects a cache, invalidates tags, evicts expired entries, or clears the cache."""

    help = "Look into a stillfresh cache, invalidate entries by tag, evict what is over, or clear."

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("--cache", default="default", help="An alias of CACHES.")
        parser.add_argument("action", choices=["inspect", "invalidate", "evict", "clear"])
        more = "Tags to invalidate, or options as `stillfresh inspect` and `evict` take them."
        parser.add_argument("more", nargs=REMAINDER, help=more)

    def handle(self, *, cache: str, action: str, more: list[str], **_: Any) -> None:
        if "--cache" in more:
            raise CommandError(
                f"--cache stands before the action: manage.py stillfresh --cache ALIAS {action}"
            )
        try:
            backend = backend_of(cache, "these commands")
        except ConfigError as exc:
            raise CommandError(str(exc)) from exc
        if action == "clear":
            backend.clear()
            self.stdout.write(f"{cache}: cleared")
            return
        if action == "invalidate":
            if not more:
                raise CommandError("name the tags: manage.py stillfresh invalidate shop.product:7")
            more = [word for tag in more for word in ("--tag", tag)]
        if action == "inspect":
            more = ["--kind", backend.name, *more]
        self._run([action, backend.location, *more])

    @staticmethod
    def _run(arguments: list[str]) -> None:
        # Started by name, as a shell would: the terminal is the room above this one.
        program = import_module("stillfresh.cli")
        try:
            program.main(arguments)
        except SystemExit as exc:
            if exc.code:
                raise CommandError(
                    f"{arguments[0]} failed for the reason above", returncode=exc.code
                ) from None


Command = StillfreshCommand
"""The name that Django looks for."""
