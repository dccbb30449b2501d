"""D3: codecs around codecs on every store; a value that cannot be read is a miss, logged once."""

import pytest

from stillfresh import CodecMaker, SyncCache, encrypted, new_key, zstd
from stillfresh.engine.codecs import MsgpackCodec
from tests.kit.engine import Price
from tests.kit.held_store import store_bytes
from tests.kit.sync import PlainUpstream, declare

KEY = new_key()
MAKERS: dict[str, CodecMaker] = {
    "zstd": zstd(above=0),
    "encrypted": encrypted(KEY),
    "both": encrypted(KEY, zstd(above=0)),
}


@pytest.fixture
def address(every_store: str) -> str:
    return every_store


@pytest.fixture(params=MAKERS)
def maker(request: pytest.FixtureRequest) -> CodecMaker:
    return MAKERS[request.param]


def stored_bytes(cache: SyncCache, key: str) -> bytes:
    async def read() -> bytes:
        store = await cache.on_loop.store()
        copy = (await store.read("price", [key]))[key].copy
        assert copy is not None
        assert isinstance(copy.value, bytes)
        return copy.value

    return cache.run(read)


class TestD3EveryStore:
    def test_a_value_is_stored_changed_and_read_by_another_cache(
        self, cache: SyncCache, address: str, upstream: PlainUpstream, maker: CodecMaker
    ) -> None:
        prices = declare(cache, upstream, codec=maker)
        assert prices("a") == Price("a", 1)
        plain = MsgpackCodec[Price](Price, "price").encode(Price("a", 1))
        assert plain != stored_bytes(cache, "a")
        if address != "memory://":
            with SyncCache(address, clock=cache.clock) as other:
                assert declare(other, upstream, codec=maker)("a") == Price("a", 1)
        assert upstream.loaded == [["a"]]

    @pytest.mark.parametrize("damage", ["tampered", "truncated", "foreign", "of another key"])
    def test_an_unreadable_value_is_a_miss_and_one_log_line(
        self,
        cache: SyncCache,
        upstream: PlainUpstream,
        maker: CodecMaker,
        damage: str,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        codec = maker.make("price", lambda: MsgpackCodec(Price, "price"))
        value = codec.encode(Price("a" * 200, 1))
        match damage:
            case "tampered":
                value = value[:-5] + bytes([value[-5] ^ 1]) + value[-4:]
            case "truncated":
                value = value[:-5]
            case "foreign":
                value = MsgpackCodec[Price](Price, "price").encode(Price("a", 9))
            case _:
                other = encrypted(new_key()).make("price", lambda: MsgpackCodec(Price, "price"))
                value = other.encode(Price("a", 9))
        prices = declare(cache, upstream, codec=maker)
        cache.open()
        for key in ("a", "b"):
            cache.run(store_bytes, cache.on_loop, "price", key, value)
        assert prices("a") == Price("a", 1)
        assert prices("b") == Price("b", 1)
        assert upstream.loaded == [["a"], ["b"]]
        (line,) = (record.getMessage() for record in caplog.records)
        assert line.startswith("price: a stored value cannot be read, so it is loaded again: ")
        assert prices("a") == Price("a", 1)
        assert len(upstream.loaded) == 2

    def test_keys_rotate_without_a_miss(
        self, cache: SyncCache, address: str, upstream: PlainUpstream
    ) -> None:
        """A process with both keys reads the old values, and writes new ones with the first key."""
        if address == "memory://":
            pytest.skip("a memory:// store is not shared by two caches")
        new = new_key()
        declare(cache, upstream, codec=encrypted(KEY))("a")
        with SyncCache(address, clock=cache.clock) as other:
            both = declare(other, upstream, codec=encrypted([new, KEY]))
            assert both("a") == Price("a", 1)
            assert upstream.loaded == [["a"]]
            both.refresh("a")
        with SyncCache(address, clock=cache.clock) as last:
            assert declare(last, upstream, codec=encrypted(new))("a").sku == "a"
        assert upstream.loaded == [["a"], ["a"]]
