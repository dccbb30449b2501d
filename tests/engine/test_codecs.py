"""E19: values of Pydantic's and msgspec's types, by the annotation; and values that are none."""

import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from typing import Annotated, Any, Generic, Literal, NamedTuple, TypeVar

import msgspec
import pydantic
import pydantic.dataclasses
import pytest
import typing_extensions

from stillfresh import BadValue, Cache, ConfigError, LoadFailed, Verdict
from stillfresh.engine.codecs import MsgpackCodec, PydanticCodec, codec_for
from stillfresh.testing import ManualClock
from tests.kit.engine import Sleeper, idle, outcome, read_with
from tests.kit.held_store import store_bytes

T = TypeVar("T")


class User(pydantic.BaseModel):
    name: str
    age: int = 0


class Cat(pydantic.BaseModel):
    kind: Literal["cat"] = "cat"
    lives: int = 9


class Dog(pydantic.BaseModel):
    kind: Literal["dog"] = "dog"


class Aliased(pydantic.BaseModel, extra="forbid"):
    name: str = pydantic.Field(alias="userName", serialization_alias="shownName")

    @pydantic.computed_field  # type: ignore[prop-decorator]
    @property
    def shout(self) -> str:
        return self.name.upper()


class Noted(pydantic.BaseModel):
    """Two that are written alike may differ."""

    name: str = pydantic.Field(alias="userName")
    _seen: int = 0


class Swapped(pydantic.BaseModel):
    """Each field's alias is the other's name."""

    left: int = pydantic.Field(alias="right")
    right: int = pydantic.Field(alias="left")


class Admin(pydantic.BaseModel):
    name: str


class Guest(pydantic.BaseModel):
    name: str


class Boss(Admin):
    salary: int = 5


class Short(pydantic.BaseModel):
    id: int


class Long(Short):
    name: str | None = None


class Cents(pydantic.BaseModel):
    price: int

    @pydantic.field_serializer("price")
    def euros(self, cents: int) -> float:
        return cents / 100


class Counted(pydantic.BaseModel):
    number: int
    tags: set[str] = set()

    @pydantic.field_validator("number")
    @classmethod
    def next(cls, number: int) -> int:
        return number + 1


class Account(pydantic.BaseModel):
    password: pydantic.SecretStr


class Numbers(pydantic.RootModel[list[int]]):
    pass


@pydantic.dataclasses.dataclass
class Checked:
    age: int


@dataclass
class Team:
    lead: User
    others: list[User]


@dataclass
class Page(Generic[T]):
    items: list[T]


@dataclass
class Tree:
    value: int
    below: "list[Tree]"


class Row(typing_extensions.TypedDict):
    user: User


class Pair(NamedTuple):
    user: User
    age: int


class Struct(msgspec.Struct):
    user: User


class Odd:
    pass


@dataclass
class Holder:
    odd: Odd


PYDANTIC: list[tuple[Any, Any]] = [
    (User, User(name="ann", age=5)),
    (list[User], [User(name="ann")]),
    (dict[str, User], {"a": User(name="ann")}),
    (User | None, None),
    (User | int, User(name="ann")),
    (Cat | Dog, Dog()),
    (Annotated[Cat | Dog, pydantic.Field(discriminator="kind")], Cat(lives=3)),
    (Team, Team(User(name="ann"), [User(name="bob")])),
    (Page[User], Page([User(name="ann")])),
    (Row, {"user": User(name="ann")}),
    (Pair, Pair(User(name="ann"), 5)),
    (tuple[User, ...], (User(name="ann"),)),
    (Aliased, Aliased(userName="ann")),
    (Swapped, Swapped.model_validate({"left": 1, "right": 2})),
    (Numbers, Numbers([1, 2])),
    (Checked, Checked(5)),
]


