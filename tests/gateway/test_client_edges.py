"""G5: the browser client at its edges: put back, full, signed out in between, bad ids, memory."""

import asyncio
import json
from typing import Any

from playwright.async_api import Page, WebSocketRoute

from stillfresh.gateway.live.messages import Close
from tests.kit.browser_site import Site, show, text_is
from tests.kit.engine import until

QUICK = "{minPause: 20, maxPause: 100}"


def by_code(options: str = QUICK) -> str:
    """A page that keeps its client, its errors and what was shown."""
    return f"""<script type="module">
    import {{connect}} from "/stillfresh.js";
    Object.assign(window, {{connect, errors: [], states: [], shown: []}});
    addEventListener("stillfresh:update", ({{detail}}) => shown.push([detail.id, detail.found]));
    window.client = connect(undefined, {options});
    client.on("error", (it) => errors.push(it));
    client.on("state", (it) => states.push(it.state));
    </script>"""


def said(sent: list[Any], type_: str) -> list[dict[str, Any]]:
    return [message for frame in sent for message in frame if message["type"] == type_]


def viewers(site: Site) -> list[str | None]:
    return [session.connection.viewer_id for session in site.gateway.live._sessions]


def cut_off(site: Site) -> None:
    """As a proxy would: the page comes again by itself."""
    for session in site.gateway.live._sessions:
        session.end(Close.RESTART, "")


async def changes(page: Page, site: Site, selector: str, id_: str, version: int) -> None:
    """A new version upstream comes on screen: it is subscribed, on both sides."""
    site.upstream.version = version
    await site.gateway.hub.resource("word").refresh(id_)
    await text_is(page, selector, f"{id_} {version}")


class TestG5PutBack:
    async def test_an_element_put_back_within_a_frame_stays_subscribed(
        self, page: Page, site: Site
    ) -> None:
        """Taken out and put back after the observers have been told: it is subscribed."""
        await show(page, site, '<b data-fresh="word:a"></b>' + by_code())
        await text_is(page, "b", "a 1")
        await page.evaluate(
            """async () => {
                const element = document.querySelector("b");
                element.remove();
                await Promise.resolve().then(() => null).then(() => null);
                document.body.prepend(element);
                await new Promise((done) => setTimeout(done, 100));
            }"""
        )
        await changes(page, site, "b", "a", 2)

    async def test_an_element_put_back_after_its_unsubscribe_is_subscribed_again(
        self, page: Page, site: Site
    ) -> None:
        """The screen never was without it, and the server was told that it has gone."""
        await show(page, site, '<b data-fresh="word:a"></b>' + by_code())
        await text_is(page, "b", "a 1")
        await page.evaluate(
            """async () => {
                const element = document.querySelector("b");
                await new Promise((done) => setTimeout(done));
                element.remove();
                await Promise.resolve().then(() => null).then(() => null);
                await new Promise(requestAnimationFrame);
                document.body.prepend(element);
                await new Promise((done) => setTimeout(done, 100));
            }"""
        )
        await changes(page, site, "b", "a", 2)

    async def test_a_moved_element_is_not_subscribed_again(self, page: Page, site: Site) -> None:
        """Nor when text beside it comes and goes."""
        html = '<b data-fresh="word:a"></b><i data-fresh="word:b"></i><p></p>' + by_code()
        sent = await show(page, site, html)
        await text_is(page, "i", "b 1")
        sent.clear()
        await page.evaluate(
            """async () => {
                for (let turn = 0; turn < 5; turn += 1) {
                  document.querySelector("p").append(document.querySelector("b"), "text");
                  document.body.prepend("more", document.querySelector("b"));
                  document.querySelector("p").replaceChildren("other");
                  await new Promise(requestAnimationFrame);
                }
            }"""
        )
        await changes(page, site, "b", "a", 2)
        assert sent == []


