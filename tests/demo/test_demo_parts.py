"""The demo's parts over real sockets and files: its upstream's switch, visitors, games (G8)."""

import asyncio
import random
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from html import escape
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.responses import PlainTextResponse

import stillfresh.demo
from stillfresh.demo.guard import HEADER, Guard
from stillfresh.demo.rules import Pace
from stillfresh.demo.running import demo
from stillfresh.demo.site import Demo
from stillfresh.demo.upstream import MODES
from stillfresh.demo.visitors import MOST_VISITORS, Approvals, Visitors, key_in
from stillfresh.demo.world import MOST_COMMENTS, UpstreamData
from stillfresh.errors import ConfigError
from stillfresh.systems.feed import Comment
from stillfresh.testing import ManualClock

QUICK = Pace(lookup=(0, 0), slow_lookup=(0.2, 0.2), bot_thinks=(0, 0), change_every=3600)
OURS = {HEADER: "1"}


@asynccontextmanager
async def client_of(made: Demo) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(made.app)
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8000") as client:
        yield client


@pytest.fixture
async def made(tmp_path: Path) -> AsyncIterator[Demo]:
    async with demo(tmp_path, QUICK) as made:
        yield made


@pytest.fixture
async def client(made: Demo) -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(made) as client:
        assert (await client.get("/")).status_code == 200
        yield client


async def asked(made: Demo) -> httpx.Response:
    async with httpx.AsyncClient(base_url=made.upstream.url) as client:
        return await client.get("/prices")


class TestG8Upstream:
    async def test_the_upstream_in_mode_fine_answers(self, made: Demo) -> None:
        """A real server, on a port of its own, that counts who asks."""
        before = made.upstream.requests["prices"]
        assert (await asked(made)).json()
        assert made.upstream.requests["prices"] == before + 1

    async def test_the_upstream_in_mode_failing_answers_500(self, made: Demo) -> None:
        """HTTP 500, whatever is asked."""
        await made.upstream.turn("failing")
        assert (await asked(made)).status_code == 500

    async def test_the_upstream_in_mode_down_refuses_connections_and_returns_on_its_port(
        self, made: Demo
    ) -> None:
        """Refused, not timed out; and the same address works again afterwards."""
        url = made.upstream.url
        await made.upstream.turn("down")
        with pytest.raises(httpx.ConnectError):
            await asked(made)
        await made.upstream.turn("fine")
        assert made.upstream.url == url
        assert (await asked(made)).status_code == 200

    async def test_switching_the_upstream_down_ends_running_requests(self, made: Demo) -> None:
        """A slow answer that somebody waits for never comes: the connection is gone at once."""
        await made.upstream.turn("slow")
        waiting = asyncio.create_task(asked(made))
        while not made.upstream.requests["prices"]:
            await asyncio.sleep(0)
        await made.upstream.turn("down")
        with pytest.raises(httpx.TransportError):
            await waiting

    async def test_concurrent_switches_of_the_upstream_leave_it_working(self, made: Demo) -> None:
        """Turning waits for turning; a port is never bound twice."""
        await asyncio.gather(*(made.upstream.turn(mode) for mode in MODES * 3))
        await made.upstream.turn("fine")
        assert (await asked(made)).status_code == 200

    async def test_an_unknown_upstream_mode_is_refused(self, made: Demo) -> None:
        """With the modes that there are."""
        with pytest.raises(ConfigError, match="fine, slow, failing, down"):
            await made.upstream.turn("on fire")


class TestG8World:
    def test_the_demo_data_changes_and_stays_bounded(self) -> None:
        """However long it runs, nothing grows without end; and posts do change."""
        world = UpstreamData(1_000_000, random.Random(1))
        likes = sum(post["counts"]["likes"] for post in world.posts.values())
        for second in range(5_000):
            world.change(1_000_000 + second)
        assert likes < sum(post["counts"]["likes"] for post in world.posts.values())
        assert len(world.posts) == 240
        assert len(world.topics) == len(world.comments) == 12
        assert max(map(len, world.comments.values())) <= MOST_COMMENTS

    def test_a_comment_sent_twice_is_stored_once(self) -> None:
        """Who did not hear the answer asks again."""
        world = UpstreamData(1_000_000, random.Random(1))
        comment = Comment("c1", "topic-0", "ann", 1_000_000, "Hello")
        assert world.add_comment("topic-0", comment)
        assert world.add_comment("topic-0", comment)
        assert world.comments["topic-0"].count(comment) == 1


