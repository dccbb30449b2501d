"""I35: which cookies a pattern names, and what is left of a request without them."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stillfresh.errors import ConfigError
from stillfresh.http.cookies import CookieNames
from tests.kit.examples import examples

NAME = st.text("abc_-.", min_size=1, max_size=4)
VALUE = st.text('abc=*" ', max_size=4)


def left(patterns: list[str], *lines: bytes) -> list[bytes]:
    headers = ((b"host", b"h"), *((b"cookie", line) for line in lines))
    fields = CookieNames.of(patterns).removed_from(headers)
    return [value for name, value in fields if name == b"cookie"]


class TestI35CookieNames:
    @pytest.mark.parametrize(
        ("patterns", "sent", "expected"),
        [
            (["consent"], b"consent=1", []),
            (["consent"], b"consent=1; sid=2", [b"sid=2"]),
            (["consent"], b"sid=2;consent=1", [b"sid=2"]),
            (["consent"], b"consent2=1", [b"consent2=1"]),
            (["consent"], b"Consent=1", [b"Consent=1"]),
            (["_ga*"], b"_ga=1; _gat=2; _g=3", [b"_g=3"]),
            (["*"], b"a=1; b=2", []),
            (["*"], b"nameless", [b"nameless"]),
            (["consent"], b" consent = 1 ; ; ", []),
            (["_ga"], b'_ga="; sid=2; x="', [b'sid=2; x="']),
            (["sid"], b"_ga=1, sid=2", [b"_ga=1, sid=2"]),
            (["_ga"], b"_ga=1, sid=2", []),
            ([], b"a=1", [b"a=1"]),
        ],
    )
    def test_ignored_cookies_are_removed_and_the_others_stay_in_order(
        self, patterns: list[str], sent: bytes, expected: list[bytes]
    ) -> None:
        """Names are compared by case; a cookie ends at a semicolon, whatever is in quotes (I35)."""
        assert left(patterns, sent) == expected

    def test_each_of_several_cookie_fields_is_read(self) -> None:
        assert left(["a"], b"a=1", b"b=2; a=3", b"c=4") == [b"b=2", b"c=4"]

    def test_a_request_without_ignored_cookies_stays_byte_for_byte(self) -> None:
        odd = b"b=2 ;;c=3;"
        assert left(["a"], odd) == [odd]

    @settings(max_examples=examples(60), deadline=None)
    @given(st.lists(st.tuples(NAME, VALUE), max_size=5), st.lists(NAME, max_size=3))
    def test_no_ignored_cookie_is_left_and_no_other_one_is_lost(
        self, cookies: list[tuple[str, str]], ignored: list[str]
    ) -> None:
        line = "; ".join(f"{name}={value}" for name, value in cookies).encode()
        fields = left(ignored, line)
        names = [part.partition(b"=")[0].strip() for part in b";".join(fields).split(b";")]
        expected = [name.encode() for name, _ in cookies if name not in ignored]
        assert [name for name in names if name] == expected

    @pytest.mark.parametrize("pattern", ["", "a b", "a;b", "a=1", "*a", "a**", "é", 1])
    def test_a_pattern_that_no_name_can_match_is_refused(self, pattern: object) -> None:
        with pytest.raises(ConfigError, match=r"ignore_cookies: .* cannot match a name; write"):
            CookieNames.of([pattern])  # type: ignore[list-item]

    def test_a_single_text_is_refused(self) -> None:
        with pytest.raises(ConfigError, match="must be a list such as"):
            CookieNames.of("_ga")
