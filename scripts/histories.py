"""Writes the histories in the docs: `python scripts/histories.py`.

`make diagrams` runs it. Another Python may order callbacks in another way, so tests compare what
the pages tell, not byte by byte.
"""

from pathlib import Path

from stillfresh.lab.replay import page_of, play_of, replayed

FOLDER = Path(__file__).parent.parent / "docs" / "histories"
SHOWN = ("invalidation", "invalidation-without-the-law")
SEED = 3


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for name in SHOWN:
        (FOLDER / f"{name}.html").write_text(page_of(replayed(play_of(name), SEED)))


if __name__ == "__main__":
    main()