class TestG8Approvals:
    def test_an_approval_in_time_counts_once(self) -> None:
        """The first press gets it, the second is told that it is gone."""
        approvals = Approvals(20, random.Random(1), clock=ManualClock())
        (ask,) = approvals.show()["pending"]
        assert approvals.decide(ask["id"])
        assert not approvals.decide(ask["id"])

    def test_an_approval_after_its_time_is_refused(self) -> None:
        """At the end of its time it is absent, and counted as expired."""
        clock = ManualClock()
        approvals = Approvals(20, random.Random(1), clock=clock)
        (ask,) = approvals.show()["pending"]
        assert ask["left"] == 20
        clock.advance(20)
        assert not approvals.decide(ask["id"])
        assert approvals.show()["expired"] == 1

    def test_at_most_three_approvals_are_pending(self) -> None:
        """They come a third of a lifetime apart, and go at its end."""
        clock = ManualClock()
        approvals = Approvals(30, random.Random(1), clock=clock)
        for _ in range(100):
            assert 1 <= len(approvals.show()["pending"]) <= 3
            clock.advance(1)


class TestG8Site:
    async def test_topics_are_served_while_the_upstream_is_down(
        self, made: Demo, client: httpx.AsyncClient
    ) -> None:
        """Read once, they are there with their age, whatever becomes of the upstream."""
        first = (await client.get("/demo/topics")).json()
        await made.upstream.turn("down")
        kept = (await client.get("/demo/topics")).json()
        assert kept["topics"] == first["topics"] != []
        assert kept["verdict"] in {"fresh", "stale"}

    async def test_a_topic_without_a_copy_says_so_while_the_upstream_is_down(
        self, made: Demo, client: httpx.AsyncClient
    ) -> None:
        """No copy, no upstream: one sentence for the page, no error of the site's."""
        await made.upstream.turn("down")
        answer = await client.get("/demo/topics/topic-3")
        assert answer.status_code == 200
        assert answer.json()["refused"].startswith("There is no copy yet")

    async def test_a_comment_refused_by_the_upstream_is_removed(
        self, made: Demo, client: httpx.AsyncClient
    ) -> None:
        """Shown at once, and not there any more when it could not be published."""
        before = (await client.get("/demo/topics/topic-0")).json()["comments"]
        await made.upstream.turn("failing")
        path = "/demo/topics/topic-0/comments"
        refused = (await client.post(path, json={"body": "Hello"}, headers=OURS)).json()
        assert set(refused) == {"refused"}
        assert (await client.get("/demo/topics/topic-0")).json()["comments"] == before
        await made.upstream.turn("fine")
        said = (await client.post(path, json={"body": "Hello"}, headers=OURS)).json()
        assert [it["body"] for it in said["comments"]].count("Hello") == 1

    async def test_the_slow_page_is_served_while_the_upstream_is_down(
        self, made: Demo, client: httpx.AsyncClient
    ) -> None:
        """The copy that was rendered before, with its age and what the cache did."""
        assert (await client.get("/prices")).status_code == 200
        await made.upstream.turn("down")
        kept = await client.get("/prices")
        assert kept.status_code == 200
        assert kept.headers["cache-status"].startswith("stillfresh; hit")
        assert "age" in kept.headers

    async def test_the_slow_page_without_a_copy_is_503_while_the_upstream_is_down(
        self, made: Demo, client: httpx.AsyncClient
    ) -> None:
        """503, in words, and not kept."""
        await made.upstream.turn("down")
        assert (await client.get("/prices")).status_code == 503
        await made.upstream.turn("fine")


