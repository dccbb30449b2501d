"""E6: the fence says whether a key was changed after a piece of work began."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stillfresh.engine import fence as fences
from stillfresh.engine.fence import Fence, FenceClock

TAGS: dict[str, tuple[str | None, ...]] = {"a": ("eu",), "b": ("us",), "c": (), "d": (None,)}
"""None: a tag that is not known."""


class World:
    """A fence whose resource always has a load under way, or never."""

    def __init__(self, *, is_busy: bool = True) -> None:
        self.is_busy = is_busy
        self.clock = FenceClock(lambda: self.is_busy)
        self.fence: Fence[str] = Fence(self.clock, TAGS.__getitem__, lambda: self.is_busy)

    def begin(self) -> int:
        """The number of work that begins now."""
        began = self.clock.now
        self.clock.advance()
        return began


class TestE6Fence:
    @pytest.mark.parametrize("change", ["void", "change"])
    def test_a_change_counts_for_work_that_began_before_it(self, change: str) -> None:
        world = World()
        earlier = world.begin()
        getattr(world.fence, change)(["a"])
        later = world.begin()
        assert world.fence.is_changed("a", earlier)
        assert not world.fence.is_changed("b", earlier)
        assert not world.fence.is_changed("a", later)

    def test_a_put_is_void_after_an_invalidation_and_not_after_another_put(self) -> None:
        world = World()
        began = world.begin()
        world.fence.change(["a"])
        assert not world.fence.is_void("a", began, ("eu",))
        world.fence.void(["a"])
        assert world.fence.is_void("a", began, ("eu",))

    def test_a_tag_counts_for_the_keys_that_have_it_or_may_have_it(self) -> None:
        world = World()
        began = world.begin()
        world.clock.void_tag("eu")
        assert {key for key in TAGS if world.fence.is_changed(key, began)} == {"a", "d"}
        assert world.fence.is_changed("c", began, tags=("eu",)), "only its load knew the tag"
        assert world.fence.is_void("c", began, ("eu",))
        assert not world.fence.is_void("c", began, ("us",))

    def test_all_keys_can_be_voided_at_once(self) -> None:
        world = World()
        began = world.begin()
        world.fence.void_all()
        assert all(world.fence.is_changed(key, began) for key in TAGS)
        assert all(world.fence.is_void(key, began, ()) for key in TAGS)
        assert not world.fence.is_changed("a", world.begin())

    def test_nothing_is_noted_while_nothing_is_under_way(self) -> None:
        world = World(is_busy=False)
        for number in range(3):
            world.fence.void([f"k{number}"])
            world.clock.void_tag(f"t{number}")
        world.is_busy = True
        assert not world.fence.is_changed("a", world.begin())

    def test_an_open_start_makes_the_fence_busy_and_learns_of_changes(self) -> None:
        world = World(is_busy=False)
        with world.fence.starting() as start:
            assert world.fence.is_busy
            world.fence.void(["a"])
            assert world.fence.changed_keys(["a", "b", "c"], start.number) == {"a"}
            assert start.is_void("a", ())
        assert not world.fence.is_busy

    def test_marks_are_bounded_and_beyond_the_bound_every_key_counts_as_changed(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(fences, "MOST_MARKS", 2)
        world = World()
        began = world.begin()
        world.fence.void(["a"])
        world.fence.void(["b"])
        assert not world.fence.is_changed("c", began)
        between = world.begin()
        world.fence.void(["a"])
        assert world.fence.is_changed("c", began), "which of the keys it was is given up"
        assert world.fence.is_changed("c", between)
        assert not world.fence.is_changed("a", world.begin())

    @given(
        steps=st.lists(
            st.one_of(
                st.tuples(st.just("begin"), st.just("")),
                st.tuples(st.sampled_from(["void", "change"]), st.sampled_from(["a", "b", "c"])),
                st.tuples(st.just("tag"), st.sampled_from(["eu", "us", "other"])),
                st.tuples(st.just("all"), st.just("")),
            ),
            max_size=30,
        ),
        most=st.integers(1, 5),
    )
    def test_in_any_history_no_change_is_missed(
        self, steps: list[tuple[str, str]], most: int
    ) -> None:
        """With room for all marks, nothing is called changed that is not."""
        for bound in (most, 1_000):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(fences, "MOST_MARKS", bound)
                self._play(steps, is_exact=bound == 1_000)

    @staticmethod
    def _play(steps: list[tuple[str, str]], *, is_exact: bool) -> None:
        world = World()
        changed: dict[int, set[str]] = {}  # by the number of each work: keys changed since
        voided: dict[int, set[str]] = {}
        for what, name in steps:
            keys: set[str] = set()
            match what:
                case "begin":
                    began = world.begin()
                    changed[began] = set()
                    voided[began] = set()
                case "void":
                    world.fence.void([name])
                    keys = {name}
                case "change":
                    world.fence.change([name])
                    for seen in changed.values():
                        seen.add(name)
                case "tag":
                    world.clock.void_tag(name)
                    keys = {key for key, tags in TAGS.items() if name in tags or None in tags}
                case _:
                    world.fence.void_all()
                    keys = set(TAGS)
            for began in changed:
                changed[began] |= keys
                voided[began] |= keys
        for began, seen in changed.items():
            answered = {key for key in TAGS if world.fence.is_changed(key, began)}
            assert answered == seen if is_exact else answered >= seen
        for began, seen in voided.items():
            known = {key: tuple(tag for tag in TAGS[key] if tag) for key in "abc"}
            void = {key for key in known if world.fence.is_void(key, began, known[key])}
            assert void == seen - {"d"} if is_exact else void >= seen - {"d"}
