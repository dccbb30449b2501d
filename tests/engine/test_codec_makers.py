"""D3: `zstd()` and `encrypted()` around any codec; bytes that cannot be read are never a value."""

import os
from re import escape
from typing import Any

import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stillfresh import Cache, Codec, CodecMaker, ConfigError, encrypted, new_key, zstd
from stillfresh.engine.codec_makers import DAMAGED, NOT_COMPRESSED, TOO_LARGE, UNKNOWN_KEY
from stillfresh.engine.codecs import MsgpackCodec, PydanticCodec, advice_on
from stillfresh.errors import UnreadableValue
from tests.kit.engine import Price

OLD_KEY = bytes(range(32))
NEW_KEY = bytes(range(1, 33))
STORED = bytes.fromhex(
    "c173666555c57d63000102030405060708090a0b0c0d0e0f000000000000000000000000e9784fb8"
    "f00806431d74971d5ba5001d6c5cebe304"
)
"""`b"hello"`, encrypted with OLD_KEY for the resource "price" by the first release that could."""
MAKERS: dict[str, CodecMaker] = {
    "zstd": zstd(above=100),
    "zstd of everything": zstd(above=0, level=19),
    "encrypted": encrypted(OLD_KEY),
    "both": encrypted(OLD_KEY, zstd(above=100)),
}
VALUES = {"small": b"x", "empty": b"", "large": b"sku and price " * 300, "dense": os.urandom(3_000)}


class BytesCodec:
    """A codec of the caller's: values are bytes already."""

    def encode(self, value: bytes) -> bytes:
        return value

    def decode(self, data: bytes) -> bytes:
        return bytes(data)


class User(pydantic.BaseModel):
    name: str


def made(maker: CodecMaker, resource: str = "price") -> Codec[Any]:
    return maker.make(resource, BytesCodec)


def as_others_read(codec: Codec[Any], data: bytes) -> Any:
    """As another process reads it, which has not just encoded these bytes."""
    return codec.decode(bytes(bytearray(data)))


@pytest.fixture(params=MAKERS)
def maker(request: pytest.FixtureRequest) -> CodecMaker:
    return MAKERS[request.param]


