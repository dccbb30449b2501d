"""The demo's pages as text: templates from `static/`, filled in and escaped (G8)."""

import time
from collections.abc import Mapping, Sequence
from functools import cache
from html import escape
from pathlib import Path
from string import Template

from stillfresh.demo.pace import Pace


@cache
def _template(name: str) -> Template:
    return Template((Path(__file__).parent / "static" / name).read_text())


def front_page(token: str, post_ids: Sequence[str], pace: Pace) -> str:
    return _template("demo.html").substitute(
        token=escape(token),
        posts="\n".join(map(_post, post_ids)),
        count=len(post_ids),
        post_fresh_for=_shown(pace, "post_fresh_for"),
        user_fresh_for=_shown(pace, "user_fresh_for"),
        feed_fresh_for=_shown(pace, "feed_fresh_for"),
        page_fresh_for=_shown(pace, "page_fresh_for"),
    )


def _shown(pace: Pace, name: str) -> str:
    return f"{pace.seconds_of(name):g}"


def _post(post_id: str) -> str:
    """Empty until it has been on screen: what it says comes through the gateway."""
    id_ = escape(post_id)
    author = escape(post_id.partition(":")[0])
    return _template("post.html").substitute(id=id_, author=author)


def prices_page(prices: Mapping[str, int], rendered_at: float, pace: Pace) -> str:
    rows = "\n".join(
        f'<tr><th scope="row">{escape(name)}</th><td class="number">{cents / 100:.2f} €</td></tr>'
        for name, cents in prices.items()
    )
    return _template("prices.html").substitute(
        rows=rows,
        rendered_at=f"{rendered_at:.3f}",
        time=time.strftime("%H:%M:%S", time.localtime(rendered_at)),
        took=f"{time.time() - rendered_at:.1f}",
        page_fresh_for=_shown(pace, "page_fresh_for"),
    )


def away_page() -> str:
    """Nothing was rendered yet, and there is nothing to render it from."""
    return _template("away.html").substitute()
