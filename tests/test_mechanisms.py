"""The small mechanisms that every package shares: checks, backoff, bounds, errors."""

import asyncio

import pytest

from stillfresh.backoff import pause_after, spread
from stillfresh.bounded import BoundedDict, MessageRate, Room, TagIndex, sliced
from stillfresh.checks import (
    checked_bytes,
    checked_flag,
    checked_function,
    checked_share,
    checked_unicode,
    checked_whole,
    is_whole,
)
from stillfresh.errors import (
    ConfigError,
    LeaseHeld,
    MissingExtra,
    MissingMethod,
    StoreError,
    needs,
    shown,
    shown_address,
    shown_place,
    unconfirmed,
    without_secrets,
)
from stillfresh.events import Events
from stillfresh.tasks import SharedResult


class TestChecks:
    @pytest.mark.parametrize("value", [0, -1, 11, True, 1.0, "1", None])
    def test_a_value_that_is_no_number_within_the_bounds_is_refused(self, value: object) -> None:
        """The error says the name, the bounds and the value."""
        says = f"^size: .* from 1 to 10, .*{value!r}$"
        assert not is_whole(value, 1, 10)
        with pytest.raises(ConfigError, match=says):
            checked_whole("size", value, 1, 10)

    def test_numbers_sizes_and_shares_may_equal_their_bounds(self) -> None:
        """Of numbers, of sizes and of shares, which are more than nothing."""
        assert [checked_whole("size", value, 1, 10) for value in (1, 10)] == [1, 10]
        assert [checked_bytes("size", value, 1000) for value in (1000, "1KB")] == [1000, 1000]
        assert [checked_bytes("size", value) for value in (1, "1", "12b")] == [1, 1, 12]
        assert checked_share("share", 1) == 1.0
        with pytest.raises(ConfigError, match="at least 1,000, not 999"):
            checked_bytes("size", 999, 1000)
        with pytest.raises(ConfigError, match=r"share: .*above 0, up to 1, .*0"):
            checked_share("share", 0)

    @pytest.mark.parametrize("value", [-0.1, 1.1, True, "1", None, float("nan")])
    def test_a_share_is_a_number_above_0_and_up_to_1(self, value: object) -> None:
        """And above nothing."""
        assert checked_share("share", 0.001) == 0.001
        with pytest.raises(ConfigError, match=r"share: .*above 0, up to 1"):
            checked_share("share", value)

    def test_without_an_upper_bound_any_larger_number_is_allowed(self) -> None:
        """The error then says "or more"."""
        assert checked_whole("size", 10**30) == 10**30
        with pytest.raises(ConfigError, match=r"^size: .*1 or more, .*0"):
            checked_whole("size", 0)

    def test_a_flag_must_be_true_or_false(self) -> None:
        """1 is not True."""
        assert checked_flag("on", value=True)
        with pytest.raises(ConfigError, match=r"^on: .*True or False.*1$"):
            checked_flag("on", 1)

    def test_a_function_that_cannot_be_called_is_refused_with_the_kind_that_was_wanted(
        self,
    ) -> None:
        """The error says which kind of function was wanted."""
        assert checked_function("load", len) is len
        with pytest.raises(ConfigError, match=r"^load: .*an async function.*1$"):
            checked_function("load", 1, "an async function")

    def test_a_lone_surrogate_is_refused_as_text(self) -> None:
        """A lone surrogate cannot be written as UTF-8."""
        assert checked_unicode("name", "é") == b"\xc3\xa9"
        with pytest.raises(ConfigError, match="lone surrogates"):
            checked_unicode("name", "\ud800")


class TestBackoff:
    def test_pauses_double_up_to_the_longest(self) -> None:
        """However many failures there were."""
        pauses = [pause_after(count, first=1.0, longest=5.0) for count in (1, 2, 3, 4, 10**6)]
        assert pauses == [1.0, 2.0, 4.0, 5.0, 5.0]

    def test_a_pause_is_spread_over_its_second_half(self) -> None:
        """Never shorter than half of it, never longer than it."""
        assert spread(4.0, lambda: 0.0) == 2.0
        assert spread(4.0, lambda: 1.0) == 4.0