class TestE19Values:
    @pytest.mark.parametrize(("of", "value"), PYDANTIC, ids=lambda it: str(it)[:40])
    def test_a_pydantic_type_is_encoded_wherever_it_stands(self, of: Any, value: Any) -> None:
        """What comes back is what was stored, of the same types."""
        codec = codec_for(of, "user")
        assert isinstance(codec, PydanticCodec)
        back = codec.decode(codec.encode(value))
        assert back == value
        assert type(back) is type(value)

    def test_a_value_that_was_just_written_is_read_back_once(self) -> None:
        """To see that it comes back is enough; who has its bytes later reads a value of its own."""
        codec = PydanticCodec[User](User, "user")
        data = codec.encode(User(name="Ann"))
        first, second, third = codec.decode(data), codec.decode(data), codec.decode(data)
        assert first == second == third == User(name="Ann")
        assert second is not third

    def test_a_digit_is_not_taken_for_msgpack(self) -> None:
        """Whoever sees the bytes alone can tell which of the two they are."""
        assert PydanticCodec[int](int, "user").encode(5) == b"5 "

    @pytest.mark.parametrize(
        "of", [int, list[str], dict[str, int | None], Any, object, Tree, Mapping[str, object]]
    )
    def test_other_types_are_encoded_by_msgspec(self, of: Any) -> None:
        """Types that hold themselves as well; `object` is anything."""
        assert isinstance(codec_for(of, "user"), MsgpackCodec)

    @pytest.mark.parametrize(
        ("of", "says"),
        [
            (Odd, "it holds a <class 'tests.engine.test_codecs.Odd'>"),
            (list[Odd], "it holds a <class 'tests.engine.test_codecs.Odd'>"),
            (Holder, "it holds a <class 'tests.engine.test_codecs.Odd'>"),
            (complex | None, "it holds a <class 'complex'>"),
            (list[Odd | complex], "not contain more than one custom type"),
            (Struct, "Struct"),
            (dict[str, User | Odd], "Odd"),
            (Account, "it holds a SecretStr, which Pydantic writes as asterisks; give codec="),
        ],
    )  # fmt: skip
    def test_a_type_that_no_codec_supports_is_refused(self, of: Any, says: str) -> None:
        """Refused where it is declared: names the resource, the type, and `codec=`."""

        async def load(keys: list[str]) -> Any:
            raise NotImplementedError

        load.__annotations__["return"] = dict[str, of]
        with pytest.raises(ConfigError) as caught:
            Cache("memory://").batched("user", fresh_for=1)(load)
        said = str(caught.value)
        assert said.startswith("user: cannot store values of type ")
        assert says in said
        assert "codec=" in said

    def test_pydantic_is_imported_for_its_own_types_only(self) -> None:
        """A program without it does not pay for it."""
        script = (
            "import sys; from stillfresh import Cache\n"
            "@Cache('memory://').cached('a', fresh_for=1)\n"
            "async def a(x: int) -> dict[str, list[int]]: ...\n"
            "assert 'pydantic' not in sys.modules"
        )
        subprocess.run([sys.executable, "-c", script], check=True, timeout=60)

    async def test_a_model_comes_back_from_every_store(self, cache: Cache) -> None:
        """A model, not a dict; also where memory does not have it."""

        @cache.cached("user", fresh_for=60, max_entries=1)
        async def user(name: str) -> User | None:
            return User(name=name) if name else None

        for _ in range(2):  # memory has room for one: the other is read from the store
            assert await user("ann") == User(name="ann")
            assert await user("") is None

    async def test_a_stored_value_of_another_shape_is_a_miss(
        self, url: str, clock: ManualClock
    ) -> None:
        """E11: an older release wrote it; validated, not believed."""
        async with Cache(url, clock=clock) as cache:

            @cache.batched("user", fresh_for=60)
            async def users(names: list[str]) -> dict[str, User]:
                return {name: User(name=name) for name in names}

            await store_bytes(cache, "user", "ann", b'{"name": ["another"]}')
            assert await users("ann") == User(name="ann")


