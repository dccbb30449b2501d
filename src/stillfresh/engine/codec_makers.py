"""Codecs around another codec: `zstd()` compresses, `encrypted(keys)` encrypts.

Each begins what it writes with four bytes of its own. No msgpack, JSON or Arrow begins with them,
so bytes that another codec wrote are never taken for a value. Bytes that cannot be read raise
`UnreadableValue`, which the engine treats as a miss.

Encryption: AES-256 in GCM mode. GCM allows only about 2**32 random nonces for one key, which a busy
cache uses up in weeks. So each value has a key of its own, derived from the given key and 16 random
bytes by HMAC-SHA256, and a random nonce as well. The resource's name is authenticated with the
value: a value that was moved to another resource cannot be read there.
"""

import base64
import binascii
import hmac
import os
import sys
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from hashlib import sha256
from importlib import import_module
from typing import Any, Final

from stillfresh.checks import checked_bytes, checked_whole
from stillfresh.engine.model import Codec, CodecMaker
from stillfresh.errors import ConfigError, UnreadableValue, needs, shown

PLAIN: Final = b"\xc1sf0"
"""Begins a value that `zstd()` did not compress."""
COMPRESSED: Final = b"\xc1sfz"
ENCRYPTED: Final = b"\xc1sfe"
CHECKSUM_SIZE: Final = 4
KEY_SIZE: Final = 32
KEY_ID_SIZE: Final = 4
SALT_SIZE: Final = 16
NONCE_SIZE: Final = 12
TAG_SIZE: Final = 16
HIGHEST_LEVEL: Final = 19
KEY_ID: Final = b"stillfresh: the name of a key"
VALUE_KEY: Final = b"stillfresh: the key of one value"

DAMAGED: Final = "it was changed or cut short"
NOT_COMPRESSED: Final = "zstd() did not write it"
NOT_ENCRYPTED: Final = "encrypted() did not write it"
UNKNOWN_KEY: Final = "it was encrypted with a key that is not among the given ones"
TOO_LARGE: Final = "it is larger than zstd(max_bytes=) allows"


class OuterCodec:
    """A codec that leaves the values themselves to another one, `inner`."""

    def __init__(self, inner: Codec[Any]) -> None:
        self.inner = inner


class AroundCodec(OuterCodec, ABC):
    """A codec that changes the bytes of another one."""

    def __init__(self, inner: Codec[Any]) -> None:
        super().__init__(inner)
        self._last: tuple[bytes, bytes] | None = None

    def encode(self, value: object, /) -> bytes:
        """Encode with the inner codec, then change the bytes."""
        data = self.inner.encode(value)
        changed = self.wrap(data)
        self._last = (changed, data)
        return changed

    def decode(self, data: bytes, /) -> Any:  # noqa: ANN401 (a value of any type)
        """Change the bytes back, then decode them.

        The engine decodes each value that it has just encoded, so that all callers see the same.
        The bytes of the inner codec are still known then.
        """
        last = self._last
        self._last = None
        if last is not None and last[0] is data:
            return self.inner.decode(last[1])
        return self.inner.decode(self.unwrap(data))

    @abstractmethod
    def wrap(self, data: bytes) -> bytes:
        """Return the bytes to store."""

    @abstractmethod
    def unwrap(self, data: bytes) -> bytes:
        """Return what `wrap` was given. Raises UnreadableValue for other bytes."""


class ZstdCodec(AroundCodec):
    """Compresses values above a size; smaller ones get a checksum only."""

    def __init__(self, inner: Codec[Any], above: int, level: int, max_bytes: int) -> None:
        super().__init__(inner)
        self._library = zstd_library()
        parameter = self._library.CompressionParameter
        self._options = {parameter.compression_level: level, parameter.checksum_flag: 1}
        self._above = above
        self._max_bytes = max_bytes

    def wrap(self, data: bytes) -> bytes:
        """Compress, if the value is large enough and becomes smaller by it."""
        if len(data) > self._max_bytes:
            advice = f"it has {len(data):,} bytes, and zstd(max_bytes=) is {self._max_bytes:,}"
            raise ValueError(advice)
        if len(data) > self._above:
            compressed: bytes = self._library.compress(data, options=self._options)
            if len(compressed) < len(data):
                return COMPRESSED + compressed
        return PLAIN + checksum(data) + data

    def unwrap(self, data: bytes) -> bytes:
        """Decompress. A frame says how long its content is, so no value can fill the memory."""
        if data.startswith(PLAIN):
            return checked_content(data)
        if not data.startswith(COMPRESSED):
            raise UnreadableValue(NOT_COMPRESSED)
        frame = memoryview(data)[len(COMPRESSED) :]
        library = self._library
        try:
            size = library.get_frame_info(frame).decompressed_size
            if size is None:
                raise UnreadableValue(DAMAGED)
            if size > self._max_bytes:
                raise UnreadableValue(TOO_LARGE)
            decompressor = library.ZstdDecompressor()
            content: bytes = decompressor.decompress(frame, max_length=size)
            if not decompressor.eof:  # the checksum behind the content
                content += decompressor.decompress(b"", max_length=1)
        except library.ZstdError as exc:
            raise UnreadableValue(DAMAGED) from exc
        if not decompressor.eof or decompressor.unused_data or len(content) != size:
            raise UnreadableValue(DAMAGED)
        return content


