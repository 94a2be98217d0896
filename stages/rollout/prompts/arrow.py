"""Read columnar files as Arrow record batches, and convert these to the values that JSON text of the same rows has.

All structs of a column have the same fields, so a field that is null is one that the row does not have. Maps become
dictionaries, dates and times ISO 8601 text, and the float32 0.1 becomes 0.1. Decimals stay `Decimal`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.ipc
import pyarrow.parquet as pq
from pyarrow import types

from penstock.storage.errors import DataError

COLUMNAR = (".parquet", ".arrow", ".feather")
Batches = Callable[[list[str]], Iterable[pa.RecordBatch]]  # column names -> record batches with these columns
Convert = Callable[[Any], Any]


def open_batches(file: BinaryIO, suffix: str, num_rows: int) -> tuple[pa.Schema, Batches]:
    """Return the schema of a columnar file, and a function that reads its record batches.

    Args:
        file: the file, decompressed.
        suffix: its format, one of COLUMNAR.
        num_rows: rows of a batch of a Parquet file; Arrow files consist of batches.

    Raises:
        ValueError, OSError, pa.ArrowException: the file is damaged.
    """
    if suffix == ".parquet":
        # Without both arguments, pyarrow keeps a whole column of a row group in memory, and many writers make groups of
        # a million rows (pyarrow 25, row group of 201 MB: 207 MB without, 19 MB with both).
        parquet = pq.ParquetFile(file, buffer_size=1 << 20, pre_buffer=False)
        return parquet.schema_arrow, lambda names: parquet.iter_batches(num_rows, columns=names)
    is_stream = file.read(6) != b"ARROW1"
    file.seek(0)
    reader = pa.ipc.open_stream(file) if is_stream else pa.ipc.open_file(file)
    batches = reader if is_stream else map(reader.get_batch, range(reader.num_record_batches))
    return reader.schema, lambda names: (batch.select(names) for batch in batches)


def field_names(fields: Iterable[pa.Field]) -> dict[str, Any]:
    """Return the names of columns or of fields of a struct, each with the names inside it, or True if not a struct."""
    return {field.name: field_names(field.type) if types.is_struct(field.type) else True for field in fields}


def select_fields(batch: pa.RecordBatch, fields: dict[str, list[str]]) -> pa.RecordBatch:
    """Return the columns of a batch, or fields of its structs (null where the struct is null), under new names."""
    arrays = [
        pc.struct_field(batch.column(first), inner) if inner else batch.column(first)
        for first, *inner in fields.values()
    ]
    return pa.RecordBatch.from_arrays(arrays, names=list(fields))


def read_values(column: pa.Array, path: str, first: int, name: str) -> list[Any]:
    """Return the values of a column.

    Args:
        column: the array.
        path: name of the file, for error messages.
        first: number of the array's first row in the file.
        name: name of the column.

    Raises:
        DataError: a value cannot be converted; the message names its row.
    """
    convert = _converter(column.type)
    try:
        values = column.to_pylist()
        return values if convert is None else [None if value is None else convert(value) for value in values]
    except (ValueError, TypeError) as error:  # text that is not UTF-8, a struct with two fields of one name
        if len(column) > 1:
            rows = (read_values(column.slice(row, 1), path, first + row, name) for row in range(len(column)))
            return [value for values in rows for value in values]
        raise DataError(
            f"{path} row {first}: column {name!r} of type {column.type} cannot be read ({error}): convert the column"
        ) from None


@lru_cache(maxsize=256)
def _converter(kind: pa.DataType) -> Convert | None:
    """Return the function that converts values, except None, of an Arrow type; None: values stay as they are."""
    if isinstance(kind, pa.BaseExtensionType):
        return _converter(kind.storage_type)
    if types.is_struct(kind):
        return _struct_converter({field.name: _converter(field.type) for field in kind})
    if types.is_map(kind):
        inner = _converter(kind.item_type)
        return lambda entries: {str(key): _apply(inner, value) for key, value in entries}
    if types.is_dictionary(kind) or types.is_run_end_encoded(kind) or _is_list(kind):
        inner = _converter(kind.value_type)
        return inner if inner is None or not _is_list(kind) else lambda values: [_apply(inner, v) for v in values]
    if types.is_float32(kind) or types.is_float16(kind):
        scalar = np.float32 if types.is_float32(kind) else np.float16
        return lambda value: float(str(scalar(value)))
    if types.is_date(kind) or types.is_time(kind) or types.is_timestamp(kind):
        return lambda value: value.isoformat()
    return None


def _struct_converter(converters: dict[str, Convert | None]) -> Convert:
    def convert(struct: dict[str, Any]) -> dict[str, Any]:
        return {name: _apply(converters[name], value) for name, value in struct.items() if value is not None}

    return convert


def _apply(convert: Convert | None, value: Any) -> Any:
    return value if convert is None or value is None else convert(value)


def _is_list(kind: pa.DataType) -> bool:
    return any(
        is_kind(kind)
        for is_kind in (
            types.is_list,
            types.is_large_list,
            types.is_fixed_size_list,
            types.is_list_view,
            types.is_large_list_view,
        )
    )
