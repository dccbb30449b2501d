"""I14, I15, I25: fields, freshness, validation and ranges of HTTP, by example and by property."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from stillfresh import Answer, ConfigError, LoadFailed, Origin, RetryAfter, Verdict
from stillfresh.freshness import Policy
from stillfresh.gateway.rules_rest import freshness_headers
from stillfresh.http.answer_fields import (
    cache_control,
    cache_status,
    freshness_fields,
    pause_after,
    policy_headers,
    without_lifetime,
)
from stillfresh.http.fields import (
    LONGEST_TAG,
    MOST_TAGS,
    Raw,
    checked_headers,
    dictionary,
    directives,
    field_value,
    http_date,
    http_date_text,
    members,
    normalised,
    number,
    pause_of,
    strings,
    tag_names,
    with_field,
)
from stillfresh.http.freshness import (
    ResponseTimes,
    controls,
    guessed,
    initial_age,
    longest_lifetime,
    stated,
)
from stillfresh.http.serving import Wish, is_good_enough, wish_of
from stillfresh.http.validation import (
    RangeAsked,
    conditions,
    etag_of,
    if_range_holds,
    is_refresh,
    not_modified,
    part_asked,
    refreshed,
)
from stillfresh.pages.sharing import Allowed, judged
from stillfresh.systems.coordinator import Kind

NOW = 1_700_000_000.0
fields = st.lists(
    st.tuples(
        st.sampled_from(
            [b"cache-control", b"cdn-cache-control", b"expires", b"date", b"age", b"vary"]
        ),
        st.binary(max_size=40) | st.from_regex(rb"[a-z-]+=[0-9\", ]{0,12}", fullmatch=True),
    ),
    max_size=6,
).map(tuple)


def raw(*lines: str) -> tuple[tuple[bytes, bytes], ...]:
    pairs = (line.partition(": ") for line in lines)
    return tuple((name.lower().encode(), value.encode()) for name, _, value in pairs)


class TestI14Fields:
    def test_a_comma_in_quotes_does_not_split_a_list(self) -> None:
        """RFC 9110 §5.6.1, also over several lines and with empty members."""
        assert members([b'a, "b, c",, d', b"e"]) == [b"a", b'"b, c"', b"d", b"e"]

    def test_directives_are_read_in_any_case_and_quoted_or_not(self) -> None:
        """RFC 9111 §5.2: tokens and quoted strings; the first of several counts."""
        known = directives([b'Max-Age="60", no-cache="set-cookie", public', b"max-age=5"])
        assert known == {"max-age": "60", "no-cache": "set-cookie", "public": ""}

    @pytest.mark.parametrize(
        ("text", "expected"),
        [
            *[("60", 60), ("-1", 0), ("1.5", 0), ("", 0), ("\u0663", 0), ("2147483649", 2**31)],
            *[("2147483647", 2**31 - 1), ("00000000060", 2**31), ("9" * 30, 2**31)],
        ],
    )
    def test_unreadable_delta_seconds_count_as_zero(self, text: str, expected: float) -> None:
        """RFC 9111 §4.2.1: invalid freshness is stale; huge values are capped."""
        assert number({"max-age": text}, "max-age") == expected

    def test_http_dates_are_read_in_three_forms(self) -> None:
        """RFC 9110 §5.6.7."""
        forms = [
            b"Sun, 06 Nov 1994 08:49:37 GMT",
            b"Sunday, 06-Nov-94 08:49:37 GMT",
            b"Sun Nov  6 08:49:37 1994",
        ]
        assert {http_date(form) for form in forms} == {784111777.0}
        assert http_date(http_date_text(784111777)) == 784111777
        assert http_date(b"0") is None

    def test_years_of_two_digits_are_from_1969_to_2068(self) -> None:
        """They are from 1969 to 2068."""
        late, early = (http_date(b"Sunday, 06-Nov-%b 08:49:37 GMT" % it) for it in (b"68", b"69"))
        assert late == http_date(b"Sun, 06 Nov 2068 08:49:37 GMT")
        assert early == http_date(b"Sun, 06 Nov 1969 08:49:37 GMT")

    def test_with_field_replaces_all_lines_of_a_field(self) -> None:
        """And the others stay."""
        found = with_field(raw("a: 1", "b: 2", "a: 3"), b"a", b"4")
        assert found == raw("b: 2", "a: 4")

    def test_a_structured_field_with_a_mistake_is_ignored_whole(self) -> None:
        """RFC 9651 §4.2: over all its lines; a mistake anywhere voids it; the last one counts."""
        assert dictionary([b"a=1, b;x=2", b"a=3, c=?0"]) == {"a": "3", "b": ""}
        assert dictionary([b"a=1, B=2"]) == dictionary([b"a=1,"]) == {}
        assert strings([b'"a", "b\\"c"', b'"d"']) == ["a", 'b"c', "d"]
        assert strings([b'"a", b']) == strings([b'"a",']) == []

    @pytest.mark.parametrize(
        ("lines", "expected"),
        [
            (["x: a"], []),
            (["surrogate-key: a b", "cache-tag: c d, a,,", 'cache-groups: "g", "a"'], "a,b,c d,g"),
            (["cache-tag: \u00e9"], "\u00e9"),
            (["cache-tag: " + "t" * LONGEST_TAG], "t" * LONGEST_TAG),
            (["cache-tag: " + "t" * (LONGEST_TAG + 1)], None),
            (["surrogate-key: " + " ".join(map(str, range(MOST_TAGS)))], MOST_TAGS),
            (["surrogate-key: " + " ".join(map(str, range(MOST_TAGS + 1)))], None),
        ],
    )
    def test_i26_tags_of_a_response_are_unique_and_limited(
        self, lines: list[str], expected: object
    ) -> None:
        """Each once; too many, or one that is too long, are none that could be kept."""
        found = tag_names(raw(*lines))
        if isinstance(expected, int):
            assert found is not None
            assert len(found) == expected
        else:
            assert found == (expected.split(",") if isinstance(expected, str) else expected)

    def test_i26_a_tag_that_is_not_utf8_is_latin_1(self) -> None:
        """So that every site's bytes name something."""
        assert tag_names(((b"cache-tag", b"\xe9"),)) == ["\u00e9"]

    @pytest.mark.parametrize(
        ("said", "date", "expected"),
        [
            *[("120", "", 120), (" 5 ", "", 5), ("0", "", None), ("86401", "", 86_400)],
            *[("-5", "", None), ("\u0665", "", None), ("soon", "", None), ("1.5", "", None)],
            ("Tue, 14 Nov 2023 22:14:20 GMT", "", 60),
            ("Tue, 14 Nov 2023 22:14:20 GMT", "Tue, 14 Nov 2023 22:14:10 GMT", 10),
            ("Tue, 14 Nov 2023 22:13:20 GMT", "", None),
            ("Tue, 14 Nov 2023 22:13:00 GMT", "", None),
        ],
    )
    def test_retry_after_is_seconds_or_a_date(
        self, said: str, date: str, expected: float | None
    ) -> None:
        """RFC 9110 §10.2.3: by the server's own clock if it names it; a day at most."""
        assert pause_of(said, date, NOW) == expected

    def test_a_text_becomes_a_field_value_only_without_controls(self) -> None:
        """RFC 9110 §5.5: Latin-1 without controls, and without spaces around it."""
        assert field_value("caf\u00e9\t!") == b"caf\xe9\t!"
        assert [field_value(it) for it in ("\u20ac", "a\n", "a\x7f", " a", "a ")] == [None] * 5

    def test_configured_headers_must_be_names_and_printable_texts(self) -> None:
        """The error names the field and not its value, which may be a secret."""
        good = {"X-Key": "a\tb~ ", "b": ""}
        assert checked_headers(good) == good
        with pytest.raises(ConfigError, match=r"headers: .*list"):
            checked_headers([("a", "b")])
        for name in ("a b", "", "\u20ac", 5):
            with pytest.raises(ConfigError, match=r"headers: .* is no name of a header"):
                checked_headers({name: "b"})
        for value in ("s3cret\n", "s3cret\u00e9", 5, None):
            with pytest.raises(ConfigError, match="the value of 'a' must be") as refused:
                checked_headers({"a": value})
            assert "s3cret" not in str(refused.value)
        with pytest.raises(ConfigError, match="the value of 'aaa") as refused:
            checked_headers({"a" * 5_000: "\n"})
        assert len(str(refused.value)) < 600

    @pytest.mark.parametrize(
        ("asked", "expected"),
        [
            ("en;q=0.5, de-DE, fr;q=0", "de-de, en"),
            ("fr, en, de", "de, en, fr"),
            ("en, en-gb;q=0, fr-ch;q=0", "en, en-gb;q=0"),
            ("*, fr;q=0, de;q=0", "*, de;q=0, fr;q=0"),
            ("en;q=2, de; Q = 0.3", "de"),
        ],
    )
    def test_i13_languages_are_normalised_by_rank(self, asked: str, expected: str) -> None:
        """Equal ones are sorted; a refused one stays if a wider range includes it."""
        assert normalised("accept-language", raw(f"accept-language: {asked}")) == expected

    def test_i13_a_field_that_is_too_long_is_not_part_of_a_key(self) -> None:
        """All its lines together count."""
        assert normalised("x", raw(f"x: {'a' * 512}", f"x: {'b' * 512}")) is not None
        assert normalised("x", raw(f"x: {'a' * 512}", f"x: {'b' * 513}")) is None

    @given(fields, st.floats(0, 2e9))
    def test_any_header_bytes_are_judged_without_an_exception(
        self, headers: tuple[tuple[bytes, bytes], ...], now: float
    ) -> None:
        """Whatever bytes come: a judgement, terms that are not negative, a wish."""
        wish_of(headers)
        judged(200, headers, now, None, Allowed(heuristic=True, cdn_override=True))
        times = stated(headers, now)
        if times is not None:
            terms = times.terms
            assert min(terms.fresh_for, terms.stale_for, terms.error_for, times.stale_by) >= 0
            assert not (terms.fresh_for and times.stale_by)


