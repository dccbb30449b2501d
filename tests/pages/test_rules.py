"""I12, I13: the pure rules of the page cache, by example and by property."""

import sys
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stillfresh import Answer, ConfigError, Origin, Verdict
from stillfresh.errors import LoadFailed
from stillfresh.freshness import Policy
from stillfresh.http.fields import ENCODINGS, end_to_end, normalised
from stillfresh.http.serving import Wish, age_at, ttl_at, why_asked
from stillfresh.http.sharing import (
    MOST_HEADERS,
    Reason,
    carried_in,
    checked_credentials,
    is_answer_to,
    is_event_stream,
    is_failure,
    selected,
)
from stillfresh.pages import Headers, Page, Route
from stillfresh.pages.clients import (
    CLEARLY,
    MOST_FIELDS,
    STANDS_FOR,
    UNUSED_FOR,
    BoundedNames,
    Heard,
    NamePlaces,
    as_asked,
    believed,
    canonical_host,
    checked_networks,
    forwarded,
    forwards_left,
    host_fault,
    is_allowed,
    is_trusted,
    peer_of,
    reads_along,
    reflected,
    target_of,
    unfit_to_fill,
)
from stillfresh.pages.model import Head, PageCaller, PageRead, ServedPage, StoredPage
from stillfresh.pages.routes import (
    MOST_KEY,
    MOST_PATH,
    MOST_URL,
    Routes,
    Site,
    Visit,
    canonical_path,
    canonical_url,
    checked_path,
    group_tag,
    own_tag,
    plain_path,
    query_of,
    reached,
)
from stillfresh.pages.sharing import (
    Allowed,
    Shared,
    forbids_stale,
    is_changed,
    is_for,
    is_good_for,
    is_of_gateway,
    judged,
    judged_for,
    may_serve,
    suits,
)

NOW = 1_700_000_000.0
KEPT = Policy(60, 100, 100)
OWN = (KEPT, Policy(10))


def raw(*lines: str) -> tuple[tuple[bytes, bytes], ...]:
    pairs = (line.partition(": ") for line in lines)
    return tuple((name.lower().encode(), value.encode()) for name, _, value in pairs)


