"""The compiled build of TtlCache, beside the plain one in the same process (M11).

mypyc compiles a copy of the very same source under another module name.
"""

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import stillfresh.ttl_cache

__all__ = ["compiled_ttl_cache"]

NAME = "compiled_ttl_cache"


def compiled_ttl_cache(folder: Path) -> ModuleType | None:
    """The module, built in `folder`; None where there is no C compiler."""
    if shutil.which("cc") is None or stillfresh.ttl_cache.__file__.endswith(".so"):
        return None
    shutil.copy(stillfresh.ttl_cache.__file__, folder / f"{NAME}.py")
    command = [sys.executable, "-m", "mypyc", "--ignore-missing-imports", f"{NAME}.py"]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)
    (built,) = folder.glob(f"{NAME}.*.so")
    sys.path.insert(0, str(folder))
    spec = importlib.util.spec_from_file_location(NAME, built)
    if spec is None or spec.loader is None:
        return None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