class TestI25Dates:
    @pytest.mark.parametrize(
        "text",
        [
            b"Thu, 18 Aug 2050 02:01:18 AEST",
            b"Thu, 18 Aug 2050 02:01:18 +0000",
            b"Thu, 18 Aug 2050 02:01 GMT",
            b"Thu, 18 Aug 2050 02:01:18",
            b"Thu, 18 Aug 2050 2:01:18 GMT",
            b"Thu, 18 Aug 2050 02.01.18 GMT",
            b"Thu, 18 August 2050 02:01:18 GMT",
            b"Thu, 18-Aug-2050 02:01:18 GMT",
            b"Thu, 18 Aug 50 02:01:18 GMT",
            b"Thu,  18 Aug 2050 02:01:18 GMT",
            b"Thu 18 Aug 2050 02:01:18 GMT",
            b"Thu, 8 Aug 2050 02:01:18 GMT",
            b"18 Aug 2050 02:01:18 GMT",
            b"Thu, 32 Aug 2050 02:01:18 GMT",
            b"Thu, 18 Aug 2050 25:01:18 GMT",
            b"Thu Aug 18 02:01:18 2050 GMT",
            b"Thu Aug  8 02:01:18 50",
            b"Thursday, 18-Aug-2050 02:01:18 GMT",
            b"2050-08-18T02:01:18Z",
            b"2544400878",
            "Thu, 1\u0668 Aug 2050 02:01:18 GMT".encode(),
        ],
    )
    def test_dates_in_other_forms_are_in_the_past(self, text: bytes) -> None:
        """What is in none of the three forms is in the past, for `Expires` and everywhere."""
        assert http_date(text) is None
        assert stated(((b"expires", text),), NOW) == ResponseTimes(Policy(0, 0, 0))
        assert initial_age(((b"date", text),), NOW) == 0
        assert not not_modified(((b"if-modified-since", text),), None, http_date_text(0.0))

    def test_impossible_dates_are_refused(self) -> None:
        """The day, the hour and the year are checked; a leap second is its minute's last."""
        assert http_date(b"Tue, 29 Feb 2023 00:00:00 GMT") is None
        assert http_date(b"Sat, 01 Jan 0000 00:00:00 GMT") is None
        assert http_date(b"Sat, 31 Dec 2016 23:59:60 GMT") == 1483228799


