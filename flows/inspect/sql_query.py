"""`penstock query`: SQL over the commits and samples of the runs in a store. Never writes to the store.

storage/sql_views.py defines the views; this file parses the request and prints the result.
"""

from __future__ import annotations

import csv
import itertools
import re
import sys
from collections.abc import Iterator, Sequence
from decimal import Decimal
from typing import TYPE_CHECKING, Any

from pydantic_core import to_json
from rich.cells import cell_len, set_cell_size

from penstock.flows.options.argv import parse_integer, short_repr, split_args, to_one_line
from penstock.flows.options.flags import split_flags
from penstock.flows.runtime.runs import keys_of_existing_run, open_named_store
from penstock.flows.terminal.escape import escape_controls, unescaped
from penstock.storage.disk import read_file
from penstock.storage.errors import OptionError, check_rules
from penstock.storage.sql_views import VIEWS, execute, list_columns, open_connection, translate_sql_errors

if TYPE_CHECKING:
    import duckdb

USAGE = """penstock query "SQL" [--run NAME ...] [--format table|csv|json|jsonl] [--limit N] [--store URI ...]

  Runs a DuckDB query over the commits and samples of the runs in a store, for example
  penstock query "select run, rollout_id, avg(reward) from samples group by all order by all"
  Writes nothing to the store. Warns if a query aggregates over several runs together.
  Without SQL, lists the views and their columns; docs/queries.md describes them, with examples.

  -          read the SQL from standard input
  --file     read the SQL from a file
  --run      read only these runs; default: all runs in the store
  --format   table (long cells are cut), csv, json or jsonl (complete); default: table
  --limit    maximum number of rows; default: 1,000 in a table, otherwise all"""

Row = tuple[Any, ...]

_FORMATS = ("table", "csv", "json", "jsonl")
_TABLE_ROWS = 1000
_TABLE_CELL = 60  # maximum width of a cell
_BATCH = 1024  # rows fetched at once


def main(argv: list[str]) -> int:
    """Run `penstock query`. Return 0."""
    positional, own, rest = split_args(argv, {"--file": True, "--format": True, "--limit": True})
    given = split_flags(rest)
    runs = [run for name, values in given if name == "--run" for run in values]
    store_argv = [word for name, values in given if name != "--run" for word in (name, *values)]
    output_format = own.get("--format", "table")
    rules = (
        (output_format not in _FORMATS, f"--format takes {', '.join(_FORMATS)}; found {short_repr(output_format)}"),
        (
            len(positional) + ("--file" in own) > 1,
            "penstock query takes one SQL text, in quotes, or --file; found several: pass one of them",
        ),
        (("--run", []) in given, "--run needs a value: the name of a run; `penstock runs` lists them"),
    )
    check_rules(rules)
    limit = parse_integer("--limit", own["--limit"]) if "--limit" in own else None
    if limit is None and output_format == "table":
        limit = _TABLE_ROWS
    sql = read_sql(positional, own.get("--file"))
    store = open_named_store(store_argv, "query")
    names = [keys_of_existing_run(store, run).run for run in runs] or store.list("runs")
    connection, problems = open_connection(store, names)
    for run, problem in problems.items():
        print(to_one_line(f"run {run} is damaged and is left out: {problem}"), file=sys.stderr)
    if sql is None:
        for view, view_columns in list_columns(connection).items():
            print(f"{view}: {VIEWS[view]}")
            width = max(len(name) for name, _ in view_columns)
            for name, column_type in view_columns:
                print(f"  {name:{width}}  {column_type}")
        return 0
    columns, cursor = execute(connection, sql)
    if len(names) > 1 and aggregates_without_run(connection, sql):
        print(
            f"warning: this query aggregates over {len(names)} runs together: group by run, add a condition on run, or "
            "choose one with --run NAME",
            file=sys.stderr,
        )
    rows = fetch_rows(cursor)
    write_rows(output_format, columns, itertools.islice(rows, limit))
    if limit is not None and next(rows, None) is not None:
        print(f"only the first {limit} rows are printed; print more with --limit N", file=sys.stderr)
    return 0


