"""Parts that need libraries of their own: who lacks one is told which extra brings it."""

from importlib import import_module
from types import ModuleType

from stillfresh.errors import StillfreshError


def extra(module: str, named: str = "aws") -> ModuleType:
    try:
        return import_module(module)
    except ModuleNotFoundError as exc:
        if exc.name is None or exc.name.partition(".")[0] == "stillfresh":
            raise
        raise StillfreshError(
            f"this command needs {exc.name}: install stillfresh[{named}]"
        ) from exc
