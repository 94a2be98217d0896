"""Paths of artifacts in an SQLite database, which move with the store.

MLflow stores absolute paths, also in the database that is in the store by default. After the store was moved, the pages
would not have their artifacts any more, and new ones would be written to the old place.
"""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

ARTIFACTS = "artifacts"  # directory next to the database
_TIMEOUT = 30.0  # seconds to wait for other writers of the database
_COLUMNS = (
    *(("experiments", "artifact_location"), ("runs", "artifact_uri"), ("logged_models", "artifact_location")),
    *(("model_versions", "source"), ("model_versions", "storage_location"), ("trace_tags", "value")),
)


def update_artifact_paths(database: Path, experiment: str) -> bool:
    """Let an MLflow database refer to the artifacts next to it, if the experiment's are there and it refers to another
    place. Return whether it was changed.

    Raises:
        sqlite3.OperationalError: another process has locked the database.
    """
    if not database.exists():
        return False
    with closing(sqlite3.connect(database, timeout=_TIMEOUT)) as connection, connection:
        if not _has_column(connection, "experiments", "artifact_location"):
            return False
        row = connection.execute("select artifact_location from experiments where name = ?", (experiment,)).fetchone()
        old, _, name = (row[0] if row else "").rstrip("/").rpartition("/")
        root = (database.absolute().parent / ARTIFACTS).as_uri()
        if old in ("", root) or not (database.parent / ARTIFACTS / name).is_dir():
            return False
        for table, column in _COLUMNS:
            if _has_column(connection, table, column):
                values = (f"{root}/", len(old) + 2, len(old) + 1, f"{old}/")
                change = f"update {table} set {column} = ? || substr({column}, ?) where substr({column}, 1, ?) = ?"
                connection.execute(change, values)
        return True


def _has_column(connection: sqlite3.Connection, table: str, column: str) -> bool:
    return column in [row[1] for row in connection.execute(f"pragma table_info({table})")]
