"""G5: the browser client in a real browser: what is on screen is subscribed, and nothing else."""

import json

from playwright.async_api import Page

from tests.kit.browser_site import AUTOMATIC, Site, show, text_is
from tests.kit.engine import until

BY_CODE = """<script type="module">
import {connect, watch} from "/stillfresh.js";
window.client = connect(undefined, {minPause: 20, maxPause: 100, bind: false});
window.seen = {};
for (const element of document.querySelectorAll("li")) {
  const id = element.id;
  watch(element, "price", id, (view, at) => {
    at.textContent = view.found ? `${view.value.name} ${view.value.n}` : "absent";
    (window.seen[id] ??= []).push(view.value?.n ?? null);
  });
}
</script>"""
ROWS = "<ul>" + "".join(f'<li id="r{n}"></li>' for n in range(100)) + "</ul>"


def rows(*numbers: int) -> set[str]:
    return {f"r{number}" for number in numbers}


class TestG5OnScreen:
    async def test_only_visible_elements_are_subscribed(self, page: Page, site: Site) -> None:
        """A hundred rows, six of them on screen: six subscriptions, one request of six ids."""
        sent = await show(page, site, ROWS + BY_CODE)
        await text_is(page, "#r0", "r0 1")
        await text_is(page, "#r4", "r4 1")
        assert site.watched() == rows(*range(6))
        assert site.upstream.asked == rows(*range(6))
        kinds = [message["type"] for frame in sent for message in frame]
        assert kinds == ["route", "subscribe"]

    async def test_scrolling_swaps_subscriptions_in_one_message(
        self, page: Page, site: Site
    ) -> None:
        """What came on screen and what left it go in one frame, not one for each element."""
        sent = await show(page, site, ROWS + BY_CODE)
        await text_is(page, "#r4", "r4 1")
        sent.clear()
        await page.evaluate("scrollTo(0, 3000)")
        await text_is(page, "#r30", "r30 1")
        await until(lambda: site.watched() == rows(*range(29, 36)))
        assert [[message["type"] for message in frame] for frame in sent] == [
            ["unsubscribe", "subscribe"]
        ]
        assert {id_ for _, id_ in sent[0][0]["items"]} == rows(*range(6))

    async def test_fast_scrolling_sends_at_most_one_message_a_frame(
        self, page: Page, site: Site
    ) -> None:
        """Thirty frames of scrolling past ninety rows: no more messages than frames."""
        sent = await show(page, site, ROWS + BY_CODE)
        await text_is(page, "#r4", "r4 1")
        sent.clear()
        frames = await page.evaluate(
            """() => new Promise((done) => {
                let frames = 0;
                const step = () => {
                  scrollBy(0, 400);
                  if (++frames === 30) requestAnimationFrame(() => requestAnimationFrame(
                    () => done(frames + 2)));
                  else requestAnimationFrame(step);
                };
                requestAnimationFrame(step);
            })"""
        )
        await until(lambda: site.watched() == rows(*range(94, 100)))
        assert 1 <= len(sent) <= frames

    async def test_a_fresh_copy_is_not_sent_again_when_its_row_returns(
        self, page: Page, site: Site
    ) -> None:
        """The client says which copy it has; the same one, still fresh, does not travel twice."""
        await show(page, site, ROWS + BY_CODE)
        await text_is(page, "#r0", "r0 1")
        await page.evaluate("scrollTo(0, 3000)")
        await text_is(page, "#r30", "r30 1")
        await page.evaluate("scrollTo(0, 0)")
        await until(lambda: site.watched() == rows(*range(6)))
        await page.evaluate("scrollTo(0, 6000)")
        await text_is(page, "#r60", "r60 1")
        assert await page.evaluate("seen.r0") == [1]

    async def test_a_removed_element_is_unsubscribed(self, page: Page, site: Site) -> None:
        """And the one that moved up into its place is subscribed."""
        await show(page, site, ROWS + BY_CODE)
        await text_is(page, "#r4", "r4 1")
        await page.evaluate("document.querySelector('#r2').remove()")
        await until(lambda: site.watched() == rows(0, 1, 3, 4, 5, 6))

    async def test_an_element_that_comes_back_is_subscribed_again(
        self, page: Page, site: Site
    ) -> None:
        """Taken out of the document and put back."""
        await show(page, site, ROWS + BY_CODE)
        await text_is(page, "#r2", "r2 1")
        await page.evaluate("(window.row = document.querySelector('#r2')).remove()")
        await until(lambda: "r2" not in site.watched())
        await page.evaluate("document.querySelector('#r1').after(window.row)")
        await until(lambda: "r2" in site.watched())

    async def test_the_function_that_watch_returns_unsubscribes(
        self, page: Page, site: Site
    ) -> None:
        """By the function that watch returned."""
        await show(page, site, ROWS + BY_CODE)
        await text_is(page, "#r0", "r0 1")
        await page.evaluate(
            "() => { window.off = client.watch(document.querySelector('#r0'), 'word', 'x', null); }"
        )
        await until(lambda: "x" in site.watched())
        await page.evaluate("() => off()")
        await until(lambda: "x" not in site.watched() and "r0" in site.watched())

    async def test_one_id_on_several_elements_is_one_subscription(
        self, page: Page, site: Site
    ) -> None:
        """And all of them show it, also one that comes later."""
        html = '<b data-fresh="word:a"></b><i data-fresh="word:a"></i><p></p>'
        await show(page, site, html + AUTOMATIC)
        await text_is(page, "b", "a 1")
        await text_is(page, "i", "a 1")
        assert site.subscribed["word"] == 1
        await page.evaluate("document.querySelector('p').dataset.fresh = 'word:a'")
        await text_is(page, "p", "a 1")
        await page.evaluate("document.querySelector('b').remove()")
        site.upstream.version = 2
        await site.gateway.hub.resource("word").refresh("a")
        await text_is(page, "i", "a 2")
        assert site.subscribed["word"] == 1