class TestI14Stated:
    @pytest.mark.parametrize(
        ("lines", "expected"),
        [
            (["cache-control: max-age=60"], (60, 0, 0)),
            (["cache-control: max-age=60, s-maxage=10"], (10, 0, 0)),
            (["cache-control: max-age=60, stale-while-revalidate=30"], (60, 30, 0)),
            (["cache-control: s-maxage=60, stale-while-revalidate=30"], (60, 30, 0)),
            (["cache-control: max-age=60, stale-if-error=90"], (60, 0, 90)),
            (["cache-control: max-age=60, must-revalidate, stale-if-error=90"], (60, 0, 0)),
            (["cache-control: max-age=9, proxy-revalidate, stale-while-revalidate=9"], (9, 0, 0)),
            (["cache-control: no-cache, max-age=60"], (0, 0, 0)),
            (["cache-control: max-age=60", "age: 20"], (40, 0, 0)),
            (["cache-control: max-age=60, stale-while-revalidate=30", "age: 70"], (0, 20, 0)),
            (["cache-control: max-age=oops"], (0, 0, 0)),
            (["cdn-cache-control: max-age=600", "cache-control: max-age=5"], (5, 0, 0)),
            (["expires: 0"], (0, 0, 0)),
            (["expires: Tue, 14 Nov 2023 22:14:20 GMT"], (60, 0, 0)),
            (
                [
                    "expires: Tue, 14 Nov 2023 22:14:20 GMT",
                    "date: Tue, 14 Nov 2023 22:13:10 GMT",
                ],
                (60, 0, 0),
            ),
            (["cache-control: max-age=9", "expires: Tue, 14 Nov 2023 22:14:20 GMT"], (9, 0, 0)),
        ],
    )
    def test_stated_terms_are_those_of_the_response_less_its_age(
        self, lines: list[str], expected: tuple[float, float, float]
    ) -> None:
        """RFC 9111 §4.2.1 and RFC 5861, less the age it already has."""
        times = stated(raw(*lines), NOW)
        assert times is not None
        assert times.terms == Policy(*expected)

    def test_a_response_without_freshness_states_no_terms(self) -> None:
        """No heuristics: with neither route nor statement there is nothing to keep."""
        assert stated(raw("content-type: text/html", "cache-control: public"), NOW) is None

    def test_different_expires_fields_are_not_fresh(self) -> None:
        """§5.3; the same twice counts, and one in the past is no more than over."""
        line, other = (f"expires: Tue, 14 Nov 2023 22:14:2{it} GMT" for it in "01")
        assert stated(raw(line, line), NOW) == ResponseTimes(Policy(60, 0, 0))
        assert stated(raw(line, other), NOW) == ResponseTimes(Policy(0, 0, 0))
        past = raw("expires: Tue, 14 Nov 2023 22:12:20 GMT")
        assert stated(past, NOW) == ResponseTimes(Policy(0, 0, 0))

    def test_cdn_cache_control_alone_counts_if_targeted(self) -> None:
        """RFC 9213: it alone counts where it is asked for; one that cannot be read says nothing."""
        both = raw("cdn-cache-control: max-age=600", "cache-control: max-age=5")
        assert stated(both, NOW, is_targeted=True) == ResponseTimes(Policy(600, 0, 0))
        assert controls(both, is_targeted=True) == {"max-age": "600"}
        unread = raw("cdn-cache-control: max-age=5.5", "expires: Tue, 14 Nov 2023 22:14:20 GMT")
        assert controls(unread, is_targeted=True) == {}
        assert stated(unread, NOW, is_targeted=True) is None
        negative = raw("cdn-cache-control: max-age=-5")
        assert stated(negative, NOW, is_targeted=True) == ResponseTimes(Policy(0, 0, 0))

    def test_the_initial_age_is_the_greater_of_age_and_date(self) -> None:
        """RFC 9111 §4.2.3: by its Age, the first of several, or by its Date; never negative."""
        earlier, later = (raw(f"date: Tue, 14 Nov 2023 22:13:{it} GMT") for it in ("10", "30"))
        assert initial_age((*earlier, *raw("age: 4, 50")), NOW) == 10
        assert initial_age((*earlier, *raw("age: 40, 50")), NOW) == 40
        assert initial_age(later, NOW) == 0

    def test_a_response_past_its_freshness_has_less_stale_time_left(self) -> None:
        """The times after freshness count from its end, which is in the past."""
        said = raw("cache-control: max-age=60, stale-while-revalidate=5, stale-if-error=90")
        assert stated((*said, *raw("age: 70")), NOW) == ResponseTimes(Policy(0, 0, 80), 10)
        assert stated((*said, *raw("age: 60")), NOW) == ResponseTimes(Policy(0, 5, 90), 0)
        assert stated((*said, *raw("age: 300")), NOW) == ResponseTimes(Policy(0, 0, 0), 240)

    @pytest.mark.parametrize(
        ("lines", "expected"),
        [
            (["cache-control: max-age=60"], (60, 30, 90)),
            (["cache-control: max-age=60, stale-while-revalidate=7"], (60, 7, 90)),
            (["cache-control: max-age=60, stale-if-error=7"], (60, 30, 7)),
            (["cache-control: max-age=60, stale-if-error=oops"], (60, 30, 0)),
            (["cache-control: max-age=60, must-revalidate"], (60, 0, 0)),
            (["cache-control: max-age=60", "age: 100"], (0, 0, 50)),
        ],
    )
    def test_own_stale_times_count_where_a_response_states_none(
        self, lines: list[str], expected: tuple[float, float, float]
    ) -> None:
        """From the end of its lifetime, as those that it states, unless it forbids them."""
        times = stated(raw(*lines), NOW, stale_for=30, error_for=90)
        assert times is not None
        assert times.terms == Policy(*expected)
        modified = "last-modified: Tue, 14 Nov 2023 22:11:40 GMT"
        assumed = guessed(200, raw(modified, "age: 50"), NOW, stale_for=30, error_for=90)
        assert assumed == ResponseTimes(Policy(0, 0, 50), 40)

    @pytest.mark.parametrize(
        ("status", "lines", "expected"),
        [
            (200, ["last-modified: Tue, 14 Nov 2023 22:11:40 GMT"], 10),
            (302, ["last-modified: Tue, 14 Nov 2023 22:11:40 GMT"], None),
            (302, ["last-modified: Tue, 14 Nov 2023 22:11:40 GMT", "cache-control: public"], 10),
            (200, ["last-modified: Tue, 14 Nov 2023 22:23:20 GMT"], 0),
            (200, ["last-modified: Sun, 06 Nov 1994 08:49:37 GMT"], 86_400),
            (200, [], None),
            (
                200,
                [
                    "last-modified: Tue, 14 Nov 2023 22:11:40 GMT",
                    "date: Tue, 14 Nov 2023 22:14:20 GMT",
                ],
                16,
            ),
        ],
    )
    def test_heuristic_freshness_is_guessed_by_last_modified(
        self, status: int, lines: list[str], expected: float | None
    ) -> None:
        """RFC 9111 §4.2.2: a tenth of its age then, a day at most; some statuses only if public."""
        found = guessed(status, raw(*lines), NOW)
        assert (None if found is None else found.terms.fresh_for) == expected

    def test_heuristic_freshness_applies_to_some_statuses_only(self) -> None:
        """RFC 9110 §15.1 names them; 206 is a part, which is never kept."""
        said = raw("last-modified: Tue, 14 Nov 2023 22:11:40 GMT")
        found = [it for it in range(200, 600) if guessed(it, said, NOW) is not None]
        assert found == [200, 203, 204, 300, 301, 308, 404, 405, 410, 414, 501]

    def test_the_longest_lifetime_is_the_largest_stated_one(self) -> None:
        """Of all that it says, to whomever."""
        assert longest_lifetime(()) == 0
        assert longest_lifetime(raw("cache-control: max-age=5, s-maxage=7")) == 7
        both = raw("cache-control: max-age=5", "cdn-cache-control: max-age=9")
        assert longest_lifetime(both) == 9
        date = "date: Tue, 14 Nov 2023 22:13:20 GMT"
        assert longest_lifetime(raw("expires: Tue, 14 Nov 2023 22:14:20 GMT", date)) == 60

    def test_a_routes_times_replace_the_freshness_fields_of_the_app(self) -> None:
        """In every field about freshness; the others stay."""
        said = raw("cache-control: a", "expires: b", "pragma: c", "cdn-cache-control: d", "x: e")
        ours = "cache-control: public, max-age=0, s-maxage=60, stale-while-revalidate=30"
        assert policy_headers(said, 60.9, 30.9) == raw("x: e", ours)
        assert cache_control(60, 0)[1] == b"public, max-age=0, s-maxage=60"

    @pytest.mark.parametrize(
        ("asked", "age", "ttl", "good"),
        [
            ("", 10, 50, True),
            ("no-cache", 10, 50, False),
            ("max-age=10", 10, 50, True),
            ("max-age=9", 10, 50, False),
            ("max-age=0", 1, 50, False),
            ("min-fresh=50", 10, 50, True),
            ("min-fresh=51", 10, 50, False),
            ("", 70, -10, False),
            ("max-stale", 70, -10, True),
            ("max-stale=10", 70, -10, True),
            ("max-stale=9", 70, -10, False),
            ("max-age=50, max-stale=20", 70, -10, True),
            ("max-age=50, max-stale=19", 70, -10, False),
            ("min-fresh=1", 70, 0, False),
        ],
    )
    def test_a_requests_cache_control_decides_whether_a_copy_is_good_enough(
        self, asked: str, age: float, ttl: float, *, good: bool
    ) -> None:
        """RFC 9111 §5.2.1."""
        wish = wish_of(raw(f"cache-control: {asked}"))
        assert is_good_enough(wish, age=age, ttl=ttl, may_be_stale=False) is good

    @pytest.mark.parametrize(
        ("asked", "good"),
        [("", True), ("max-age=100", True), ("max-age=9", False), ("no-cache", False)],
    )
    def test_a_stale_copy_is_good_enough_unless_the_request_forbids_it(
        self, asked: str, *, good: bool
    ) -> None:
        """RFC 5861 §3, unless the request says otherwise."""
        wish = wish_of(raw(f"cache-control: {asked}"))
        assert is_good_enough(wish, age=70, ttl=-10, may_be_stale=True) is good

    def test_pragma_no_cache_counts_without_cache_control(self) -> None:
        """RFC 9111 §5.4."""
        assert wish_of(raw("pragma: no-cache")) == Wish(no_cache=True)
        assert wish_of(raw("pragma: no-cache", "cache-control: max-age=1")) == Wish(max_age=1)


