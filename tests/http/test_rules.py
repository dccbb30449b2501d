"""I14, I15, I25: fields, freshness, validation and ranges of HTTP, by example and by property."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stillfresh.freshness import Policy
from stillfresh.http.fields import Raw, directives, http_date, http_date_text, members, number
from stillfresh.http.freshness import Wish, initial_age, is_good_enough, stated, wish_of
from stillfresh.http.validation import (
    RangeAsked,
    etag_of,
    if_range_holds,
    is_refresh,
    not_modified,
    part_asked,
    refreshed,
)
from stillfresh.isr.sharing import Allowed, judged

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
    def test_a_comma_in_quotes_parts_nothing(self) -> None:
        """RFC 9110 §5.6.1, also over several lines and with empty members."""
        assert members([b'a, "b, c",, d', b"e"]) == [b"a", b'"b, c"', b"d", b"e"]

    def test_directives_are_read_whatever_their_case_and_quotes(self) -> None:
        """RFC 9111 §5.2: tokens and quoted strings; the first of several counts."""
        known = directives([b'Max-Age="60", no-cache="set-cookie", public', b"max-age=5"])
        assert known == {"max-age": "60", "no-cache": "set-cookie", "public": ""}

    @pytest.mark.parametrize(
        ("text", "expected"), [("60", 60), ("-1", 0), ("1.5", 0), ("9" * 30, 2**31), ("", 0)]
    )
    def test_seconds_that_cannot_be_read_are_none_left(self, text: str, expected: float) -> None:
        """RFC 9111 §4.2.1: invalid freshness is stale; huge values are capped."""
        assert number({"max-age": text}, "max-age") == expected

    def test_dates_in_three_forms(self) -> None:
        """RFC 9110 §5.6.7."""
        forms = [
            b"Sun, 06 Nov 1994 08:49:37 GMT",
            b"Sunday, 06-Nov-94 08:49:37 GMT",
            b"Sun Nov  6 08:49:37 1994",
        ]
        assert {http_date(form) for form in forms} == {784111777.0}
        assert http_date(http_date_text(784111777)) == 784111777
        assert http_date(b"0") is None

    @given(fields, st.floats(0, 2e9))
    def test_nothing_is_raised_at_anybody(
        self, headers: tuple[tuple[bytes, bytes], ...], now: float
    ) -> None:
        """Whatever bytes come: a judgement, terms that are not negative, a wish."""
        wish_of(headers)
        judged(200, headers, now, None, Allowed(heuristic=True, cdn_override=True))
        terms = stated(headers, now)
        if terms is not None:
            assert min(terms.fresh_for, terms.stale_for, terms.error_for) >= 0


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
            b"thu, 18 aug 2050 02:01:18 gmt",
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
    def test_other_dates_are_none(self, text: bytes) -> None:
        """What is in none of the three forms is in the past, for `Expires` and everywhere."""
        assert http_date(text) is None
        assert stated(((b"expires", text),), NOW) == Policy(0, 0, 0)
        assert initial_age(((b"date", text),), NOW) == 0
        assert not not_modified(((b"if-modified-since", text),), None, http_date_text(0.0))

    def test_what_no_calendar_has_is_none(self) -> None:
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
    def test_what_a_response_says_counts(
        self, lines: list[str], expected: tuple[float, float, float]
    ) -> None:
        """RFC 9111 §4.2.1 and RFC 5861, less the age it already has."""
        terms = stated(raw(*lines), NOW)
        assert terms == Policy(*expected)

    def test_says_nothing(self) -> None:
        """No heuristics: with neither route nor statement there is nothing to keep."""
        assert stated(raw("content-type: text/html", "cache-control: public"), NOW) is None

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
        ],
    )
    def test_what_a_request_asks(self, asked: str, age: float, ttl: float, *, good: bool) -> None:
        """RFC 9111 §5.2.1."""
        wish = wish_of(raw(f"cache-control: {asked}"))
        assert is_good_enough(wish, age=age, ttl=ttl, may_be_stale=False) is good

    @pytest.mark.parametrize(
        ("asked", "good"),
        [("", True), ("max-age=100", True), ("max-age=9", False), ("no-cache", False)],
    )
    def test_what_is_stale_for_anybody_is_stale_for_who_asks(
        self, asked: str, *, good: bool
    ) -> None:
        """RFC 5861 §3, unless the request says otherwise."""
        wish = wish_of(raw(f"cache-control: {asked}"))
        assert is_good_enough(wish, age=70, ttl=-10, may_be_stale=True) is good

    def test_pragma_counts_without_cache_control(self) -> None:
        """RFC 9111 §5.4."""
        assert wish_of(raw("pragma: no-cache")) == Wish(no_cache=True)
        assert wish_of(raw("pragma: no-cache", "cache-control: max-age=1")) == Wish(max_age=1)


class TestI14Validation:
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

    def test_an_etag_is_of_the_body(self) -> None:
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
    def test_what_is_of_the_stored_bytes_stays(self, name: str) -> None:
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
    def test_if_range(self, asked: bytes, stored: Raw, holds: bool) -> None:
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
    def test_of_ten_bytes(self, asked: bytes, expected: object) -> None:
        """RFC 9110 §14: one range; the rest may be ignored."""
        assert part_asked(asked, 10) == expected

    @given(st.binary(max_size=30), st.integers(0, 100))
    def test_a_part_lies_inside(self, asked: bytes, length: int) -> None:
        """Never empty, never past the end, never an error."""
        part = part_asked(asked, length)
        if isinstance(part, tuple):
            assert 0 <= part[0] < part[1] <= length