class TestI13Judged:
    @pytest.mark.parametrize(
        "lines",
        [
            ["set-cookie: a=b", "cache-control: public, max-age=60"],
            ["cache-control: private, max-age=60"],
            ['cache-control: private="x-a", max-age=60'],
            ["cache-control: max-age=60", "cache-control: no-store"],
            ["cdn-cache-control: private", "cache-control: max-age=60"],
            ["cdn-cache-control: no-store", "cache-control: max-age=60"],
            ["vary: *", "cache-control: max-age=60"],
            ["vary: Accept, *", "cache-control: max-age=60"],
            ["content-type: text/event-stream", "cache-control: max-age=60"],
            ["content-length: 3", "content-length: 4", "cache-control: max-age=60"],
            ["x-split: a\r\nset-cookie: b", "cache-control: max-age=60"],
            [f"x-big: {'x' * 40_000}", "cache-control: max-age=60"],
        ],
    )
    def test_personal_and_unstorable_responses_are_never_shared(self, lines: list[str]) -> None:
        """Whatever the route says."""
        assert isinstance(judged(200, raw(*lines), NOW, OWN), Reason)
        assert isinstance(judged(200, raw(*lines), NOW, None), Reason)

    @pytest.mark.parametrize("status", [206, 304, 500, 503, 101])
    def test_partial_interim_and_error_statuses_are_never_stored(self, status: int) -> None:
        """Partial, not final, or an error."""
        assert isinstance(judged(status, raw("cache-control: max-age=60"), NOW, OWN), Reason)

    def test_a_routes_duration_applies_to_some_statuses_only(self) -> None:
        """Not for refusals of a client, bad requests and errors."""
        said = raw("cache-control: max-age=60")
        by_route = [it for it in range(100, 600) if isinstance(judged(it, (), NOW, OWN), Shared)]
        refused = {206, 304, 428, 429, 431}
        assert by_route == [200, 203, 204, 300, 301, 302, 303, 307, 308, 404, 405, 410, 414]
        by_itself = {
            it for it in range(100, 700) if isinstance(judged(it, said, NOW, None), Shared)
        }
        assert by_itself == set(range(200, 600)) - refused

    @pytest.mark.parametrize("status", [428, 429, 431])
    def test_statuses_428_429_and_431_are_never_stored(self, status: int) -> None:
        """RFC 6585 §3 to §5, whatever it says of itself."""
        assert isinstance(judged(status, raw("cache-control: max-age=60"), NOW, None), Reason)

    @pytest.mark.parametrize("status", [400, 401, 403])
    def test_a_refusal_is_stored_only_if_it_states_freshness(self, status: int) -> None:
        """A route's duration is for pages: one bad request must not take a page down."""
        assert isinstance(judged(status, (), NOW, OWN), Reason)
        assert isinstance(judged(status, raw("cache-control: max-age=60"), NOW, None), Shared)

    def test_a_routes_duration_overrides_max_age(self) -> None:
        """But never its privacy."""
        assert judged(200, raw("cache-control: max-age=5"), NOW, OWN) == Shared(KEPT)
        assert judged(200, raw("cache-control: max-age=5"), NOW, None) == Shared(Policy(5))

    def test_an_encoded_response_varies_by_accept_encoding(self) -> None:
        """Whether it says so or not."""
        headers = raw("content-encoding: gzip", "vary: Accept-Language")
        assert judged(200, headers, NOW, OWN) == Shared(
            KEPT, ("accept-encoding", "accept-language")
        )

    def test_a_response_answers_requests_that_agree_in_its_vary_fields(self) -> None:
        """RFC 9110 §12.5.5: by nothing that he sent, or by what the render was given, too."""
        request = raw("accept-language: de", "x-plan: gold")
        assert is_answer_to(request, {}, ())
        assert is_answer_to(request, {}, raw("vary: Accept, Host"))
        assert is_answer_to(request, {"accept-language": "de"}, raw("vary: Accept-Language"))
        assert not is_answer_to(request, {"accept-language": "de"}, raw("vary: X-Plan"))
        assert not is_answer_to(request, {"accept-language": "en"}, raw("vary: Accept-Language"))
        assert not is_answer_to((), {"accept-language": "de"}, raw("vary: Accept-Language"))
        assert is_answer_to(raw("accept-encoding: identity"), {}, raw("vary: Accept-Encoding"))
        assert not is_answer_to((), {"accept-encoding": "gzip"}, raw("content-encoding: gzip"))
        assert not is_answer_to(request, {}, raw("vary: *"))

    def test_a_missing_page_has_the_terms_of_missing_pages(self) -> None:
        """I23: with a route's duration."""
        own = Policy(60, 100, 100), Policy(5)
        for status, expected in ((404, 5), (410, 5), (200, 60), (405, 60)):
            found = judged(status, (), NOW, own)
            assert isinstance(found, Shared)
            assert found.terms.fresh_for == expected

    def test_the_bytes_of_response_headers_are_limited(self) -> None:
        """Names and values together."""
        most = MOST_HEADERS - len(b"x")
        assert isinstance(judged(200, ((b"x", b"a" * most),), NOW, OWN), Shared)
        assert judged(200, ((b"x", b"a" * (most + 1)),), NOW, OWN) == Reason.HEADERS

    @pytest.mark.parametrize(
        ("lines", "expected"),
        [
            (["cache-control: private"], Reason.PRIVATE),
            (["cache-control: no-store"], Reason.PRIVATE),
            (['cache-control: max-age=60, x="private'], Reason.PRIVATE),
            (["cache-control: max-age=60 private"], Reason.PRIVATE),
            (["set-cookie: a=b"], Reason.SET_COOKIE),
            (["vary: *"], Reason.VARY),
            (["content-type: Text/Event-Stream; x"], Reason.STREAM),
            (["content-length: 3", "content-length: 4"], Reason.HEADERS),
            (["bad name: 3"], Reason.HEADERS),
            (["cache-tag: " + "t" * 2_000], Reason.TAGS),
        ],
    )
    def test_each_response_that_is_not_shared_has_its_reason(
        self, lines: list[str], expected: Reason
    ) -> None:
        """Whatever the route says."""
        assert judged(200, raw(*lines), NOW, OWN) == expected

    def test_must_understand_beats_no_store(self) -> None:
        """RFC 9111 §5.2.2.3: for a status whose meaning is known."""
        said = raw("cache-control: must-understand, no-store, max-age=60")
        assert isinstance(judged(200, said, NOW, None), Shared)
        assert judged(299, said, NOW, None) == Reason.STATUS
        assert judged(299, raw("cache-control: max-age=60"), NOW, None) == Shared(Policy(60, 0, 0))

    def test_cdn_cache_control_counts_in_place_of_cache_control(self) -> None:
        """RFC 9213: then `Cache-Control` says nothing, not even that it is private (I34)."""
        said = raw("cache-control: private", "cdn-cache-control: max-age=60")
        assert judged(200, said, NOW, None) == Shared(Policy(60, 0, 0), is_targeted=True)
        assert judged(200, said, NOW, None, Allowed(cdn_override=False)) == Reason.PRIVATE

    def test_a_response_that_sets_a_cookie_is_never_shared_whatever_cdn_cache_control_says(
        self,
    ) -> None:
        """RFC 9213 replaces `Cache-Control`; a cookie is one visitor's own all the same (I13)."""
        said = raw("set-cookie: a=1", "cdn-cache-control: max-age=60")
        assert judged(200, said, NOW, None) == Reason.SET_COOKIE

    def test_freshness_is_guessed_only_with_heuristic(self) -> None:
        """Only if the response states none."""
        said = raw("last-modified: Tue, 14 Nov 2023 22:11:40 GMT")
        heuristic = Allowed(heuristic=True)
        assert judged(200, said, NOW, None, heuristic) == Shared(Policy(10, 0, 0))
        assert judged(200, said, NOW, None) == Reason.NO_FRESHNESS
        targeted = (*said, *raw("cdn-cache-control: public"))
        both = Allowed(heuristic=True)
        assert judged(200, targeted, NOW, None, both) == Reason.NO_FRESHNESS

    def test_a_page_without_freshness_is_stored_if_it_can_be_validated(self) -> None:
        """By its ETag or its date; else it is of no use to anybody."""
        never = "cache-control: max-age=0"
        assert judged(200, raw(never), NOW, None) == Reason.NO_FRESHNESS
        for more in ('etag: "a"', "last-modified: Tue, 14 Nov 2023 22:11:40 GMT"):
            assert isinstance(judged(200, raw(never, more), NOW, None), Shared)
        for more in ("stale-while-revalidate=5", "stale-if-error=5"):
            assert isinstance(judged(200, raw(f"{never}, {more}"), NOW, None), Shared)

    def test_server_errors_and_429_are_failures(self) -> None:
        """I8: errors of the server, and too many requests."""
        assert [it for it in (404, 429, 428, 499, 500, 599) if is_failure(it)] == [429, 500, 599]

    def test_an_error_of_the_gateway_without_a_cookie_is_shared(self) -> None:
        """RFC 9209: one that it made itself, without a cookie."""
        ours = "proxy-status: stillfresh; error=connection_refused"
        assert is_of_gateway(raw(ours))
        assert is_of_gateway(raw("proxy-status: other; error=x", ours))
        assert not is_of_gateway(raw(ours, "set-cookie: a=b"))
        assert not is_of_gateway(raw("proxy-status: other; error=x"))

    def test_an_event_stream_is_known_by_its_content_type(self) -> None:
        """Whatever its case and its parameters."""
        assert is_event_stream(raw("content-type: text/Event-Stream; charset=utf-8"))
        assert not is_event_stream(raw("content-type: text/html"))
        assert not is_event_stream(())


KEYS = checked_credentials(["X-Api-Key"])


def judged_by(request: tuple[str, ...], *answer: str) -> object:
    made, said = raw(*request), raw("cache-control: max-age=60", *answer)
    return judged_for(made, KEYS, 200, said, fetched_at=NOW, own=None, allowed=Allowed())