class TestG5Fresh:
    async def test_a_change_upstream_appears_without_a_reload(self, page: Page, site: Site) -> None:
        """Pushed when it was refreshed."""
        await show(page, site, ROWS + BY_CODE)
        await text_is(page, "#r0", "r0 1")
        site.upstream.version = 2
        await site.gateway.hub.resource("price").invalidate("r0")
        await text_is(page, "#r0", "r0 2")

    async def test_absent_and_failed_items_are_shown_as_such(self, page: Page, site: Site) -> None:
        """What does not exist says so; what fails to load has the error, without its secrets."""
        html = '<p data-fresh="price:absent">?</p><b data-fresh="price:a" data-fresh-field="n"></b>'
        await show(page, site, html + AUTOMATIC)
        await page.wait_for_selector('p[data-verdict="absent"]', state="attached")
        assert await page.text_content("p") == ""
        await text_is(page, "b", "1")
        site.upstream.is_down = True
        await site.gateway.hub.resource("price").invalidate("a")
        await page.wait_for_selector('b[data-error][data-verdict="expired"]')
        assert await page.text_content("b") == "1"
        assert "secret" not in (await page.get_attribute("b", "data-error") or "")

    async def test_a_hidden_tab_stops_refreshing(self, page: Page, site: Site) -> None:
        """Hidden, nothing is asked for; looked at again, the page catches up."""
        await show(page, site, ROWS + BY_CODE)
        await text_is(page, "#r0", "r0 1")
        await set_hidden(page, hidden=True)
        await until(lambda: not visible(site))
        site.upstream.version = 2
        calls = len(site.upstream.calls)
        await site.gateway.hub.resource("price").invalidate("r0")
        assert await page.text_content("#r0") == "r0 1"
        assert len(site.upstream.calls) == calls
        await set_hidden(page, hidden=False)
        await text_is(page, "#r0", "r0 2")

    async def test_a_change_of_route_subscribes_again_in_one_message(
        self, page: Page, site: Site
    ) -> None:
        """pushState is told, and what is still on screen is subscribed again, in one message."""
        sent = await show(page, site, ROWS + BY_CODE)
        await text_is(page, "#r4", "r4 1")
        sent.clear()
        await page.evaluate("history.pushState({}, '', '/other?page=2')")
        await until(lambda: len(sent) == 1)
        assert sent[0][0] == {"type": "route", "path": "/other"}
        assert {id_ for _, id_, _ in sent[0][1]["items"]} == rows(*range(6))
        await until(lambda: site.watched() == rows(*range(6)))
        await page.go_back()
        await until(lambda: len(sent) == 2)
        assert sent[1][0] == {"type": "route", "path": "/"}

    async def test_signing_in_shows_private_items_and_signing_out_hides_them(
        self, page: Page, site: Site
    ) -> None:
        """A guest is refused; signed in it comes; signed out it is gone from the screen."""
        html = '<b data-fresh="inbox:1"></b><i data-fresh="word:a"></i><script type="module">'
        html += 'import {connect} from "/stillfresh.js"; window.client = connect();</script>'
        await show(page, site, html)
        await text_is(page, "i", "a 1")
        assert site.upstream.inboxes == []
        await page.evaluate("client.signIn('ann')")
        await text_is(page, "b", "ann's 1")
        assert await page.evaluate("client.viewerId") == "ann"
        await page.evaluate("client.signIn(() => 'bob')")
        await text_is(page, "b", "bob's 1")
        await page.evaluate("client.signOut()")
        await text_is(page, "b", "")
        assert await page.text_content("i") == "a 1"


