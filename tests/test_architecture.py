"""The design's promises about the code itself: imports go down, rules are pure, names are exact."""

import ast
import importlib
import re
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

SRC = Path(__file__).parent.parent / "src" / "stillfresh"
MODULES = sorted(SRC.rglob("*.py"))
CORE_DEPENDENCIES = {"apsw", "msgspec"}

ROOMS = [
    {"errors", "held_signals"},
    {
        "backoff",
        "bounded",
        "checks",
        "clock",
        "durations",
        "events",
        "file_locks",
        "forks",
        "logs",
        "nines",
        "repeated_lines",
        "tasks",
        "turns",
        "virtual_loop",
    },
    {"freshness"},
    {"ttl_cache"},
    {"sweeper"},
    {"stores"},
    {"engine"},
    {"sync"},
    {"http"},
    {"systems.coordinator", "systems.feed", "systems.waiting", "pages"},
    {"gateway.live", "gateway.server"},
    {"gateway"},
    {"integrations"},
    {"lab.plan", "lab.prove", "testing"},
    {"lab.replay"},
    {"demo"},
    {"cli"},
    {"__main__"},
]
"""From the bottom up: a part may import itself and what stands in a line above its own."""
CORE = {"errors", "held_signals", "freshness", "ttl_cache", "sweeper", "engine", "sync", *ROOMS[1]}
"""What needs no library but the core's two; of the stores, memory and SQLite need no other."""

PURE = re.compile(
    r"(^|/)(freshness|durations|checks|backoff|load_states|work|fence|rules\w*|lane|model|keys)\.py$"
    r"|^http/(answer_fields|fields|freshness|serving|sharing|validation)\.py$|^pages/(clients|routes|sharing)\.py$"
)
"""Modules that decide and do nothing else."""
RUN_CODE = {"_pickle", "cloudpickle", "dill", "jsonpickle", "marshal", "pickle", "shelve"}
IMPURE = {"apsw", "asyncio", "logging", "os", "random", "socket", "sqlite3", "threading", "time"}

ENGINE = "stillfresh.engine"
ENGINE_DOORS = {
    ENGINE,
    *(
        f"{ENGINE}.{name}"
        for name in ("explain", "keys", "loader", "recordings", "rules", "watcher")
    ),
}
"""The modules of the engine that other packages may import."""
SYNC_DOOR = f"{ENGINE}.thread_face"
"""`sync` is the same engine for threads: it alone may import this, and use entries in memory."""
ENGINE_PARTS = {"core", "cores", "faces", "memory", "recording_to", "runtime"}
"""Attributes of the engine's objects that nothing outside the engine may use."""
OWN_OWNERS = {"virtual_loop", "systems.coordinator", "testing"}
"""Where `owner` is a simulated process or a viewer, and not the cache behind a resource."""

NAMES_USED_TWICE = 0
DOORS = {
    "stores": 7,
    "engine": 8,
    "sync": 1,
    "systems.coordinator": 2,
    "systems.feed": 4,
    "systems.waiting": 5,
    "lab.plan": 1,
    "lab.prove": 1,
    "http": 4,
    "pages": 4,
    "gateway.live": 3,
    "gateway.server": 1,
    "gateway": 3,
    "integrations": 0,
    "demo": 0,
}


def name(path: Path) -> str:
    return str(path.relative_to(SRC))


def part(path: Path) -> str:
    """The part that a file belongs to: `engine`, `systems.feed`, …"""
    return part_of(".".join(path.relative_to(SRC).with_suffix("").parts))


def part_of(dotted: str) -> str:
    """The part that holds a module; a part is named by one word or by two."""
    names = dotted.split(".")
    two = ".".join(names[:2])
    return two if any(two in room for room in ROOMS) else names[0]


def level(which: str) -> int:
    return next(number for number, room in enumerate(ROOMS) if which in room)


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def nodes(path: Path) -> list[ast.AST]:
    return list(ast.walk(tree(path)))