class TestI24JudgedFor:
    @pytest.mark.parametrize(
        ("request_", "answer", "expected"),
        [
            ("cookie: a=b", "x: y", Reason.COOKIE),
            ("cookie: a=b", "cache-control: must-revalidate", Reason.COOKIE),
            ("cookie: a=b", "cache-control: public", None),
            ("cookie: a=b", "cache-control: s-maxage=5", None),
            ("authorization: b", "x: y", Reason.AUTHORIZATION),
            ("x-api-key: b", "x: y", Reason.AUTHORIZATION),
            ("x-api-key: b", "cache-control: must-revalidate", None),
            ("x-api-key: b", "cache-control: public", None),
            ("x-other: b", "x: y", None),
            ("x-a: b", "set-cookie: a=b", Reason.SET_COOKIE),
            ("x_api_key: b", "x: y", Reason.HEADERS),
            ("x_other: b", "x: y", None),
            ("x_a: b", "vary: x-a", Reason.HEADERS),
        ],
    )
    def test_a_response_to_credentials_must_allow_sharing(
        self, request_: str, answer: str, expected: Reason | None
    ) -> None:
        """RFC 9111 §3.5: with credentials, only what says that it may be shared is."""
        found = judged_by((request_,), answer)
        assert found == expected if expected else isinstance(found, Shared)

    def test_a_page_that_allows_an_origin_varies_by_origin(self) -> None:
        """One that allows an origin depends on it, though it does not say so."""
        origin, allows = "origin: https://a", "access-control-allow-origin: https://a"
        for request, answer, expected in (
            (origin, (allows,), ("origin",)),
            (origin, (allows, "vary: X-A"), ("origin", "x-a")),
            (origin, ("access-control-allow-origin: *",), ()),
            ("x: y", (allows,), ()),
            (origin, (), ()),
        ):
            found = judged_by((request,), *answer)
            assert isinstance(found, Shared)
            assert found.vary == expected

    def test_a_field_hidden_by_connection_chooses_no_variant(self) -> None:
        """`Connection` hid it from the site, so its answer is no answer to it."""
        request = ("connection: x-a", "x-a: 1")
        assert judged_by(request, "vary: x-a") == Reason.VARY
        assert isinstance(judged_by(("x-a: 1",), "vary: x-a"), Shared)
        assert isinstance(judged_by(request, "vary: x-b"), Shared)

    def test_credentials_never_become_part_of_a_key(self) -> None:
        """A page that varies by one is for those without it."""
        request = raw("x-api-key: a", "x-b: c")
        carried = carried_in(request, KEYS)
        assert carried == {b"x-api-key"}
        assert selected(["x-api-key"], request, carried) is None
        assert selected(["x-b", "x-none"], request, carried) == {"x-b": "c"}

    def test_names_of_credentials_are_checked(self) -> None:
        """A list of field names, in any case."""
        assert checked_credentials(["X-Api-Key", "Token"]) == {b"x-api-key", b"token"}
        for bad in ("X-Api-Key", ["a b"], [""]):
            with pytest.raises(ConfigError, match="credentials"):
                checked_credentials(bad)

    def test_must_revalidate_allows_sharing_for_credentials_not_for_cookies(self) -> None:
        """Of several fields of a client, each must be allowed."""
        both = frozenset({b"cookie", b"authorization"})
        assert is_for(Head(headers=raw("cache-control: public")), both) is None
        says = Head(headers=raw("cache-control: must-revalidate"))
        assert is_for(says, both) == Reason.COOKIE
        assert is_for(says, both - {b"cookie"}) is None


def a_copy(
    verdict: Verdict = Verdict.FRESH, said: str = "x: y", **terms: Any
) -> Answer[StoredPage]:
    """A page that was fetched at NOW, fresh for 60 seconds, stale for 20, kept for 40."""
    times = {"fresh_for": 60.0, "stale_for": 20.0, "error_for": 40.0} | terms
    stored = StoredPage(Head(headers=raw(said), **times))
    return Answer(
        stored,
        found=True,
        verdict=verdict,
        fetched_at=NOW,
        origin=Origin.STORE,
        clock=lambda: NOW,
    )