class TestG5Places:
    async def test_elements_beyond_the_subscription_limit_wait_for_a_place(
        self, page: Page, site: Site
    ) -> None:
        """Five more than the server takes: they are not sent, and come when others have gone."""
        style = "<style>b {display: inline-block; width: 4px; height: 4px; overflow: hidden}"
        rows = "".join(f'<b data-fresh="word:w{n}"></b>' for n in range(1_005))
        await show(page, site, style + "</style>" + rows + by_code())
        await text_is(page, "b:nth-of-type(1000)", "w999 1")
        assert site.subscribed["word"] == 1_000
        assert await page.evaluate("client.subscribed.length") == 1_000
        assert [it["code"] for it in await page.evaluate("errors")] == ["too_many_subscriptions"]
        assert await page.text_content("b:nth-of-type(1001)") == ""
        await page.evaluate(
            "[...document.querySelectorAll('b')].slice(0, 3).forEach((it) => it.remove())"
        )
        await text_is(page, "[data-fresh='word:w1002']", "w1002 1")
        assert site.subscribed["word"] == 1_000
        await page.evaluate("document.querySelector('b').remove()")
        await page.evaluate("document.querySelector('b').remove()")
        await text_is(page, "[data-fresh='word:w1004']", "w1004 1")

    async def test_subscriptions_refused_as_too_many_are_tried_again(
        self, page: Page, site: Site
    ) -> None:
        """It names them; when another has gone, they are asked for again."""
        server = Refusing("too_many_subscriptions", "b", "c")
        await server.stand_in(page)
        await show(page, site, THREE + by_code())
        await page.wait_for_function("client.subscribed.join() === 'word:a'")
        await page.evaluate("document.querySelector('b').remove()")
        await until(lambda: len(server.asked) == 2)
        assert server.asked == [["a", "b", "c"], ["b", "c"]]


THREE = "".join(f'<b data-fresh="word:{id_}">?</b>' for id_ in "abc")


class Refusing:
    """A server that refuses some ids, and closes after that if it `is_strict`."""

    def __init__(self, code: str, *ids: str, is_strict: bool = False) -> None:
        self.asked: list[list[str]] = []
        self._code, self._ids, self._is_strict = code, ids, is_strict

    async def stand_in(self, page: Page) -> None:
        await page.route_web_socket(lambda url: "/v1/live" in url, self._welcome)

    def _welcome(self, socket: WebSocketRoute) -> None:
        socket.on_message(lambda text: self._hear(socket, text))
        kinds = {"kinds": ["word"], "per_viewer": [], "heartbeat": 30, "max_subscriptions": 10}
        socket.send(json.dumps({"type": "welcome", "viewer_id": None, **kinds}))

    def _hear(self, socket: WebSocketRoute, text: str | bytes) -> None:
        frame = json.loads(text)
        asked = said([frame if isinstance(frame, list) else [frame]], "subscribe")
        if not asked:
            return
        self.asked.append([id_ for _, id_, *_ in asked[0]["items"]])
        refused = [id_ for id_ in self.asked[-1] if id_ in self._ids]
        for error in self._errors(refused):
            socket.send(json.dumps({"type": "error", "code": self._code, "message": "", **error}))
        if refused and self._is_strict:
            self._closing = asyncio.ensure_future(socket.close(code=1008))

    def _errors(self, refused: list[str]) -> list[dict[str, Any]]:
        if self._code == "too_many_subscriptions":
            return [{"items": [["word", id_] for id_ in refused]}]
        return [{"kind": "word", "id": id_} for id_ in refused]


