"""Write docs/promised.txt: what docs/versions.md promises, a name in each line."""

import re
from collections.abc import Iterator
from pathlib import Path

import click
import msgspec

from stillfresh.cli import main as program
from stillfresh.gateway.config import MODELS
from stillfresh.gateway.live import messages
from stillfresh.gateway.setting_readers import keys_of

ROOT = Path(__file__).parent.parent
PLACE = ROOT / "docs" / "promised.txt"


def promised() -> list[str]:
    """What there is now."""
    return sorted({*_names(), *_settings(), *_options(program, "stillfresh"), *_messages()})


def _names() -> Iterator[str]:
    """Of the reference, but for what it calls the inside. `tests/test_reference.py` finds each."""
    for page in (ROOT / "docs" / "reference").glob("*.md"):
        if page.name != "inside.md":
            yield from (
                f"name {it}" for it in re.findall(r"^::: (\S+)$", page.read_text(), re.MULTILINE)
            )


def _settings() -> Iterator[str]:
    for table, model in MODELS.items():
        yield from (f"setting {table}.{key}" for key in keys_of(model))


def _options(command: click.Command, path: str) -> Iterator[str]:
    yield f"command {path}"
    for param in command.params:
        yield from (f"option {path} {it}" for it in param.opts if it.startswith("-"))
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            below = command.get_command(context, name)
            if below is not None:
                yield from _options(below, f"{path} {name}")


def _messages() -> Iterator[str]:
    for it in vars(messages).values():
        is_struct = isinstance(it, type) and issubclass(it, msgspec.Struct)
        if is_struct and (tag := it.__struct_config__.tag) is not None:
            yield from (f"message {tag} {field}" for field in ("type", *it.__struct_fields__))


if __name__ == "__main__":
    PLACE.write_text("\n".join(promised()) + "\n")
