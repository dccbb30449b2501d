"""Resources with `share=False`: each caller gets a value of its own.

Memory holds such values as the bytes that the store has, which nobody can change. The public
objects decode them for each caller. Nothing else in the engine knows of it.
"""

from collections.abc import Awaitable, Hashable, Iterable, Sequence
from typing import Any, Generic, Never, ParamSpec, TypeVar

from msgspec.structs import replace

from stillfresh.durations import Duration
from stillfresh.engine.codec_makers import OuterCodec
from stillfresh.engine.function import Function
from stillfresh.engine.memo import Memo
from stillfresh.engine.model import Answer, Codec, OwnLoad, Read, Refreshed
from stillfresh.engine.resource import Resource, value_or_key_error
from stillfresh.engine.update import Change
from stillfresh.engine.watch import Update, Watch

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")
P = ParamSpec("P")


class BytesCodec(OuterCodec, Generic[V]):
    """Keeps values as bytes: `decode` checks them, and returns them as they are."""

    def __init__(self, codec: Codec[V]) -> None:
        super().__init__(codec)
        self.encode = codec.encode

    def decode(self, data: bytes, /) -> bytes:
        """Raise if the bytes are not a value of the declared type."""
        self.inner.decode(data)
        return data


def own_answer(codec: object, answer: Answer[Any]) -> Answer[Any]:
    """The answer with a value that only its caller has."""
    if not answer.found or not isinstance(codec, BytesCodec):
        return answer
    return replace(answer, value=codec.inner.decode(answer.value))


class UnsharedWatch(Watch[K, V]):
    """A watch that gives a value of its own to its listener."""

    def tell(self, update: Update[K, V]) -> None:
        super().tell(self._own_update(update))

    def tell_failure(self, update: Update[K, V]) -> None:
        super().tell_failure(self._own_update(update))

    def _own_update(self, update: Update[K, V]) -> Update[K, V]:
        return Update(update.key, own_answer(self._watcher.core.spec.codec, update.answer))


class UnsharedResource(Resource[K, V]):
    """A resource with `share=False`."""

    watch_of = UnsharedWatch

    def own(self, answer: Answer[V]) -> Answer[V]:
        """The answer with a value that only its caller has."""
        return own_answer(self.core.spec.codec, answer)

    def _own_or_none(self, answer: Answer[V] | None) -> Answer[V] | None:
        return None if answer is None else self.own(answer)

    async def __call__(self, key: K, *others: Never) -> V:
        if others:
            raise self._one_key(key, *others)
        return value_or_key_error(await self.get(key), key)

    async def get(
        self,
        key: K,
        max_age: Duration | None = None,
        patience: Duration | None = None,
        at_least: str | None = None,
    ) -> Answer[V]:
        return self.own(await super().get(key, max_age, patience=patience, at_least=at_least))

    async def get_many(
        self,
        keys: Iterable[K],
        max_age: Duration | None = None,
        patience: Duration | None = None,
        at_least: str | None = None,
    ) -> dict[K, Answer[V]]:
        answers = await super().get_many(keys, max_age, patience=patience, at_least=at_least)
        return {key: self.own(answer) for key, answer in answers.items()}

    def get_nowait(self, key: K) -> Answer[V] | None:
        return self._own_or_none(super().get_nowait(key))

    def last_answer(self, key: K) -> Answer[V] | None:
        return self._own_or_none(super().last_answer(key))

    def memo(self, keys: Sequence[K]) -> tuple[Memo[K, V], list[Answer[V]]] | None:  # noqa: ARG002
        """None: no answer may be served to two callers."""
        return None

    async def get_stored(self, key: K) -> Answer[V] | None:
        return self._own_or_none(await super().get_stored(key))

    async def read(self, key: K, load: OwnLoad, *, anew: bool = False) -> Read[V]:
        outcome = await super().read(key, load, anew=anew)
        return self.own(outcome) if isinstance(outcome, Answer) else outcome

    async def known(
        self,
        keys: Iterable[K],
        *,
        unread: set[K] | None = None,
        max_age: Duration | None = None,
    ) -> dict[K, Answer[V]]:
        answers = await super().known(keys, unread=unread, max_age=max_age)
        return {key: self.own(answer) for key, answer in answers.items()}

    def peek(self, key: K) -> Answer[V] | None:
        return self._own_or_none(super().peek(key))

    async def refresh(self, *keys: K) -> dict[K, Answer[V]]:
        answers = await super().refresh(*keys)
        return {key: self.own(answer) for key, answer in answers.items()}

    async def refresh_many(self, keys: Iterable[K]) -> dict[K, Refreshed[V]]:
        results = await super().refresh_many(keys)
        return {key: replace(each, answer=self.own(each.answer)) for key, each in results.items()}

    async def update(self, key: K, change: Change[V]) -> Answer[V] | None:
        def change_own(answer: Answer[V] | None) -> object | Awaitable[object]:
            return change(self._own_or_none(answer))

        return self._own_or_none(await super().update(key, change_own))


class UnsharedFunction(Function[P, V]):
    """A cached function with `share=False`."""

    async def __call__(self, *args: P.args, **kwargs: P.kwargs) -> V:
        return value_or_key_error(await self.get(*args, **kwargs), args)

    async def get(self, *args: P.args, **kwargs: P.kwargs) -> Answer[V]:
        return await self.resource.get(self.signature.call(*args, **kwargs))
