"""A site behind its page cache, on a clock of its own, and what may happen between two visits."""

from typing import Any

from hypothesis import strategies as st

from stillfresh.pages import IsrMiddleware, PageCache, Route
from stillfresh.stores.memory import MemoryStore
from stillfresh.testing import ManualClock
from tests.kit.isr import Site

Step = tuple[Any, ...]
ROUTES = {"/own/*": Route("60s", query=["q"], vary=["x-lang"]), "/said/*": Route(query=None)}
SAYS = (
    ("Cache-Control: max-age=30", 'ETag: "a"'),
    ("Cache-Control: max-age=30", "Vary: Accept-Encoding"),
    (
        "Cache-Control: max-age=3, stale-while-revalidate=60",
        "Vary: Accept-Language, Accept-Encoding",
    ),
    ("Cache-Control: max-age=30, public", "Vary: Cookie", "Age: 2"),
    ("Cache-Control: private, max-age=30",),
    ("Cache-Control: max-age=30", "Last-Modified: Tue, 14 Nov 2023 22:13:20 GMT"),
    ("Cache-Control: max-age=30", "Connection: close"),
)
changes = st.one_of(
    st.tuples(st.just("advance"), st.sampled_from([0.25, 0.5, 1.0, 2.75, 25.0, 40.0])),
    st.tuples(st.just("says"), st.sampled_from(SAYS)),
    st.tuples(st.just("revalidate"), st.sampled_from(["/own/a", "/said/a"])),
    st.tuples(st.just("purge"), st.sampled_from(["/own/a", "/said/a"])),
)


class PageWorld:
    """Subclass it with the visits."""

    def __init__(self, *, in_memory: bool = True) -> None:
        self.clock = ManualClock(start=1_700_000_000.0)
        self.site = Site(self.clock)
        store = "memory://" if in_memory else MemoryStore(clock=self.clock)
        self.pages = PageCache(store, clock=self.clock, dice=lambda: 0.0)
        self.app = IsrMiddleware(self.site, self.pages, routes=ROUTES)

    async def change(self, what: str, given: Any) -> None:
        match what:
            case "advance":
                self.clock.advance(given)
            case "says":
                self.site.says(*given)
            case "revalidate":
                await self.pages.revalidate(given)
            case "purge":
                await self.pages.purge(given)

    async def is_loading(self) -> bool:
        return bool((await self.pages.stats()).resources["page"].loading)

    async def reads(self) -> dict[Any, int]:
        return dict((await self.pages.stats()).resources["page"].reads)