async def set_hidden(page: Page, *, hidden: bool) -> None:
    """As the browser tells a page; headless Chromium has no tabs to hide behind."""
    await page.evaluate(
        """(state) => {
            Object.defineProperty(document, "visibilityState", {value: state, configurable: true});
            document.dispatchEvent(new Event("visibilitychange"));
        }""",
        "hidden" if hidden else "visible",
    )


def visible(site: Site) -> bool:
    return any(session.connection.is_visible for session in site.gateway.live._sessions)


class TestG5Reconnect:
    async def test_the_client_reconnects_after_a_restart_and_catches_up(
        self, page: Page, site: Site, expected_errors: list[str]
    ) -> None:
        """On the same port: subscriptions restored, and what changed meanwhile is shown."""
        expected_errors += ["ERR_CONNECTION_REFUSED", "WebSocket connection"]
        await show(page, site, ROWS + BY_CODE)
        await text_is(page, "#r4", "r4 1")
        await page.evaluate(
            "() => { window.states = []; client.on('state', (it) => states.push(it.state)); }"
        )
        await site.stop()
        await page.wait_for_function("client.state === 'waiting'")
        site.upstream.version = 2
        await site.start()
        await text_is(page, "#r0", "r0 2")
        await text_is(page, "#r4", "r4 2")
        assert site.watched() == rows(*range(6))
        states = await page.evaluate("states")
        assert states[0] == "waiting"
        assert states[-2:] == ["connecting", "open"]

    async def test_pauses_between_reconnects_grow_and_vary(
        self, page: Page, site: Site, expected_errors: list[str]
    ) -> None:
        """Each up to twice as long, to the longest, and never in step with others."""
        expected_errors += ["ERR_CONNECTION_REFUSED", "WebSocket connection"]
        await show(page, site, "<p></p>")
        pauses = await page.evaluate(
            """async () => {
                const pauses = [], later = setTimeout;
                window.WebSocket = class {
                  constructor() { later(() => this.onclose({code: 1006, reason: ""})); }
                  close() {}
                };
                window.setTimeout = (work, pause) => {
                  if (pause > 0) pauses.push(pause);
                  return later(work, 0);
                };
                const {connect} = await import("/stillfresh.js");
                const client = connect("/nowhere", {minPause: 100, maxPause: 1000});
                while (pauses.length < 8) await new Promise((done) => later(done, 1));
                client.close();
                return pauses.slice(0, 8);
            }"""
        )
        for pause, most in zip(pauses, [100, 200, 400, 800, 1000, 1000, 1000, 1000], strict=True):
            assert most / 2 <= pause <= most

    async def test_a_closed_client_subscribes_to_nothing(self, page: Page, site: Site) -> None:
        """Nothing is watched or tried again, and nothing is subscribed."""
        await show(page, site, ROWS + BY_CODE)
        await text_is(page, "#r0", "r0 1")
        await page.evaluate("client.close()")
        await until(lambda: site.gateway.live.snapshot()["connections"] == 0)
        await page.evaluate("scrollTo(0, 3000)")
        assert await page.evaluate("client.state") == "closed"