class TestBounds:
    def test_a_bounded_dict_drops_what_was_noted_longest_ago(self) -> None:
        """A key that is noted again is the newest."""
        known = BoundedDict[str, int](2)
        for key, value in (("a", 1), ("b", 2), ("a", 3), ("c", 4)):
            known.note(key, value)
        assert known == {"a": 3, "c": 4}

    def test_a_bounded_dict_counts_bytes(self) -> None:
        """Of the values that it has now; one that is too large goes as well."""
        known = BoundedDict[str, bytes](9, 10, len)
        for key, size in (("a", 4), ("b", 4), ("b", 6)):
            known.note(key, b"1" * size)
        assert [*known] == ["a", "b"]
        known.note("c", b"1")
        assert [*known] == ["b", "c"]
        known.note("d", b"1" * 11)
        assert known == {}
        known.note("e", b"1" * 10)
        assert [*known] == ["e"]

    def test_a_rate_limit_allows_a_burst_and_then_so_many_a_second(self) -> None:
        """What is over is made up for by waiting; a clock that goes back changes nothing."""
        rate = MessageRate(rate=2, burst=3, now=100.0)
        assert [rate.spend(100.0) for _ in range(4)] == [True, True, True, False]
        assert not rate.spend(100.5)
        assert not rate.spend(99.0)
        assert rate.spend(100.5), "1.5 s since the clock went back are 3 messages"
        assert rate.spend(1_000.0, cost=3)
        assert not rate.spend(1_000.0)

    def test_a_tag_index_keeps_the_keys_of_a_tag_in_order(self) -> None:
        """One key, many, and none again; a key may be 0."""
        index = TagIndex[int]()
        index.add(0, ["x", None])
        index.add(0, ["x"])
        assert index.keys("x") == [0]
        for key in (2, 1, 2):
            index.add(key, ["x", "y"])
        assert (index.keys("x"), index.keys("y"), index.keys("z")) == ([0, 2, 1], [2, 1], [])
        index.remove(5, ["x", "y"])
        index.remove(2, ["x", "y", "z"])
        index.remove(1, ["y"])
        assert (index.keys("x"), index.keys("y"), index.keys(None)) == ([0, 1], [], [0])
        index.remove(0, ["x", None])
        index.remove(1, ["x"])
        assert [*index.freed()] == []

    def test_a_tag_index_is_freed_one_key_at_each_step(self) -> None:
        """A key of many, and a tag."""
        index = TagIndex[int]()
        for key in range(3):
            index.add(key, ["x", f"{key}"])
        assert len([*index.freed()]) == 3 + 4
        assert [*index.freed()] == []

    async def test_room_is_made_in_slices_until_nine_tenths_are_held(self) -> None:
        """The first at once, the others each in a turn of the loop; none when there is enough."""
        freed = list[int]()

        def free() -> bool:
            freed.append(room.held)
            room.held -= 4
            return True

        room = Room(100, free)
        room.held += 100
        assert not room.is_enough
        room.shrink()
        assert freed == [100]
        for _ in range(9):
            await asyncio.sleep(0)
        assert freed == [100, 96, 92]
        room.held = 90
        await asyncio.sleep(0)
        assert (freed, room.is_enough) == ([100, 96, 92], True)
        room.held = 95
        room.shrink()
        await asyncio.sleep(0)
        assert freed[3:] == [95, 91]

    async def test_making_room_stops_if_nothing_may_be_dropped(self) -> None:
        """Until it is asked again."""
        calls = list[int]()

        def free() -> bool:
            calls.append(1)
            return False

        room = Room(10, free)
        room.held = 20
        for count in (1, 2):
            room.shrink()
            for _ in range(5):
                await asyncio.sleep(0)
            assert len(calls) == count

    async def test_slices_have_turns_of_the_loop_between_them(self) -> None:
        """None before the first, and none after one that is not full."""
        turns = 0

        async def count() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        counting = asyncio.create_task(count())
        seen = [(some, turns) async for some in sliced(range(5), 2)]
        assert seen == [([0, 1], 0), ([2, 3], 1), ([4], 2)]
        assert [some async for some in sliced(list[int](), 2)] == []
        assert turns == 2
        counting.cancel()


