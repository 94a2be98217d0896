"""--debug-rollout-only, --debug-train-only and --check-weight-update-equal on the command line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from penstock_command import penstock

from penstock.flows.commands.demo_model import make_tiny_data
from penstock.flows.debug_options import check_committed_rollouts
from penstock.flows.options.flags import parse_config
from penstock.flows.runtime.engine_options import engine_options
from penstock.storage.commit import Commit, RunKeys
from penstock.storage.errors import RunError
from penstock.storage.store import Store

KEYS = RunKeys("r")


def commit(store: Store, kind: str, index: int, version: int) -> None:
    key = KEYS.rollout_prefix(index) if kind == "rollout" else KEYS.step_prefix(index)
    store.commit(key, Commit(kind=kind, run="r", index=index, policy_version=version))  # type: ignore[arg-type]


def check(store: Store, *words: str) -> None:
    check_committed_rollouts(store, parse_config(["--run", "r", *words]))


def test_debug_options_are_refused_if_the_committed_rounds_do_not_fit(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    check(store)
    check(store, "--debug-rollout-only")
    with pytest.raises(RunError, match=r"--debug-train-only .*has none"):
        check(store, "--debug-train-only")
    commit(store, "rollout", 0, 0)
    check(store)  # the start weights generate the first round of every run
    commit(store, "rollout", 1, 0)
    with pytest.raises(RunError, match=r"2 untrained rollouts .*--debug-train-only"):
        check(store)
    check(store, "--debug-rollout-only")
    check(store, "--debug-train-only")
    commit(store, "step", 0, 1)
    with pytest.raises(RunError, match=r"--debug-rollout-only .*trained 1 rounds"):
        check(store, "--debug-rollout-only")
    commit(store, "step", 1, 2)
    check(store)
    commit(store, "rollout", 2, 2)  # of an ordinary start whose training failed
    check(store)
    check(store, "--debug-train-only")


def test_engines_alone_use_the_first_gpus() -> None:
    words = ["--run", "r", "--hf-checkpoint", "model", "--rollout-num-gpus", "4", "--rollout-num-gpus-per-engine", "2"]
    with_trainer, alone = (engine_options(parse_config([*words, *more])) for more in ([], ["--debug-rollout-only"]))
    assert (with_trainer.first_gpu, with_trainer.num_engines_to_start(True)) == (1, 2)
    assert (alone.first_gpu, alone.num_engines_to_start(True)) == (0, 2)


@pytest.mark.integration
@pytest.mark.full
def test_each_half_runs_alone_and_an_ordinary_start_continues(
    prefect_api: dict[str, str], tiny_model: Path, tmp_path: Path, printed: Callable[..., str]
) -> None:
    data = make_tiny_data(tmp_path / "data")["train"]
    place = ["--store", str(tmp_path / "store")]
    words = f"""
        --run r --hf-checkpoint {tiny_model} --prompt-data {data} --input-key prompt --label-key label --rm-type random
        --apply-chat-template --rollout-batch-size 4 --n-samples-per-prompt 2 --rollout-max-response-len 8 --lr 1e-3
        --trainer-threads 1 --check-logits false --update-weight-transport disk
    """.split()

    def train(*more: str, check: bool = True) -> str:
        result = penstock("train", *words, *place, *more, env=prefect_api, check=check)
        return result.stdout + result.stderr

    store = Store(str(tmp_path / "store"))
    logs = tmp_path / "store" / KEYS.prefix / "logs"
    output = train("--num-rollout", "2", "--debug-rollout-only")
    assert "round 1 (2/2)  reward" in output and "loading the starting weights" not in output  # no trainer
    versions = [(store.committed(KEYS.rollout_prefix(r)) or Commit(kind="rollout")).policy_version for r in range(2)]
    assert versions == [0, 0] and store.committed(KEYS.step_prefix(0)) is None
    assert "1 rollouts generated with the initial weights" in printed("verify", "r", *place)
    assert "--debug-train-only" in train("--num-rollout", "2", check=False)  # an ordinary start is refused

    servers = len(list(logs.glob("sglang-*")))
    output = train("--num-rollout", "3", "--debug-train-only")
    assert "round 1 (2/3)" in output and len(list(logs.glob("sglang-*"))) == servers > 0  # no engine
    assert store.committed(KEYS.step_prefix(1)) is not None and store.committed(KEYS.rollout_prefix(2)) is None

    output = train("--num-rollout", "3", "--check-weight-update-equal")
    assert "weights of version 2 are equal in trainer and engines" in output
    last = store.committed(KEYS.rollout_prefix(2))
    assert last is not None and last.policy_version == 2
    assert "no problems found" in printed("verify", "r", *place)
