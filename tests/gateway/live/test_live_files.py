"""G3, G5: docs and types say of the messages what they are, and all of it is shipped."""

import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest

from stillfresh.gateway.live.messages import (
    MAX_ID,
    ClientMessage,
    Close,
    Code,
    ServerMessage,
    UpdateMessage,
    is_id,
)
from stillfresh.systems.waiting.messages import GameStateNews, InvalidatedNews, YourTurnNews

ROOT = Path(__file__).parents[3]
STATIC = ROOT / "src" / "stillfresh" / "gateway" / "static"
SAID = {tag.__struct_config__.tag: tag for tag in get_args(ClientMessage)}
HEARD = {
    tag.__struct_config__.tag: tag
    for tag in (*get_args(ServerMessage), YourTurnNews, InvalidatedNews, GameStateNews)
}


NODE = shutil.which("node")
REFUSED = """
const refused = [];
for (let point = 0; point <= 0x10ffff; point++) {
  if (!isId(String.fromCodePoint(point))) refused.push(point);
}
const lengths = [0, 1, LONGEST_ID, LONGEST_ID + 1];
const allowed = lengths.map((length) => isId("😀".repeat(length)));
console.log(JSON.stringify([refused, allowed]));
"""
"""Which characters are in no id, and how long one may be, as stillfresh.js says."""


def fields_of(message: Any) -> set[str]:
    names = {field.encode_name for field in msgspec.structs.fields(message)}
    return names | {"age"} if message is UpdateMessage else names


def typed(part: str) -> dict[str, set[str]]:
    """The interfaces of one half of the types: tag -> fields."""
    found = {}
    for body in re.findall(r"interface \w+Message(?:<.*?>)? \{(.*?)\n\}", part, re.DOTALL):
        plain = re.sub(r"/\*.*?\*/", "", body, flags=re.DOTALL)
        names = set(re.findall(r"^  (\w+)\??:", plain, re.MULTILINE))
        [tag] = re.findall(r'type: "(\w+)"', plain)
        found[tag] = names - {"type"}
    return found


def documented(heading: str) -> dict[str, str]:
    """The rows of a table of docs/live.md: tag -> fields, as written."""
    page = (ROOT / "docs" / "live.md").read_text()
    table = page.partition(heading)[2].partition("\n\n")[2].partition("\n\n")[0]
    rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in table.splitlines()]
    return {tag: row[1] for row in rows[2:] for tag in re.findall(r"`(\w+)`", row[0])}


class TestG3Documented:
    @pytest.mark.parametrize(
        ("heading", "messages"),
        [("Messages from a viewer:", SAID), ("Messages from the server:", HEARD)],
    )
    def test_every_field_of_a_live_message_is_documented(
        self, heading: str, messages: dict[str, Any]
    ) -> None:
        """And no type is there that is not."""
        rows = documented(heading)
        assert set(rows) == set(messages) | {"stats"}
        for tag, message in messages.items():
            named = set(re.findall(r"`(\w+)`", rows[tag]))
            assert named == fields_of(message), tag

    def test_every_field_of_a_live_message_is_in_the_typescript_types(self) -> None:
        """Both halves of stillfresh.d.ts."""
        said, heard = (STATIC / "stillfresh.d.ts").read_text().split("// What the server tells")
        mine = typed(said)
        assert mine == {tag: fields_of(message) for tag, message in SAID.items()}
        theirs = typed(heard)
        del theirs["stats"]
        assert theirs == {
            tag: fields_of(message) for tag, message in HEARD.items() if tag not in {"ping", "pong"}
        }

    def test_every_error_and_close_code_is_in_docs_and_types(self) -> None:
        """What an error is about, and why a connection was closed."""
        page = (ROOT / "docs" / "live.md").read_text()
        types = (STATIC / "stillfresh.d.ts").read_text()
        for code in get_args(Code):
            assert f"| `{code}` |" in page
            assert f'| "{code}"' in types
        for close in Close:
            assert f"| {close.value} |" in page


class TestG5Shipped:
    def test_the_wheel_contains_the_browser_files(self, tmp_path: Path) -> None:
        """Everything that a browser loads is in the package."""
        command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
        subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=100)
        [wheel] = tmp_path.glob("*.whl")
        names = set(zipfile.ZipFile(wheel).namelist())
        for file in STATIC.iterdir():
            assert f"stillfresh/gateway/static/{file.name}" in names

    def test_the_browser_client_never_writes_html(self) -> None:
        """The client has no way to write any."""
        source = (STATIC / "stillfresh.js").read_text()
        for way in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("):
            assert way not in source


@pytest.mark.skipif(NODE is None, reason="this machine has no node")
class TestG5Ids:
    def test_the_browser_client_refuses_the_same_ids_as_the_server(self) -> None:
        """Every character there is, and the length of one that JavaScript counts as two."""
        source = (STATIC / "stillfresh.js").read_text()
        parts = r"const (?:LONGEST_ID|NOT_IN_IDS) = .*?\n|function isId\(.*?\n}\n"
        script = "".join(re.findall(parts, source, re.DOTALL)) + REFUSED
        told = subprocess.run(
            [NODE or ""], input=script.encode(), stdout=subprocess.PIPE, check=True, timeout=60
        )
        refused, allowed = msgspec.json.decode(told.stdout)
        halves = range(0xD800, 0xE000)  # which no JSON that the server reads can hold
        assert set(refused) - set(halves) == {
            point for point in range(0x110000) if not is_id(chr(point))
        }
        assert allowed == [is_id("😀" * length) for length in (0, 1, MAX_ID, MAX_ID + 1)]