class TestG5Mistakes:
    async def test_bad_ids_are_not_sent_to_the_server(self, page: Page, site: Site) -> None:
        """Twenty of them: each is told once, the good one is shown, the connection stays."""
        sent = await show(page, site, '<i data-fresh="word:a"></i>' + by_code())
        await text_is(page, "i", "a 1")
        await page.evaluate(
            """() => {
                const bad = ["x".repeat(1001), "a\\ud800", "a\\nb", "a\\u2028b"];
                for (let n = 0; n < 16; n += 1) bad.push(`a\\u0085${n}`);
                for (const id of [...bad, "é b😀"]) {
                  const element = document.createElement("b");
                  element.textContent = "?";
                  element.dataset.fresh = `word:${id}`;
                  document.body.prepend(element);
                }
            }"""
        )
        await text_is(page, "b", "é b😀 1")
        assert [it["code"] for it in await page.evaluate("errors")] == ["bad_id"] * 20
        assert await page.locator("b[data-error]").count() == 20
        assert await page.evaluate("states.filter((it) => it === 'waiting')") == []
        asked = [item[1] for it in said(sent, "subscribe") for item in it["items"]]
        assert asked == ["a", "é b😀"]

    async def test_refused_ids_are_not_sent_again_after_a_reconnect(
        self, page: Page, site: Site
    ) -> None:
        """Also over a reconnect: what closed the connection is not said again."""
        server = Refusing("bad_id", "b", is_strict=True)
        await server.stand_in(page)
        await show(page, site, THREE + by_code())
        await until(lambda: len(server.asked) == 2)
        assert server.asked == [["a", "b", "c"], ["a", "c"]]
        assert await page.locator("b[data-error]").count() == 1

    async def test_a_long_route_path_is_cut(self, page: Page, site: Site) -> None:
        """As the server takes it."""
        html = '<i data-fresh="word:a"></i>' + by_code()
        sent = await show(page, site, html, path="/" + "%E3%81%82" * 400)
        await text_is(page, "i", "a 1")
        assert len(said(sent, "route")[0]["path"]) == 2_000

    async def test_unwatching_and_watching_after_close_do_nothing(
        self, page: Page, site: Site
    ) -> None:
        """What watch returned may be called, and what is watched from then on is not."""
        await show(page, site, "<b>?</b>" + by_code())
        await page.evaluate(
            "() => { window.off = client.watch(document.querySelector('b'), 'word', 'a', null); }"
        )
        await until(lambda: site.watched() == {"a"})
        await page.evaluate(
            """async () => {
                client.close();
                off();
                client.watch(document.querySelector("b"), "word", "b", null)();
                client.signOut();
                await client.signIn("ann");
                client.close();
            }"""
        )
        await until(lambda: viewers(site) == [])


LATE = "() => new Promise((done) => { window.give = done; })"


