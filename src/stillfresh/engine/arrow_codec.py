"""Tables of pandas, polars and pyarrow as bytes: Arrow's stream format.

Chosen by the annotation, or given with `arrow(pandas.DataFrame)`. What one library has written,
another can read. The bytes begin with a checksum: an Arrow stream that was cut between two of its
messages would otherwise be read as a shorter table.
"""

import io
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any, Final

from stillfresh.engine.codec_makers import CHECKSUM_SIZE, DAMAGED, checksum
from stillfresh.errors import ConfigError, UnreadableValue, needs

STREAM: Final = b"\xc1sfa"
NOT_ARROW: Final = "arrow() did not write it"
TABLES: Final = {
    ("pandas", "DataFrame"): "pandas.DataFrame",
    ("polars", "DataFrame"): "polars.DataFrame",
    ("pyarrow", "Table"): "pyarrow.Table",
}
"""By the first part of the class's module, and by its name."""


def table_type(of: object) -> str | None:
    """The name of a table's class, or None for any other type. Imports nothing."""
    if not isinstance(of, type):
        return None
    return TABLES.get((of.__module__.partition(".")[0], of.__name__))


class ArrowCodec:
    """Turns tables of one class into an Arrow stream and back."""

    def __init__(self, of: Any, resource: str = "arrow") -> None:  # noqa: ANN401 (a type form)
        name = table_type(of)
        if name is None:
            known = ", ".join(TABLES.values())
            raise ConfigError(f"{resource}: Arrow holds values of {known}, not of {of!r}")
        self._of = of
        self._name = name
        self._write: Callable[[Any], bytes]
        self._read: Callable[[memoryview], Any]
        if name == "polars.DataFrame":
            self._write = _polars_stream
            self._read = _polars_table
        else:
            with needs("pandas", f"storing a {name}"):
                import_module("pyarrow.ipc")
            is_pandas = name == "pandas.DataFrame"
            self._write = _pandas_stream if is_pandas else _pyarrow_stream
            self._read = partial(_pyarrow_table, is_pandas=is_pandas)

    def encode(self, value: object, /) -> bytes:
        """Return the table as bytes. Raises TypeError for a value of another class."""
        if not isinstance(value, self._of):
            raise TypeError(f"expected a {self._name}, got a {type(value).__name__}")
        stream = self._write(value)
        return b"".join([STREAM, checksum(stream), stream])

    def decode(self, data: bytes, /) -> Any:  # noqa: ANN401 (a table of one of three classes)
        """Return the table. Raises UnreadableValue for other bytes."""
        if not data.startswith(STREAM):
            raise UnreadableValue(NOT_ARROW)
        begin = len(STREAM) + CHECKSUM_SIZE
        stream = memoryview(data)[begin:]
        if checksum(stream) != data[len(STREAM) : begin]:
            raise UnreadableValue(DAMAGED)
        return self._read(stream)


def arrow(of: type) -> ArrowCodec:
    """Store tables as Arrow: `codec=arrow(pandas.DataFrame)`, where no annotation says so.

    Needs `stillfresh[pandas]` or `stillfresh[polars]`. Raises ConfigError if `of` is not
    `pandas.DataFrame`, `polars.DataFrame` or `pyarrow.Table`.
    """
    return ArrowCodec(of)


def _pandas_stream(frame: Any) -> bytes:  # noqa: ANN401 (its library is imported where it is used)
    pyarrow = import_module("pyarrow")
    return _pyarrow_stream(pyarrow.Table.from_pandas(frame))


def _pyarrow_stream(table: Any) -> bytes:  # noqa: ANN401
    pyarrow = import_module("pyarrow")
    sink = pyarrow.BufferOutputStream()
    with pyarrow.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    stream: bytes = sink.getvalue().to_pybytes()
    return stream


def _pyarrow_table(stream: memoryview, *, is_pandas: bool) -> Any:  # noqa: ANN401
    pyarrow = import_module("pyarrow")
    reader = pyarrow.ipc.open_stream(pyarrow.py_buffer(stream))
    return reader.read_pandas() if is_pandas else reader.read_all()


def _polars_stream(frame: Any) -> bytes:  # noqa: ANN401
    """Polars writes Python objects as addresses in memory, so they are refused here."""
    polars = import_module("polars")
    for name, kind in frame.schema.items():
        if kind == polars.Object:
            raise TypeError(f"column {name!r} holds Python objects, which Arrow cannot")
    stream = io.BytesIO()
    frame.write_ipc_stream(stream)
    return stream.getvalue()


def _polars_table(stream: memoryview) -> Any:  # noqa: ANN401
    polars = import_module("polars")
    try:
        return polars.read_ipc_stream(io.BytesIO(stream))
    except polars.exceptions.PanicException as exc:  # no Exception: it would end the load's task
        raise UnreadableValue(DAMAGED) from exc
