"""`stillfresh browser`: the modules for browsers, as a package that npm and TypeScript know."""

import json
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

import click

from stillfresh.cli.program import command

MODULES: Final = {".": "stillfresh", "./waiting": "stillfresh-waiting"}
"""What is imported from the package, and the name of its file."""


@command("stillfresh browser vendor/stillfresh")
@click.argument("folder", type=click.Path(file_okay=False, path_type=Path))
def browser(*, folder: Path) -> None:
    """Write the modules for browsers, with types, as an npm package.

    Install it with npm: `npm install ./FOLDER`. Then `import { watch } from "stillfresh"` and
    `import { WaitingCache } from "stillfresh/waiting"` work in bundlers, Node and TypeScript.
    Files that are there already are replaced.
    """
    source = files("stillfresh.gateway").joinpath("static")
    folder.mkdir(parents=True, exist_ok=True)
    for module in MODULES.values():
        for name in (f"{module}.js", f"{module}.d.ts"):
            folder.joinpath(name).write_bytes(source.joinpath(name).read_bytes())
    package = json.dumps(package_of(version("stillfresh")), indent=2)
    folder.joinpath("package.json").write_text(f"{package}\n")
    click.echo(f"wrote {folder}; install it with: npm install ./{folder}")


def package_of(number: str) -> dict[str, Any]:
    """Describe the package to npm, bundlers and TypeScript."""
    return {
        "name": "stillfresh",
        "version": number,
        "description": "Keeps what is on screen fresh; next-game navigation that never guesses.",
        "license": "MIT",
        "private": True,  # it is installed from a folder, not published
        "type": "module",
        "exports": {
            path: {"types": f"./{module}.d.ts", "default": f"./{module}.js"}
            for path, module in MODULES.items()
        },
    }