class TestG19Words:
    @pytest.mark.parametrize(
        ("mode", "says", "said"),
        [
            ("failing", "answers with errors", "answered with 500"),
            ("down", "does not answer", "does not answer"),
        ],
    )
    async def test_each_part_of_the_demo_names_the_upstreams_trouble(
        self, made: Demo, client: httpx.AsyncClient, mode: str, says: str, said: str
    ) -> None:
        """A topic, a page, a comment: failing is not "away", and a refusal has its reason."""
        await made.upstream.turn(mode)
        topic = (await client.get("/demo/topics/topic-3")).json()
        assert topic["refused"] == f"There is no copy yet, and the upstream {says}."
        assert f"the upstream {says}" in (await client.get("/prices")).text
        path = "/demo/topics/topic-0/comments"
        comment = (await client.post(path, json={"body": "Hello"}, headers=OURS)).json()
        assert comment == {"refused": f"the upstream {said}"}

    @pytest.mark.parametrize("body", ["", "  ", "x" * 281])
    async def test_a_comment_of_a_bad_length_is_refused(
        self, client: httpx.AsyncClient, body: str
    ) -> None:
        """Empty or too long, it is refused, with what is allowed and what it was."""
        path = "/demo/topics/topic-0/comments"
        said = (await client.post(path, json={"body": body}, headers=OURS)).json()["refused"]
        assert "1 to 280 characters" in said
        assert said.endswith(f" {len(body.strip())}")

    async def test_a_failed_move_is_taken_back_with_its_reason(
        self, made: Demo, client: httpx.AsyncClient
    ) -> None:
        """The game service answered with an error: it is not away."""
        first: str = (await settled(client))["next"][0]["id"]
        await client.post(f"/demo/games/{first}/open", headers=OURS)
        await made.upstream.turn("failing")
        refused = (await client.post("/demo/games/play", json={"cell": 0}, headers=OURS)).json()
        why = "the game service answered with an error: your move was taken back"
        assert refused["refused"] == why

    async def test_hints_that_were_dismissed_are_not_shown_again(
        self, client: httpx.AsyncClient
    ) -> None:
        """From the first byte on: a page that hides them later moves under its reader."""
        assert 'aria-label="What to try">' in (await client.get("/")).text
        client.cookies.set("stillfresh_demo_tried", "1")
        assert 'aria-label="What to try" hidden>' in (await client.get("/")).text


class TestG22Function:
    async def test_a_call_of_the_cached_function_says_its_value_age_and_time(
        self, made: Demo, client: httpx.AsyncClient
    ) -> None:
        """The first call loads; the next one returns the copy without a request."""
        first = (await client.get("/demo/rate")).json()
        assert first["value"] == made.world.rates["USD"]
        second = (await client.get("/demo/rate")).json()
        assert (second["value"], second["verdict"]) == (first["value"], "fresh")
        assert made.upstream.requests["rates"] == 1

    async def test_an_invalidated_function_is_called_again(
        self, made: Demo, client: httpx.AsyncClient
    ) -> None:
        """And while the upstream is down, the old value is returned as expired."""
        old = (await client.get("/demo/rate")).json()["value"]
        made.world.rates["USD"] = 2.0
        await client.post("/demo/rate/invalidate", headers=OURS)
        assert (await client.get("/demo/rate")).json()["value"] == 2.0
        await made.upstream.turn("down")
        await client.post("/demo/rate/invalidate", headers=OURS)
        answer = (await client.get("/demo/rate")).json()
        assert (answer["value"], answer["verdict"]) == (2.0, "expired")
        assert answer["error"]
        assert old != 2.0

    async def test_without_a_copy_the_function_says_why(
        self, made: Demo, client: httpx.AsyncClient
    ) -> None:
        await made.upstream.turn("down")
        answer = (await client.get("/demo/rate")).json()
        assert answer == {"refused": "There is no copy yet, and the upstream does not answer."}