class TestSharedResult:
    """E3: one task, many callers, of which each may leave."""

    async def test_each_caller_gets_the_result_though_another_has_left(self) -> None:
        """A cancelled caller takes neither the task nor another caller along."""
        goes_on = asyncio.Event()
        result: SharedResult[int] = SharedResult()

        async def work() -> int:
            await goes_on.wait()
            return 7

        task = asyncio.create_task(result.of(work()))
        task.add_done_callback(result.note_end)
        leaving, waiting = result.wait(), result.wait()
        leaving.cancel()
        goes_on.set()
        assert await waiting == 7
        assert not task.cancelled()

    async def test_each_caller_gets_the_error(self) -> None:
        """The same one."""
        result: SharedResult[int] = SharedResult()

        async def work() -> int:
            raise OSError("gone")

        task = asyncio.create_task(result.of(work()))
        task.add_done_callback(result.note_end)
        ends = await asyncio.gather(result.wait(), result.wait(), return_exceptions=True)
        assert [str(end) for end in ends] == ["gone", "gone"]

    @pytest.mark.parametrize("has_begun", [False, True])
    async def test_callers_are_cancelled_with_the_task(self, *, has_begun: bool) -> None:
        """Also if its first step never ran: nobody waits for ever."""
        result: SharedResult[bool] = SharedResult()
        task = asyncio.create_task(result.of(asyncio.Event().wait()))
        task.add_done_callback(result.note_end)
        caller = result.wait()
        if has_begun:
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([caller])
        assert caller.cancelled()


class TestErrors:
    def test_a_long_value_is_cut_in_error_texts(self) -> None:
        """At 60 characters of its repr; a number that Python does not print is described."""
        assert shown("a" * 58) == f"'{'a' * 58}'"
        assert shown("a" * 59) == f"'{'a' * 59}…"
        assert shown(10**5000) == "a int too long to print"

    def test_an_address_is_shown_without_password_and_options(self) -> None:
        """Options may be secrets, too."""
        assert shown_address("redis://me:secret@host/0") == "'redis://***@host/0'"
        assert shown_place("redis://me:secret@host/0?password=x") == "'redis://***@host/0?…'"
        assert shown_place("redis://host/0") == "'redis://host/0'"

    def test_a_text_for_logs_is_shown_without_queries_and_credentials(self) -> None:
        """What stands around them stays."""
        said = "GET (https://me:secret@host/a?token=1). Really?!"
        assert without_secrets(said) == "GET (https://***@host/a?***). Really?!"
        assert without_secrets("no // and https://host/a") == "no // and https://host/a"
        assert without_secrets("Cookie: a=b\nBearer abcdefgh") == "Cookie: ***\nBearer ***"

    def test_a_missing_library_is_named_with_what_to_install(self) -> None:
        """With what to install; a module of our own that is missing is our mistake."""
        says = r"^a page needs foo: install stillfresh\[isr\]$"
        with pytest.raises(MissingExtra, match=says), needs("isr", "a page"):
            raise ModuleNotFoundError(name="foo.bar")
        for error in (
            ModuleNotFoundError(name="stillfresh.gone"),
            ModuleNotFoundError(),
            MissingExtra("another"),
        ):
            with pytest.raises(ModuleNotFoundError) as caught, needs("isr", "pages"):
                raise error
            assert caught.value is error

    def test_a_missing_method_is_named_with_what_to_write(self) -> None:
        """By the name of the object, or else of its class."""

        class Shop:
            open = MissingMethod("write async with {}")

        with pytest.raises(AttributeError, match="write async with Shop"):
            Shop().open  # noqa: B018
        named = Shop()
        named.__name__ = "prices"  # type: ignore[attr-defined]
        with pytest.raises(AttributeError, match="write async with prices"):
            named.open  # noqa: B018

    def test_a_lease_held_error_has_the_time_at_which_the_lease_ends(self) -> None:
        """Beside its text."""
        error = LeaseHeld("held by another", 12.5)
        assert (str(error), error.until) == ("held by another", 12.5)

    def test_the_error_of_an_unconfirmed_change_says_what_to_do(self) -> None:
        """The error itself is raised."""
        error = StoreError("away")
        with pytest.raises(StoreError) as caught, unconfirmed():
            raise error
        assert caught.value is error
        assert "until the store confirms" in error.__notes__[0]


def test_events_count_their_listeners() -> None:
    """One that subscribed twice counts twice; each leaves once."""
    events = Events[int]()
    leave = [events.subscribe(print) for _ in range(2)]
    leave[0]()
    leave[0]()
    assert len(events) == 1