class EncryptedCodec(AroundCodec):
    """Encrypts and authenticates values."""

    def __init__(self, inner: Codec[Any], keys: Sequence[bytes], resource: str) -> None:
        super().__init__(inner)
        self._cipher = ciphers().AESGCM
        self._invalid = import_module("cryptography.exceptions").InvalidTag
        self._keys = {key_id(key): key for key in keys}
        self._first_id = key_id(keys[0])
        self._resource = resource.encode()

    def wrap(self, data: bytes) -> bytes:
        """Encrypt with the first key."""
        salt = os.urandom(SALT_SIZE)
        nonce = os.urandom(NONCE_SIZE)
        cipher = self._cipher(value_key(self._keys[self._first_id], salt))
        head = ENCRYPTED + self._first_id + salt + nonce
        content: bytes = cipher.encrypt(nonce, data, self._resource)
        return head + content

    def unwrap(self, data: bytes) -> bytes:
        """Decrypt with the key that the value names."""
        if not data.startswith(ENCRYPTED):
            raise UnreadableValue(NOT_ENCRYPTED)
        salt_at = len(ENCRYPTED) + KEY_ID_SIZE
        nonce_at = salt_at + SALT_SIZE
        content_at = nonce_at + NONCE_SIZE
        if len(data) < content_at + TAG_SIZE:
            raise UnreadableValue(DAMAGED)
        key = self._keys.get(data[len(ENCRYPTED) : salt_at])
        if key is None:
            raise UnreadableValue(UNKNOWN_KEY)
        view = memoryview(data)
        cipher = self._cipher(value_key(key, data[salt_at:nonce_at]))
        nonce = bytes(view[nonce_at:content_at])
        try:
            content: bytes = cipher.decrypt(nonce, view[content_at:], self._resource)
        except self._invalid as exc:
            raise UnreadableValue(DAMAGED) from exc
        return content


class Zstd(CodecMaker):
    """What `zstd()` returns: compresses the bytes of another codec."""

    def __init__(
        self, inner: Codec[Any] | CodecMaker | None, above: int, level: int, max_bytes: int
    ) -> None:
        self._inner = inner
        self._above = above
        self._level = level
        self._max_bytes = max_bytes

    def make(self, resource: str, chosen: Callable[[], Codec[Any]]) -> Codec[Any]:
        """Return a codec that compresses the values of this resource."""
        inner = codec_of(self._inner, chosen, resource)
        return ZstdCodec(inner, self._above, self._level, self._max_bytes)


class Encrypted(CodecMaker):
    """What `encrypted()` returns: encrypts the bytes of another codec. It never shows its keys."""

    def __init__(self, keys: Sequence[bytes], inner: Codec[Any] | CodecMaker | None) -> None:
        self._keys = keys
        self._inner = inner

    def make(self, resource: str, chosen: Callable[[], Codec[Any]]) -> Codec[Any]:
        """Return a codec that encrypts the values of this resource."""
        return EncryptedCodec(codec_of(self._inner, chosen, resource), self._keys, resource)


def zstd(
    codec: Codec[Any] | CodecMaker | None = None,
    *,
    above: int | str = 1_000,
    level: int = 1,
    max_bytes: int | str = "256MB",
) -> CodecMaker:
    """Compress values: `codec=zstd()`. Needs `stillfresh[zstd]` before Python 3.14.

    Raises ConfigError for an option that cannot be used.

    Args:
        codec: Turns values into the bytes that are compressed; None: chosen by the annotation.
        above: Values of at most so many bytes are stored as they are, with a checksum.
        level: From 1 (fast) to 19 (small).
        max_bytes: Larger values are not stored, and not decompressed.
    """
    if isinstance(codec, Encrypted):
        raise ConfigError(
            "zstd(encrypted(…)) would compress nothing; write encrypted(keys, zstd())"
        )
    zstd_library()
    return Zstd(
        codec,
        checked_bytes("zstd: above", above, 0),
        checked_whole("zstd: level", level, 1, HIGHEST_LEVEL),
        checked_bytes("zstd: max_bytes", max_bytes),
    )


