"""The page of a history: one HTML file that loads nothing, made of a template and the data."""

from html import escape
from importlib.resources import files

from stillfresh.lab.replay.history import ReplayHistory

TEMPLATE = "page.html"


def page_of(history: ReplayHistory) -> str:
    """The whole page. The data cannot end its script: `<` is written as an escape."""
    template = files(__package__).joinpath(TEMPLATE).read_text("utf-8")
    data = history.encoded().decode().replace("<", "\\u003c")
    return template.replace("{{title}}", escape(history.title)).replace("{{data}}", data)