class TestD3RoundTrip:
    @given(value=st.binary(max_size=3_000))
    def test_any_bytes_come_back(self, value: bytes) -> None:
        for maker in MAKERS.values():
            codec = made(maker)
            data = codec.encode(value)
            assert codec.decode(data) == value
            assert as_others_read(codec, data) == value

    def test_values_are_compressed_above_the_size_and_only_if_they_become_smaller(self) -> None:
        codec = made(zstd(above=1_000))
        assert len(codec.encode(b"a" * 100_000)) < 100
        assert len(codec.encode(b"a" * 1_000)) == 1_008
        assert len(codec.encode(os.urandom(5_000))) == 5_008

    def test_every_value_is_encrypted_differently(self) -> None:
        """Equal values cannot be seen to be equal."""
        codec = made(encrypted(OLD_KEY))
        data = codec.encode(b"secret")
        assert b"secret" not in data
        assert data != codec.encode(b"secret")
        assert len(data) == 6 + 52

    def test_a_value_that_was_just_encoded_is_not_decrypted(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The engine decodes each value that it encodes: that costs nothing twice."""
        codec = made(encrypted(OLD_KEY))
        data = codec.encode(b"secret")
        monkeypatch.setattr(codec, "unwrap", None)
        assert codec.decode(data) == b"secret"

    def test_bytes_of_the_first_release_can_be_read(self) -> None:
        assert made(encrypted(OLD_KEY)).decode(STORED) == b"hello"

    def test_both_work_around_the_codec_of_any_type(self, maker: CodecMaker) -> None:
        prices = maker.make("price", lambda: MsgpackCodec(Price, "price"))
        assert as_others_read(prices, prices.encode(Price("a", 1))) == Price("a", 1)
        users = maker.make("user", lambda: PydanticCodec(User, "user"))
        data = users.encode(User(name="Ada"))
        assert users.decode(data) == User(name="Ada")
        assert as_others_read(users, data) == User(name="Ada")

    def test_the_given_codec_is_used_instead_of_the_chosen_one(self) -> None:
        for maker in (zstd(BytesCodec()), encrypted(OLD_KEY, BytesCodec())):
            codec = maker.make("price", lambda: MsgpackCodec(int, "price"))
            assert as_others_read(codec, codec.encode(b"bytes")) == b"bytes"

    def test_the_advice_about_a_refused_value_is_that_of_the_inner_codec(self) -> None:
        codec = encrypted(OLD_KEY, zstd()).make("price", lambda: MsgpackCodec(Any, "price"))
        assert advice_on(codec) == "annotate the return type, or give codec="


class TestD3Unreadable:
    @pytest.mark.parametrize("value", VALUES.values(), ids=VALUES)
    def test_a_value_that_was_cut_anywhere_is_unreadable(
        self, maker: CodecMaker, value: bytes
    ) -> None:
        codec = made(maker)
        data = codec.encode(value)
        for length in range(len(data)):
            with pytest.raises(UnreadableValue):
                codec.decode(data[:length])

    @pytest.mark.parametrize("value", VALUES.values(), ids=VALUES)
    def test_a_value_with_one_changed_bit_is_unreadable(
        self, maker: CodecMaker, value: bytes
    ) -> None:
        """Of zstd, a bit that the format ignores may change: the same value comes back then."""
        codec = made(maker)
        data = codec.encode(value)
        for position in range(0, len(data), 1 + len(data) // 400):
            changed = bytearray(data)
            changed[position] ^= 1 << position % 8
            try:
                assert codec.decode(bytes(changed)) == value
                assert maker in {MAKERS["zstd"], MAKERS["zstd of everything"]}
            except UnreadableValue:
                pass

    def test_a_value_with_bytes_behind_it_is_unreadable(self, maker: CodecMaker) -> None:
        codec = made(maker)
        data = codec.encode(b"sku and price " * 300)
        for tail in (b"\0", data, data[4:]):
            with pytest.raises(UnreadableValue):
                codec.decode(data + tail)

    @given(data=st.binary(max_size=200))
    def test_bytes_of_anybody_are_unreadable(self, data: bytes) -> None:
        for maker in MAKERS.values():
            for head in (b"", b"\xc1sf0", b"\xc1sfz", b"\xc1sfe"):
                with pytest.raises(UnreadableValue):
                    made(maker).decode(head + data)

    def test_a_value_of_another_codec_is_unreadable(self, maker: CodecMaker) -> None:
        """The codec was given to a resource that has values already, or was taken from it."""
        plain = MsgpackCodec[Price](Price, "price")
        with pytest.raises(UnreadableValue):
            made(maker).decode(plain.encode(Price("a", 1)))
        with pytest.raises(UnreadableValue):
            made(encrypted(NEW_KEY)).decode(made(zstd()).encode(b"value"))
        with pytest.raises(UnreadableValue, match=escape(NOT_COMPRESSED)):
            made(zstd()).decode(made(encrypted(NEW_KEY)).encode(b"value"))

    def test_a_small_value_cannot_fill_the_memory(self) -> None:
        """Its frame says how long the content is; it is not even begun."""
        bomb = made(zstd()).encode(bytes(50_000_000))
        assert len(bomb) < 5_000
        with pytest.raises(UnreadableValue, match=escape(TOO_LARGE)):
            made(zstd(max_bytes="10MB")).decode(bomb)

    def test_a_value_larger_than_the_limit_is_refused_when_it_is_stored(self) -> None:
        with pytest.raises(ValueError, match=r"2,000 bytes, and zstd\(max_bytes=\) is 1,000"):
            made(zstd(max_bytes=1_000)).encode(bytes(2_000))


class TestD3Keys:
    def test_the_first_key_encrypts_and_all_keys_decrypt(self) -> None:
        before = made(encrypted(OLD_KEY)).encode(b"value")
        both = made(encrypted([NEW_KEY, OLD_KEY]))
        assert both.decode(before) == b"value"
        after = both.encode(b"value")
        assert made(encrypted(NEW_KEY)).decode(after) == b"value"

    def test_a_value_of_a_key_that_was_dropped_is_unreadable(self) -> None:
        before = made(encrypted(OLD_KEY)).encode(b"value")
        with pytest.raises(UnreadableValue, match=UNKNOWN_KEY):
            made(encrypted(NEW_KEY)).decode(before)

    def test_a_value_that_was_moved_to_another_resource_is_unreadable(self) -> None:
        data = made(encrypted(OLD_KEY), "role").encode(b"admin")
        with pytest.raises(UnreadableValue, match=DAMAGED):
            made(encrypted(OLD_KEY), "name").decode(data)

    def test_a_new_key_is_text_that_is_taken(self) -> None:
        key = new_key()
        assert key != new_key()
        assert len(key) == 44
        data = made(encrypted(key)).encode(b"value")
        assert made(encrypted([new_key(), key])).decode(data) == b"value"
        assert made(encrypted(key.encode())).decode(data) == b"value"

    @pytest.mark.parametrize(
        ("keys", "text"),
        [
            ("hunter2 is no key", "a key is not base64 text"),
            ("aHVudGVyMg==", "a key has 7 bytes"),
            (b"hunter2", "a key is not base64 text"),
            ([], "there is no key"),
            ([OLD_KEY, OLD_KEY], "a key is given twice"),
            ([42], "a key is of the type int"),
            (None, "a key is of the type NoneType"),
        ],
    )
    def test_a_wrong_key_is_refused_and_not_shown(self, keys: Any, text: str) -> None:
        with pytest.raises(ConfigError, match=f"encrypted: {text}") as refusal:
            encrypted(keys)
        assert "hunter2" not in str(refusal.value)
        assert "aHVudGVy" not in str(refusal.value)

    @pytest.mark.parametrize("several", [set, frozenset, dict.fromkeys])
    def test_keys_without_an_order_are_refused(self, several: Any) -> None:
        """Which one would encrypt?"""
        with pytest.raises(ConfigError, match="as a list: the first one encrypts"):
            encrypted(several([new_key(), new_key()]))

    def test_keys_are_not_in_the_text_of_any_object(self) -> None:
        key = new_key()
        maker = encrypted(key)
        assert key not in f"{maker!r}{made(maker)!r}"


class TestD3Options:
    @pytest.mark.parametrize(
        "options", [{"level": 0}, {"level": 20}, {"above": -1}, {"above": "x"}, {"max_bytes": 0}]
    )
    def test_an_option_that_cannot_be_used_is_named(self, options: dict[str, Any]) -> None:
        with pytest.raises(ConfigError, match=f"zstd: {next(iter(options))}"):
            zstd(**options)

    def test_compressing_encrypted_values_is_refused(self) -> None:
        with pytest.raises(ConfigError, match=r"write encrypted\(keys, zstd\(\)\)"):
            zstd(encrypted(OLD_KEY))

    def test_an_inner_codec_that_is_none_is_refused_where_it_is_declared(self) -> None:
        with pytest.raises(ConfigError, match="price: codec must have encode and decode"):

            @Cache("memory://").cached("price", fresh_for=60, codec=zstd(object()))  # type: ignore[arg-type]
            async def price(sku: str) -> int:
                return 1
