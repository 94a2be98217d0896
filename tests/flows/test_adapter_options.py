"""Which runs give their engines adapters, and which merged weights."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.engines.backends import engine_backend
from penstock.engines.options import EngineOptions
from penstock.flows.config import PostTrainConfig
from penstock.flows.options.adapters import fully_trained_ancestor, with_adapters
from penstock.flows.options.flags import parse_config
from penstock.flows.runtime.engine_options import engine_options
from penstock.flows.runtime.preflight import config_warnings
from penstock.flows.runtime.resolve import resolve
from penstock.storage.errors import OptionError
from penstock.storage.history.run_record import ParentRecord
from penstock.storage.store import Store
from tests.run_records import parent_record

STORE = Store("memory://", probe=False)


def config_of(model: Path, *words: str) -> PostTrainConfig:
    return parse_config(["--run", "r", "--hf-checkpoint", str(model), "--lora-rank", "4", "--num-rollout", "9", *words])


def options_of(model: Path, *words: str, parent: ParentRecord | None = None) -> EngineOptions:
    config = config_of(model, *words)
    return with_adapters(engine_options(config), config, parent)


def test_engines_get_adapters_by_default(tiny_model: Path) -> None:
    options = options_of(tiny_model, "--lora-target-modules", "attention")
    args = engine_backend().server_args(options, has_gpus=False)
    assert args["enable_lora"] and (args["max_lora_rank"], args["max_loras_per_batch"]) == (4, 2)
    assert args["lora_target_modules"] == ["k_proj", "o_proj", "q_proj", "v_proj"]
    streaming = options_of(tiny_model, "--async-mode", "streaming", "--max-staleness", "2")
    assert streaming.in_flight is None and streaming.adapters is not None and streaming.adapters.max_versions == 4
    assert engine_backend().server_args(options_of(tiny_model, "--colocate", "--offload-rollout"), has_gpus=True)[
        "enable_weights_cpu_backup"
    ]


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--update-weight-transport", "nccl"], "adapters cannot be broadcast"),
        (["--sglang-dp-size", "2"], "--sglang-dp-size"),
        (["--sglang-speculative-algorithm", "NGRAM"], "--sglang-speculative-algorithm"),
        (["--async-mode", "streaming", "--max-staleness", "1", "--use-router"], "behind a router"),
        (["--check-weight-update-equal", "--update-weight-transport", "disk"], "--check-weight-update-equal"),
        (["--ref-load", "OTHER", "--use-kl-loss"], "trained on .*, but engines start with"),
    ],
)
def test_other_runs_get_merged_weights_or_are_refused(
    words: list[str], reason: str, tiny_model: Path, other_tiny_model: Path
) -> None:
    words = [str(other_tiny_model) if word == "OTHER" else word for word in words]
    assert options_of(tiny_model, *words).adapters is None
    with pytest.raises(
        OptionError, match=f"--lora-publish adapter is not possible: .*{reason}.*; use --lora-publish merged"
    ):
        options_of(tiny_model, *words, "--lora-publish", "adapter")


def test_fork_of_full_training_gets_merged_weights(tiny_model: Path) -> None:
    full = parent_record("full", 3, config={"train": {}})
    adapters = parent_record("adapters", 5, config={"train": {"lora": {"lora_rank": 4}}}, parent=full.model_dump())
    assert fully_trained_ancestor(full) == fully_trained_ancestor(adapters) == "full"
    assert fully_trained_ancestor(full.model_copy(update={"at": 0})) is None and fully_trained_ancestor(None) is None
    assert options_of(tiny_model, parent=full).adapters is None
    assert options_of(tiny_model, parent=adapters.model_copy(update={"parent": None})).adapters is not None


def test_engines_that_others_may_call_get_merged_weights_by_default(tiny_model: Path) -> None:
    functions = ("--custom-generate-function-path", "--rollout-function-path", "--eval-function-path")
    for words in (*((option, "module.function") for option in functions), ("--rollout-external-engine-addrs", "h:1")):
        assert options_of(tiny_model, *words).adapters is None
        assert options_of(tiny_model, *words, "--lora-publish", "adapter").adapters is not None
    words = ("--eval-function-path", "slime.rollout.sglang_rollout.eval_rollout")
    assert options_of(tiny_model, *words).adapters is not None
    assert options_of(tiny_model, *words, "--lora-publish", "merged").adapters is None


def test_pause_mode_without_effect_is_named(tiny_model: Path) -> None:
    streaming = ["--async-mode", "streaming", "--max-staleness", "1", "--pause-generation-mode", "in_place"]
    shown = config_warnings(resolve("train", config_of(tiny_model, *streaming), STORE))
    assert any("--pause-generation-mode has no effect" in warning for warning in shown)
    merged = config_warnings(resolve("train", config_of(tiny_model, *streaming, "--lora-publish", "merged"), STORE))
    assert not any("--pause-generation-mode" in warning for warning in merged)
