"""The code behind each card of the demo's page: the source that runs, cut out of its file.

A card shows about ten lines: how the cache is declared, and how it is read. They are taken from
the functions themselves, so that the page cannot show anything else than what runs.
"""

import inspect
import re
from collections.abc import Callable
from html import escape
from pathlib import Path
from textwrap import dedent
from typing import Any, Final

BUTTON: Final = (
    '<button type="button" class="plain small code-button" popovertarget="code-{card}"'
    ' aria-label="Code of {title}">Code</button>'
)
PANEL: Final = """<div popover id="code-{card}" class="card code"
  aria-labelledby="code-{card}-title">
  <header><h2 id="code-{card}-title">{title}: the code</h2>
  <button type="button" class="plain spread" popovertarget="code-{card}"
    popovertargetaction="hide" aria-label="Close">✕</button></header>
  <pre class="mono" tabindex="0">{code}</pre>
</div>"""
DOCSTRING: Final = re.compile(r'\n *"""[^"]*"""(?=\n)')


def source_of(*functions: Callable[..., Any]) -> str:
    """The source of these functions, without indentation and docstrings."""
    sources = (dedent(inspect.getsource(function)).strip() for function in functions)
    return "\n\n".join(DOCSTRING.sub("", source) for source in sources)


def script_of(file: Path, function: str) -> str:
    """The source of an exported function of a script."""
    [source] = re.findall(
        rf"^export function {function}\b.*?^\}}$", file.read_text(), re.MULTILINE | re.DOTALL
    )
    return str(source)


def code_corners(codes: dict[str, tuple[str, str]]) -> dict[str, str]:
    """For the page's template: a button for each card (title, code), and all panels."""
    fields = {
        f"code_{card}": BUTTON.format(card=card, title=escape(title))
        for card, (title, _) in codes.items()
    }
    panels = [
        PANEL.format(card=card, title=escape(title), code=escape(code))
        for card, (title, code) in codes.items()
    ]
    return {**fields, "codes": "\n".join(panels)}
