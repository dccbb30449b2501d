"""Next.js ISR for `benchmarks/pages.py`: the same ten kilobytes, made and built while measuring.

Its packages come from npm into a folder that is gone afterwards. Where that cannot be done, the
row is left out and the notes say why.
"""

import json
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.request import urlopen

from benchmarks.pages_sites import BODY

__all__ = ["Missing", "next_isr", "version"]

PACKAGES = ("next", "react", "react-dom")
PATIENCE = 240.0
ROUTE = """\
export const dynamic = "force-static";
export const revalidate = 3600;
const headers = {{ "content-type": "text/html; charset=utf-8" }};
export function GET() {{
  return new Response({body}, {{ headers }});
}}
"""


class Missing(Exception):
    """Why it cannot be measured here."""


def built(folder: Path) -> Path:
    """A production build; the program that serves it."""
    if shutil.which("npm") is None or shutil.which("node") is None:
        raise Missing("node and npm are not installed")
    route = folder / "app" / "pricing" / "route.js"
    route.parent.mkdir(parents=True)
    route.write_text(ROUTE.format(body=json.dumps(BODY.decode())))
    (folder / "package.json").write_text('{"private": true}')
    run(folder, "npm", "install", "--no-audit", "--no-fund", *PACKAGES)
    program = folder / "node_modules" / "next" / "dist" / "bin" / "next"
    run(folder, "node", str(program), "build")
    return program


def run(folder: Path, *command: str) -> None:
    said = " ".join(command[:2])
    try:
        subprocess.run(
            command, cwd=folder, env=settings(), check=True, capture_output=True, timeout=PATIENCE
        )
    except subprocess.CalledProcessError as exc:
        raise Missing(f"{said} ended with {exc.returncode}") from exc
    except subprocess.TimeoutExpired as exc:
        raise Missing(f"{said} took more than {PATIENCE:g} s") from exc


def settings() -> dict[str, str]:
    return {**os.environ, "NEXT_TELEMETRY_DISABLED": "1"}


def version(folder: Path) -> str:
    about = json.loads((folder / "node_modules" / "next" / "package.json").read_text())
    return f"Next.js {about['version']}"


@contextmanager
def next_isr(folder: Path) -> Iterator[int]:
    """`next start` in a process of its own; its port."""
    program = built(folder)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    command = ["node", str(program), "start", "--hostname", "127.0.0.1", "--port", port]
    process = subprocess.Popen(
        command, cwd=folder, env=settings(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    try:
        if not any(b"Ready" in line for line in process.stdout or ()):
            raise Missing("next start did not come up")
        with urlopen(f"http://127.0.0.1:{port}/pricing", timeout=PATIENCE) as page:
            if page.read() != BODY:
                raise Missing("next start serves other bytes")
        yield int(port)
    finally:
        process.terminate()
        process.communicate()