class TestI14Served:
    def test_age_and_ttl_count_the_initial_age_and_invalidation(self) -> None:
        """RFC 9111 §4.2.3: with the age that it came with; an invalidated one has nothing left."""
        assert age_at(a_copy(initial_age=5.0), NOW + 10) == 15
        assert age_at(a_copy(initial_age=5.0), NOW - 10) == 5
        assert ttl_at(a_copy(), NOW + 10) == 50
        assert ttl_at(a_copy(Verdict.STALE), NOW + 10) == 0
        assert ttl_at(a_copy(Verdict.STALE), NOW + 70) == -10
        came_stale = a_copy(Verdict.STALE, fresh_for=0.0, stale_by=240.0)
        assert ttl_at(came_stale, NOW + 10) == -250

    def test_a_stored_head_of_an_earlier_release_is_never_fresh(self) -> None:
        """What an earlier release did not write means nothing: no time, no age, no variant."""
        head = msgspec.convert([404, []], Head)
        assert head == Head(404)
        assert head.fresh_for == head.stale_for == head.error_for == 0
        assert head.initial_age == head.stale_by == 0
        others = [head.is_own, head.vary, head.variant, head.is_targeted]
        assert not any([*others, head.spans, head.total, head.shows_tags])

    def test_the_forward_reason_is_miss_request_or_stale(self) -> None:
        """RFC 9211 §2.2: there was none, the client wanted another, or it was stale."""
        assert why_asked(None, NOW, absent="miss") == "miss"
        assert why_asked(a_copy(), NOW + 59, absent="miss") == "request"
        assert why_asked(a_copy(), NOW + 60, absent="miss") == "stale"

    def test_a_changed_page_is_not_served_after_a_failed_refresh(self) -> None:
        """I12: and is not served after a failed refresh; one whose time is over is not changed."""
        assert is_changed(a_copy(Verdict.EXPIRED), NOW + 79)
        assert not is_changed(a_copy(Verdict.EXPIRED), NOW + 80)
        assert not is_changed(a_copy(Verdict.STALE), NOW + 79)
        assert not may_serve(a_copy(Verdict.EXPIRED), NOW + 79)
        assert may_serve(a_copy(Verdict.EXPIRED), NOW + 80)
        assert may_serve(a_copy(Verdict.EXPIRED), NOW + 99)
        assert not may_serve(a_copy(Verdict.EXPIRED), NOW + 100)
        longer = a_copy(Verdict.STALE, stale_for=90.0)
        assert may_serve(longer, NOW + 149)
        assert not may_serve(longer, NOW + 150)

    def test_a_copy_suits_the_requests_wish_or_the_route(self) -> None:
        """By its wish; with a route's duration the site decides."""
        wish = Wish(max_age=5)
        assert not suits(a_copy(), wish, NOW + 10)
        assert suits(a_copy(is_own=True), wish, NOW + 10)
        assert suits(a_copy(), wish, NOW + 5)
        assert suits(a_copy(Verdict.STALE), Wish(), NOW + 70)
        assert not suits(a_copy(Verdict.EXPIRED), Wish(), NOW + 90)

    def test_an_expired_copy_is_served_to_requests_with_max_stale(self) -> None:
        """RFC 9111 §5.2.1.2: unless it was changed, or forbids it itself."""
        expired, wish = a_copy(Verdict.EXPIRED), Wish(max_stale=100)
        assert is_good_for(expired, wish, NOW + 90)
        assert not is_good_for(expired, Wish(), NOW + 90)
        assert not is_good_for(expired, Wish(max_stale=20), NOW + 90)
        assert not is_good_for(expired, wish, NOW + 70)
        assert is_good_for(a_copy(), Wish(), NOW)
        for said in ("must-revalidate", "proxy-revalidate", "no-cache", "s-maxage=60"):
            strict = a_copy(Verdict.EXPIRED, f"cache-control: {said}")
            assert not is_good_for(strict, wish, NOW + 90)
        assert not forbids_stale(Head(headers=raw("cache-control: max-age=60, public")))


class TestI13Clients:
    def test_a_peer_is_trusted_by_its_network(self) -> None:
        """Also as IPv4 inside IPv6, and with a zone; what is no address is not."""
        trusted = checked_networks(["10.0.0.0/8", "fe80::/10"])
        peers = ("10.1.2.3", "::ffff:10.1.2.3", "fe80::1%eth0", "11.0.0.1", "unix", None)
        assert [is_trusted(peer, trusted) for peer in peers] == [True] * 3 + [False] * 3
        assert not is_trusted("10.1.2.3", ())
        with pytest.raises(ConfigError, match=r"10\.0\.0\.1/8"):
            checked_networks(["10.0.0.1/8"])

    def test_forwarding_fields_are_dropped_unless_the_peer_is_trusted(self) -> None:
        """Dropped unless it is trusted; a name written with `_` is dropped in any case."""
        host, claims = raw("host: a", "x: y"), raw("x-forwarded-for: b", "x-real-ip: c")
        disguised = raw("x_forwarded_for: b", "x_real_ip: c")
        assert believed((*host, *claims, *disguised), is_trusted=True) == (*host, *claims)
        assert believed((*host, *claims, *disguised), is_trusted=False) == host

    def test_the_last_value_of_a_forwarding_field_counts(self) -> None:
        """Of all lines of the field."""
        headers = raw("x-forwarded-host: a, b", "x-forwarded-host: c")
        assert forwarded(headers, b"host") == b"c"
        assert forwarded(headers, b"proto") is None

    @pytest.mark.parametrize(
        ("hosts", "version", "expected"),
        [
            ([], "1.1", b"no Host"),
            ([], "1.0", None),
            (["a", "a"], "1.1", b"several Hosts"),
            (["a b"], "1.1", b"not a Host"),
            (["a."], "1.1", None),
            (["a.:80"], "1.1", None),
            ([""], "1.1", None),
        ],
    )
    def test_each_bad_host_field_has_its_fault(
        self, hosts: list[str], version: str, expected: bytes | None
    ) -> None:
        """RFC 9112 §3.2."""
        fault = host_fault(raw(*(f"host: {it}" for it in hosts)), version)
        assert fault is None if expected is None else expected in (fault or b"")

    def test_max_forwards_is_one_plain_number_or_no_limit(self) -> None:
        """RFC 9110 §7.6.2: one plain number; anything else is no limit."""
        said: tuple[list[str], ...] = ([], ["0"], ["12"], ["9" * 9], ["9" * 10], ["-1"], ["1", "2"])
        found = [forwards_left(raw(*(f"max-forwards: {it}" for it in its))) for its in said]
        assert found == [None, 0, 12, 999_999_999, None, None, None]

    def test_a_trace_is_reflected_without_secrets(self) -> None:
        """RFC 9110 §9.3.8: the head as it came."""
        headers = raw("host: a", "cookie: b", "authorization: c", "proxy-authorization: d", "x: y")
        scope = {"raw_path": b"/%7E", "query_string": b"q=1", "headers": headers}
        assert reflected(scope) == b"TRACE /%7E?q=1 HTTP/1.1\r\nhost: a\r\nx: y\r\n\r\n"
        assert target_of({"raw_path": b"", "query_string": b""}) == b"/"

    def test_the_peer_of_a_socket_file_is_unknown(self) -> None:
        """A server on a socket file knows none."""
        assert peer_of({"client": ("1.2.3.4", 5)}) == "1.2.3.4"
        assert peer_of({"client": None}) is peer_of({}) is None

    @pytest.mark.parametrize(
        ("headers", "expected"),
        [
            ((), None),
            (raw("content-length: 0"), None),
            (raw("content-length: 1"), Reason.BODY),
            (raw("transfer-encoding: chunked"), Reason.BODY),
            (raw("range: bytes=0-1"), Reason.RANGE),
            (((b"x", b"a\0"),), Reason.HEADERS),
            (((b"x", b"a" * (MOST_FIELDS - 1)),), None),
            (((b"x", b"a" * MOST_FIELDS),), Reason.HEADERS),
        ],
    )
    def test_requests_with_a_body_a_range_or_odd_fields_are_not_stored(
        self, headers: tuple[tuple[bytes, bytes], ...], expected: Reason | None
    ) -> None:
        """With a body, a range, or fields that a site may refuse."""
        assert unfit_to_fill(headers) == expected

    def test_only_a_plain_get_can_receive_a_growing_page(self) -> None:
        """I15: a GET of a whole page, by a client that can see a break."""
        scope = {"headers": raw("x: y"), "method": "GET", "http_version": "1.1"}
        assert reads_along(scope)
        for other in (
            {"method": "HEAD"},
            {"http_version": "1.0"},
            {"headers": raw("x: y", "range: bytes=0-")},
            {"headers": raw('if-none-match: "a"')},
        ):
            assert not reads_along({**scope, **other})

    def test_i24_the_site_gets_the_visitors_fields_without_made_up_claims(self) -> None:
        """For one host, for the whole page, in codings that we offer; without made-up claims."""
        headers = raw(
            "host: Made-Up", "x: y", "range: bytes=0-", "x-forwarded-for: a", "x-original-url: /b"
        )
        mine, claim = raw("host: a.example", "x: y"), raw("x-forwarded-for: a")
        assert as_asked(headers, "a.example", is_vouched=False) == mine
        assert as_asked(headers, "a.example", is_vouched=True) == (*mine, *claim)
        for asked, offered in (("gzip, deflate", "gzip"), ("deflate", "identity")):
            coded = as_asked(raw(f"accept-encoding: {asked}"), "a", is_vouched=False)
            assert coded == raw("host: a", f"accept-encoding: {offered}")


