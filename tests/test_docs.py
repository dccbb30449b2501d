"""The docs are true: every block runs, every default and every rule's test is as written."""

import ast
import asyncio
import importlib
import importlib.util
import inspect
import re
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, is_typeddict
from xml.etree import ElementTree as ET

import pytest

import stillfresh
import stillfresh.demo
import stillfresh.gateway
import stillfresh.gateway.live
import stillfresh.integrations.diskcache
import stillfresh.integrations.fastapi
import stillfresh.integrations.flask
import stillfresh.integrations.httpx
import stillfresh.integrations.postgres
import stillfresh.integrations.requests
import stillfresh.pages
import stillfresh.stores.dynamodb
import stillfresh.systems.coordinator
import stillfresh.systems.feed
import stillfresh.systems.feed.http
import stillfresh.testing
from game_service import Games, Player
from stillfresh.integrations.http_cache.responses import ResponseCache
from stillfresh.systems.waiting import WaitingCache
from stillfresh.systems.waiting.client import WaitingClient
from stillfresh.testing import ManualClock
from tests.simulation.scenarios import SCENARIOS

ROOT = Path(__file__).parent.parent
PACKAGES = (
    stillfresh,
    stillfresh.integrations.diskcache,
    stillfresh.integrations.fastapi,
    stillfresh.integrations.flask,
    stillfresh.integrations.httpx,
    stillfresh.integrations.postgres,
    stillfresh.integrations.requests,
    stillfresh.systems.coordinator,
    stillfresh.demo,
    stillfresh.systems.feed,
    stillfresh.systems.feed.http,
    stillfresh.pages,
    stillfresh.gateway.live,
    stillfresh.stores.dynamodb,
    stillfresh.testing,
    stillfresh.gateway,
)
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]