def an_answer(origin: Origin, error: LoadFailed | None = None) -> Answer[str]:
    return Answer(
        "a",
        found=True,
        verdict=Verdict.STALE,
        fetched_at=NOW,
        origin=origin,
        clock=lambda: NOW,
        error=error,
    )


class TestE29Lifetime:
    @pytest.mark.parametrize(
        ("given", "sent"),
        [
            ("Cache-Control: public, S-MaxAge=60, max-age = 5", "public, S-MaxAge=0, max-age = 0"),
            ('CDN-Cache-Control: max-age="9", x-max-age=7', "max-age=0, x-max-age=7"),
            ("cache-control: private, stale-if-error=9", "private, stale-if-error=9"),
            ("expires: Tue, 14 Nov 2023 23:13:20 GMT", None),
            ("last-modified: Tue, 14 Nov 2023 23:13:20 GMT", "Tue, 14 Nov 2023 23:13:20 GMT"),
        ],
    )
    def test_an_unverified_response_has_no_lifetime_fields(
        self, given: str, sent: str | None
    ) -> None:
        """Everything else in its fields stays as it is."""
        name, _, value = given.partition(": ")
        fields = without_lifetime([(name.encode(), value.encode())])
        assert fields == (() if sent is None else ((name.encode(), sent.encode()),))

    def test_a_read_over_http_has_no_lifetime_if_it_is_unverified(self) -> None:
        """G2: an unverified answer is STALE at best, and only a FRESH one has an `s-maxage`."""

        async def fetch(ids: list[str]) -> dict[str, str]:
            return dict.fromkeys(ids, "tea")

        kind = Kind("price", fetch=fetch, fresh_for=60)
        said = freshness_headers(kind, an_answer(Origin.MEMORY), Policy(60, 5))["cache-control"]
        assert said == "public, max-age=0, s-maxage=0, stale-while-revalidate=5"