def imports(path: Path) -> Iterator[str]:
    for node in nodes(path):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: write imports in full, not relative"
            yield node.module or ""


def own_imports(path: Path) -> set[str]:
    """The parts of stillfresh that a file imports."""
    modules = (module.partition(".") for module in imports(path))
    return {part_of(below) for top, _, below in modules if top == "stillfresh"}


def roots(path: Path) -> set[str]:
    """The first-level names of all that a file imports."""
    return {module.split(".")[0] for module in imports(path)}


class TestEveryModule:
    """Each test names the files that break its promise."""

    def test_every_module_has_a_docstring(self) -> None:
        """The first line of a file tells its reader why it is there."""
        assert [name(path) for path in MODULES if not ast.get_docstring(tree(path))] == []

    def test_imports_go_down_only(self) -> None:
        """Nothing imports what stands above it, a sibling system, or the flat root."""
        upward = [
            (name(path), other)
            for path in MODULES
            if (here := part(path)) not in {"__init__", "lab", "systems"}
            for other in own_imports(path) - {here}
            if level(other) >= level(here)
        ]
        assert upward == []

    def test_rule_modules_are_pure(self) -> None:
        """What decides has no clock, randomness, logging, SQL or `await` in it."""
        rules = [path for path in MODULES if PURE.search(name(path))]
        assert rules
        assert [name(path) for path in rules if roots(path) & IMPURE] == []
        waits = [
            name(path)
            for path in rules
            for node in nodes(path)
            if isinstance(node, ast.Await | ast.AsyncFunctionDef)
        ]
        assert waits == []

    def test_the_core_imports_two_libraries_only(self) -> None:
        """Everything else is an extra, imported only by the part that is named after it."""
        known = {"stillfresh", *CORE_DEPENDENCIES, *sys.stdlib_module_names}
        paths = [path for path in MODULES if part(path) in CORE]
        assert paths
        assert [(name(path), more) for path in paths if (more := roots(path) - known)] == []

    def test_no_module_imports_pickle(self) -> None:
        """E11: no pickle, nor what is made of it, anywhere."""
        assert [name(path) for path in MODULES if roots(path) & RUN_CODE] == []

    def test_every_name_in_an_all_exists(self) -> None:
        """A door has an `__all__`, and it names what exists; a private module needs none."""
        for path in MODULES:
            dotted = ".".join(path.relative_to(SRC.parent).with_suffix("").parts)
            module = importlib.import_module(dotted.removesuffix(".__init__"))
            shown = getattr(module, "__all__", ())
            assert [it for it in shown if not hasattr(module, it)] == [], name(path)
            assert path.name != "__init__.py" or hasattr(module, "__all__"), name(path)


@pytest.mark.parametrize(
    "package", ["stillfresh", "stillfresh.testing", "stillfresh.systems.waiting"]
)
def test_the_all_of_a_package_is_exact(package: str) -> None:
    """What a package shows and what it says it shows are the same."""
    module = importlib.import_module(package)
    for public in module.__all__:  # some are imported when they are first used
        getattr(module, public)
    shown = {
        public
        for public, value in vars(module).items()
        if not public.startswith("_") and not isinstance(value, type(ast))
    }
    assert set(module.__all__) == shown


