"""E19: one call, one key: which arguments count, and what is refused with which words."""

import datetime as dt
import inspect
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from decimal import Decimal
from enum import Enum, Flag, IntEnum
from threading import Lock
from typing import Any, NamedTuple
from uuid import UUID

import attrs
import msgspec
import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stillfresh import ConfigError
from stillfresh.engine.calls import Signature, key_text


class Colour(Enum):
    RED = 1
    BLUE = 2


class Level(IntEnum):
    LOW = 1


class Right(Flag):
    READ = 1
    WRITE = 2


@dataclass
class Query:
    year: int
    tags: set[str] = field(default_factory=set)
    note: str = field(default="", compare=False)


@dataclass(repr=False)
class Mute:
    year: int


class Box(msgspec.Struct):
    side: float


class Filter(pydantic.BaseModel):
    year: int
    colours: list[Colour] = []


class Open(pydantic.BaseModel, extra="allow"):
    year: int = pydantic.Field(0, alias="theYear")


@attrs.define
class Visitor:
    _id: int
    score: float | None = 0.0
    note: str = attrs.field(default="", eq=False)


class Point(NamedTuple):
    x: int


class Session:
    """What cannot be a key."""


def signature(function: Callable[..., Any], **options: Any) -> Signature[Any]:
    return Signature("report", function, **options)


async def report(year: int, region: str = "eu", *of: object, deep: bool = False, **more: object):  # type: ignore[no-untyped-def]  # noqa: ANN201
    raise NotImplementedError


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=8,
)
RICH = (
    JSON
    | st.sampled_from([Colour.RED, Colour.BLUE, Level.LOW, Right.READ, Right.READ | Right.WRITE])
    | st.uuids()
    | st.datetimes()
    | st.dates()
    | st.timedeltas()
    | st.decimals(allow_nan=False)
    | st.binary(max_size=5)
    | st.frozensets(st.integers() | st.text(max_size=3), max_size=4)
    | st.builds(Query, st.integers(), st.sets(st.text(max_size=2), max_size=3))
    | st.builds(Box, st.floats(allow_nan=False))
    | st.builds(Filter, year=st.integers(), colours=st.lists(st.sampled_from(Colour), max_size=2))
)


def same(one: object, other: object) -> bool:
    """Of the same type and content, all the way down: written another way than `key_text`."""
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if type(one) is not type(other):
        return False
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(one[name], other[name]) for name in one)
    if isinstance(one, frozenset | set) and isinstance(other, frozenset | set):
        return {(type(it), it) for it in one} == {(type(it), it) for it in other}
    if isinstance(one, float | Decimal | Box):
        return repr(one) == repr(other)
    if isinstance(one, Query) and isinstance(other, Query):
        return (one.year, one.tags) == (other.year, other.tags)
    return one == other


def shuffled(value: Any) -> Any:
    """Equal, and made in another order."""
    if isinstance(value, dict):
        return {name: shuffled(value[name]) for name in reversed(value)}
    if isinstance(value, list):
        return tuple(map(shuffled, value))
    if isinstance(value, frozenset | set):
        return set(value)
    if isinstance(value, Query):
        return Query(value.year, shuffled(value.tags), note="another")
    return value


