"""Records of runs, as `penstock` writes them, with fields of a test's own."""

from __future__ import annotations

from typing import Any

from penstock.storage.history.run_record import ParentRecord, RunRecord


def run_record(**fields: Any) -> RunRecord:
    """The record of a run, by default of `penstock train` with no options."""
    values = {"flow": "train", "config": {}, "config_hash": "", "directory": "/", "code_version": "", "id": "1"}
    given = fields.get("config", {})
    return RunRecord.model_validate({**values, "created_at": 0.0, "given": given, **fields})


def run_json(**fields: Any) -> bytes:
    """The content of run.json."""
    return run_record(**fields).model_dump_json().encode()


def parent_record(run: str, at: int, **fields: Any) -> ParentRecord:
    """The origin of a fork, by default of one that continues the data of its parent."""
    restarts = [at] if fields.get("restart_data") else []
    values = {"restart_data": False, "restarts": restarts, "discard_responses": False, "config": {}, "parent": None}
    return ParentRecord.model_validate({"run": run, "at": at, **values, **fields})