class TestG5SignedOut:
    async def test_a_token_that_arrives_after_signing_out_is_not_used(
        self, page: Page, site: Site
    ) -> None:
        """Signed out before the hook gave the token: it is not used."""
        html = '<i data-fresh="word:a"></i><b data-fresh="word:b"></b>'
        sent = await show(page, site, html + by_code(f"{{token: {LATE}}}"))
        await page.wait_for_function("window.give !== undefined")
        await page.evaluate("() => { client.signOut(); give('ann'); }")
        await text_is(page, "i", "a 1")
        assert said(sent, "sign_in") == []
        assert viewers(site) == [None]
        await page.evaluate(
            f"""async () => {{
                const signingIn = client.signIn({LATE});
                client.signOut();
                give("bob");
                await signingIn;
            }}"""
        )
        await changes(page, site, "b", "b", 2)
        assert said(sent, "sign_in") == []
        assert await page.evaluate("client.viewerId") is None

    async def test_the_newest_token_wins_over_an_earlier_one(self, page: Page, site: Site) -> None:
        """However long the one before takes, also for ever."""
        html = '<i data-fresh="inbox:1"></i>' + by_code(f"{{token: {LATE}}}")
        sent = await show(page, site, html)
        await page.wait_for_function("window.give !== undefined")
        await page.evaluate("client.signIn('bob')")
        await text_is(page, "i", "bob's 1")
        await page.evaluate("() => give('ann')")
        await page.evaluate(
            f"""async () => {{
                const signingIn = client.signIn({LATE});
                await client.signIn("eve");
                give("ann");
                await signingIn;
            }}"""
        )
        await text_is(page, "i", "eve's 1")
        assert [it["token"] for it in said(sent, "sign_in")] == ["bob", "eve"]

    async def test_signing_out_before_the_server_answers_leaves_a_guest(
        self, page: Page, site: Site
    ) -> None:
        """The token was sent, and the server has not answered: the page ends as a guest."""
        html = '<i data-fresh="inbox:1"></i><b data-fresh="word:b"></b>'
        await show(page, site, html + by_code("{token: 'ann', minPause: 20, maxPause: 100}"))
        await text_is(page, "i", "ann's 1")
        await page.evaluate(
            """() => {
                const send = WebSocket.prototype.send;
                WebSocket.prototype.send = function (text) {
                  send.call(this, text);
                  if (text.includes("sign_in")) queueMicrotask(() => client.signOut());
                };
            }"""
        )
        cut_off(site)
        await text_is(page, "i", "")
        await until(lambda: viewers(site) == [None])
        await changes(page, site, "b", "b", 2)
        assert await page.evaluate("client.viewerId") is None

    async def test_signing_out_without_a_connection_clears_private_items(
        self, page: Page, site: Site, expected_errors: list[str]
    ) -> None:
        """What is one's own is gone from the screen at once."""
        expected_errors += ["ERR_CONNECTION_REFUSED", "WebSocket connection"]
        html = '<i data-fresh="inbox:1"></i>' + by_code("{token: 'ann'}")
        await show(page, site, html)
        await text_is(page, "i", "ann's 1")
        await site.stop()
        await page.wait_for_function("client.state === 'waiting'")
        await page.evaluate("client.signOut()")
        assert await page.text_content("i") == ""
        assert await page.evaluate("client.viewerId") is None

    async def test_private_items_off_screen_are_not_shown_after_signing_out(
        self, page: Page, site: Site
    ) -> None:
        """What another viewer saw is not shown when it is scrolled to again."""
        html = '<i data-fresh="inbox:1"></i><div style="height: 3000px"></div>'
        html += '<b data-fresh="word:b"></b>' + by_code("{token: 'ann'}")
        await show(page, site, html)
        await text_is(page, "i", "ann's 1")
        await page.evaluate("scrollTo(0, 5000)")
        await until(lambda: site.watched() == {"b"})
        await page.evaluate("client.signOut()")
        await until(lambda: viewers(site) == [None])
        await page.wait_for_function("client.viewerId === null")
        await page.evaluate("scrollTo(0, 0)")
        await text_is(page, "i", "")


class TestG5Again:
    async def test_a_reconnect_signs_in_before_it_subscribes_once(
        self, page: Page, site: Site
    ) -> None:
        """Signed in first, then subscribed with what there is: nothing flickers or is loaded."""
        html = '<i data-fresh="inbox:1"></i><b data-fresh="word:b"></b>'
        sent = await show(page, site, html + by_code("{token: 'ann', minPause: 20, maxPause: 50}"))
        await text_is(page, "i", "ann's 1")
        await text_is(page, "b", "b 1")
        assert len(said(sent, "subscribe")) == 1
        sent.clear()
        cut_off(site)
        await until(lambda: said(sent, "subscribe"))
        await changes(page, site, "b", "b", 2)
        assert [message["type"] for frame in sent for message in frame] == [
            "sign_in",
            "route",
            "subscribe",
        ]
        assert [len(item) for item in said(sent, "subscribe")[0]["items"]] == [3, 3]
        assert {found for _, found in await page.evaluate("shown")} == {True}
        assert site.upstream.inboxes == [("ann", ["1"])]

    async def test_a_reconnect_as_another_viewer_shows_nothing_of_the_first(
        self, page: Page, site: Site
    ) -> None:
        """The token is somebody else's at the reconnect: ann's view goes, bob's comes."""
        html = '<i data-fresh="inbox:1"></i>'
        options = "{token: () => window.who ?? 'ann', minPause: 20, maxPause: 50}"
        sent = await show(page, site, html + by_code(options))
        await text_is(page, "i", "ann's 1")
        await page.evaluate("() => { window.who = 'bob'; }")
        sent.clear()
        cut_off(site)
        await text_is(page, "i", "bob's 1")
        assert [it["items"] for it in said(sent, "subscribe")] == [[["inbox", "1"]]]
        assert [found for _, found in await page.evaluate("shown")] == [True, False, True]

    async def test_a_refused_token_leaves_a_guest_with_shared_items(
        self, page: Page, site: Site
    ) -> None:
        """What is for all is shown all the same."""
        html = '<i data-fresh="inbox:1"></i><b data-fresh="word:b"></b>'
        await show(page, site, html + by_code("{token: 'x'.repeat(9000)}"))
        await text_is(page, "b", "b 1")
        assert await page.text_content("i") == ""