class TestI14Said:
    @pytest.mark.parametrize(
        ("origin", "expected"),
        [
            (Origin.MEMORY, "hit"),
            (Origin.STORE, "hit"),
            (Origin.LOADED, "fwd=miss; stored"),
            (Origin.ANOTHER, "fwd=miss; stored; collapsed"),
        ],
    )
    def test_cache_status_says_how_an_answer_was_served(
        self, origin: Origin, expected: str
    ) -> None:
        """RFC 9211: with its time left, and the verdict or that its refresh failed."""
        status = f"stillfresh; {expected}; ttl=0; detail=stale"
        assert freshness_fields(an_answer(origin), 59.9) == {"age": "0", "cache-status": status}
        fresh = structs.replace(an_answer(origin), verdict=Verdict.FRESH)
        status = f"stillfresh; {expected}; ttl=59; detail=fresh"
        assert freshness_fields(fresh, 59.9) == {"age": "0", "cache-status": status}
        failed = freshness_fields(an_answer(origin, LoadFailed("no")), -3.5)["cache-status"]
        assert failed == f"stillfresh; {expected}; ttl=-3; detail=refresh-failed"

    def test_cache_status_of_the_nearest_cache_comes_last(self) -> None:
        """RFC 9211 §2."""
        assert cache_status([], "hit") == b"stillfresh; hit"
        assert cache_status([b"a; hit", b"b"], "hit") == b"a; hit, b, stillfresh; hit"

    def test_retry_after_of_a_failure_follows_cooldown_or_upstream(self) -> None:
        """In whole seconds: when the cooldown ends, as the upstream asked, else after five."""
        error = LoadFailed("no")
        assert pause_after(error, NOW) == 5
        error.__cause__ = RetryAfter(7.2)
        assert pause_after(error, NOW) == 8
        error.__cause__ = RetryAfter(0.0)
        assert pause_after(error, NOW) == 1
        error.retry_at = NOW + 2.5
        assert pause_after(error, NOW) == 3
        assert pause_after(error, NOW + 2.5) == pause_after(error, NOW + 9) == 1