class TestG22Code:
    async def test_each_card_shows_the_lines_that_run_behind_it(
        self, made: Demo, client: httpx.AsyncClient
    ) -> None:
        """Cut out of the package: about ten lines, without docstrings."""
        package = Path(stillfresh.demo.__file__).parent
        files = [*package.glob("*.py"), *package.glob("static/*.js")]
        sources = {line.strip() for file in files for line in file.read_text().splitlines()}
        page = (await client.get("/")).text
        for card, (title, code) in made.codes.items():
            assert set(map(str.strip, code.splitlines())) <= sources
            assert 7 <= len(code.splitlines()) <= 20, title
            assert '"""' not in code
            assert f'popovertarget="code-{card}"' in page
            assert f'id="code-{card}"' in page
            assert escape(code) in page
        cards = re.findall(r'<section class="card panel".*?</section>', page, re.DOTALL)
        assert len(cards) == 6
        assert all("code-button" in card for card in cards)

    async def test_one_card_is_a_plain_cached_function(self, made: Demo) -> None:
        _, code = made.codes["rate"]
        assert '@cache.cached("rate", fresh_for="10s", stale_for="1h", error_for="1d")' in code
        script = Path(stillfresh.demo.__file__).parent / "static" / "rate.js"
        assert "const FRESH_FOR = 10;" in script.read_text()


class TestG8Guard:
    @pytest.mark.parametrize(
        "headers",
        [
            {},
            {HEADER: "0"},
            {HEADER: "1", "origin": "http://evil.example"},
            {HEADER: "1", "origin": "null"},
            {HEADER: "1", "origin": "http://127.0.0.1:9999"},
            {HEADER: "1", "host": "evil.example"},
        ],
    )
    async def test_another_site_cannot_switch_the_upstream(
        self, made: Demo, client: httpx.AsyncClient, headers: dict[str, str]
    ) -> None:
        """Neither by a form, nor by a script of another origin, nor by a name of its own."""
        answer = await client.post("/demo/upstream", json={"mode": "down"}, headers=headers)
        assert answer.status_code == 403
        assert made.upstream.mode == "fine"

    async def test_a_demo_bound_everywhere_answers_to_addresses_but_not_to_names(self) -> None:
        """A name can be anybody's; an address cannot be made to point here."""
        guard = Guard(PlainTextResponse("here"), ("0.0.0.0",))  # noqa: S104 (not bound)
        transport = httpx.ASGITransport(guard)
        async with httpx.AsyncClient(transport=transport) as client:
            assert (await client.get("http://192.0.2.7:8000/")).status_code == 200
            assert (await client.get("http://[2001:db8::7]:8000/")).status_code == 200
            assert (await client.get("http://evil.example:8000/")).status_code == 403

    async def test_the_demos_own_page_can_switch_the_upstream(
        self, made: Demo, client: httpx.AsyncClient
    ) -> None:
        """Same origin, with the header that only it can send."""
        headers = {HEADER: "1", "origin": "http://127.0.0.1:8000"}
        answer = await client.post("/demo/upstream", json={"mode": "slow"}, headers=headers)
        assert answer.json()["mode"] == made.upstream.mode == "slow"

    async def test_every_response_of_the_demo_has_a_strict_policy(
        self, client: httpx.AsyncClient
    ) -> None:
        """No inline script, no frame around it, no guessing of types."""
        for path in ("/", "/prices", "/demo/topics", "/demo/static/main.js"):
            headers = (await client.get(path)).headers
            assert "script-src 'self'" in headers["content-security-policy"]
            assert "unsafe" not in headers["content-security-policy"]
            assert headers["x-content-type-options"] == "nosniff"

    @pytest.mark.parametrize(
        "body", [b"", b"[]", b"{", b'{"mode": 5}', b"x" * 10_000, b"[" * 4_000]
    )
    async def test_a_malformed_switch_request_changes_nothing(
        self, made: Demo, client: httpx.AsyncClient, body: bytes
    ) -> None:
        """What is no small JSON object with a mode in it is refused in words."""
        answer = await client.post("/demo/upstream", content=body, headers=OURS)
        assert "refused" in answer.json()
        assert made.upstream.mode == "fine"


