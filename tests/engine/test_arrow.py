"""D3: tables of pandas, polars and pyarrow are stored as Arrow, chosen by the annotation."""

from collections.abc import Callable, Coroutine
from datetime import UTC, datetime
from typing import Any

import pandas as pd
import polars as pl
import pyarrow as pa
import pytest

from stillfresh import BadValue, Cache, ConfigError, arrow, encrypted, new_key, zstd
from stillfresh.engine.codecs import codec_for
from stillfresh.errors import UnreadableValue

COLUMNS: dict[str, list[Any]] = {
    "sku": ["rum", None, "gin"],
    "price": [1.5, 2.5, None],
    "at": [datetime(2026, 1, day, tzinfo=UTC) for day in (1, 2, 3)],
}
PANDAS = pd.DataFrame(COLUMNS, index=pd.Index([7, 8, 9], name="id"))
POLARS = pl.DataFrame({**COLUMNS, "tags": [["a"], [], ["b", "c"]]})
TABLE = pa.table(COLUMNS)
TABLES = {"pandas": PANDAS, "polars": POLARS, "pyarrow": TABLE}


@pytest.fixture(params=TABLES)
def table(request: pytest.FixtureRequest) -> Any:
    return TABLES[request.param]


def is_same(one: Any, other: Any) -> bool:
    return type(one) is type(other) and bool(one.equals(other))


def returning(value: object, of: type) -> Callable[[], Coroutine[Any, Any, Any]]:
    """A loader of this value, with this annotation."""

    async def report() -> Any:
        return value

    report.__annotations__["return"] = of
    return report


class TestD3Arrow:
    def test_a_table_comes_back_as_it_was(self, table: Any) -> None:
        """With its index, its types and its missing values."""
        codec = arrow(type(table))
        assert is_same(codec.decode(codec.encode(table)), table)

    async def test_the_annotation_chooses_it_on_every_store(self, cache: Cache, table: Any) -> None:
        """Alone, compressed, and encrypted."""
        codecs = {"plain": None, "small": zstd(above=0), "secret": encrypted(new_key(), zstd())}
        for name, codec in codecs.items():
            report = cache.cached(name, fresh_for=60, codec=codec)(returning(table, type(table)))
            assert is_same(await report(), table)
            assert is_same(await report(), table)

    def test_one_library_reads_what_another_wrote(self) -> None:
        """A service with polars and one with pandas can share a store."""
        data = arrow(pl.DataFrame).encode(POLARS.select("sku", "price"))
        assert list(arrow(pd.DataFrame).decode(data)["price"][:2]) == [1.5, 2.5]
        data = arrow(pd.DataFrame).encode(PANDAS)
        assert arrow(pl.DataFrame).decode(data)["id"].to_list() == [7, 8, 9]
        assert arrow(pa.Table).decode(data).num_rows == 3

    def test_a_stream_that_was_cut_or_changed_is_unreadable(self, table: Any) -> None:
        """Arrow alone would read a stream that ends between two messages as a shorter table."""
        codec = arrow(type(table))
        data = codec.encode(table)
        for length in range(0, len(data), 7):
            with pytest.raises(UnreadableValue):
                codec.decode(data[:length])
        for position in range(0, len(data), 7):
            changed = bytearray(data)
            changed[position] ^= 1
            with pytest.raises(UnreadableValue):
                codec.decode(bytes(changed))

    def test_a_value_of_another_codec_is_unreadable(self, table: Any) -> None:
        with pytest.raises(UnreadableValue, match="did not write it"):
            arrow(type(table)).decode(b"\x81\xa1a\x01")

    @pytest.mark.parametrize(
        "value",
        [
            [1, 2],
            pl.DataFrame({"o": [object()]}),
            pd.DataFrame({"o": [object(), {1}]}),
        ],
        ids=["list", "polars objects", "pandas objects"],
    )
    async def test_a_value_that_arrow_cannot_hold_is_refused(
        self, cache: Cache, value: Any
    ) -> None:
        of = pl.DataFrame if isinstance(value, list) else type(value)
        report = cache.cached("report", fresh_for=60)(returning(value, of))
        with pytest.raises(BadValue, match="the value cannot be stored"):
            await report()

    @pytest.mark.parametrize("of", [int, pd.Series, pl.LazyFrame, dict[str, int]])
    def test_another_type_is_refused_with_those_that_there_are(self, of: Any) -> None:
        with pytest.raises(ConfigError, match=r"pandas\.DataFrame, polars\.DataFrame, pyarrow"):
            arrow(of)

    def test_a_class_of_the_callers_with_that_name_is_no_table(self) -> None:
        class DataFrame:
            pass

        with pytest.raises(ConfigError, match="cannot store values of type"):
            codec_for(DataFrame, "report")