class TestE19Keys:
    @given(RICH, RICH)
    def test_equal_values_have_equal_texts_and_others_have_not(
        self, one: object, other: object
    ) -> None:
        """Over everything that may be an argument."""
        assert (key_text(one) == key_text(other)) == same(one, other)
        assert key_text(one) == key_text(shuffled(one))

    @given(
        st.integers(),
        st.sampled_from(["eu", "us"]),
        st.lists(RICH, max_size=2),
        st.booleans(),
        st.dictionaries(st.sampled_from(["a", "b", "c"]), RICH, max_size=3),
    )
    def test_one_call_has_one_key_however_it_is_written(
        self, year: int, region: str, of: list[Any], deep: bool, more: dict[str, Any]
    ) -> None:
        """Defaults left out or written, by name or by place, names in any order."""
        call = signature(report).call
        whole = call(year, region, *of, deep=deep, **more)
        back = dict(reversed(list(more.items())))
        assert call(year, region, *of, **back, deep=deep) == whole
        if not of:
            assert call(**back, deep=deep, region=region, year=year) == whole
            if region == "eu" and not deep:
                assert call(year, **more) == whole
        assert (whole.args, whole.kwargs) == ((year, region, *of), {"deep": deep, **more}) or (
            "nan" in whole.id.lower()
        )
        assert call(year + 1, region, *of, deep=deep, **more) != whole
        assert call(year, region, *of, deep=not deep, **more) != whole

    @given(
        st.sets(st.sampled_from(["year", "region", "deep"])),
        st.tuples(st.integers(0, 1), st.sampled_from(["eu", "us"]), st.booleans()),
        st.tuples(st.integers(0, 1), st.sampled_from(["eu", "us"]), st.booleans()),
    )
    def test_ignored_arguments_do_not_count(
        self, ignore: set[str], one: tuple[int, str, bool], other: tuple[int, str, bool]
    ) -> None:
        """And everything else does; the loader gets all of it."""

        async def of(year: int, region: str = "eu", *, deep: bool = False) -> None:
            raise NotImplementedError

        call = signature(of, ignore=ignore).call
        first = call(one[0], one[1], deep=one[2])
        second = call(other[0], other[1], deep=other[2])
        counts = [name not in ignore for name in ("year", "region", "deep")]
        alike = all(a == b for a, b, c in zip(one, other, counts, strict=True) if c)
        assert (first == second) == alike
        assert (second.args, second.kwargs) == (other[:2], {"deep": other[2]})

    def test_keys_are_the_same_in_every_process(self) -> None:
        """Sets of text are in another order in each."""
        script = (
            "from stillfresh.engine.calls import key_text;"
            "print(key_text([{'a','b','c','d','e'}, frozenset('xyz'), {'k': {1, 2, '3'}}]))"
        )
        texts = {
            subprocess.run(
                [sys.executable, "-c", script],
                env={**os.environ, "PYTHONHASHSEED": seed},
                capture_output=True, text=True, check=True, timeout=60,
            ).stdout
            for seed in ("1", "2")
        }  # fmt: skip
        assert len(texts) == 1

    @pytest.mark.parametrize(
        ("value", "text"),
        [
            (Colour.RED, "tests.engine.test_calls.Colour.RED"),
            (UUID(int=1), 'uuid.UUID("00000000-0000-0000-0000-000000000001")'),
            (dt.date(2026, 1, 2), 'datetime.date("2026-01-02")'),
            (Decimal("1.0"), 'decimal.Decimal("1.0")'),
            (Mute(3), "tests.engine.test_calls.Mute(year=3)"),
            (Box(1.5), "tests.engine.test_calls.Box(side=1.5)"),
            (Filter(year=1), "tests.engine.test_calls.Filter(year=1,colours=[])"),
            (Open(b=2, a=1), 'tests.engine.test_calls.Open(year=0,*={"a":1,"b":2})'),  # type: ignore[call-arg]
            (Visitor(3), "tests.engine.test_calls.Visitor(_id=3,score=0.0)"),
            (Point(1), "[1]"),
            (b"a", 'bytes("YQ==")'),
            (float("nan"), "nan"),
            (2**70, str(2**70)),
            ({1: "a", "1": "b"}, '{"1":"b",1:"a"}'),
            ({}, "{}"),
            (set(), "set()"),
        ],
    )
    def test_a_key_can_be_read(self, value: object, text: str) -> None:
        """By people who look into the store."""
        assert key_text(value) == text

    @pytest.mark.parametrize(
        ("one", "other"),
        [
            ({"a": 1, "b": 2}, {"a=1,b": 2}),
            ({"theYear": 1, "year": 2}, {"theYear": 2}),
            ({"theYear": 1, "year": 2}, {"theYear": 2, "year": 2}),
        ],
    )
    def test_a_client_that_names_fields_cannot_name_the_key_of_another(
        self, one: dict[str, int], other: dict[str, int]
    ) -> None:
        """Extra fields of a model are apart from its own, whatever they are called."""
        assert key_text(Open.model_validate(one)) != key_text(Open.model_validate(other))

    def test_private_fields_of_attrs_count(self) -> None:
        """Those that equality looks at, and no others; not a number is not None."""
        assert len({key_text(Visitor(1)), key_text(Visitor(2)), key_text(Visitor(1, None))}) == 3
        assert key_text(Visitor(1, float("nan"))) != key_text(Visitor(1, None))
        assert key_text(Visitor(1, note="x")) == key_text(Visitor(1))

    def test_key_is_a_function_of_the_arguments(self) -> None:
        """With their defaults; nothing else counts, and nothing is copied."""
        session = Session()

        async def of(db: Session, year: int, region: str = "eu") -> None:
            raise NotImplementedError

        call = signature(of, key=lambda _, year, region: (region, year)).call
        assert call(session, 2026).id == '["eu",2026]'
        assert call(Session(), region="eu", year=2026) == call(session, 2026)
        assert call(session, 2026).args[0] is session

    def test_keys_of_key_are_told_apart(self) -> None:
        """Text from numbers, and both from a tuple."""

        async def of(x: Any) -> None:
            raise NotImplementedError

        call = signature(of, key=lambda x: x).call
        assert len({call(x).id for x in (5, "5", (5,), ("5",), "[5]")}) == 5

    def test_ignored_arguments_are_not_copied(self) -> None:
        """And what counts is."""
        session, of_years = Session(), [1]

        async def of(years: list[int], db: Session) -> None:
            raise NotImplementedError

        call = signature(of, ignore=("db",)).call(of_years, session)
        assert call.args[1] is session
        assert call.args[0] == of_years
        assert call.args[0] is not of_years


