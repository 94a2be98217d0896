"""Check user-defined functions, or Penstock's own, against their contracts (contracts.py)."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from penstock.stages.rollout.config import RolloutConfig
from penstock.stages.train.algorithm_config import AlgorithmConfig
from tests.contracts.contracts import CONTRACTS, Bench
from tests.contracts.plugins import HERE
from tests.forked_worker import forked_workers  # noqa: F401 fixture


def test_function_keeps_its_contract(kind: str, path: str, bench: Bench) -> None:
    CONTRACTS[kind](path, bench)


def test_contract_violation_raises_with_name(kind: str, bad: str, words: str, bench: Bench) -> None:
    with pytest.raises((ValueError, AssertionError)) as caught:
        CONTRACTS[kind](f"{HERE}:{bad}", bench)
    sentence = str(caught.value)
    assert words in sentence and bad in sentence and "\n" not in sentence


PAGE = (Path(__file__).parents[2] / "docs" / "plugins.md").read_text(encoding="utf-8")


def test_plugins_page_lists_every_flag_and_kind() -> None:
    fields = [*RolloutConfig.model_fields, *AlgorithmConfig.model_fields]
    flags = {"--" + name.replace("_", "-") for name in fields if name.endswith("_path")} - {
        "--rm-model-path"
    }  # a model's
    assert set(re.findall(r"^\| `(--[a-z-]+)`", PAGE, re.MULTILINE)) == flags
    assert set(re.findall(r"`([a-z_]+)` \|$", PAGE, re.MULTILINE)) == set(CONTRACTS)


@pytest.mark.parametrize("kind", ["filter", "sample_hook", "sample_filter"])
def test_examples_of_plugins_page_keep_their_contracts(kind: str, bench: Bench, tmp_path: Path) -> None:
    found = re.search(rf"```python {kind}\n(.*?)```", PAGE, re.DOTALL)
    assert found is not None
    (tmp_path / "example.py").write_text(found[1], encoding="utf-8")
    CONTRACTS[kind](str(tmp_path / "example.py"), bench)