class TestG8Visitors:
    async def test_the_number_of_visitors_is_limited(self, made: Demo) -> None:
        """A new one beyond it ends the oldest, whose connections are closed by the next tick."""
        visitors: Visitors = made.visitors
        first = visitors.welcome()
        await first.playing.state()
        for _ in range(MOST_VISITORS):
            visitors.welcome()
        await made.tick()
        names = {task.get_name() for task in asyncio.all_tasks()}
        assert "stillfresh-waiting-client" not in names
        assert visitors.authenticate(first.token) not in {None, first.id}

    @pytest.mark.parametrize(
        "token", ["", "made up", "x" * 32, "é" * 32, "../" * 11, f"{'x' * 32}.{'0' * 32}"]
    )
    async def test_a_forged_visitor_token_is_refused(self, made: Demo, token: str) -> None:
        """Whatever a cookie or a client says."""
        assert made.visitors.authenticate(token) is None

    async def test_made_up_cookies_end_no_session(self, made: Demo) -> None:
        """Only who has a cookie of ours has a session, and who was here last keeps it."""
        visitors: Visitors = made.visitors
        first, others = visitors.welcome(), [visitors.welcome() for _ in range(MOST_VISITORS - 1)]
        for number in range(MOST_VISITORS):
            assert visitors.find(f"{number:032}.{number:032}") is None
        assert visitors.find(first.token) is first
        visitors.welcome()
        assert visitors.find(first.token) is first
        assert visitors.find(others[1].token) is others[1]
        assert visitors.find(others[0].token) is not others[0]

    def test_the_visitor_key_outlives_the_process(self, tmp_path: Path) -> None:
        """A page that is open goes on after a restart; nobody else reads the key."""
        key = key_in(tmp_path)
        assert key_in(tmp_path) == key
        assert (tmp_path / "visitors.key").stat().st_mode & 0o077 == 0

    async def test_a_demo_session_is_found_by_its_cookie_only(
        self, made: Demo, client: httpx.AsyncClient
    ) -> None:
        """Without it, there is neither a game nor an approval to be had."""
        async with client_of(made) as stranger:
            assert "refused" in (await stranger.get("/demo/games")).json()
            assert (await stranger.get("/demo/events")).status_code == 204
        assert "next" in (await client.get("/demo/games")).json()


async def settled(client: httpx.AsyncClient) -> dict[str, Any]:
    """Until the order of the games is known."""
    async with asyncio.timeout(60):
        while True:
            state: dict[str, Any] = (await client.get("/demo/games")).json()
            if state["next"] and not state["pending"]:
                return state
            await asyncio.sleep(0.01)


async def play_the_next(client: httpx.AsyncClient) -> str:
    """Opens what the header offers, and takes the middle."""
    game_id: str = (await settled(client))["next"][0]["id"]
    await client.post(f"/demo/games/{game_id}/open", headers=OURS)
    await client.post("/demo/games/play", json={"cell": 4}, headers=OURS)
    return game_id