async def plain(year: int, db: object = None) -> None:
    raise NotImplementedError


class TestE19Refusals:
    @pytest.mark.parametrize(
        ("options", "says"),
        [
            (
                {"ignore": ("dv",)},
                "report: ignore= names 'dv', which is no parameter of plain; it has year, db",
            ),
            ({"ignore": 5}, "report: ignore= takes many names; write ignore=(5,)"),
            ({"ignore": "db"}, "report: ignore= takes many names; write ignore=('db',)"),
            (
                {"ignore": ("db",), "key": lambda year, _: year},
                "report: key= and ignore= are both given",
            ),
            ({"key": "year"}, "report: key=: must be a function, not 'year'"),
            ({"key": report}, "report: key= is async; write a plain function of the arguments"),
        ],
    )  # fmt: skip
    def test_wrong_options_are_refused(self, options: dict[str, Any], says: str) -> None:
        """Each says what was given and what to write."""
        with pytest.raises(ConfigError) as caught:
            signature(plain, **options)
        assert str(caught.value).startswith(says)

    @pytest.mark.parametrize("key", [None, True, 1.5, ["a"], Session(), b"a"])
    def test_a_key_function_may_return_only_a_key(self, key: object) -> None:
        """Names the type, and what is allowed."""
        call = signature(plain, key=lambda *_: key).call
        with pytest.raises(ConfigError) as caught:
            call(1)
        assert f"a {type(key).__name__}; return a str, an int, or a tuple" in str(caught.value)

    def test_a_tuple_with_a_part_that_cannot_be_a_key_is_refused(self) -> None:
        """Names the type inside."""
        with pytest.raises(ConfigError, match=r"report: key= returned .*type .*Session cannot be"):
            signature(plain, key=lambda year, db: (year, db)).call(1, Session())

    @pytest.mark.parametrize("value", [Session(), [Session()], {"a": Session()}, Query(Session())])  # type: ignore[arg-type]
    def test_an_argument_that_cannot_be_a_key_is_refused(self, value: object) -> None:
        """Names the argument, its type, what in it is wrong, and what to write."""
        with pytest.raises(ConfigError) as caught:
            signature(plain).call(2026, value)
        said = str(caught.value)
        assert f"report: the argument db has the type {type(value).__name__} (" in said
        assert "type tests.engine.test_calls.Session cannot be written as text" in said
        assert said.endswith(
            "Write ignore=('db',) to leave it out, or key= to say what is part of the key"
        )

    def test_an_argument_that_cannot_be_copied_is_refused(self) -> None:
        """Its key has a text, and its load could not begin later."""
        with pytest.raises(
            ConfigError, match=r"the argument q has the type Query .*ignore=\('q',\)"
        ):
            signature(lambda q: q).call(Query(1, note=Lock()))  # type: ignore[arg-type]

    def test_an_argument_with_a_lone_surrogate_is_refused(self) -> None:
        """Names the argument."""
        with pytest.raises(ConfigError, match=r"report: the argument region has the type str"):
            signature(report).call(1, "\ud800")


class TestE39Binding:
    """Most functions are bound without `inspect`. What differs is compared here."""

    @given(
        st.lists(st.integers(0, 3), max_size=4),
        st.dictionaries(st.sampled_from(["a", "b", "c", "d"]), st.integers(0, 3)),
    )
    def test_arguments_are_bound_as_inspect_binds_them(
        self, args: list[int], kwargs: dict[str, int]
    ) -> None:
        async def function(a: int, b: int = 7, c: int = 8) -> int:
            return a + b + c

        signature: Signature[Any] = Signature("f", function)
        try:
            bound = inspect.signature(function).bind(*args, **kwargs)
        except TypeError as exc:
            with pytest.raises(TypeError, match=re.escape(str(exc))):
                signature.call(*args, **kwargs)
            return
        bound.apply_defaults()
        call = signature.call(*args, **kwargs)
        assert (call.args, call.kwargs) == (bound.args, bound.kwargs)
        assert call == f"[{','.join(map(str, bound.args))}]"