def encrypted(
    keys: str | bytes | Sequence[str | bytes], codec: Codec[Any] | CodecMaker | None = None
) -> CodecMaker:
    """Encrypt values: `codec=encrypted(key)`. Needs `stillfresh[encryption]`.

    A value that was changed in the store, or encrypted with another key, is loaded again. Raises
    ConfigError for a key that cannot be used; the text does not show it.

    Args:
        keys: A key that `new_key` made, or several: the first one encrypts, all of them decrypt.
        codec: Turns values into the bytes that are encrypted, for example `zstd()`; None: chosen by
            the annotation.
    """
    if isinstance(keys, Set | Mapping):
        raise ConfigError("encrypted: give several keys as a list: the first one encrypts")
    is_one = isinstance(keys, str | bytes) or not isinstance(keys, Iterable)
    given: list[object] = [keys] if is_one else list(keys)
    if not given:
        raise ConfigError("encrypted: there is no key; make one with stillfresh.new_key()")
    checked = [checked_key(key) for key in given]
    if len({key_id(key) for key in checked}) < len(checked):
        raise ConfigError("encrypted: a key is given twice; write each once")
    ciphers()
    return Encrypted(checked, codec)


def new_key() -> str:
    """Return a new random key for `encrypted`, as text. Keep it where you keep passwords."""
    return base64.urlsafe_b64encode(os.urandom(KEY_SIZE)).decode()


def checked_key(key: object) -> bytes:
    """The 32 bytes of a key, given as such or as text. The error does not show the key."""
    advice = f"write {KEY_SIZE} bytes, or the text that stillfresh.new_key() returns"
    if isinstance(key, bytes) and len(key) == KEY_SIZE:
        return key
    if not isinstance(key, str | bytes):
        raise ConfigError(f"encrypted: a key is of the type {type(key).__name__}; {advice}")
    try:
        decoded = base64.urlsafe_b64decode(key)
    except (binascii.Error, ValueError):
        raise ConfigError(f"encrypted: a key is not base64 text; {advice}") from None
    if len(decoded) != KEY_SIZE:
        raise ConfigError(f"encrypted: a key has {len(decoded)} bytes; {advice}")
    return decoded


def key_id(key: bytes) -> bytes:
    """Names a key in stored values, and tells nothing about it."""
    return hmac.digest(key, KEY_ID, sha256)[:KEY_ID_SIZE]


def value_key(key: bytes, salt: bytes) -> bytes:
    """The key of one value."""
    return hmac.digest(key, VALUE_KEY + salt, sha256)


def checksum(data: bytes | memoryview) -> bytes:
    """Four bytes that change when the data is damaged by accident."""
    return zlib.crc32(data).to_bytes(CHECKSUM_SIZE, "big")


def checked_content(data: bytes) -> bytes:
    """What follows the four bytes of a codec and the checksum. Raises UnreadableValue."""
    begin = len(PLAIN) + CHECKSUM_SIZE
    content = data[begin:]
    if checksum(content) != data[len(PLAIN) : begin]:
        raise UnreadableValue(DAMAGED)
    return content


def innermost(codec: object) -> object:
    """The codec that knows the values, without those around it."""
    while isinstance(codec, OuterCodec):
        codec = codec.inner
    return codec


def codec_of(
    given: Codec[Any] | CodecMaker | None, chosen: Callable[[], Codec[Any]], resource: str
) -> Codec[Any]:
    """Return the codec that `codec=` asks for; `chosen` makes the one for values of this type."""
    if given is None:
        return chosen()
    if isinstance(given, CodecMaker):
        return given.make(resource, chosen)
    if not all(callable(getattr(given, name, None)) for name in ("encode", "decode")):
        raise ConfigError(f"{resource}: codec must have encode and decode, not {shown(given)}")
    return given


def zstd_library() -> Any:  # noqa: ANN401 (a module, of one of two names)
    """Python's own module, or the same for older Pythons."""
    with needs("zstd", "zstd()"):
        is_own = sys.version_info >= (3, 14)
        return import_module("compression.zstd" if is_own else "backports.zstd")


def ciphers() -> Any:  # noqa: ANN401 (a module of an extra)
    """The authenticated ciphers of `cryptography`."""
    with needs("encryption", "encrypted()"):
        return import_module("cryptography.hazmat.primitives.ciphers.aead")
