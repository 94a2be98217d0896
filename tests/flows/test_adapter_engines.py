"""Runs with adapters on engines that they share, and a run that starts from an adapter."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from penstock_command import penstock

from penstock.engines.serving import endpoints
from penstock.engines.serving.server import ServerSpec
from penstock.engines.sglang import control
from penstock.engines.sglang.backend import SGLangServer
from penstock.flows.commands.demo_model import make_tiny_data
from penstock.storage.commit import Commit, RunKeys
from penstock.storage.store import Store

pytestmark = [pytest.mark.integration, pytest.mark.full, pytest.mark.timeout(1800)]
KEY = "key-of-the-shared-engine"
GAP = 1e-5  # mean difference of the log-probs of engine and trainer; measured 3e-7
OTHER_POLICY = 1e-6  # of the mean KL divergence from the base: log-probs differ by 1e-3


@pytest.fixture
def shared_engine(tiny_model: Path, tmp_path: Path) -> Iterator[str]:
    """The address of an engine that was started with --api-key, --admin-api-key and LoRA."""
    modules = [f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down")]
    args = {"enable_lora": True, "max_lora_rank": 8, "lora_target_modules": modules, "api_key": KEY}
    server = SGLangServer(ServerSpec(model_path=str(tiny_model), args=args, log_dir=str(tmp_path / "logs")))
    url = server.start()
    yield url.removeprefix("http://")
    server.stop()


def train(
    model: Path, directory: Path, run: str, environment: Mapping[str, str], *words: str, lr: float = 5e-3
) -> list[Commit]:
    """Train 3 rounds with adapters and return the commits of the steps."""
    flags = f"""
        --run {run} --store {directory / run} --hf-checkpoint {model} --lr {lr} --num-rollout 3 --rm-type random
        --prompt-data {make_tiny_data(directory / f"data-{run}")["train"]} --input-key prompt --label-key label
        --apply-chat-template --rollout-batch-size 4 --n-samples-per-prompt 4 --rollout-max-response-len 16
        --use-kl-loss --kl-loss-coef 0.0 --kl-loss-type low_var_kl --lora-rank 4 --lora-publish adapter
        --no-report --trainer-threads 1
    """
    penstock("train", *flags.split(), *words, env=environment)
    store, keys_of_run = Store(str(directory / run)), RunKeys(run)
    steps = [store.committed(keys_of_run.step_prefix(round_)) for round_ in range(3)]
    assert all(steps)
    return [step for step in steps if step is not None]


def check_policy_is_served(steps: list[Commit]) -> None:
    """Check that the engine computed with each policy, which differs from the base from version 1 on."""
    assert max(step.summary["train/train_rollout_logprob_abs_diff"] for step in steps) < GAP
    assert min(step.summary["train/kl_loss"] for step in steps[1:]) > OTHER_POLICY


def test_two_runs_share_an_engine(
    shared_engine: str, tiny_model: Path, tmp_path: Path, prefect_api: dict[str, str]
) -> None:
    words = ["--rollout-external-engine-addrs", shared_engine, "--sglang-api-key", KEY]
    with ThreadPoolExecutor(2) as pool:
        options = {"first": [], "second": ["--lora-alpha", "8"]}
        runs = [
            pool.submit(train, tiny_model, tmp_path, run, prefect_api, *words, *more) for run, more in options.items()
        ]
        for run in runs:
            check_policy_is_served(run.result())
    endpoints.set_api_key(f"http://{shared_engine}", KEY)
    assert control.weight_version(f"http://{shared_engine}") == "default", "the base is never replaced"
    assert control.loaded_adapters(f"http://{shared_engine}") == [], "each run unloads its adapters at its end"


def test_run_starts_from_an_adapter(tiny_model: Path, tmp_path: Path, prefect_api: dict[str, str]) -> None:
    before = train(tiny_model, tmp_path, "first", prefect_api, "--check-weight-update-equal")
    check_policy_is_served(before)
    directory = str(tmp_path / "adapter")
    penstock("export", "first", "--store", str(tmp_path / "first"), "--format", "peft", "--output", directory)
    after = train(tiny_model, tmp_path, "second", prefect_api, "--lora-load", directory, lr=1e-4)
    check_policy_is_served(after)
    assert after[0].summary["train/kl_loss"] > OTHER_POLICY, "version 0 is the adapter, not the base"
