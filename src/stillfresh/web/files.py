"""The files that browsers load: from the package, whole in memory, with their ETag (G5, G6)."""

from functools import cache
from importlib.resources import files
from typing import Final

from starlette.types import Scope, Send

from stillfresh.isr.rules_validation import etag_of, not_modified
from stillfresh.web.replies import Problem, Reply, method_of

TYPES: Final = {
    "css": "text/css; charset=utf-8",
    "html": "text/html; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
    "ts": "text/plain; charset=utf-8",
}
POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; form-action 'none'; frame-ancestors 'none'; base-uri 'none'"
)


async def send_file(scope: Scope, send: Send, name: str) -> None:
    """`name` is ours, never the visitor's."""
    method_of(scope)
    body = _file(name)
    etag = etag_of(body)
    headers = {"etag": etag.decode(), "cache-control": "no-cache"}
    if name.endswith(".html"):
        headers["content-security-policy"] = POLICY
    if not_modified(tuple(scope["headers"]), etag, None):
        await Reply(304, headers=headers).send(scope, send)
        return
    kind = TYPES[name.rpartition(".")[2]]
    await Reply(200, body, kind, headers).send(scope, send)


@cache
def _file(name: str) -> bytes:
    """Read once: a name is one of a few."""
    try:
        return files("stillfresh.web").joinpath("static", name).read_bytes()
    except FileNotFoundError as exc:
        raise Problem(404, "not_found", "Not found", f"this build has no {name}") from exc
