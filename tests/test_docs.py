"""The docs are true: every block runs, every default and every rule's test is as written."""

import asyncio
import importlib.util
import inspect
import random
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import stillfresh
import stillfresh.coordinator
import stillfresh.demo
import stillfresh.feed
import stillfresh.feed.http
import stillfresh.isr
import stillfresh.live
import stillfresh.stores.dynamodb
import stillfresh.testing
import stillfresh.web
from stillfresh.stores.dynamodb.store import random_uuid
from stillfresh.testing import ManualClock
from stillfresh.waiting import WaitingCache
from stillfresh.waiting.backend import Games, Player
from stillfresh.waiting.client import WaitingClient
from stillfresh.waiting.model import LIMIT
from stillfresh.waiting.rules import MEMORY
from stillfresh.waiting.rules_refetch import LONGEST_PAUSE, PAUSE

ROOT = Path(__file__).parent.parent
PACKAGES = (
    stillfresh,
    stillfresh.coordinator,
    stillfresh.demo,
    stillfresh.feed,
    stillfresh.feed.http,
    stillfresh.isr,
    stillfresh.live,
    stillfresh.stores.dynamodb,
    stillfresh.testing,
    stillfresh.web,
)
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]


def blocks(language: str) -> Iterator[Any]:
    for page in PAGES:
        text = page.read_text()
        for found in re.finditer(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
            line = text[: found.start()].count("\n") + 2
            yield pytest.param(found[1], id=f"{page.relative_to(ROOT)}:{line}")


def cells(page: str) -> Iterator[list[str]]:
    for line in (ROOT / "docs" / page).read_text().splitlines():
        if line.startswith("| ") and not line.startswith("| ---"):
            yield [cell.strip() for cell in line.strip("|").split(" | ")]


@pytest.mark.parametrize("source", list(blocks("python")))
def test_every_python_block_runs(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copied out of the page into a file and run, just as it stands."""
    monkeypatch.chdir(tmp_path)
    exec(compile(source, "block", "exec"), {"__name__": "block"})  # noqa: S102 (our own pages)


@pytest.mark.parametrize("source", list(blocks("sh")))
def test_every_make_target_exists(source: str) -> None:
    """No page names a target that the Makefile has not."""
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"^make (\w+)", source, re.MULTILINE):
        assert re.search(rf"^{target}:.*## ", makefile, re.MULTILINE), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_somewhere(page: Path) -> None:
    """Links between pages name files, and headings in them, that are there."""
    prose = re.sub(r"^```.*?^```$|`[^`\n]*`", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    for link, heading in re.findall(r"\]\(([^)#:]*)#?([^):]*)\)", prose):
        target = page.parent / link if link else page
        assert target.exists(), link
        assert not heading or heading in headings(target), f"{link}#{heading}"


def headings(page: Path) -> set[str]:
    """As a link names them: small letters, hyphens for spaces, no marks."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


def test_every_page_is_in_the_index() -> None:
    """A reader who starts at the index finds every page."""
    index = (ROOT / "docs" / "index.md").read_text()
    for page in (ROOT / "docs").glob("*.md"):
        assert page.name == "index.md" or f"({page.name})" in index, page.name


def described() -> dict[tuple[str, str], str]:
    """(class or method, option) -> default, as docs/defaults.md has them."""
    rows = [row for row in cells("defaults.md") if row[0] != "where"]
    return {(row[0].strip("`"), row[1].strip("`")): row[2].strip("`") for row in rows}


def _is_written(member: object) -> bool:
    return inspect.isfunction(member) or inspect.ismethod(member)


def public_callables() -> Iterator[tuple[str, Any]]:
    for package in PACKAGES:
        for name in package.__all__:
            yield from callables_of(name, getattr(package, name))
    for value in (WaitingCache, WaitingClient, Games, Player):
        yield from callables_of(value.__name__, value)


def callables_of(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if inspect.isfunction(value):
        yield name, value
    if not inspect.isclass(value) or value.__init__ is object.__init__:
        return
    if issubclass(value, Exception | str):
        return
    yield name, value
    for method, function in inspect.getmembers(value, _is_written):
        if not method.startswith("_"):
            yield f"{name}.{method}", function


def test_every_default_is_documented() -> None:
    """docs/defaults.md lists each optional argument of the public API, with its value."""
    known = {
        time.monotonic: "time.monotonic",
        time.time: "time.time",
        asyncio.sleep: "asyncio.sleep",
        random.random: "random.random",
        random_uuid: "random_uuid",
        print: "print",
    }
    actual = {
        (where, parameter.name): known.get(parameter.default, repr(parameter.default))
        if callable(parameter.default)
        else repr(parameter.default)
        for where, function in public_callables()
        for parameter in inspect.signature(function).parameters.values()
        if parameter.default is not parameter.empty
    }
    assert actual == described()


def test_fixed_numbers_are_as_written() -> None:
    """The constants that docs/defaults.md quotes."""
    assert (stillfresh.freshness.MAX_SKEW, stillfresh.ttl_cache.DROPPED_PER_INSERT) == (5, 2)
    assert stillfresh.ttl_cache.SLICE == 1_000
    assert (LIMIT, MEMORY, PAUSE, LONGEST_PAUSE) == (5, 64, 0.5, 30)


def rules() -> Iterator[Any]:
    for row in cells("seeds.md"):
        if re.fullmatch(r"[A-Z]\d+", row[0]):
            yield pytest.param(row[0], row[2], id=row[0])


@pytest.mark.parametrize(("rule", "tests"), list(rules()))
def test_every_rule_has_its_tests(rule: str, tests: str) -> None:
    """Each test named in docs/seeds.md exists, and its file speaks of the rule."""
    named = re.findall(r"`(tests/[\w/.]+)(?:::(\w+))?`", tests)
    assert named
    for file, test in named:
        source = (ROOT / file).read_text()
        assert re.search(rf"(\b|Test){rule}(?!\d)", source), f"{file} does not mention {rule}"
        assert not test or re.search(rf"^(async )?(class|def) {test}\b", source, re.MULTILINE), test


def test_every_rule_has_one_row() -> None:
    """A rule that is listed twice would be proved by the tests of one row only."""
    listed = [parameters.id for parameters in rules()]
    assert sorted(listed) == sorted(set(listed))


def named_after_a_rule() -> Iterator[Any]:
    """(rule, test) of every class and function whose name says which rule it proves."""
    defined = re.compile(
        r"^(?:async )?(?:class|def) ((?:Test|test_)([A-Z]\d+)\w*)", re.MULTILINE | re.IGNORECASE
    )
    for file in sorted((ROOT / "tests").rglob("test_*.py")):
        for name, rule in defined.findall(file.read_text()):
            yield rule.upper(), f"`{file.relative_to(ROOT)}::{name}`"


def test_every_test_of_a_rule_is_listed() -> None:
    """Who looks a rule up in docs/seeds.md finds all that proves it, and not a part."""
    listed = {row.id: row.values[1] for row in rules()}
    for rule, test in named_after_a_rule():
        assert test in listed.get(rule, test), f"{rule}: {test}"


def test_every_rule_that_landed_is_listed() -> None:
    """All of M, E, S, F, I, W, C and G, and T."""
    counts = {"M": 12, "E": 15, "S": 7, "F": 14, "I": 16, "W": 14, "C": 14, "G": 10, "T": 6}
    landed = {f"{letter}{n + 1}" for letter, count in counts.items() for n in range(count)}
    assert {parameters.id for parameters in rules()} >= landed


def test_diagrams_are_drawn_from_the_code() -> None:
    """What `make diagrams` would write is what the page shows."""
    diagrams = loaded(ROOT / "scripts" / "diagrams.py")
    pages = [page.read_text() for page in diagrams.PAGES]
    assert [diagrams.drawn(page) for page in pages] == pages
    assert ["due --> queued" in pages[0], "loading --> publishing" in pages[1]] == [True, True]


def test_the_readmes_figures_were_measured() -> None:
    """What `make diagrams` would write is what the README shows."""
    readme, measured = (ROOT / "README.md").read_text(), ROOT / "docs" / "benchmarks.md"
    figures = loaded(ROOT / "scripts" / "figures.py")
    assert figures.drawn(readme, measured.read_text()) == readme
    assert "time of a hit" in readme


def loaded(path: Path) -> Any:
    """A script, as a module."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_viewport_runs(capsys: pytest.CaptureFixture[str]) -> None:
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


def test_the_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
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
