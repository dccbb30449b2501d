"""An import, a store or a command without its extra says which extra to install."""

import subprocess
import sys

import pytest

LIBRARIES = {
    "redis": ["redis"],
    "postgres": ["psycopg"],
    "aws": ["aiobotocore"],
    "web": ["httptools", "httpx2", "starlette", "uvicorn", "uvloop", "websockets"],
    "cli": ["click", "rich"],
    "demo": ["httpx2", "starlette", "uvicorn", "websockets"],
    "fastapi": ["fastapi", "pydantic"],
    "django": ["django"],
    "flask": ["flask"],
    "httpx": ["httpx", "httpx2"],
    "requests": ["requests"],
    "mcp": ["mcp", "mcp_types"],
    "opentelemetry": ["opentelemetry"],
    "prometheus": ["prometheus_client"],
    "zstd": ["backports", "compression"],
    "encryption": ["cryptography"],
    "pandas": ["pyarrow"],
}
CLI = "import sys; sys.argv = ['stillfresh', *{!r}]; from stillfresh.cli import main; main()"
STORE = "from stillfresh import Cache; Cache({!r})"
FLASK = (
    "from flask import Flask; from stillfresh import SyncCache; "
    "from stillfresh.integrations.flask import Fresh; app = Flask('a'); "
    "Fresh(app, cache=SyncCache('memory://')).dashboard(app)"
)
FRAME = "import stillfresh; DataFrame = type('DataFrame', (), {'__module__': 'pandas.core'})"
CASES = [
    ("redis", "import stillfresh.stores.redis"),
    ("redis", STORE.format("redis://x")),
    ("redis", STORE.format("valkey://x")),
    ("postgres", "import stillfresh.stores.postgres"),
    ("postgres", "import stillfresh.integrations.postgres"),
    ("postgres", STORE.format("postgresql://x/y")),
    ("postgres", CLI.format(["outbox", "show", "postgresql://x/y"])),
    ("aws", "from stillfresh.stores.dynamodb import DynamoStore"),
    ("aws", STORE.format("dynamodb://table?bucket=bucket")),
    ("aws", CLI.format(["table", "create", "dynamodb://table?bucket=bucket"])),
    ("web", "from stillfresh.gateway import Gateway"),
    ("web", "import stillfresh.gateway.server"),
    ("demo", "import stillfresh.demo"),
    ("web", "import stillfresh.systems.feed.http"),
    ("web", "import stillfresh.pages.upstream"),
    ("web", "import stillfresh.pages.site_connections"),
    ("web", "import stillfresh.systems.waiting.client"),
    ("web", CLI.format(["serve", "--upstream", "http://127.0.0.1:1"])),
    ("demo", CLI.format(["demo"])),
    ("web", CLI.format(["stats", "http://127.0.0.1:1"])),
    ("web", FLASK),
    ("cli", "import stillfresh.__main__"),
    ("fastapi", "import stillfresh.integrations.fastapi"),
    ("django", "import stillfresh.integrations.django"),
    ("flask", "import stillfresh.integrations.flask"),
    ("httpx", "import stillfresh.integrations.httpx"),
    ("mcp", "import stillfresh.integrations.mcp"),
    ("requests", "import stillfresh.integrations.requests"),
    ("opentelemetry", "import stillfresh.integrations.opentelemetry"),
    ("prometheus", "import stillfresh.integrations.prometheus"),
    ("zstd", "import stillfresh; stillfresh.zstd()"),
    ("encryption", "import stillfresh; stillfresh.encrypted(stillfresh.new_key())"),
    ("pandas", f"{FRAME}; stillfresh.arrow(DataFrame)"),
]


@pytest.mark.parametrize(("extra", "program"), CASES)
def test_a_missing_library_error_names_the_extra(extra: str, program: str) -> None:
    """G10: the last line names `stillfresh[…]`, not only a module."""
    blocked = f"import sys; sys.modules.update(dict.fromkeys({LIBRARIES[extra]!r}))"
    done = subprocess.run(
        [sys.executable, "-c", f"{blocked}\n{program}"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode != 0
    assert f"install stillfresh[{extra}]" in done.stderr.splitlines()[-1]