COUNTED = """<script>
window.kept = [];
for (const name of ["Map", "Set"]) {
  window[name] = class extends window[name] {
    constructor(...given) { super(...given); kept.push(new WeakRef(this)); }
  };
}
window.size = () => kept.reduce((sum, it) => sum + (it.deref()?.size ?? 0), 0);
</script><style>b {display: inline-block; width: 2px; height: 2px; overflow: hidden}</style>"""


class TestG5Memory:
    async def test_removed_elements_leave_no_memory_behind(self, page: Page, site: Site) -> None:
        """Ten thousand come and go: no key of theirs, and no element, is held."""
        await show(page, site, COUNTED + '<i data-fresh="word:a"></i><main></main>' + by_code())
        await text_is(page, "i", "a 1")
        before = await page.evaluate("size()")
        await page.evaluate(
            """async () => {
                window.elements = [];
                const main = document.querySelector("main");
                for (let turn = 0; turn < 20; turn += 1) {
                  for (let n = 0; n < 500; n += 1) {
                    const element = main.appendChild(document.createElement("b"));
                    element.dataset.fresh = `word:${turn}-${n}`;
                    elements.push(new WeakRef(element));
                  }
                  await new Promise((done) => setTimeout(done, 100));
                  main.replaceChildren();
                }
            }"""
        )
        await page.wait_for_function("client.subscribed.join() === 'word:a'")
        await until(lambda: site.watched() == {"a"})
        devtools = await page.context.new_cdp_session(page)
        await devtools.send("HeapProfiler.collectGarbage")
        await page.wait_for_function(f"size() <= {before}")
        assert await page.evaluate("elements.filter((it) => it.deref()).length") == 0

    async def test_names_of_object_properties_are_plain_ids_and_fields(
        self, page: Page, site: Site
    ) -> None:
        """A kind, an id or a field called as what every object has: nothing is found there."""
        html = """<b data-fresh="price:__proto__" data-fresh-field="name"></b>
        <i data-fresh="price:constructor" data-fresh-field="constructor.name">?</i>
        <p data-fresh="price:toString" data-fresh-field="__proto__.n">?</p>
        <u data-fresh="__proto__:polluted">?</u><s data-fresh="constructor:x">?</s>"""
        await show(page, site, html + by_code())
        await text_is(page, "b", "__proto__")
        await page.wait_for_selector("p[data-verdict]", state="attached")
        assert await page.text_content("i") == ""
        assert await page.text_content("p") == ""
        assert await page.evaluate("({}).polluted === undefined && ({}).n === undefined")
        kinds = {it["kind"] for it in await page.evaluate("errors")}
        assert kinds == {"__proto__", "constructor"}


OWN = '<i data-fresh="inbox:1"></i><b data-fresh="word:b"></b>'
FULL = "{token: %s, minPause: 20, maxPause: 100}"


