"""D7: the modules for browsers as an npm package, whose types TypeScript finds by itself.

The programs are those of the docs. The compiler and React's types come from npm.
"""

import json
import re
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from tests.kit.cli import call
from tests.kit.processes import ROOT

BLOCK = re.compile(r"^```(tsx?|js|text)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NPM = Path(sys.prefix) / "servers" / "node_modules"
NODE = shutil.which("node")
COMPILER = NPM / "typescript" / "bin" / "tsc"
MESSAGES = 'import "stillfresh";\n'
"""Makes a file a module, as in a program that extends `Notices`."""

needs_compiler = pytest.mark.skipif(
    NODE is None or not COMPILER.exists(), reason="this machine has no TypeScript"
)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A page's sources, with the packages that they import."""
    packages = tmp_path / "node_modules"
    packages.mkdir()
    done = call("browser", str(packages / "stillfresh"))
    assert done.exit_code == 0, done.output
    if (NPM / "@types").exists():
        (packages / "@types").symlink_to(NPM / "@types")
        (packages / "csstype").symlink_to(NPM / "csstype")
    (tmp_path / "package.json").write_text('{"type": "module"}')
    return tmp_path


def programs(page: str, *languages: str) -> dict[str, str]:
    """The blocks of a page that are files, by their names."""
    text = (ROOT / "docs" / page).read_text()
    found = [block[2] for block in BLOCK.finditer(text) if block[1] in languages]
    return {source.split("\n")[0].removeprefix("// "): source for source in found}


def mistakes(project: Path, resolution: str = "bundler") -> str:
    """What the compiler says of all sources, without any `paths`."""
    module = "nodenext" if resolution == "nodenext" else "esnext"
    options: dict[str, Any] = {
        "strict": True,
        "noEmit": True,
        "target": "es2022",
        "module": module,
        "moduleResolution": resolution,
        "jsx": "react-jsx",
        "lib": ["es2023", "dom", "dom.iterable"],
        "types": [],
    }
    settings = {"compilerOptions": options, "include": ["*.ts", "*.tsx"]}
    (project / "tsconfig.json").write_text(json.dumps(settings))
    command = [NODE or "", str(COMPILER), "--project", str(project), "--pretty", "false"]
    done = subprocess.run(
        command, cwd=project, capture_output=True, text=True, check=False, timeout=100
    )
    assert (done.returncode == 0) == (done.stdout == ""), done.stderr
    return done.stdout


@needs_compiler
class TestD7Types:
    @pytest.mark.parametrize("resolution", ["bundler", "nodenext"])
    def test_the_hooks_of_the_docs_have_the_right_types(
        self, project: Path, resolution: str
    ) -> None:
        """React's hooks for items on screen and for the next game."""
        files = programs("browser.md", "ts", "tsx")
        assert set(files) == {"use-fresh.tsx", "waiting.ts", "use-next-game.tsx"}
        for name, source in files.items():
            (project / name).write_text(source)
        assert mistakes(project, resolution) == ""

    def test_an_application_adds_its_own_notices(self, project: Path) -> None:
        """By the declaration in docs/live.md."""
        [declaration] = programs("live.md", "ts").values()
        use = """
        import { connect } from "stillfresh";
        connect("/v1/live").on("order_shipped", (notice) => notice.carrier.toUpperCase());
        """
        (project / "notices.ts").write_text(MESSAGES + declaration)
        (project / "use.ts").write_text(use)
        assert mistakes(project) == ""

    def test_wrong_programs_are_refused(self, project: Path) -> None:
        """So the types are found: nothing is `any`."""
        lines = [
            'import { watch } from "stillfresh";',
            'import { WaitingCache, navigation } from "stillfresh/waiting";',
            'watch("#price", "price", "sku-1");',
            'watch<number>(document.body, "price", "sku-1", (view) => view.value.toFixed());',
            "new WaitingCache(async () => [null]);",
            "const waiting = new WaitingCache(async () => [1, 'a']);",
            'waiting.opened("chess", "yes");',
            'waiting.state.pool.push("go");',
            'waiting.hear({ type: "your_turn" });',
            "navigation(waiting.state).proof === 'guessed';",
        ]
        (project / "wrong.ts").write_text("\n".join(lines))
        said = mistakes(project)
        wrong = {int(line) for line in re.findall(r"wrong\.ts\((\d+),", said)}
        assert wrong == {3, 4, 5, 7, 8, 9, 10}, said

    def test_a_file_without_npm_has_its_types_beside_it(self, project: Path) -> None:
        """Copied into the sources, and imported by its path."""
        shutil.copytree(project / "node_modules" / "stillfresh", project / "vendor")
        shutil.rmtree(project / "node_modules")
        source = 'import { connect } from "./vendor/stillfresh.js";\nconnect(1);'
        (project / "page.ts").write_text(source)
        said = mistakes(project)
        assert "page.ts(2,9)" in said
        assert said.count("error") == 1


class TestD7Package:
    @pytest.mark.skipif(NODE is None, reason="this machine has no node")
    def test_the_program_of_the_docs_runs_in_node(self, project: Path) -> None:
        """And prints what the page shows."""
        [(name, source)] = programs("browser.md", "js").items()
        [shown] = programs("browser.md", "text").values()
        (project / name).write_text(source)
        done = subprocess.run(
            [NODE or "", name],
            cwd=project,
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        assert (done.stdout, done.stderr) == (shown, "")

    @pytest.mark.skipif(NODE is None, reason="this machine has no node")
    def test_the_client_can_be_imported_where_there_is_no_page(self, project: Path) -> None:
        """As by a server that renders React: nothing happens."""
        script = 'import { connect } from "stillfresh"; console.log(typeof connect);'
        done = subprocess.run(
            [NODE or "", "--input-type=module", "--eval", script],
            cwd=project,
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        assert (done.stdout, done.stderr) == ("function\n", "")

    def test_the_package_names_existing_files_and_its_version(self, project: Path) -> None:
        """Written twice, the files are replaced."""
        folder = project / "node_modules" / "stillfresh"
        (folder / "stillfresh.js").write_text("old")
        assert call("browser", str(folder)).exit_code == 0
        package = json.loads((folder / "package.json").read_text())
        assert package["version"] == version("stillfresh")
        assert set(package["exports"]) == {".", "./waiting"}
        for files in package["exports"].values():
            for file in files.values():
                source = ROOT / "src" / "stillfresh" / "gateway" / "static" / file
                assert (folder / file).read_bytes() == source.read_bytes()