def test_every_declared_dependency_is_used() -> None:
    """What is installed with stillfresh or an extra of it is named in the code."""
    project = tomllib.loads((SRC.parent.parent / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    needs = [*project["dependencies"], *(need for name in extras for need in extras[name])]
    packages = {re.split(r"(-api)?[\[><=]", need)[0] for need in needs} - {"stillfresh"}
    names = {package.replace("-", "_") for package in packages}
    texts = "\n".join(path.read_text() for path in MODULES)
    assert {name for name in names if not re.search(rf"\b{name}(\b|_)", texts)} == set()


def test_importing_stillfresh_does_no_work_and_needs_no_extra() -> None:
    """A fresh interpreter: no thread, no file, no optional dependency, only the core's two."""
    script = f"""
import sys, threading
class Refuse:
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        allowed = sys.stdlib_module_names | {CORE_DEPENDENCIES | {"stillfresh"}!r}
        if top not in allowed:
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Refuse())
import stillfresh, stillfresh.systems.coordinator, stillfresh.gateway.live, stillfresh.testing
for name in stillfresh.__all__:
    getattr(stillfresh, name)
import stillfresh.systems.waiting
assert threading.active_count() == 1
"""
    subprocess.run([sys.executable, "-W", "error", "-c", script], check=True, timeout=60)


def test_importing_stillfresh_imports_nothing_large() -> None:
    """E39: its names are imported when they are first used, and an unknown name is an error."""
    script = """
import sys, stillfresh
assert not {"asyncio", "msgspec", "stillfresh.engine"} & set(sys.modules)
assert "Cache" in dir(stillfresh)
from stillfresh import ConfigError
assert "stillfresh.engine" not in sys.modules
try:
    stillfresh.Cash
except AttributeError as error:
    assert "Cash" in str(error)
else:
    raise AssertionError
"""
    subprocess.run([sys.executable, "-W", "error", "-c", script], check=True, timeout=60)


def test_importing_stillfresh_needs_no_platform_module() -> None:
    """Windows has no `fcntl`: what the platform has is imported when a file is locked."""
    script = """
import asyncio, logging, subprocess, sys, tempfile
HIDDEN = {"fcntl", "grp", "msvcrt", "pwd", "resource", "termios"}
class Hide:
    def find_spec(self, name, path=None, target=None):
        if name in HIDDEN:
            raise ModuleNotFoundError(name)
for name in HIDDEN:
    sys.modules.pop(name, None)
sys.meta_path.insert(0, Hide())
import stillfresh, stillfresh.stores.memory, stillfresh.stores.sqlite, stillfresh.stores.redis
for name in stillfresh.__all__:
    getattr(stillfresh, name)
"""
    subprocess.run([sys.executable, "-W", "error", "-c", script], check=True, timeout=60)


def doors(package: str) -> set[str]:
    """The modules of a package that the rest of the code imports, by their dotted names."""
    outside = (path for path in MODULES if part(path) != "testing" and not is_in(path, package))
    modules = set[str]().union(*map(entered, outside))
    below = {module for module in modules if f"{module}.".startswith(f"stillfresh.{package}.")}
    inner = [name for name in DOORS if name.startswith(f"{package}.")]
    return {it for it in below if not any(f"{it}.".startswith(f"stillfresh.{n}.") for n in inner)}


def is_in(path: Path, package: str) -> bool:
    """Does a file belong to a part, or to a part inside of it?"""
    return f"{part(path)}.".startswith(f"{package}.")


@cache
def entered(path: Path) -> set[str]:
    """The modules from which a file takes something."""
    found = set()
    for node in nodes(path):
        if isinstance(node, ast.ImportFrom) and node.module:
            below = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {it for it in below if is_module(it)} or {node.module}
    return found


@cache
def is_module(dotted: str) -> bool:
    path = SRC.parent.joinpath(*dotted.split("."))
    return path.with_suffix(".py").exists() or (path / "__init__.py").exists()


def engine_parts_used(source: ast.Module, here: str) -> list[str]:
    """The private parts of the engine that a module of the part `here` uses, by line."""
    is_sync = here == "sync"
    modules = ENGINE_DOORS | {SYNC_DOOR} if is_sync else ENGINE_DOORS
    names = ENGINE_PARTS if is_sync else ENGINE_PARTS | {"entry_by_key"}
    names = names if here in OWN_OWNERS else names | {"owner"}
    used: list[tuple[int, str]] = []
    for node in ast.walk(source):
        match node:
            case ast.Import(names=aliases):
                imported = [alias.name for alias in aliases]
            case ast.ImportFrom(module=str(module), names=aliases):
                below = [f"{module}.{alias.name}" for alias in aliases]
                imported = [module, *filter(is_module, below)]
            case ast.Attribute(attr=name) if name in names:
                used.append((node.lineno, f".{name}"))
                continue
            case ast.Call(func=ast.Name(id=function), args=[_, ast.Constant(value=name), *_]) if (
                function in {"getattr", "setattr", "hasattr"} and name in names
            ):
                used.append((node.lineno, f".{name}"))
                continue
            case _:
                continue
        private = [it for it in imported if f"{it}.".startswith(f"{ENGINE}.") and it not in modules]
        used += [(node.lineno, module) for module in private]
    return [f"{line}: {what}" for line, what in sorted(used)]


class TestTheEnginesPrivateParts:
    """Other packages use the public methods of a cache and of its resources."""

    def test_nothing_outside_the_engine_uses_them(self) -> None:
        """They may change without a look at pages, gateway, systems, integrations or tools."""
        outside = [path for path in MODULES if part(path) != "engine"]
        assert len(outside) > 100
        found = {name(path): engine_parts_used(tree(path), part(path)) for path in outside}
        assert {path: used for path, used in found.items() if used} == {}

    @pytest.mark.parametrize(
        ("line", "used"),
        [
            ("kind = resource.core.spec.kind", ".core"),
            ("core = cache.cores['price']", ".cores"),
            ("entry = front.memory.entries.get(key)", ".memory"),
            ("cache = front.owner", ".owner"),
            ("store = (await cache.runtime()).store", ".runtime"),
            ("entry = resource.entry_by_key.get(key)", ".entry_by_key"),
            ("core = getattr(resource, 'core')", ".core"),
            ("import stillfresh.engine.core", "stillfresh.engine.core"),
            ("from stillfresh.engine import core", "stillfresh.engine.core"),
            ("from stillfresh.engine.memory import Memory", "stillfresh.engine.memory"),
            ("from stillfresh.engine.thread_face import ThreadFace", SYNC_DOOR),
        ],
    )
    def test_a_planted_use_is_found(self, line: str, used: str) -> None:
        """In any package, wherever it stands in a file."""
        source = ast.parse(f"async def plant():\n    {line}\n")
        assert engine_parts_used(source, "pages") == [f"2: {used}"]

    @pytest.mark.parametrize(
        "line",
        [
            "from stillfresh.engine import Cache, Resource",
            "from stillfresh.engine.rules import may_retry",
            "answer = await prices.get_stored(key)",
        ],
    )
    def test_public_names_may_be_used(self, line: str) -> None:
        """The package itself, and its few public modules."""
        assert engine_parts_used(ast.parse(f"async def use():\n    {line}\n"), "pages") == []

    def test_only_sync_may_use_the_door_for_threads(self) -> None:
        """It is the same engine for code without an event loop."""
        source = ast.parse(f"from {SYNC_DOOR} import ThreadFace")
        assert engine_parts_used(source, "sync") == []
        assert engine_parts_used(source, "gateway") == [f"1: {SYNC_DOOR}"]


def names_used_twice() -> set[str]:
    names = Counter(
        node.name.lstrip("_")
        for path in MODULES
        for node in nodes(path)
        if isinstance(node, ast.ClassDef)
    )
    return {found for found, count in names.items() if count > 1}


class TestBudgets:
    """What a reader must know: names that mean one thing, and packages with few doors.

    To see all numbers: `pytest tests/test_architecture.py -k Budgets -rP`.
    """

    def test_class_names_are_used_once(self) -> None:
        """A name that means two things is explained twice."""
        twice = sorted(names_used_twice())
        print(f"{len(twice)} class names are used twice: {', '.join(twice)}")
        assert len(twice) <= NAMES_USED_TWICE

    @pytest.mark.parametrize("package", DOORS)
    def test_a_package_has_few_doors(self, package: str) -> None:
        """It is entered through its `__init__` and a few public modules; the rest is its own."""
        found = sorted(doors(package))
        print(f"{package} has {len(found)} doors: {', '.join(found)}")
        assert len(found) <= DOORS[package]