class TestG12Browser:
    """The server ends a viewer's sign-in; the page shows nothing of theirs any more."""

    async def test_a_revoked_token_clears_private_items_from_the_screen(
        self, page: Page, site: Site
    ) -> None:
        """What was private is gone from the screen, what is for all goes on, the page is told."""
        sent = await show(page, site, OWN + by_code(FULL % "'ann'"))
        await text_is(page, "i", "ann's 1")
        site.revoked.add("ann")
        await site.check_tokens()
        await text_is(page, "i", "")
        assert await page.evaluate("client.viewerId") is None
        assert await page.evaluate("errors[0].code") == "signed_out"
        await changes(page, site, "b", "b", 2)
        cut_off(site)
        await page.wait_for_function("states.at(-1) === 'open'")
        await changes(page, site, "b", "b", 3)
        assert [it["token"] for it in said(sent, "sign_in")] == ["ann"]

    async def test_a_revoked_token_is_replaced_by_a_new_one_from_the_page(
        self, page: Page, site: Site
    ) -> None:
        """Where the page gives one at each connect: access tokens that end are replaced."""
        html = "<script>window.token = 'ann';</script>" + OWN
        sent = await show(page, site, html + by_code(FULL % "() => token"))
        await text_is(page, "i", "ann's 1")
        await page.evaluate("() => { token = 'ann-2'; }")
        site.revoked.add("ann")
        await site.check_tokens()
        await until(lambda: len(said(sent, "sign_in")) == 2)
        await text_is(page, "i", "ann's 1")
        assert await page.evaluate("client.viewerId") == "ann"
        await until(lambda: "1" in site.watched())

    async def test_a_revoked_token_is_not_tried_again(self, page: Page, site: Site) -> None:
        """Nor one that comes at once: the page stays a guest, and nobody is asked in a circle."""
        html = "<script>window.given = 0;</script>" + OWN
        sent = await show(page, site, html + by_code(FULL % "() => (given += 1, 'ann')"))
        await text_is(page, "i", "ann's 1")
        site.revoked.add("ann")
        await site.check_tokens()
        await page.wait_for_function("given === 2")
        await changes(page, site, "b", "b", 2)
        assert len(said(sent, "sign_in")) == 1
        assert viewers(site) == [None]

    async def test_private_items_are_asked_for_again_when_sign_in_was_unavailable(
        self, page: Page, site: Site
    ) -> None:
        """A private id that was refused is asked for again; what is shown stays."""
        sent = await show(page, site, OWN + by_code(FULL % "'ann'"))
        await text_is(page, "i", "ann's 1")
        site.is_identity_away = True
        await page.evaluate(
            "() => document.body.insertAdjacentHTML('afterbegin', '<u data-fresh=\"inbox:2\"></u>')"
        )
        await page.wait_for_function("errors.some((it) => it.code === 'sign_in_unavailable')")
        assert await page.text_content("i") == "ann's 1"
        assert "could not be confirmed" in (await page.get_attribute("u", "data-error") or "")
        site.is_identity_away = False
        await text_is(page, "u", "ann's 2")
        assert len(said(sent, "sign_in")) == 1

    async def test_an_unavailable_sign_in_is_retried_after_a_pause(
        self, page: Page, site: Site
    ) -> None:
        """A server that cannot say who they are is given a pause."""
        html = OWN + by_code("{token: 'ann', minPause: 600_000, maxPause: 600_000}")
        sent = await show(page, site, html)
        await text_is(page, "i", "ann's 1")
        site.is_identity_away = True
        await page.evaluate(
            "() => document.body.insertAdjacentHTML('afterbegin', '<u data-fresh=\"inbox:2\"></u>')"
        )
        await page.wait_for_function("errors.some((it) => it.code === 'sign_in_unavailable')")
        asked = len(said(sent, "subscribe"))
        for version in (2, 3):
            await changes(page, site, "b", "b", version)
        assert len(said(sent, "subscribe")) == asked

    async def test_signing_in_is_retried_while_it_is_unavailable(
        self, page: Page, site: Site
    ) -> None:
        """While nobody can say, the page is a guest's; then it is the viewer's."""
        site.is_identity_away = True
        await show(page, site, OWN + by_code(FULL % "'ann'"))
        await text_is(page, "b", "b 1")
        assert await page.evaluate("client.viewerId") is None
        site.is_identity_away = False
        await text_is(page, "i", "ann's 1")