class TestG8Games:
    async def test_the_next_game_is_never_the_current_one(self, client: httpx.AsyncClient) -> None:
        """Whichever game is opened and played, the header offers another."""
        for number in range(12):
            state = await settled(client)
            offered: list[dict[str, str]] = state["next"]
            assert state["current"] not in [game["id"] for game in offered]
            path = f"/demo/games/{offered[0]['id']}/open"
            opened = (await client.post(path, headers=OURS)).json()
            assert opened["current"] == offered[0]["id"]
            assert opened["current"] not in [game["id"] for game in opened["next"]]
            cells = opened["board"]["cells"]
            cell = cells.index(".", number % 3) if "." in cells[number % 3 :] else 0
            played = (
                await client.post("/demo/games/play", json={"cell": cell}, headers=OURS)
            ).json()
            assert played["current"] not in [game["id"] for game in played["next"]]

    async def test_the_game_that_waits_longest_comes_first(self, client: httpx.AsyncClient) -> None:
        """A game that was just played, and came back, waits behind the others."""
        first = await play_the_next(client)
        second = await play_the_next(client)
        async with asyncio.timeout(60):
            while True:
                games = [game["id"] for game in (await settled(client))["next"]]
                if first in games:
                    break
                await asyncio.sleep(0.01)
        assert games.index(first) >= 3
        assert second not in games

    async def test_only_a_waiting_game_can_be_opened(
        self, made: Demo, client: httpx.AsyncClient
    ) -> None:
        """Not a game that is made up, nor another visitor's."""
        await settled(client)
        async with client_of(made) as other:
            await other.get("/")
            theirs: str = (await settled(other))["next"][0]["id"]
        for game_id in ("made-up", theirs):
            said = (await client.post(f"/demo/games/{game_id}/open", headers=OURS)).json()
            assert "does not wait" in said["refused"]
            assert said["current"] is None

    async def test_a_game_is_played_to_its_end_and_another_follows(
        self, made: Demo, client: httpx.AsyncClient
    ) -> None:
        """What is over stays on screen as it ended, and is not asked for again."""
        await play_the_next(client)
        async with asyncio.timeout(60):
            while True:
                board = (await client.get("/demo/games")).json()["board"]
                if board["result"]:
                    break
                if board["my_turn"]:
                    cell = board["cells"].index(".")
                    await client.post("/demo/games/play", json={"cell": cell}, headers=OURS)
                await asyncio.sleep(0.01)
        asked = made.upstream.requests["games"]
        assert (await client.get("/demo/games")).json()["board"] == board
        assert made.upstream.requests["games"] == asked

    async def test_a_move_while_the_game_service_is_down_is_taken_back(
        self, made: Demo, client: httpx.AsyncClient
    ) -> None:
        """The board stays as it was, with its age; back up, the same move is made."""
        first: str = (await settled(client))["next"][0]["id"]
        await client.post(f"/demo/games/{first}/open", headers=OURS)
        await made.upstream.turn("down")
        refused = (await client.post("/demo/games/play", json={"cell": 0}, headers=OURS)).json()
        assert "taken back" in refused["refused"]
        assert not refused["connected"]
        assert refused["board"]["cells"] == "." * 9
        await made.upstream.turn("fine")
        async with asyncio.timeout(60):
            while True:
                said = (
                    await client.post("/demo/games/play", json={"cell": 0}, headers=OURS)
                ).json()
                if said["refused"] is None:
                    break
                await asyncio.sleep(0.05)
        assert said["board"]["cells"][0] == "x"

    async def test_a_game_without_a_copy_is_shown_when_the_service_is_back(
        self, made: Demo, client: httpx.AsyncClient
    ) -> None:
        """Opened while the service is down: no board, and no other's; back up, it is there."""
        state = await settled(client)
        assert state["connected"]
        first, second = (game["id"] for game in state["next"][:2])
        await client.post(f"/demo/games/{first}/open", headers=OURS)
        await made.upstream.turn("down")
        said = (await client.post(f"/demo/games/{second}/open", headers=OURS)).json()
        assert (said["current"], said["board"], said["connected"]) == (second, None, False)
        assert said["current_bot"].lower() == second.partition("-")[0]
        await made.upstream.turn("fine")
        async with asyncio.timeout(60):
            while not (said := (await client.get("/demo/games")).json())["board"]:
                await asyncio.sleep(0.05)
        assert said["board"]["id"] == second


class TestG8WithoutAClone:
    async def test_the_games_card_says_where_the_game_service_is(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """An installed stillfresh has no examples; the rest of the demo works."""
        monkeypatch.setattr("stillfresh.demo.example_games.EXAMPLES", tmp_path / "none")
        async with demo(tmp_path, QUICK) as made, client_of(made) as client:
            assert (await client.get("/")).status_code == 200
            games = (await client.get("/demo/games")).json()
            assert "Clone the repository" in games["no_service"]
            assert (await client.get("/demo/topics")).json()["topics"]