class TestI13Places:
    def test_a_name_replaces_the_one_unused_for_longest(self) -> None:
        """The one not seen for longest, after a while."""
        names = BoundedNames(2)
        assert names.has("a", NOW)
        assert names.has("b", NOW + 1)
        assert not names.has("c", NOW + UNUSED_FOR - 1)
        assert names.has("c", NOW + UNUSED_FOR)
        assert names.has("b", NOW + UNUSED_FOR)
        assert not names.has("a", NOW + UNUSED_FOR)

    def test_a_name_requested_clearly_more_often_takes_a_place(self) -> None:
        """So names that are repeated only to hold their places keep nobody out."""
        names = BoundedNames(1)
        assert names.has("held", NOW)
        tries = 0
        while not names.has("real", NOW):
            tries += 1
        assert tries == 1 + CLEARLY
        assert names.has("real", NOW)

    def test_counts_of_visits_are_halved_over_time(self) -> None:
        """Those of long ago count less, for the name inside and for the one that waits."""
        names = BoundedNames(1)
        for _ in range(8):
            names.has("held", NOW)
        tries = [names.has("real", NOW + UNUSED_FOR - 1) for _ in range(8)]
        assert tries.index(True) == 6
        assert not any(BoundedNames(0).has("a", NOW) for _ in range(9))

    def test_a_clock_set_back_does_not_keep_names_out(self) -> None:
        """A name that was seen in the future counts as seen now."""
        names = BoundedNames(1)
        assert names.has("a", NOW + 10 * UNUSED_FOR)
        assert not names.has("b", NOW)
        assert names.has("b", NOW + UNUSED_FOR)

    def test_variants_and_queries_have_places_of_their_own(self) -> None:
        """Of each page, and of each host and path; a page without a query needs none."""
        places = NamePlaces(1, 1, most=10)
        page = ("host", "/a", "q=1")
        assert places.has(page, ["k"], NOW)
        assert not places.has(("host", "/a", "q=2"), ["k"], NOW)
        assert places.has(("host", "/a", ""), ["k"], NOW)
        assert places.has(("host", "/b", "q=2"), ["k"], NOW)
        assert places.has(page, ["k", "k1"], NOW)
        assert not places.has(page, ["k", "k2"], NOW)
        assert places.has(page, ["l", "l2"], NOW)

    def test_a_personal_response_outweighs_a_private_render_only_after_a_while(self) -> None:
        """A personal answer outweighs a private render only after a while; others do at once."""
        heard = Heard(10)
        assert heard.is_private("a") is None
        heard.rendered("a", NOW, is_shared=False)
        assert heard.is_private("a") is True
        heard.stated("a", NOW + STANDS_FOR - 1, is_personal=True)
        assert heard.is_private("a") is True
        heard.stated("a", NOW + STANDS_FOR, is_personal=True)
        assert heard.is_private("a") is False
        heard.rendered("a", NOW, is_shared=False)
        heard.stated("a", NOW, is_personal=False)
        assert heard.is_private("a") is False
        heard.rendered("a", NOW, is_shared=True)
        assert heard.is_private("a") is None


def a_scope(path: str = "/a", query: str = "", *headers: str, **more: Any) -> dict[str, Any]:
    fields = raw(*(headers or ("host: a.example",)))
    made = {"path": path, "query_string": query.encode(), "headers": fields, "method": "GET"}
    return {"raw_path": path.encode(), **made, **more}