class TestI14Validation:
    def test_a_stored_page_is_validated_by_its_etag_and_date(self) -> None:
        """RFC 9111 §4.3.1: by those that it has; an empty one is none."""
        stored = raw('etag: "v1"', "last-modified: a")
        assert conditions(stored) == raw('if-none-match: "v1"', "if-modified-since: a")
        assert conditions(raw("etag: ", "last-modified: a")) == raw("if-modified-since: a")
        assert conditions(()) == ()

    def test_a_304_is_about_the_etag_or_date_it_names(self) -> None:
        """RFC 9111 §4.3.4: its ETag, weakly, else its date; one without either is about it."""
        stored = raw('etag: W/"v1"', "last-modified: a")
        assert is_refresh(stored, raw('etag: "v1"', "last-modified: b"))
        assert is_refresh(stored, raw("last-modified: a"))
        assert not is_refresh(stored, raw("last-modified: b"))
        assert not is_refresh((), raw('etag: "v1"'))
        assert is_refresh(stored, raw("x: y"))

    def test_a_304_keeps_the_vary_of_the_stored_page(self) -> None:
        """Its `Vary` may only add; its time is when it came; an age before it is over."""
        stored = raw("vary: Accept, Cookie", "date: a", "age: 5")
        found = refreshed(stored, raw("vary: cookie"), 784111777.0)
        date = "date: Sun, 06 Nov 1994 08:49:37 GMT"
        assert found == raw("vary: cookie", "vary: Accept", date)
        assert refreshed(stored, raw("vary: cookie, accept", date), NOW) == raw(
            "vary: cookie, accept", date
        )
        assert refreshed(raw("vary: Accept", "x: 1"), raw("x: 2"), NOW) == raw(
            "vary: Accept", "x: 2"
        )

    def test_an_etag_is_compared_weakly_and_counts_before_dates(self) -> None:
        """RFC 9110 §13.2.2."""
        etag, modified = b'"v1"', b"Sun, 06 Nov 1994 08:49:37 GMT"
        for asked in ('"v1"', 'W/"v1"', '"v0", "v1"', "*"):
            assert not_modified(raw(f"if-none-match: {asked}"), etag, modified)
        asked_both = raw('if-none-match: "v2"', "if-modified-since: " + modified.decode())
        assert not not_modified(asked_both, etag, modified)
        assert not_modified(raw("if-modified-since: " + modified.decode()), etag, modified)
        assert not not_modified(raw("if-modified-since: rubbish"), etag, modified)
        assert not not_modified((), etag, modified)

    def test_an_etag_is_a_strong_hash_of_the_body(self) -> None:
        """Strong: equal for equal bytes only."""
        assert etag_of(b"a") == etag_of(memoryview(b"a")) != etag_of(b"b")
        assert etag_of(b"a").startswith(b'"')

    def test_a_304_refreshes_the_stored_headers(self) -> None:
        """RFC 9111 §3.2: all but those of the body; one about another page refreshes nothing."""
        stored = raw('etag: "v1"', "content-type: text/html", "x-old: 1", "date: a")
        answer = raw(
            'etag: "v1"', "content-type: text/plain", "date: b", "cache-control: max-age=9"
        )
        assert is_refresh(stored, answer)
        assert refreshed(stored, answer, NOW) == raw(
            "x-old: 1",
            'etag: "v1"',
            "content-type: text/plain",
            "date: b",
            "cache-control: max-age=9",
        )
        assert not is_refresh(stored, raw('etag: "v2"'))

    @pytest.mark.parametrize("name", ["length", "encoding", "range", "md5", "digest"])
    def test_a_304_keeps_fields_that_describe_the_stored_bytes(self, name: str) -> None:
        """RFC 9111 §3.2: whatever the 304 says of bytes that it does not carry."""
        stored = raw('etag: "v1"', f"content-{name}: ours")
        answer = raw('etag: "v1"', f"content-{name}: theirs")
        assert dict(refreshed(stored, answer, NOW))[f"content-{name}".encode()] == b"ours"


