"""Builds the documentation site in build/site: `make site`. Another folder may be given.

The pages of docs are written to be read in the repository as well, where a link may lead to a file
outside docs. So the site is built from a copy in build/docs: README and the other pages of the root
stand beside the pages of docs, a linked file has a page that shows it, and every link is changed to
lead there. The first page of the site is docs/front.md. The navigation is docs/index.md, the site's
map: its sections, and the links in their order. Everything else is in zensical.toml.

The search compares titles and texts, and knows of no page that matters more. So what only helps
somebody who changes stillfresh is left out of it: the records of decisions (their index is in it),
the rules with their tests, and names that other code does not need. Of two titles that have the
words, it lists the one first in which they stand further to the left; of two places that match
equally, the one that comes first in its index. So the index is sorted as docs/index.md is, guides
first. And a name of the reference is listed in full (`stillfresh.Cache.invalidate_tag`), a heading
of the benchmarks as one of them, which puts both after a heading that begins with the word.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PARTS = Path(sys.prefix) / "site"
"""Scripts that the site serves itself, fetched by scripts/site_parts."""
LINK = re.compile(r"^```.*?^```$|`[^`\n]*`|\]\(([^)\s:#]+)(#[^)\s]*)?\)", re.MULTILINE | re.DOTALL)
"""A link to a file, and what only looks like one: code."""
TESTS = re.compile(r"\[([^]]*)\]\((?:\.\./)+tests/[^)]*\)")
"""A link to a test: named in the site, and read in the repository."""
HIDDEN = "---\nsearch:\n  exclude: true\n---\n"
"""Begins a page that the search does not know."""
UNSEARCHED = re.compile(r"decisions/\d|reference/inside\.|seeds\.|changelog\.|changes/")
"""Pages for those who change stillfresh."""
REFERENCE = re.compile(r"reference/.*#(stillfresh\..+)")
"""The place of a public name: its full name is the anchor."""
BENCHMARKS = "benchmarks.html#"
"""How the places of their headings begin."""
MOVED = {Path("front.md"): Path("index.md"), Path("index.md"): Path("map.md")}
"""Pages of docs that the site has under another name."""


def place(target: Path) -> Path:
    """Where in the site a file of the repository is shown."""
    if target.is_relative_to(DOCS):
        path = target.relative_to(DOCS)
        return MOVED.get(path, path)
    if target.parent == ROOT and target.suffix == ".md":
        return Path(target.name.lower())
    return Path("files", f"{target.relative_to(ROOT)}.md")


def page(source: Path) -> tuple[str, set[Path]]:
    """The text of a page with its links changed, and the files that they lead to."""
    linked: set[Path] = set()

    def moved(link: re.Match[str]) -> str:
        if not link[1]:
            return link[0]
        target = (source.parent / link[1]).resolve()
        linked.add(target)
        return f"]({os.path.relpath(place(target), place(source).parent)}{link[2] or ''})"

    return LINK.sub(moved, TESTS.sub(r"\1", source.read_text())), linked


def shown(target: Path) -> str:
    """A page for a file, or for the files of a folder."""
    head = f"{HIDDEN}# {target.relative_to(ROOT)}\n\n"
    files = [target] if target.is_file() else sorted(it for it in target.iterdir() if it.is_file())
    return head + "\n".join(
        f"**{file.name}**\n\n````{file.suffix[1:]}\n{file.read_text()}````\n" for file in files
    )


def sections() -> dict[str, dict[str, str]]:
    """The pages of docs/index.md by title, in sections; one linked twice belongs to the first."""
    index = (DOCS / "index.md").read_text()
    by_name: dict[str, dict[str, str]] = {}
    seen = {Path("index.md"), Path("map.md")}
    for section in index.split("\n## ")[1:]:
        pages: dict[str, str] = {}
        for title, link in re.findall(r"\[([^]]+)\]\(([^):#]+)\)", section):
            if (at := place((DOCS / link).resolve())) not in seen:
                seen.add(at)
                pages[title] = str(at)
        by_name[section.partition("\n")[0]] = pages
    return by_name


def navigation() -> list[dict[str, str | list[dict[str, str]]]]:
    """The front page, the map, and the sections of the map."""
    nav: list[dict[str, str | list[dict[str, str]]]] = [
        {"stillfresh": "index.md"},
        {"All pages": "map.md"},
    ]
    for name, pages in sections().items():
        nav.append({name: [{title: page} for title, page in pages.items()]})
    return nav


def write(build: Path) -> None:
    """Write the copy that the site is built from."""
    copy = build / "docs"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(DOCS, copy, ignore=shutil.ignore_patterns("*.md"))
    shutil.copytree(PARTS, copy / "assets")
    others: set[Path] = set()
    for source in [*ROOT.glob("*.md"), *DOCS.rglob("*.md")]:
        text, linked = page(source)
        head = HIDDEN if UNSEARCHED.match(str(place(source))) else ""
        (copy / place(source)).parent.mkdir(parents=True, exist_ok=True)
        (copy / place(source)).write_text(head + text)
        others |= {it for it in linked if place(it).parts[0] == "files"}
    for target in others:
        (copy / place(target)).parent.mkdir(parents=True, exist_ok=True)
        (copy / place(target)).write_text(shown(target))
    config = (ROOT / "zensical.toml").read_text()
    nav = re.sub(r'("[^"]+"):', r"\1 =", json.dumps(navigation(), ensure_ascii=False))
    config = config.replace("nav = []", f"nav = {nav}")
    (build / "zensical.toml").write_text(config.replace('["src"]', f'["{ROOT / "src"}"]'))


def sorted_for_search(entries: list[dict[str, str]], pages: list[str]) -> list[dict[str, str]]:
    """The search's entries in the order of these pages, each with a title that says where it leads.

    A page that is in no list, such as the front page, only repeats what others explain: it comes
    after them, and before the reference.
    """
    position = {page: number for number, page in enumerate(pages)}

    def rank(entry: dict[str, str]) -> tuple[bool, int]:
        page = entry["location"].partition("#")[0]
        return page.startswith("reference/"), position.get(page, len(pages))

    return sorted((entry | {"title": search_title(entry)} for entry in entries), key=rank)


def search_title(entry: dict[str, str]) -> str:
    """The title under which the search lists this entry: one that says where it leads."""
    if name := REFERENCE.fullmatch(entry["location"]):
        return name[1]
    if entry["location"].startswith(BENCHMARKS):
        return f"Benchmarks: {entry['title']}"
    return entry["title"]


def sort_search(site: Path) -> None:
    """Sort the search's index: once as data, and once as the script that pages on a disk load."""
    index = json.loads((site / "search.json").read_text())
    listed = [page for pages in sections().values() for page in pages.values()]
    pages = [str(Path(page).with_suffix(".html")) for page in listed]
    index["items"] = sorted_for_search(index["items"], pages)
    text = json.dumps(index, ensure_ascii=False)
    (site / "search.json").write_text(text)
    (site / "search.js").write_text(f"var __index = {text}")


def main() -> int:
    folder = Path(sys.argv[1] if sys.argv[1:] else ROOT / "build")
    write(folder)
    command = [str(Path(sys.executable).with_name("zensical")), "build", "--strict", "--clean"]
    status = subprocess.run(command, cwd=folder, check=False).returncode
    if status == 0:
        sort_search(folder / "site")
    return status


if __name__ == "__main__":
    sys.exit(main())