class TestI13Visit:
    def test_each_request_that_is_not_cached_has_its_reason(self) -> None:
        """With its reason."""
        site = Site({"/a": Route(60, vary=["X-Big"]), "/b*": None}, ["a.example"])
        host, big = "host: a.example", "x-big: " + "x" * 1_025
        assert site.visit(a_scope("/c")) == Reason.ROUTE
        assert site.visit(a_scope("/a/../a")) == Reason.PATH
        assert site.visit(a_scope("/a", "q=\x01")) == Reason.PATH
        assert site.visit(a_scope("/a", "", "host: b.example")) == Reason.HOST
        assert site.visit(a_scope("/a", "", "x: y")) == Reason.HOST
        assert site.visit(a_scope("/a", "", host, 'if-match: "a"')) == Reason.CONDITION
        assert site.visit(a_scope("/a", "", host, big)) == Reason.VARY
        assert isinstance(site.visit(a_scope("/b", "", host, big)), Visit)
        assert site.visit(a_scope("/a", root_path="/\n")) == Reason.PATH
        assert site.visit(a_scope("/a", root_path="/" + "r" * MOST_KEY)) == Reason.HEADERS

    def test_the_key_has_url_declared_fields_mount_and_rewritten_path(self) -> None:
        """The URL, declared fields, where the app is mounted, and a rewritten path."""
        site = Site({"*": Route(60, query=["q"], vary=["X-B", "X-A"])}, None)
        found = site.visit(a_scope("/a", "z=1&q=2", "host: A.example:80", "x-a: 1", "x-b: 2"))
        assert isinstance(found, Visit)
        assert found.id == "http://a.example/a?q=2\nx-a: 1\nx-b: 2"
        mounted = site.visit(a_scope("/a", "", root_path="/m", raw_path=b"/m/a", method="HEAD"))
        assert isinstance(mounted, Visit)
        assert mounted.id == "http://a.example/m/a\n:path: /a\n:root: /m"
        assert (mounted.path, mounted.app_path, mounted.root_path) == ("/m/a", "/a", "/m")
        assert (mounted.is_head, found.is_head) == (True, False)
        assert found.part().id == found.id + "\n:part"
        assert found.part().is_part
        bare = site.visit(a_scope("/a b", raw_path=None))
        assert isinstance(bare, Visit)
        assert bare.url == "http://a.example/a%20b"

    def test_i24_route_then_site_then_duration_decide_how_the_app_is_asked(self) -> None:
        """By the route, else by the site, else by whether the route has a duration."""
        routes = {"/own": Route(60, forward="request"), "/timed": 60, "/open": None}
        found = {
            (forward, path): visit.is_as_asked
            for forward in (None, "request", "key")
            for path in routes
            if isinstance(visit := Site(routes, None, forward).visit(a_scope(path)), Visit)  # type: ignore[arg-type]
        }
        as_it_is = [it for it, is_as_asked in found.items() if is_as_asked]
        assert as_it_is == [
            *[(None, "/own"), (None, "/open")],
            *[("request", "/own"), ("request", "/timed"), ("request", "/open")],
            ("key", "/own"),
        ]

    def test_a_cookie_alone_is_not_an_authorization(self) -> None:
        """A cookie alone authorizes nobody; only a route without a duration is open."""
        site = Site({"/timed": 60, "/open": None}, None)
        host = "host: a"
        for path, line, expected in (
            ("/timed", "cookie: a=b", (False, False)),
            ("/timed", "x-api-key: a", (True, False)),
            ("/open", "x: y", (False, True)),
        ):
            visit = site.visit(a_scope(path, "", host, line))
            assert isinstance(visit, Visit)
            assert (visit.is_authorized, visit.is_open) == expected
            assert dict(visit.unencoded().headers)[b"accept-encoding"] == b"identity"

    def test_a_change_concerns_urls_of_its_own_origin(self) -> None:
        """RFC 9111 §4.4: itself, its groups, and what `Location` and `Content-Location` name."""
        site, scope = Site(None, None), a_scope("/a")
        place = site.place(scope)
        assert isinstance(place, Visit)
        answer = raw(
            'cache-group-invalidation: "g"',
            "location: /b?z=1&a=2",
            "Content-Location: http://A.example:80/c",
            "location: http://other.example/d",
            "location: https://a.example/e",
            "location: http://[bad/f",
            "x-location: /g",
        )
        assert site.changed(scope, place, answer) == [
            "http://a.example/a",
            "group:http://a.example g",
            "http://a.example/b?z=1&a=2",
            "http://a.example/c",
        ]

    def test_only_a_host_listed_in_full_is_named(self) -> None:
        """In any case; without a list none is."""
        site = Site(None, ["A.example", "*.b.example"])
        assert site.is_named("a.example")
        assert not site.is_named("x.b.example")
        assert not Site(None, None).is_named("a.example")