def blocks(language: str) -> Iterator[Any]:
    for page in PAGES:
        if language == "python" and page.parent.name == "guides":
            continue  # one program on a page: tests/test_guides.py
        text = page.read_text()
        for found in re.finditer(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
            line = text[: found.start()].count("\n") + 2
            yield pytest.param(found[1], id=f"{page.relative_to(ROOT)}:{line}")


def cells(page: str) -> Iterator[list[str]]:
    for line in (ROOT / "docs" / page).read_text().splitlines():
        if line.startswith("| ") and not line.startswith("| ---"):
            yield [cell.strip() for cell in line.strip("|").split(" | ")]


@pytest.mark.parametrize("source", list(blocks("python")))
def test_every_python_block_of_the_docs_runs(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copied out of the page into a file and run, just as it stands."""
    monkeypatch.chdir(tmp_path)
    exec(compile(source, "block", "exec"), {"__name__": "block"})  # noqa: S102 (our own pages)


def test_every_make_target_in_the_docs_exists() -> None:
    """No page names a target that the Makefile has not."""
    targets = re.findall(r"^([\w-]+):.*## ", (ROOT / "Makefile").read_text(), re.MULTILINE)
    named = {
        target: block.id
        for block in blocks("sh")
        for target in re.findall(r"^make ([\w-]+)", block.values[0], re.MULTILINE)
    }
    assert len(named) > 3
    assert {target: where for target, where in named.items() if target not in targets} == {}


def test_every_link_of_the_docs_leads_somewhere() -> None:
    """Links between pages name files, and headings in them, that are there."""
    links = [(page, *link) for page in PAGES for link in links_of(page)]
    assert len(links) > len(PAGES)
    for page, link, heading in links:
        target = page.parent / link if link else page
        assert target.exists(), f"{page.name}: {link}"
        assert not heading or heading in headings(target), f"{page.name}: {link}#{heading}"


def links_of(page: Path) -> list[tuple[str, str]]:
    """Files and headings, both as written."""
    prose = re.sub(r"^```.*?^```$|`[^`\n]*`", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    return re.findall(r"\]\(([^)#:]*)#?([^):]*)\)", prose)


@cache
def headings(page: Path) -> set[str]:
    """As a link names them: small letters, hyphens for spaces, no marks."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


def test_every_page_of_the_docs_is_in_the_index() -> None:
    """A reader who starts at the index finds every page; the site's navigation is made from it."""
    index = (ROOT / "docs" / "index.md").read_text()
    linked = {(ROOT / "docs" / it).resolve() for it in re.findall(r"\]\(([^)#:]+)", index)}
    single = {page for page in PAGES if page.parent.name != "decisions"}
    assert single - linked == {ROOT / "docs" / "index.md"}


def test_every_decision_is_in_the_index_of_decisions() -> None:
    """The index lists every record once, under the title that the record has."""
    folder = ROOT / "docs" / "decisions"
    rows = re.findall(
        r"^\| \[(\d{4})\]\(([^)]+)\) \| (.+) \|$", (folder / "index.md").read_text(), re.MULTILINE
    )
    records = {it.name: it.read_text().splitlines()[0] for it in folder.glob("0*.md")}
    assert {file: f"# {number}: {title}" for number, file, title in rows} == records
    assert all(file.startswith(f"{number}-") for number, file, _ in rows)


def test_every_public_name_is_in_the_reference() -> None:
    """Whatever the `__all__` of a module names is on a page of docs/reference, once."""
    pages = "".join(page.read_text() for page in PAGES if page.parent.name == "reference")
    listed = [named(path) for path in re.findall(r"^::: (\S+)$", pages, re.MULTILINE)]
    assert len(listed) == len(set(listed))
    missing = {path for path in public_names() if named(path) not in listed}
    assert missing == set(), "add `::: name` to a page of docs/reference"


def public_names() -> Iterator[str]:
    for path in (ROOT / "src").rglob("*.py"):
        if "__all__" in path.read_text():
            dotted = ".".join(path.relative_to(ROOT / "src").with_suffix("").parts)
            module = importlib.import_module(dotted.removesuffix(".__init__"))
            yield from (f"{module.__name__}.{name}" for name in module.__all__)


def named(path: str) -> tuple[str, int]:
    """The same for all paths that lead to one thing."""
    module, _, name = path.rpartition(".")
    return name, id(getattr(importlib.import_module(module), name))


def described() -> Iterator[tuple[tuple[str, str], str]]:
    """(class or method, option) and default, as docs/defaults.md has them."""
    for row in cells("defaults.md"):
        options, default, places = (re.findall(r"`(.*?)`", cell) for cell in row[:3])
        if len(row) == 4 and options:
            yield from (((it, option), default[0]) for option in options for it in places)


def _is_written(member: object) -> bool:
    return inspect.isfunction(member) or inspect.ismethod(member)


def public_callables() -> Iterator[tuple[str, Any]]:
    for package in PACKAGES:
        for name in package.__all__:
            yield from callables_of(name, getattr(package, name))
    for value in (WaitingCache, WaitingClient, Games, Player, ResponseCache):
        yield from callables_of(value.__name__, value)


def callables_of(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if inspect.isfunction(value):
        yield name, value
    if not inspect.isclass(value) or is_typeddict(value) or value.__init__ is object.__init__:
        return
    if issubclass(value, Exception | str):
        return
    yield name, value
    for method, function in inspect.getmembers(value, _is_written):
        if not method.startswith("_"):
            yield f"{name}.{method}", function


def test_every_public_name_is_in_the_glossary() -> None:
    """A class that `stillfresh` offers is a term: it is explained in one place."""
    text = (ROOT / "docs" / "glossary.md").read_text()
    names = {it for it in stillfresh.__all__ if it[0].isupper() and not it.isupper()}
    assert names <= set(re.findall(r"`(\w+)`", text))


def test_every_default_is_documented() -> None:
    """A default that is a choice is in docs/defaults.md, once; and every default there is true."""
    known = {time.monotonic: "time.monotonic", time.time: "time.time"}
    parameters = {
        (where, it.name): it.default
        for where, function in public_callables()
        for it in inspect.signature(function).parameters.values()
        if it.default is not it.empty
    }
    values = {
        it: known[default] if default in known else repr(default)
        for it, default in parameters.items()
    }
    rows = list(described())
    assert len(rows) == len(dict(rows)), "an option of one function has one row"
    assert dict(rows).items() <= values.items()
    assert {it for it, default in parameters.items() if is_choice(default)} <= dict(rows).keys()


def is_choice(default: object) -> bool:
    """A number or a text; not what only says that an argument was not given."""
    is_number = isinstance(default, int | float) and not isinstance(default, bool)
    return is_number or (isinstance(default, str | tuple) and bool(default))


def constant_of(module: str, name: str) -> object:
    """As the source has it: a fixture may have changed it for its tests."""
    source = importlib.util.find_spec(module)
    assert source is not None
    assert source.origin is not None
    found = re.search(rf"^{name}: Final = (.*)$", Path(source.origin).read_text(), re.MULTILINE)
    assert found is not None, (module, name)
    return eval(found[1], {**vars(importlib.import_module(module))})  # noqa: S307 (our own source)


def test_constants_quoted_in_the_docs_have_these_values() -> None:
    """The constants that docs/defaults.md quotes have the values that it says."""
    rows = [row for row in cells("defaults.md") if len(row) == 3 and row[2] != "constant"]
    assert len(rows) > 20
    for _, value, constant in rows:
        module, _, name = constant.strip("`").rpartition(".")
        actual = constant_of(f"stillfresh.{module}", name)
        assert actual == float(value.split()[0].replace(",", "")), constant


class TestSeeds:
    """docs/seeds.md: every rule, with the tests that name it."""

    @pytest.fixture
    def seeds(self) -> Any:
        return loaded(ROOT / "scripts" / "seeds.py")

    def test_the_page_of_rules_lists_the_existing_tests(self, seeds: Any) -> None:
        """What `python scripts/seeds.py` would write is what the page shows."""
        page = seeds.PAGE.read_text()
        tests, everyday = seeds.collected()
        assert seeds.mistakes(page, tests, everyday) == []
        assert seeds.written(page, tests) == page, "run python scripts/seeds.py"

    def test_every_rule_of_a_contract_has_one_row(self, seeds: Any) -> None:
        """All numbers up to the last, in order; there is no I30."""
        last = {"E": 41, "S": 15, "C": 19, "F": 19, "I": 37, "M": 13, "W": 16, "G": 24, "T": 16}
        last["D"] = 7
        rules = [f"{letter}{n + 1}" for letter, count in last.items() for n in range(count)]
        rules.remove("I30")
        assert [row[1] for row in seeds.RULE.finditer(seeds.PAGE.read_text())] == rules

    @pytest.mark.parametrize(
        ("source", "named"),
        [
            ('class TestE1Put:\n    """S5: away."""', {"E1": ["TestE1Put"], "S5": ["TestE1Put"]}),
            ("async def test_s3_is_as_memory(): ...", {"S3": ["test_s3_is_as_memory"]}),
            (
                'class TestE1:\n    def test(self):\n        """E1, E2: x."""',
                {"E1": ["TestE1"], "E2": ["TestE1::test"]},
            ),
            ('"""F2-F4, F9: all."""', {"F2": [], "F3": [], "F4": [], "F9": []}),
            ('"""F2: all."""\nclass TestF2: ...', {"F2": ["TestF2"]}),
            ('def seaweed():\n    """S3 on real storage: slow."""', {}),
        ],
    )
    def test_the_rules_that_a_test_names_are_found(
        self, seeds: Any, source: str, named: dict[str, list[str]]
    ) -> None:
        """In its name, in the first words of its docstring, or in those of its module."""
        assert seeds.named_in(ast.parse(source)) == named

    def test_an_unknown_rule_and_a_lost_test_are_reported(self, seeds: Any) -> None:
        """A rule that is not built yet may have no test; one that had one may not lose it."""
        page = "| E1 | a | [t](../tests/t.py) |\n| E2 | b | not built yet |\n"
        assert seeds.mistakes(page, {"E1": {}, "E2": {}}, {"E1", "E2"}) == []
        [unknown, lost] = seeds.mistakes(page, {"E11": {"tests/test_a.py": []}}, {"E11"})
        assert "E11 is no rule" in unknown
        assert "tests/test_a.py" in unknown
        assert "E1 had tests" in lost

    @pytest.mark.parametrize(
        "source",
        [
            '"""E1: slow."""\npytestmark = pytest.mark.proof\ndef test_a(): ...',
            "@pytest.mark.proof\nclass TestE1Put:\n    def test_a(self): ...",
            "class TestE1Put:\n    @pytest.mark.proof\n    def test_a(self): ...",
            '@pytest.mark.proof\ndef test_a():\n    """E1: slow."""',
        ],
    )
    def test_t13_a_rule_that_only_the_proof_tests_is_told(self, seeds: Any, source: str) -> None:
        """`make test` has a test of every rule."""
        module = ast.parse(source)
        assert list(seeds.named_in(module)) == ["E1"]
        assert seeds.named_in(seeds.without_proofs(module)) == {}
        page = "| E1 | a | [t](../tests/t.py) |\n"
        [slow] = seeds.mistakes(page, {"E1": {"tests/test_a.py": []}}, set())
        assert "E1 is tested in make proof only: tests/test_a.py" in slow

    def test_t13_a_class_with_one_quick_test_is_enough(self, seeds: Any) -> None:
        tests = "@pytest.mark.proof\n    def test_a(self): ...\n    def test_b(self): ..."
        everyday = seeds.without_proofs(ast.parse(f"class TestE1Put:\n    {tests}"))
        assert seeds.named_in(everyday) == {"E1": ["TestE1Put"]}


def test_every_test_that_the_http_page_names_exists() -> None:
    """docs/http.md: a row names tests that exist, or says why there is none."""
    classes = set(re.findall(r"`(Test\w+)\.", (ROOT / "docs" / "http.md").read_text()))
    texts = [path.read_text() for path in (ROOT / "tests").rglob("test_*.py")]
    known = {
        f"{node.name}.{step.name}"
        for text in texts
        if classes & set(re.findall(r"^class (\w+)", text, re.MULTILINE))
        for node in ast.parse(text).body
        if isinstance(node, ast.ClassDef)
        for step in node.body
        if isinstance(step, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    rows = [row for row in cells("http.md") if len(row) == 3 and row[0][:1] in "§R59"]
    assert len(rows) > 50
    for row in rows:
        named = re.findall(r"`(Test\w+\.\w+)`", row[2])
        assert named or row[2].startswith("Not "), row
        assert set(named) <= known, row


def test_diagrams_are_drawn_from_the_code() -> None:
    """What `make diagrams` would write is what the page shows."""
    diagrams = loaded(ROOT / "scripts" / "diagrams.py")
    pages = [page.read_text() for page in diagrams.PAGES]
    assert [diagrams.drawn(page) for page in pages] == pages
    expected = ("due --> queued", "loading --> publishing", "engine --> stores")
    assert [it in page for it, page in zip(expected, pages, strict=True)] == [True, True, True]


def test_every_scenario_of_the_simulator_has_a_row_that_says_what_runs() -> None:
    """T1: in docs/reliability.md."""
    page = (ROOT / "docs" / "reliability.md").read_text()
    described = page.partition("## What is simulated")[2].partition("## One run")[0]
    rows = re.findall(r"^\| ([a-z ]+) \|", described, re.MULTILINE)
    assert sorted(rows) == sorted(["scenario", *(name.replace("_", " ") for name in SCENARIOS)])


def test_the_figures_of_readme_and_comparison_were_measured() -> None:
    """T8: what `make diagrams` would write is what the pages show."""
    figures = loaded(ROOT / "scripts" / "figures.py")
    pages = figures.README.read_text(), figures.COMPARISON.read_text()
    measured = figures.MEASURED.read_text()
    rules = figures.RULES.read_text()
    assert figures.drawn(*pages, measured, rules) == pages
    for pattern in figures.sentences(measured, rules):
        assert len(re.findall(pattern, pages[0])) == 1, pattern
    assert "time of a hit" in pages[1]
    assert "where others are faster" in pages[1]


def test_the_pictures_of_the_comparison_show_the_measured_figures() -> None:
    """T8: what `make diagrams` would draw is what the page shows; each bar has its figure."""
    figures = loaded(ROOT / "scripts" / "figures.py")
    pictures = figures.pictures(figures.MEASURED.read_text())
    assert {path.name: path.read_text() for path in figures.PICTURES.iterdir()} == pictures
    page = figures.COMPARISON.read_text()
    for name, picture in pictures.items():
        assert f"](images/benchmarks/{name})" in page
        bars = figures.DRAWN[name.removesuffix(".svg")]
        drawn = ET.fromstring(picture)  # noqa: S314 (our own text)
        lengths = [float(it.attrib["width"]) for it in drawn.iter() if it.tag.endswith("rect")]
        assert len(lengths) == len(bars.ours | bars.theirs)
        assert lengths == sorted(lengths)


def loaded(path: Path) -> Any:
    """A script, as a module."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_viewport_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    """C13: what `make examples` shows: a fraction of the requests that polling makes."""
    asyncio.run(the_example("viewport").scroll(minutes=10))
    said = capsys.readouterr().out
    polled, made = (
        int(found.replace(",", "")) for found in re.findall(r"([\d,]+) requests", said)[::2]
    )
    assert "requests made" in said
    assert polled == 10 * 60 // 5 * 12
    assert made < polled / 20


def the_example(name: str) -> Any:
    return loaded(ROOT / "examples" / f"{name}.py")


def test_the_approvals_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    """What `make examples` shows, on a manual clock: approved in time, too late, once of eight."""
    example = the_example("approvals")
    clock = ManualClock()

    async def sleep(seconds: float) -> None:
        if seconds == 1:  # the sweeper's pause, which the script's own do not wait for
            await asyncio.Event().wait()
        clock.advance(seconds)

    asyncio.run(asyncio.wait_for(example.requests(clock, sleep), 30))
    asyncio.run(example.million(5_000))
    said = capsys.readouterr().out
    for line in ("r1 → approved: open the gate", "r1 again → nothing to approve"):
        assert line in said
    assert "r2 → nothing to approve" in said
    assert "at once: 1 approval" in said
    assert "swept 5,000" in said


def test_the_feed_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    """What `make examples` shows of a feed: cold, again, stale, without a network, commented on."""
    example = the_example("feed")
    asyncio.run(asyncio.wait_for(example.main(sleep=lambda _: asyncio.sleep(0)), 30))
    said = capsys.readouterr().out.splitlines()
    opened, counted, again, stale, event, updated, gone, why, comment, published = said
    assert counted == "  7 topics, 7 lookups side by side, not in a row"
    assert event == "  FeedCacheUpdated(cache_key='index:all:7', changed=True)"
    shown = [line.split("edition ")[1][:8] for line in (opened, again, stale, updated, gone)]
    assert shown == ["1  fresh", "1  fresh", "1  stale", "2  fresh", "2  stale"]
    assert "ConnectionError: the network is down" in why
    assert comment == "a comment: 'Well said!' is shown, published: False"
    assert published == "  and a lookup later, published: True"
