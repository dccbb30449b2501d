"""Which tests touch which line: measured once, kept in `build/mutants`, and read again (T12).

Measured again is a file of tests that has changed. A source may have changed since: its old text is
kept too, and tells where its lines are now.
"""

import difflib
import json
import re
from collections.abc import Iterator
from functools import cache
from hashlib import sha1
from pathlib import Path
from typing import Any

from tests.mutation.changes import Change

SET = re.compile(r"^(?:    )?([A-Za-z]\w*)\b[^(]*?=(?!=)")
"""A name that a module or a class sets."""


@cache
def digest(path: Path) -> str:
    return sha1(path.read_bytes(), usedforsecurity=False).hexdigest()[:12]


class Touched:
    """The lines that each test ran, and how long each takes."""

    def __init__(self, root: Path, kept: Path) -> None:
        self._root, self._kept = root, kept
        self.seconds: dict[str, float] = {}
        self._size: dict[str, int] = {}
        self._lines: dict[str, dict[str, int]] = {}
        """Source -> test -> the lines that it ran, as bits."""
        self._files: dict[str, list[str]] = {}
        self._moved: dict[str, dict[int, int]] = {}
        for folder in (kept / "tests", kept / "sources"):
            folder.mkdir(parents=True, exist_ok=True)

    def missing(self, files: list[str]) -> list[str]:
        """The files of tests to measure; those that are known are read."""
        return [file for file in files if not self._read(file)]

    def keep(self, file: str, tests: dict[str, Any]) -> None:
        """What one file's tests ran, with the texts of those sources."""
        sources = {source for _, ran in tests.values() for source in ran}
        versions = {}
        for source in sources:
            text = (self._root / source).read_text()
            versions[source] = digest(self._root / source)
            (self._kept / "sources" / versions[source]).write_text(text)
        record = {"of": digest(self._root / file), "versions": versions, "tests": tests}
        self._record(file).write_text(json.dumps(record))
        self._read(file)

    def tests_for(self, change: Change) -> list[str]:
        """Those that run the changed line; else its function, its module, what imports that.

        A head with its defaults is run by the test that imports it first: there the body counts.
        """
        ran = self._lines.get(change.path, {})
        if change.function:
            first, last = change.function
            for lines in (range(max(first, change.line), change.last + 1), range(first, last + 1)):
                bits = sum(1 << line for line in lines)
                if found := [test for test, its in ran.items() if its & bits]:
                    return self._nearest(found, Path(change.path))
        naming = self._naming(change)
        others = [test for test in self._ran(change.path) if test not in naming]
        return [*self._interleaved([*naming]), *self._interleaved(others)]

    def _naming(self, change: Change) -> dict[str, None]:
        """Of a name that is set on import: the tests in files that read it."""
        lines = (self._root / change.path).read_text().splitlines()[: change.line]
        names = [found[1] for line in lines if (found := SET.match(line))]
        if change.function or not names:
            return {}
        word = re.compile(rf"\b{names[-1]}\b")
        files = [it for it in self._files if word.search((self._root / it).read_text())]
        return {test: None for file in files for test in self._files[file]}

    def _ran(self, path: str) -> dict[str, None]:
        """The tests that run anything of a source, or of those that import it."""
        paths, seen = [path], {path}
        while paths:
            if found := {test: None for it in paths for test in self._lines.get(it, ())}:
                return found
            paths = [it for path in paths for it in self._importers(path) if it not in seen]
            seen.update(paths)
        return {}

    def _importers(self, path: str) -> list[str]:
        name = re.escape(path.removeprefix("src/").removesuffix(".py").replace("/", "."))
        imports = re.compile(rf"^(from|import) {name}\b", re.MULTILINE)
        sources = sorted((self._root / "src").rglob("*.py"))
        found = [source for source in sources if imports.search(source.read_text())]
        return [str(source.relative_to(self._root)) for source in found]

    def within(self, tests: list[str], seconds: float) -> list[str]:
        """As many as fit into the time; one always does."""
        chosen: list[str] = []
        for test in tests:
            if seconds <= 0 or (chosen and self.seconds[test] > seconds):
                continue
            seconds -= self.seconds[test]
            chosen.append(test)
        return chosen

    def _nearest(self, tests: list[str], source: Path) -> list[str]:
        """Every other one from files of tests that are named as the source or its folder is."""
        names = re.compile(rf"({source.stem}|{source.parent.name})[^/]*::")
        ordered = self._interleaved(tests)
        near = [it for it in ordered if names.search(it)]
        far = [it for it in ordered if not names.search(it)]
        places = [(at, test) for some in (near, far) for at, test in enumerate(some)]
        return [test for _, test in sorted(places, key=lambda it: it[0])]

    def _interleaved(self, tests: list[str]) -> list[str]:
        """From each file in turn, and first those that touch little else."""
        files: dict[str, list[str]] = {}
        for test in sorted(tests, key=lambda test: (self._size[test], test)):
            files.setdefault(test.partition("::")[0], []).append(test)
        places = [(at, self._size[it], it) for its in files.values() for at, it in enumerate(its)]
        return [test for _, _, test in sorted(places)]

    def _record(self, file: str) -> Path:
        return self._kept / "tests" / f"{file.replace('/', '.')}.json"

    def _read(self, file: str) -> bool:
        record = self._record(file)
        if not record.exists():
            return False
        known = json.loads(record.read_text())
        if known["of"] != digest(self._root / file):
            return False
        self._files[file] = [*known["tests"]]
        for test, (seconds, ran) in known["tests"].items():
            self.seconds[test], self._size[test] = seconds, 0
            for source, bits in ran.items():
                lines = self._now(source, known["versions"][source], int(bits, 16))
                self._lines.setdefault(source, {})[test] = lines
                self._size[test] += lines.bit_count()
        return True

    def _now(self, source: str, version: str, bits: int) -> int:
        """The same lines, where they stand now."""
        if not (self._root / source).exists() or version == digest(self._root / source):
            return bits
        if version not in self._moved:
            old = (self._kept / "sources" / version).read_text().splitlines()
            new = (self._root / source).read_text().splitlines()
            self._moved[version] = dict(pairs(old, new))
        moved = self._moved[version]
        return sum(1 << moved[line] for line in moved if bits >> line & 1)


def pairs(old: list[str], new: list[str]) -> Iterator[tuple[int, int]]:
    """The line numbers of what stayed; of a changed passage, its first lines."""
    for _, a, b, c, d in difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
        yield from ((a + at + 1, c + at + 1) for at in range(min(b - a, d - c)))