class TestI11Names:
    def test_a_plain_path_is_decoded_as_in_visits(self) -> None:
        """An impossible one stays as it is."""
        assert plain_path("/caf%c3%a9?q=%7E") == "/caf\u00e9?q=%7E"
        assert plain_path("/a/../b?q") == "/a/../b?q"

    def test_i21_a_path_reaches_every_host_and_a_url_its_own(self) -> None:
        """A path every host's page, a URL its own."""
        assert reached("/caf%c3%a9") == (["path:/caf\u00e9"], ["/caf%c3%a9", "/caf\u00e9"])
        assert reached("HTTP://A.b/x") == (["key:http://a.b/x"], ["HTTP://A.b/x", "http://a.b/x"])
        assert reached("/x") == (["path:/x"], ["/x"])

    def test_i20_a_path_that_could_name_another_page_is_refused(self) -> None:
        """A tenant's, or a variant; a long one is an error, too."""
        assert checked_path("a\nb") == "a\nb"
        assert checked_path("\u00e9" * (MOST_PATH // 2)) != ""
        for bad in ("", None, "TENANT#a", "https://a/\nx: y", "\u00e9" * (MOST_PATH // 2) + "a"):
            with pytest.raises(ConfigError, match="path"):
                checked_path(bad)  # type: ignore[arg-type]

    def test_tags_of_users_and_groups_of_origins_are_separate(self) -> None:
        """Those of users, and groups of each origin."""
        assert own_tag("blog") == "tag:blog"
        assert group_tag("https://a.b/c?d", "g") == "group:https://a.b g"
        assert group_tag("/c", "g") == "group: g"
        for bad in ("", None, 5):
            with pytest.raises(ConfigError, match="tag"):
                own_tag(bad)  # type: ignore[arg-type]

    def test_the_defaults_of_a_page_read_are_those_of_a_miss(self) -> None:
        """It was not the caller's own render, of a page that was not there; its fate is noted."""
        assert PageRead(LoadFailed())[1:] == (False, "miss", None, None)
        assert PageCaller()[1:] == (True, False)
        served = ServedPage(Page(b""), verdict=Verdict.FRESH, age=0)
        assert (served.stored, served.etag, served.error) == (True, None, None)

    def test_the_length_of_path_and_query_is_limited(self) -> None:
        """And no longer."""
        assert canonical_path(b"/" + b"a" * (MOST_URL - 1)) is not None
        assert canonical_path(b"/" + b"a" * MOST_URL) is None
        assert query_of(b"a" * MOST_URL, None) is not None
        assert query_of(b"a" * (MOST_URL + 1), None) is None
        assert query_of(b"&b=1&&a=2&b=0", None, is_sorted=True) == "a=2&b=1&b=0"
        assert [query_of(it, None) for it in (b"a b", b"a\x7f", b"!~")] == [None, None, "!~"]
        assert [canonical_path(b"/" + it) for it in (b"a b", b"\x7f", b"!~")] == [None, None, "/!~"]
        assert canonical_path(b"/\xfe") == "/%FE"


class TestI13Keys:
    @pytest.mark.parametrize(
        ("path", "expected"),
        [
            (b"/a/b", "/a/b"),
            (b"/%7Euser", "/~user"),
            (b"/caf%c3%a9", "/caf%C3%A9"),
            (b"/a%3Fb", "/a%3Fb"),
            (b"/a;b=c", "/a;b=c"),
            (b"/blog/", "/blog/"),
            (b"/a%2fb", "/a%2fb"),
            (b"/a%2Fb", "/a%2Fb"),
            (b"/a%2F..", None),
            (b"/a%5Cb", None),
            (b"/a\\b", None),
            (b"/a/../b", None),
            (b"/a/%2e%2e/b", None),
            (b"/a/..", None),
            (b"/a//b", None),
            (b"//evil.example/a", None),
            (b"/a%00.css", None),
            (b"/a%0d%0ab", None),
            (b"/a%zz", None),
            (b"/a b", None),
            (b"*", None),
            (b"/" + b"a" * 9000, None),
        ],
    )
    def test_a_path_has_one_canonical_form_or_none(self, path: bytes, expected: str | None) -> None:
        """What another server might read as another path is not kept."""
        assert canonical_path(path) == expected

    @pytest.mark.parametrize(
        ("url", "expected"),
        [
            ("HTTP://Shop.example:80/caf%c3%a9?b=2&a=1", "http://shop.example/caf%C3%A9?b=2&a=1"),
            ("http://Shop.example:80/%7Eann?b=2&a=1", "http://shop.example/~ann?b=2&a=1"),
            ("https://shop.example", "https://shop.example/"),
            ("https://shop.example/a/../b", "https://shop.example/a/../b"),
            ("https://no host/a%7Eb", "https://no host/a%7Eb"),
        ],
    )
    def test_a_url_to_purge_has_the_canonical_form_of_visits(self, url: str, expected: str) -> None:
        """I11; one that no visit can have stays as it is, whole."""
        assert canonical_url(url) == expected

    @given(st.binary(max_size=60).map(lambda tail: b"/" + tail))
    def test_a_canonical_path_is_its_own_canonical_form(self, path: bytes) -> None:
        """And it holds nothing that could start a new line or a new request."""
        form = canonical_path(path)
        if form is not None:
            assert canonical_path(form.encode()) == form
            assert form.isascii()
            assert not set(form) & set("\r\n\0 \\?#")

    def test_a_query_is_limited_to_declared_parameters(self) -> None:
        """Names that are not declared make no other page; I32: the others stay as they came."""
        assert query_of(b"b=2&utm=x&a=1&b=1", {"a", "b"}) == "b=2&a=1&b=1"
        assert query_of(b"b=2&a=1", None) == "b=2&a=1"
        assert query_of(b"a=1", set()) == ""

    def test_semicolons_and_encoded_ampersands_do_not_split_parameters(self) -> None:
        """`;` and encoded `&` are part of a value, and of the key."""
        assert query_of(b"utm=1;q=evil&q=good", {"q"}) == "q=good"
        assert query_of(b"q=a%26admin%3D1;b=2", {"q"}) == "q=a%26admin%3D1;b=2"

    @pytest.mark.parametrize(
        ("hosts", "expected"),
        [
            ([b"Example.com"], "example.com"),
            ([b"example.com:80"], "example.com"),
            ([b"example.com:8080"], "example.com:8080"),
            ([b"[::1]:80"], "[::1]"),
            ([b"a", b"b"], None),
            ([], None),
            ([b"evil.com/x"], None),
            ([b"a b"], None),
            ([b"user@host"], None),
            ([b"a" * 255], "a" * 255),
            ([b"a" * 256], None),
            ([b""], None),
        ],
    )
    def test_a_host_is_single_well_formed_and_without_default_port(
        self, hosts: list[bytes], expected: str | None
    ) -> None:
        """Without the port that goes without saying."""
        assert canonical_host(tuple((b"host", host) for host in hosts), "http") == expected

    def test_pages_of_one_host_share_its_text(self) -> None:
        """I16: and a text that a visitor made up is freed again, which an interned one may not be.

        Python 3.12.0 to 3.12.4 keep interned texts for ever.
        """
        one, same = (canonical_host(((b"host", b"A.%b" % it),), "http") for it in (b"x", b"x"))
        assert one is not None
        assert one is same
        assert sys.intern("".join([*one])) is not one

    def test_hosts_are_allowed_by_name(self) -> None:
        """Or below a name; another's is not."""
        allowed = {"example.com", "*.shop.example"}
        assert is_allowed("example.com", allowed)
        assert is_allowed("example.com:8000", allowed)
        assert is_allowed("de.shop.example", allowed)
        assert not is_allowed("shop.example", allowed)
        assert not is_allowed("evilexample.com", allowed)
        assert not is_allowed("notshop.example", allowed)

    def test_the_end_of_an_ipv6_address_is_not_a_port(self) -> None:
        """With brackets or without, another address is not allowed."""
        assert is_allowed("[fe80::1]:8000", {"[fe80::1]"})
        assert is_allowed("fe80::1", {"fe80::1"})
        assert not is_allowed("[fe80::1:8]", {"[fe80::1]"})
        assert not is_allowed("fe80::1:8", {"fe80::1"})

    @pytest.mark.parametrize(
        ("asked", "offered"),
        [
            ("gzip, deflate, br, zstd", "br, zstd, gzip"),
            ("br;q=0.1, GZIP", "br, gzip"),
            ("gzip,br", "br, gzip"),
            ("br;q=0, gzip", "gzip"),
            ("br;q=0.0, *", "zstd, gzip"),
            ("gzip, *;q=0", "gzip"),
            ("gzip, gzip;q=0", ""),
            ("gzip;q=0.00001", ""),
            ("gzip;q=no, br; q=1.000", "br"),
            ("x-gzip", "gzip"),
            ("identity, made-up", ""),
            ("", ""),
        ],
    )
    def test_an_app_is_offered_the_encodings_that_the_client_accepts(
        self, asked: str, offered: str
    ) -> None:
        """I13, RFC 9110 §12.5.3: whichever it chooses, the client can read it."""
        assert normalised("accept-encoding", raw(f"accept-encoding: {asked}")) == offered

    @given(st.lists(st.sampled_from([*"brzstdgip,;q=01.* -x"]), max_size=40).map("".join))
    def test_no_app_is_offered_an_encoding_that_the_client_did_not_name(self, asked: str) -> None:
        """And there are eight variants at most, whatever is asked for."""
        offered = normalised("accept-encoding", raw(f"accept-encoding: {asked}"))
        assert offered is not None
        chosen = offered.split(", ") if offered else []
        assert chosen == [it for it in ENCODINGS if it in chosen]
        assert all(it in asked or "*" in asked for it in chosen)

    def test_equivalent_header_values_are_normalised_to_one(self) -> None:
        """Encodings by what an app is offered, languages by rank, others by their words."""
        assert normalised("accept-encoding", raw("accept-encoding: deflate, GZIP;q=0.5")) == "gzip"
        assert normalised("accept-encoding", raw("accept-encoding: gzip;q=0, br")) == "br"
        languages = raw("accept-language: en;q=0.5, de-DE, fr;q=0")
        assert normalised("accept-language", languages) == "de-de, en"
        assert normalised("x-kind", raw("x-kind:  a   b ,c")) == "a b, c"
        assert normalised("x-kind", raw(f"x-kind: {'a' * 2000}")) is None

    def test_utf8_characters_of_a_header_stay_whole(self) -> None:
        """In UTF-8 the second byte of "à" is what Latin-1 has for a space."""
        city = " d'à  côté ".encode()
        assert normalised("x-city", ((b"x-city", city),)) == "d'à côté".encode().decode("latin-1")

    def test_a_page_that_varies_by_cookie_is_shared_among_visitors_without_one(self) -> None:
        """A cookie is somebody's."""
        assert selected(["cookie", "accept"], raw("accept: a")) == {"accept": "a"}
        assert selected(["cookie"], raw("cookie: a=b")) is None


class TestI12Routes:
    def test_an_exact_route_wins_over_the_longest_prefix(self) -> None:
        """An exact path, else the longest prefix."""
        routes = Routes({"/blog/*": 1, "/blog/new": 2, "/*": 3, "/blog/old/*": 4})
        paths = ("/blog/a", "/blog/new", "/x", "/blog/old/a")
        assert [route.revalidate for path in paths if (route := routes.of(path))] == [1, 2, 3, 4]
        assert Routes({"/a": 1}).of("/a/b") is None
        for never in (0, "0s", -1):
            with pytest.raises(ConfigError, match="route '/a': must be more than zero"):
                Routes({"/a": never})

    @pytest.mark.parametrize("pattern", ["blog", "/a/*/b", 5])
    def test_a_bad_route_is_refused(self, pattern: Any) -> None:
        """With what is allowed."""
        with pytest.raises(ConfigError, match="route"):
            Routes({pattern: 1})

    def test_bad_options_of_routes_are_refused(self) -> None:
        """A duration that is none, a text where a list belongs, a host list that is none."""
        for bad in ({"revalidate": "soon"}, {"revalidate": 0}, {"query": "page"}):
            with pytest.raises(ConfigError):
                Route(**bad)
        with pytest.raises(ConfigError, match="hosts"):
            Site(None, "example.com")

    def test_hop_by_hop_fields_are_removed(self) -> None:
        """Those with a name for it, and those that Connection lists; but not what others keep."""
        headers = raw("connection: X-Secret, cache-control", "x-secret: 1", "keep-alive: 5")
        kept = raw("cache-control: max-age=5", "content-type: text/html")
        assert end_to_end((*headers, *kept)) == kept


class TestI12Page:
    def test_headers_are_found_in_any_letter_case(self) -> None:
        """And several of a name are one list."""
        headers = Headers([("Link", "</a>"), ("link", "</b>")])
        assert headers["LINK"] == "</a>, </b>"
        assert headers == {"Link": "</a>, </b>"}
        assert len(headers) == 1

    def test_pages_and_headers_have_a_short_repr(self) -> None:
        """For a log or a debugger; a body may be long."""
        page = Page("a" * 1_234, 404, {"A": "b"})
        assert repr(page) == "<Page 404, 1,234 bytes>"
        assert repr(page.headers) == "Headers({'a': 'b'})"
        assert page.headers != 5
        assert len(StoredPage(Head(), b"abc")) == 3
        with pytest.raises(KeyError, match="Missing"):
            page.headers["Missing"]

    @pytest.mark.parametrize(
        "make",
        [
            lambda: Page(5),  # type: ignore[arg-type]
            lambda: Page("a", 99),
            lambda: Page("a", 199),
            lambda: Page("a", 600),
            lambda: Page("a", "200"),  # type: ignore[arg-type]
            lambda: Page("a", 200, {"x": "a\r\nset-cookie: b"}),
            lambda: Page("a", 200, {"bad name": "x"}),
            lambda: Page("a", 200, {"x": "€"}),
        ],
    )
    def test_a_page_with_bad_body_status_or_headers_is_refused(self, make: Any) -> None:
        """No header can be smuggled into another."""
        with pytest.raises(ConfigError):
            make()

    def test_pages_are_equal_by_body_status_and_headers(self) -> None:
        """By body, status and headers."""
        assert Page("a", 200, {"A": "b"}) == Page(b"a", 200, [("a", "b")])
        assert Page("a") != Page("b")
        assert Page("a") != "a"
