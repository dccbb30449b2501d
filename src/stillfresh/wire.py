"""What an upstream says over HTTP, read with care: so much at most, and when to come back.

Nothing here asks for anything: chunks and header texts in, bytes and seconds out.
"""

import asyncio
import re
import zlib
from collections.abc import AsyncIterable, Mapping
from datetime import UTC, datetime
from email.utils import formatdate
from typing import Final

from stillfresh.errors import ConfigError, shown

GZIP_WINDOW: Final = 31
LONGEST_PAUSE: Final = 86_400.0
"""An upstream that asks for more is asked again after a day: nobody meant for ever."""

MONTHS: Final = ["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"]
_DAY: Final = "(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun)"
_LONG_DAY: Final = "(?:Mon|Tues|Wednes|Thurs|Fri|Satur|Sun)day"
_MONTH: Final = f"(?P<month>{'|'.join(MONTHS)})"
_TIME: Final = "(?P<hour>[0-9]{2}):(?P<minute>[0-9]{2}):(?P<second>[0-5][0-9]|60)"
_DATES: Final = tuple(
    re.compile(form)
    for form in (
        f"{_DAY}, (?P<day>[0-9]{{2}}) {_MONTH} (?P<year>[0-9]{{4}}) {_TIME} GMT",
        f"{_LONG_DAY}, (?P<day>[0-9]{{2}})-{_MONTH}-(?P<year>[0-9]{{2}}) {_TIME} GMT",
        f"{_DAY} {_MONTH} (?P<day>[0-9]{{2}}| [0-9]) {_TIME} (?P<year>[0-9]{{4}})",
    )
)
"""IMF-fixdate, and the two obsolete forms."""
_SECONDS: Final = re.compile(r"[0-9]+")
_HEADER_NAME: Final = re.compile(r"[\w!#$%&'*+.^`|~-]+", re.ASCII)
_HEADER_VALUE: Final = re.compile(r"[\t\x20-\x7e]*")


class Unreadable(ValueError):
    """What came is not what was asked for; the sentence says why."""


class BodyReader:
    """The bytes of an answer, without their compression, and never more than `most` of them."""

    def __init__(self, encoding: str, most: int) -> None:
        name = encoding.strip().lower()
        if name not in {"", "identity", "gzip", "x-gzip"}:
            raise Unreadable(f"a body encoded as {shown(encoding)}, not as gzip or not at all")
        self.data = bytearray()
        self._most = most
        self._gzip = zlib.decompressobj(GZIP_WINDOW) if name.endswith("gzip") else None

    def add(self, chunk: bytes) -> None:
        """Inflates no more than fits: a small answer can stand for gigabytes."""
        room = self._most + 1 - len(self.data)
        self.data += chunk[:room] if self._gzip is None else self._inflated(self._gzip, chunk, room)
        if len(self.data) > self._most:
            raise Unreadable(f"more than {self._most:,} bytes (max_bytes)")

    def _inflated(self, gzip: "zlib._Decompress", chunk: bytes, room: int) -> bytes:
        try:
            data = gzip.decompress(chunk, room)
        except zlib.error as exc:
            raise Unreadable(f"a broken gzip stream ({exc})") from exc
        if gzip.unused_data:
            raise Unreadable("data after the end of its gzip stream")
        return data

    def end(self) -> bytes:
        """All of it has come; or has it?"""
        if self._gzip is not None and not self._gzip.eof:
            raise Unreadable("a gzip stream that was cut short")
        return bytes(self.data)


async def whole(chunks: AsyncIterable[bytes], encoding: str, most: int) -> bytes:
    """Read as it comes, so that more than is allowed is never held, packed or unpacked."""
    body = BodyReader(encoding, most)
    async for chunk in chunks:
        body.add(chunk)
        await asyncio.sleep(0)  # a thousand tiny chunks that came at once are not one step
    return body.end()


def checked_headers(headers: object) -> dict[str, str]:
    """Names only in the error: values are often secrets."""
    if not isinstance(headers, Mapping):
        raise ConfigError(f"headers: must map names to texts, not {type(headers).__name__}")
    for name, value in headers.items():
        if not isinstance(name, str) or not _HEADER_NAME.fullmatch(name):
            raise ConfigError(f"headers: {shown(name)} is no name of a header")
        if not isinstance(value, str) or not _HEADER_VALUE.fullmatch(value):
            raise ConfigError(f"headers: the value of {name!r} must be printable ASCII text")
    return dict(headers)


def pause_of(retry_after: str, date: str, now: float) -> float | None:
    """Seconds to wait; None if it does not say, or says no time at all.

    A date is compared with the server's own (`now` where it tells none): clocks differ.
    """
    text = retry_after.strip()
    if _SECONDS.fullmatch(text):
        pause = float(text)
    elif (until := http_date(text)) is not None:
        told = http_date(date)
        pause = until - (now if told is None else told)
    else:
        return None
    return min(pause, LONGEST_PAUSE) if pause > 0 else None


def http_date_text(moment: float) -> bytes:
    """RFC 9110 §5.6.7: as it is written in a header field."""
    return formatdate(int(moment), usegmt=True).encode()


def http_date(text: str) -> float | None:
    """RFC 9110 §5.6.7: one of the three forms, as seconds; None: it is no date.

    A year of two digits is of 1969 to 2068.
    """
    if (found := next(filter(None, (form.fullmatch(text) for form in _DATES)), None)) is None:
        return None
    day, month, year, hour, minute, second = (
        found[name] for name in ("day", "month", "year", "hour", "minute", "second")
    )
    long = int(year) + (0 if len(year) == 4 else 2000 if int(year) < 69 else 1900)
    try:
        moment = datetime(
            long,
            MONTHS.index(month) + 1,
            int(day),
            int(hour),
            int(minute),
            min(int(second), 59),  # a leap second
            tzinfo=UTC,
        )
    except ValueError:
        return None
    return moment.timestamp()