MONDAY, TUESDAY = b"Mon, 01 Jan 2024 00:00:00 GMT", b"Tue, 02 Jan 2024 00:00:00 GMT"


class TestI15Ranges:
    @pytest.mark.parametrize(
        ("asked", "stored", "holds"),
        [
            (b'"a"', ((b"etag", b'"a"'),), True),
            (b'"a"', ((b"etag", b'"b"'),), False),
            (b'"a"', ((b"etag", b'W/"a"'),), False),
            (b'W/"a"', ((b"etag", b'W/"a"'),), False),
            (b'W/"a"', ((b"etag", b'"a"'),), False),
            (b'"a"', (), False),
            (MONDAY, ((b"last-modified", MONDAY), (b"date", TUESDAY)), True),
            (TUESDAY, ((b"last-modified", MONDAY), (b"date", TUESDAY)), False),
            (MONDAY, ((b"last-modified", MONDAY), (b"date", MONDAY)), False),
            (MONDAY, ((b"last-modified", MONDAY),), False),
            (MONDAY, ((b"etag", b'"a"'),), False),
            (b"rubbish", ((b"last-modified", b"rubbish"), (b"date", TUESDAY)), False),
        ],
    )
    def test_if_range_compares_strongly(self, asked: bytes, stored: Raw, holds: bool) -> None:
        """RFC 9110 §13.1.5: by strong comparison; a date is strong if it was over when told."""
        assert if_range_holds(((b"if-range", asked),), stored) is holds

    @pytest.mark.parametrize(
        ("asked", "expected"),
        [
            (b"bytes=0-3", (0, 4)),
            (b"bytes=5-", (5, 10)),
            (b"bytes=-3", (7, 10)),
            (b"bytes=-99", (0, 10)),
            (b"bytes=8-99", (8, 10)),
            (b"bytes=10-", RangeAsked.UNSATISFIABLE),
            (b"bytes=-0", RangeAsked.UNSATISFIABLE),
            (b"bytes=3-2", RangeAsked.WHOLE),
            (b"bytes=0-1,4-5", RangeAsked.WHOLE),
            (b"lines=0-1", RangeAsked.WHOLE),
            (b"bytes=-", RangeAsked.WHOLE),
            (b"rubbish", RangeAsked.WHOLE),
            (b"bytes=2-" + b"9" * 5_000, (2, 10)),
            (b"bytes=-" + b"9" * 5_000, (0, 10)),
            (b"bytes=" + b"9" * 5_000 + b"-", RangeAsked.UNSATISFIABLE),
            (b"bytes=" + b"0" * 5_000 + b"-1", (0, 2)),
            (b"bytes=" + b"0-," * 5_000, RangeAsked.WHOLE),
            (b"bytes=0-5,3-9,0-9", RangeAsked.WHOLE),
        ],
    )
    def test_one_range_is_read_and_others_are_ignored(self, asked: bytes, expected: object) -> None:
        """RFC 9110 §14: one range; the rest may be ignored."""
        assert part_asked(asked, 10) == expected

    @given(st.binary(max_size=30), st.integers(0, 100))
    def test_a_requested_part_lies_inside_the_body(self, asked: bytes, length: int) -> None:
        """Never empty, never past the end, never an error."""
        part = part_asked(asked, length)
        if isinstance(part, tuple):
            assert 0 <= part[0] < part[1] <= length
