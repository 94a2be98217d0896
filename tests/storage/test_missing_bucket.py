"""Every command names a bucket that does not exist; a bucket without runs is not an error."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from penstock.flows.cli import main
from penstock.storage.store import Store


@pytest.mark.parametrize(
    "words",
    ["runs", "show r", "verify r", "gc", "lineage r/2", "samples r", "report r", "rm r", "resume r", "replay r"],
)
def test_missing_bucket_is_named(words: str, s3_options: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    where = ["--store", "s3://missing-bucket/x", "--store-options", json.dumps(s3_options)]
    assert main([*words.split(), *where]) == 2
    error = capsys.readouterr().err
    assert "missing-bucket" in error and "the bucket does not exist" in error and error.count("\n") == 1


def test_empty_prefix_of_a_bucket_has_no_runs(
    s3_store: Callable[..., Store], s3_options: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["runs", "--store", "s3://bucket/never", "--store-options", json.dumps(s3_options)]) == 0
    assert "no runs in s3://bucket/never" in capsys.readouterr().out