class TestE19BadValues:
    async def test_a_bad_value_is_the_loaders_mistake(self, cache: Cache, caplog: Any) -> None:
        """Raised as such to all that waited, and again during the cooldown; no lease is left."""
        calls: list[str] = []

        @cache.cached("user", fresh_for=60)
        async def user(name: str) -> User:
            calls.append(name)
            return {"name": name}  # type: ignore[return-value]

        for _ in range(2):
            with pytest.raises(ConfigError, match=r"user .*ann.*: the value cannot be stored"):
                await user("ann")
        assert calls == ["ann"]
        stats = await cache.stats()
        assert stats.store is not None
        assert stats.store.leases == 0
        assert (stats.resources["user"].failed, stats.resources["user"].failing) == (1, 1)
        assert "return what the annotation says, or give codec=" in caplog.text

    async def test_without_an_annotation_the_advice_is_to_annotate(self, cache: Cache) -> None:
        """There is none that the value could be held against."""

        @cache.cached("thing", fresh_for=60)
        async def thing(name: str):  # type: ignore[no-untyped-def]  # noqa: ANN202
            del name
            return object()

        with pytest.raises(ConfigError, match=r"; annotate the return type, or give codec=$"):
            await thing("a")

    @pytest.mark.parametrize(
        ("of", "value"),
        [
            (Admin | Guest, Guest(name="ann")),
            (Long | Short, Short(id=1)),
            (list[Long | Short], [Short(id=1)]),
            (Cents, Cents(price=1200)),
            (Counted, Counted(number=1)),
        ],
        ids=str,
    )
    def test_a_value_that_would_come_back_as_another_is_refused(self, of: Any, value: Any) -> None:
        """As another class of a union, or changed by a serializer or a validator."""
        with pytest.raises(ValueError, match="it would come back as"):
            codec_for(of, "user").encode(value)

    def test_a_value_is_compared_by_what_is_written(self) -> None:
        """By all of its names; what is not written is not stored either, and does not count."""
        noted = Noted(userName="ann")
        noted._seen = 5
        codec = codec_for(Noted, "user")
        back = codec.decode(codec.encode(noted))
        assert (back.name, back._seen) == ("ann", 0)

    def test_an_old_pydantic_is_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """It cannot read values by the names of their fields."""
        monkeypatch.setattr("stillfresh.engine.codecs.signature", lambda _: signature(len))
        with pytest.raises(ConfigError, match=r"user: .*it needs Pydantic 2\.11 or newer"):
            codec_for(User, "user")

    def test_a_subclass_comes_back_as_what_is_declared(self) -> None:
        """As Pydantic and FastAPI treat it."""
        codec = codec_for(Admin | int, "user")
        assert codec.decode(codec.encode(Boss(name="ann"))) == Admin(name="ann")

    async def test_a_bad_value_can_be_caught_as_a_failed_load(self, cache: Cache) -> None:
        """Code that handles those handles this."""

        @cache.batched("count", fresh_for=60)
        async def counts(keys: list[str]) -> dict[str, int]:
            return dict.fromkeys(keys, "many")  # type: ignore[arg-type]

        error = await outcome(counts("a"))
        assert isinstance(error, LoadFailed)
        assert isinstance(error, ConfigError)
        assert isinstance(error, BadValue)
        assert isinstance(error.__cause__, msgspec.ValidationError)

    async def test_a_bad_value_among_many_fails_alone(self, cache: Cache) -> None:
        """`get_many` has it in that answer's `error`."""

        @cache.batched("count", fresh_for=60)
        async def counts(keys: list[str]) -> dict[str, int]:
            return {key: 1 if key == "a" else "many" for key in keys}  # type: ignore[misc]

        found = await counts.get_many(["a", "b"])
        assert found["a"].value == 1
        assert isinstance(found["b"].error, ConfigError)

    async def test_an_old_copy_does_not_hide_a_bad_value(
        self, url: str, clock: ManualClock, sleeper: Sleeper
    ) -> None:
        """EXPIRED: the caller that waited is told; STALE: it is served, and the log says it."""
        value: Any = 1
        async with Cache(url, clock=clock, sleep=sleeper) as cache:

            @cache.cached("count", fresh_for=10, stale_for=10, error_for=100)
            async def count(of: str) -> int:
                return value  # type: ignore[no-any-return]

            assert await count("a") == 1
            value = "many"
            clock.advance(15)
            assert (await count.get("a")).verdict is Verdict.STALE
            await idle(cache)
            clock.advance(10)
            assert isinstance(await outcome(count("a")), ConfigError)
            value = 2
            clock.advance(2)
            assert await count("a") == 2

    async def test_a_bad_value_cools_down_like_any_failure(
        self, url: str, clock: ManualClock, sleeper: Sleeper
    ) -> None:
        """One load for each pause, which doubles; every read in between raises it again."""
        calls: list[float] = []
        async with Cache(url, clock=clock, sleep=sleeper, dice=lambda: 0.0) as cache:

            @cache.cached("count", fresh_for=10)
            async def count(of: str) -> int:
                calls.append(clock() - began)
                return of  # type: ignore[return-value]

            began = clock()
            for _ in range(15):
                error = await outcome(count("many"))
                assert isinstance(error, BadValue)
                assert "the value cannot be stored: ValidationError: Expected `int`" in str(error)
                assert str(error).endswith("return what the annotation says, or give codec=")
                assert isinstance(error.__cause__, msgspec.ValidationError)
                clock.advance(0.5)
            assert calls == [0, 1, 3, 7]
            assert isinstance(await outcome(count.of("many").refresh()), BadValue)
            assert len(calls) == 5

    async def test_a_stale_copy_is_not_loaded_again_at_every_read(
        self, url: str, clock: ManualClock, sleeper: Sleeper
    ) -> None:
        """It is served with the error, as a `BadValue`, until a load succeeds."""
        value: Any = 1
        calls: list[str] = []
        async with Cache(url, clock=clock, sleep=sleeper, dice=lambda: 0.0) as cache:

            @cache.cached("count", fresh_for=10, stale_for=60)
            async def count(of: str) -> int:
                calls.append(of)
                return value  # type: ignore[no-any-return]

            await count("a")
            value = "many"
            clock.advance(10)
            await count.of("a").get()
            await idle(cache)
            for _ in range(5):
                answer = await count.of("a").get()
                await idle(cache)
                assert (answer.value, answer.verdict) == (1, Verdict.STALE)
                assert isinstance(answer.error, BadValue)
            assert len(calls) == 2
            clock.advance(1)
            value = 2
            await count.of("a").get()
            await idle(cache)
            answer = await count.of("a").get()
            assert (answer.value, answer.error) == (2, None)

    async def test_an_expired_copy_is_served_during_the_cooldown(
        self, url: str, clock: ManualClock, sleeper: Sleeper
    ) -> None:
        """The caller that waited for the load is told; those that come after it get the copy."""
        value: Any = 1
        async with Cache(url, clock=clock, sleep=sleeper, dice=lambda: 0.0) as cache:

            @cache.cached("count", fresh_for=10, error_for=3600)
            async def count(of: str) -> int:
                return value  # type: ignore[no-any-return]

            await count("a")
            value = "many"
            clock.advance(20)
            for _ in range(2):
                assert isinstance(await outcome(count("a")), BadValue)
                answer = await count.of("a").get()
                assert (answer.value, answer.verdict) == (1, Verdict.EXPIRED)
                assert isinstance(answer.error, BadValue)
                clock.advance(60)

    async def test_another_process_tells_what_the_store_remembers_of_a_bad_value(
        self, tmp_path: Path, clock: ManualClock, sleeper: Sleeper
    ) -> None:
        """It has not seen the value: LoadFailed with the text, and no load."""
        calls: list[str] = []
        options: dict[str, Any] = {"clock": clock, "sleep": sleeper, "dice": lambda: 0.0}
        url = f"sqlite:///{tmp_path}/shared.db"
        async with Cache(url, **options) as here, Cache(url, **options) as there:
            for cache in (here, there):

                @cache.cached("count", fresh_for=10)
                async def count(of: str) -> int:
                    calls.append(of)
                    return of  # type: ignore[return-value]

                error = await outcome(count("many"))
                assert isinstance(error, LoadFailed)
                assert isinstance(error, BadValue) is (cache is here)
                assert "the value cannot be stored: ValidationError: Expected `int`" in str(error)
        assert calls == ["many"]

    async def test_what_the_store_remembers_of_a_bad_value_is_bounded(self, cache: Cache) -> None:
        """E25: a codec may say anything, at any length."""

        class Talking:
            def encode(self, value: int) -> bytes:
                raise ValueError("x" * 10_000 + f"\ud800 {value}")

            def decode(self, data: bytes) -> int:
                return len(data)

        @cache.cached("count", fresh_for=10, codec=Talking())
        async def count(of: str) -> int:
            return len(of)

        await outcome(count("many"))
        [entry] = await cache.entries("count")
        assert entry.error is not None
        assert entry.error.startswith("the value cannot be stored: ValueError: xxx")
        assert len(entry.error) == 500

    async def test_of_a_callers_own_bad_value_the_class_is_remembered(self, cache: Cache) -> None:
        """E30: but not its cause, which may hold the caller's own response."""

        @cache.batched("count", fresh_for=10, max_batch=1)
        async def counts(words: list[str]) -> dict[str, int]:
            return {word: len(word) for word in words}

        async def mine() -> object:
            return "many"

        first = await read_with(counts, "a", mine)
        second = await read_with(counts, "a", mine)
        assert isinstance(first, BadValue)
        assert isinstance(second, BadValue)
        assert isinstance(first.__cause__, msgspec.ValidationError)
        assert second.__cause__ is None