def read_sql(positional: Sequence[str], file: str | None) -> str | None:
    """Return the SQL from the command line, from `file` or, for `-`, from standard input; None if no SQL is given."""
    if file is None and not positional:
        return None
    try:
        sql = positional[0] if file is None else read_file(file).decode("utf-8")
        if sql == "-" and file is None:
            sql = sys.stdin.read()
    except UnicodeDecodeError as error:
        raise OptionError(f"{file or 'standard input'} is not UTF-8 text: pass SQL encoded in UTF-8") from error
    if not sql.strip():
        raise OptionError("the SQL is empty: write a statement, for example 'select * from runs'")
    return sql


def aggregates_without_run(connection: duckdb.DuckDBPyConnection, sql: str) -> bool:
    """Return whether the SQL calls an aggregate function over a view other than `runs` and does not contain the word
    `run`: the result probably mixes several runs."""
    sql = re.sub(r"--[^\n]*|/\*.*?\*/|'(?:[^']|'')*'", " ", sql, flags=re.S).lower()
    aggregates = "select distinct function_name from duckdb_functions() where function_type = 'aggregate'"
    calls = {name for (name,) in connection.cursor().execute(aggregates).fetchall()} & set(
        re.findall(r"(\w+)\s*\(", sql)
    )
    return bool(calls and set(VIEWS) - {"runs"} & (words := set(re.findall(r"\w+", sql))) and "run" not in words)


def fetch_rows(cursor: duckdb.DuckDBPyConnection) -> Iterator[Row]:
    """Yield the rows of a result, fetched in batches. Raises OptionError if the query fails meanwhile."""
    with translate_sql_errors():
        while rows := cursor.fetchmany(_BATCH):
            yield from rows


# ---- formats ---------------------------------------------------------------------------------------------------------


def write_rows(output_format: str, columns: Sequence[str], rows: Iterator[Row]) -> None:
    """Print a result in one of _FORMATS."""
    objects = (_to_json(dict(zip(columns, row, strict=True))) for row in rows)
    if output_format == "table":
        write_table(columns, list(rows))
    elif output_format == "csv":
        out = sys.stdout if sys.stdout.isatty() else unescaped(sys.stdout)  # not escaped in a file or pipe
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow(columns)
        writer.writerows([_to_text(value) for value in row] for row in rows)
    elif output_format == "jsonl":
        for each in objects:
            print(each)
    else:
        separator = "["
        for each in objects:
            print(separator, each, sep="\n", end="")
            separator = ","
        print("[]" if separator == "[" else "\n]")


def write_table(columns: Sequence[str], values: Sequence[Row]) -> None:
    cells = [[format_cell(value) for value in row] for row in (columns, *values)]
    widths = [max(cell_len(row[index]) for row in cells) for index in range(len(columns))]
    numbers = (int, float, Decimal, type(None))
    numeric = [bool(values) and all(isinstance(row[i], numbers) for row in values) for i in range(len(columns))]
    for row in cells:
        padded = [
            " " * (width - cell_len(cell)) + cell if right else set_cell_size(cell, width)
            for cell, width, right in zip(row, widths, numeric, strict=True)
        ]
        print("  ".join(padded).rstrip())


def format_cell(value: Any) -> str:
    """Return a value as text that is at most _TABLE_CELL characters wide and has no control characters."""
    if isinstance(value, (float, Decimal)):
        return f"{value:.6g}"
    text = escape_controls(_to_text(value)).replace("\n", "\\n").replace("\t", "\\t")
    return text if cell_len(text) <= _TABLE_CELL else set_cell_size(text, _TABLE_CELL - 3) + "..."


def _to_text(value: Any) -> str:
    """Return a value as text: an empty text for NULL, JSON for lists, maps, structs and bytes."""
    if isinstance(value, (list, tuple, dict, bytes)):
        return _to_json(value)
    return "" if value is None else str(value)


def _to_json(value: Any) -> str:
    """Return a value as JSON: bytes as base64, numbers that are not finite as "NaN" and "Infinity"."""

    def to_plain(item: Any) -> Any:
        """Return a value with numbers of type Decimal replaced by floats."""
        if isinstance(item, dict):
            return {str(key): to_plain(value) for key, value in item.items()}
        if isinstance(item, (list, tuple)):
            return [to_plain(each) for each in item]
        return float(item) if isinstance(item, Decimal) else item

    return to_json(to_plain(value), inf_nan_mode="strings", bytes_mode="base64", fallback=str).decode()
