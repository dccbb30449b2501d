"""Adds the compiled TtlCache to a wheel built with STILLFRESH_COMPILED=1 (M11); else does nothing.

mypyc turns the very same source into an extension module; the plain source stays beside it.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

MODULE = "stillfresh/ttl_cache.py"


def wanted() -> bool:
    return os.environ.get("STILLFRESH_COMPILED") == "1"


class CompiledTtlCache(BuildHookInterface[Any]):
    """Runs for wheels only; an sdist carries no binaries."""

    _folder: str | None = None

    def dependencies(self) -> list[str]:
        return ["mypy", "setuptools"] if wanted() else []

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if not wanted() or self.target_name != "wheel" or version == "editable":
            return
        self._folder = mkdtemp()
        copy = Path(self._folder) / "stillfresh"
        shutil.copytree(Path(self.root) / "src" / "stillfresh", copy)
        (copy / "__init__.py").write_text("")  # else all that it imports is read and checked
        # The extras need not be there to compile a module that uses none of them, and what the
        # types of other libraries say about other modules does not matter to it.
        options = ["--ignore-missing-imports", "--follow-imports=silent"]
        command = [sys.executable, "-m", "mypyc", *options, MODULE]
        subprocess.run(command, cwd=self._folder, check=True)
        built = {str(path): f"stillfresh/{path.name}" for path in copy.glob("*.so")}
        build_data["force_include"].update(built)
        build_data["pure_python"] = False
        build_data["infer_tag"] = True

    def finalize(self, version: str, build_data: dict[str, Any], artifact: str) -> None:  # noqa: ARG002 (hatchling's signature)
        if self._folder is not None:
            shutil.rmtree(self._folder)