class TestG5Attributes:
    async def test_elements_with_data_attributes_are_kept_fresh_without_code(
        self, page: Page, site: Site
    ) -> None:
        """Named fields, as text; verdict, age and time on the element; an event that bubbles."""
        html = """<script>window.heard = [];
        addEventListener("stillfresh:update", (it) => heard.push(it.detail.id));</script>
        <article data-fresh="price:author:1"><h1 data-fresh-field="name"></h1>
        <p data-fresh-field="details.content"></p><i data-fresh-field="no.such"></i>
        <span data-fresh="word:w"><b>kept?</b></span></article>"""
        await show(page, site, html + AUTOMATIC)
        await text_is(page, "h1", "author:1")
        await text_is(page, "p", "<b>author:1</b>")
        await text_is(page, "span", "w 1")
        assert await page.text_content("i") == ""
        article = page.locator("article")
        assert await article.get_attribute("data-verdict") == "fresh"
        assert float(await article.get_attribute("data-fetched-at") or 0) > 1_600_000_000
        assert int(await article.get_attribute("data-age") or -1) >= 0
        assert set(await page.evaluate("heard")) == {"author:1", "w"}

    async def test_changing_the_data_attribute_changes_the_subscription(
        self, page: Page, site: Site
    ) -> None:
        """Changed, taken away, or none at all."""
        await show(
            page, site, '<b data-fresh="word:a"></b><i data-fresh="nonsense"></i>' + AUTOMATIC
        )
        await text_is(page, "b", "a 1")
        await page.evaluate("document.querySelector('b').dataset.fresh = 'word:b'")
        await text_is(page, "b", "b 1")
        await until(lambda: site.watched() == {"b"})
        await page.evaluate("delete document.querySelector('b').dataset.fresh")
        await until(lambda: site.watched() == set())

    async def test_elements_added_later_are_subscribed(self, page: Page, site: Site) -> None:
        """Also deep inside what was added."""
        await show(page, site, '<main data-fresh="word:a"></main><div></div>' + AUTOMATIC)
        await text_is(page, "main", "a 1")
        await page.evaluate(
            """() => {
                const section = document.createElement("section");
                const inner = section.appendChild(document.createElement("p"))
                inner.dataset.fresh = "word:deep";
                document.querySelector("div").append(section);
            }"""
        )
        await text_is(page, "section p", "deep 1")

    async def test_an_unknown_kind_is_reported_once_and_not_subscribed(
        self, page: Page, site: Site
    ) -> None:
        """The welcome says which kinds there are."""
        html = """<b data-fresh="nope:1"></b><i data-fresh="word:a"></i><script type="module">
        import {connect} from "/stillfresh.js";
        window.errors = [];
        connect().on("error", (it) => errors.push([it.code, it.kind]));</script>"""
        sent = await show(page, site, html)
        await text_is(page, "i", "a 1")
        assert await page.evaluate("errors") == [["unknown_kind", "nope"]]
        assert "nope" not in json.dumps(sent)

    async def test_mistakes_in_a_page_are_logged_to_the_console(
        self, page: Page, site: Site
    ) -> None:
        """On the console, once each; an unknown kind at its element as well. What there is of
        the rest is shown."""
        said: list[str] = []
        page.on("console", lambda it: said.append(it.text) if it.type == "warning" else None)
        html = (
            '<p data-fresh="nope:a">?</p><i data-fresh="price">?</i>'
            '<b data-fresh="price:a" data-fresh-field="n"></b>'
            '<u data-fresh="price:a" data-fresh-field="no.such">?</u>'
            '<u data-fresh="price:b" data-fresh-field="no.such">?</u>'
        )
        await show(page, site, html + AUTOMATIC)
        await page.wait_for_selector('p[data-error="no such kind: nope"]')
        await text_is(page, "b", "1")
        await text_is(page, "u:last-of-type", "")
        assert await page.text_content("p") == "?"
        assert await page.text_content("u") == ""
        assert [it for it in said if "no such kind: nope" in it]
        assert [it for it in said if 'data-fresh="price"' in it and "kind:id" in it]
        assert len([it for it in said if "no field no.such" in it]) == 1


class TestG5Files:
    async def test_client_files_have_their_content_type_and_an_etag(
        self, page: Page, site: Site
    ) -> None:
        """With their type, an ETag and nosniff; a client that has them gets 304."""
        await show(page, site, "<p></p>")
        for path, kind in (
            ("/stillfresh.js", "text/javascript"),
            ("/stillfresh.d.ts", "text/plain"),
            ("/stillfresh-waiting.js", "text/javascript"),
            ("/stillfresh-waiting.d.ts", "text/plain"),
        ):
            answer = await page.request.get(f"http://127.0.0.1:{site.port}{path}")
            assert answer.headers["content-type"].startswith(kind)
            assert answer.headers["x-content-type-options"] == "nosniff"
            again = await page.request.get(
                f"http://127.0.0.1:{site.port}{path}",
                headers={"If-None-Match": answer.headers["etag"]},
            )
            assert again.status == 304


async def test_a_render_function_that_throws_does_not_stop_others(
    page: Page, site: Site, expected_errors: list[str]
) -> None:
    """G5: it is reported, and the others are shown."""
    expected_errors += ["mine"]
    html = """<b></b><i data-fresh="word:a"></i><script type="module">
    import {connect} from "/stillfresh.js";
    connect().watch(document.querySelector("b"), "word", "a", () => { throw new Error("mine"); });
    </script>"""
    await show(page, site, html)
    await text_is(page, "i", "a 1")
