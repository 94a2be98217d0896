"""The record of a run: identity, schedule changes, placement, paths. test_damaged_records.py damages it."""

import os
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from penstock.flows.commands.start import read_flow_and_resumed_config
from penstock.flows.config import Flow, PostTrainConfig, config_hash, derive, training_options
from penstock.flows.options.flags import parse_config
from penstock.flows.options.paths import FILES, FUNCTIONS, with_absolute_paths
from penstock.flows.runtime import runs
from penstock.flows.runtime.resolve import resolve
from penstock.flows.runtime.runs import (
    ActiveRun,
    check_run_may_start,
    latest_config,
    num_planned_rounds,
    open_run,
    open_store,
    read_existing_record,
    read_flow_and_config,
)
from penstock.storage.commit import Commit, RunKeys
from penstock.storage.errors import OptionError, RunError
from penstock.storage.leases import Lease, new_driver_lease_key
from penstock.storage.store import Store

KEYS = RunKeys("r")


def config(store: Path, *words: str) -> PostTrainConfig:
    return parse_config(["--hf-checkpoint", "model", "--run", "r", "--store", str(store), *words])


def commit_round(store: Store, config: PostTrainConfig, r: int = 0) -> None:
    for kind, key, version in (("rollout", KEYS.rollout_prefix(r), r), ("step", KEYS.step_prefix(r), r + 1)):
        fields = {
            "run": "r",
            "index": r,
            "policy_version": version,
            "config_hash": config_hash(with_absolute_paths(derive(config))),
        }
        store.commit(key, Commit(kind=kind, **fields))


def start(store: Store, config: PostTrainConfig, flow: str = "train", lease: Lease | None = None) -> RunKeys:
    return open_run(store, resolve(flow, config, store), lease=lease)


def started(directory: Path, *words: str) -> tuple[Store, PostTrainConfig]:
    """A run that was started with these options, and its store."""
    first = config(directory, *words)
    store = open_store(first.run)
    start(store, first)
    return store, first


def in_threads(function: Callable[[Any], None], arguments: Iterable[Any]) -> None:
    """Call a function with each of the arguments at the same time."""
    threads = [threading.Thread(target=function, args=(argument,)) for argument in arguments]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_changed_identity_option_is_refused(tmp_path: Path) -> None:
    store, first = started(tmp_path, "--num-rollout", "3", "--lr", "1e-3")
    assert start(store, first).run == KEYS.run, "the same command again is welcome"
    commit_round(store, first)
    with pytest.raises(RunError, match=r"run 'r' has --lr 0\.001, .*0\.01"):
        start(store, config(tmp_path, "--num-rollout", "3", "--lr", "1e-2"))
    with pytest.raises(RunError, match="--policy-loss"):
        start(store, config(tmp_path, "--num-rollout", "3", "--lr", "1e-3", "--policy-loss", "gspo"))
    with pytest.raises(RunError, match=r"was started by `train`, not `sft`"):
        start(store, first, "sft")


def test_schedule_changes_are_recorded_and_placement_is_free(tmp_path: Path) -> None:
    store, first = started(tmp_path, "--num-rollout", "3")
    start(store, config(tmp_path, "--num-rollout", "3", "--trainer-threads", "1"))
    assert store.list(f"{KEYS.prefix}/changes") == []
    for rounds in ("5", "7"):
        start(store, config(tmp_path, "--num-rollout", rounds))
    assert store.list(f"{KEYS.prefix}/changes") == ["000000.json", "000001.json"]
    assert num_planned_rounds(store, KEYS, read_existing_record(store, KEYS)) == 7
    flow, again = read_flow_and_config(first.run, "r")
    assert (flow, again.run.num_rollout, again.train) == ("train", 7, derive(first).train)


def test_schedule_change_with_a_taken_number_gets_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both have listed the same changes before either has written."""
    store, _ = started(tmp_path, "--num-rollout", "3")
    start(store, config(tmp_path, "--num-rollout", "4"))
    monkeypatch.setattr(runs, "schedule_change_keys", lambda store, keys: [])
    start(store, config(tmp_path, "--num-rollout", "5"))
    monkeypatch.undo()
    assert num_planned_rounds(store, KEYS, read_existing_record(store, KEYS)) == 5
    store.create(f"{KEYS.prefix}/changes/000001.json.0123456789ab.tmp", b"")  # of a writer that was killed
    assert num_planned_rounds(store, KEYS, read_existing_record(store, KEYS)) == 5


def test_unknown_run_error_lists_existing_runs(tmp_path: Path) -> None:
    _, first = started(tmp_path)
    with pytest.raises(RunError, match=r"has no run 'x' \(it has: r\)"):
        read_flow_and_config(first.run, "x")
    for name in ("../r", "", "x" * 300):
        with pytest.raises(RunError):
            read_flow_and_config(first.run, name)


# ---- a lost record ---------------------------------------------------------------------------------------------------


@pytest.fixture
def lost(tmp_path: Path) -> tuple[Store, PostTrainConfig]:
    """A run with a committed round and without run.json."""
    store, first = started(tmp_path, "--num-rollout", "3", "--lr", "1e-3")
    commit_round(store, first)
    store.delete([KEYS.record])
    return store, first


def test_lost_record_is_written_again_only_by_the_options_of_the_run(tmp_path: Path) -> None:
    store, first = started(tmp_path, "--num-rollout", "3", "--lr", "1e-3")
    commit_round(store, first)
    store.delete([KEYS.record])
    other = config(tmp_path, "--num-rollout", "3", "--lr", "1e-2")
    for call in (
        lambda: check_run_may_start(store, resolve("train", other, store)),
        lambda: start(store, other),
        lambda: start(store, first, "sft"),
        lambda: read_flow_and_config(first.run, "r"),
    ):
        with pytest.raises(RunError, match=r"run\.json"):
            call()
    assert not store.exists(KEYS.record)
    start(store, first)
    assert read_flow_and_config(first.run, "r")[1].train == resolve("train", first, store).train


# ---- resume ----------------------------------------------------------------------------------------------------------


def test_resume_takes_options_of_schedule_and_placement(tmp_path: Path) -> None:
    store, first = started(tmp_path, "--num-rollout", "3", "--lr", "1e-3", "--n-samples-per-prompt", "4")
    commit_round(store, first)
    where = ["--store", str(tmp_path)]
    flow, again = read_flow_and_resumed_config(
        "r", [*where, "--num-rollout", "40", "--trainer-threads", "2", "--save-interval", "5"]
    )
    assert (flow, again.train.lr, again.run.run) == ("train", 1e-3, "r")
    assert (again.run.num_rollout, again.run.save_interval, again.train.trainer_threads) == (40, 5, 2)
    start(store, again, flow)
    assert num_planned_rounds(store, KEYS, read_existing_record(store, KEYS)) == 40
    for words in (["--lr", "1e-2"], ["--global-batch-size", "64"], ["--rollout-shuffle"]):
        flow, other = read_flow_and_resumed_config("r", [*where, *words])
        with pytest.raises(RunError, match=words[0]):
            check_run_may_start(store, resolve(flow, other, store))
    with pytest.raises(OptionError, match="--run"):
        read_flow_and_resumed_config("r", [*where, "--run", "s"])
    with pytest.raises(OptionError):
        read_flow_and_resumed_config("r", [*where, "--num-rollout", "-1"])


FULL = ["--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1"]
MEMORY = [*FULL, "--optimizer-cpu-offload", "--optimizer-offload-fraction", "0.5", "--max-tokens-per-gpu", "99"]


def test_memory_options_that_change_no_result_may_change_on_resume(tmp_path: Path) -> None:
    """After an out-of-memory error, or back when there is more memory."""
    base = ["--num-rollout", "3", "--attention-backend", "torch"]
    first = config(tmp_path, *base)
    store = open_store(first.run)
    plan = resolve("train", first, store)
    start(store, first)
    commit_round(store, first)
    flow, again = read_flow_and_resumed_config("r", ["--store", str(tmp_path), *MEMORY])
    assert again.train.megatron.recompute_granularity == "full" and again.train.max_tokens_per_gpu == 99
    start(store, again, flow)
    start(store, config(tmp_path, *base, "--recompute-activations", "--log-interval", "7"), flow)
    assert config_hash(again) == config_hash(plan)
    assert training_options(again) == training_options(plan)
    assert store.list(f"{KEYS.prefix}/changes") == []
    assert read_flow_and_config(first.run, "r")[1].train.megatron.recompute_granularity is None


def test_options_of_megatron_that_change_results_are_fixed(tmp_path: Path) -> None:
    store, first = started(tmp_path, "--attention-backend", "torch", *FULL)
    commit_round(store, first)
    selective = ["--attention-backend", "torch", "--recompute-granularity", "selective"]
    for words, sentence in (
        (["--attention-backend", "flash"], r"--attention-backend 'torch', this command has 'flash'"),
        ([*selective, "--recompute-modules", "layernorm", "mlp"], r"--recompute-modules None, .* \['layernorm'\]"),
    ):
        with pytest.raises(RunError, match=sentence):
            check_run_may_start(store, resolve("train", config(tmp_path, *words), store))


# ---- a run without a committed round ---------------------------------------------------------------------------------


def test_a_run_without_commits_may_be_started_with_other_options(tmp_path: Path) -> None:
    first, second = config(tmp_path, "--lr", "1e-3"), config(tmp_path, "--lr", "1e-2")
    store = open_store(first.run)
    start(store, first)
    start(store, config(tmp_path, "--lr", "1e-3", "--num-rollout", "9"))
    assert store.exists(f"{KEYS.prefix}/changes/000000.json")
    for key in ("base.json", "rollouts/000000/attempt-x/part", "tracking/outbox.jsonl"):
        store.create(f"{KEYS.prefix}/{key}", b"{}")
    check_run_may_start(store, resolve("sft", second, store))
    lease = Lease(store, new_driver_lease_key(KEYS)).take()
    start(store, second, "sft", lease=lease)
    assert {found.key for found in store.walk(KEYS.prefix)} == {KEYS.record, lease.key}
    lease.release()
    flow, again = read_flow_and_config(first.run, "r")
    assert (flow, again.train.lr) == ("sft", 1e-2)
    commit_round(store, second)
    with pytest.raises(RunError, match="--lr"):
        start(store, first, "sft")


def test_a_live_run_that_has_not_finished_its_first_round_is_not_replaced(tmp_path: Path) -> None:
    first, second = config(tmp_path, "--lr", "1e-3"), config(tmp_path, "--lr", "1e-2")
    store = open_store(first.run)
    driver = Lease(store, new_driver_lease_key(KEYS)).take()
    start(store, first, lease=driver)
    other = Lease(store, new_driver_lease_key(KEYS)).take()
    for call in (
        lambda: check_run_may_start(store, resolve("train", second, store)),
        lambda: start(store, second, lease=other),
    ):
        with pytest.raises(RunError, match=f"process {os.getpid()}"):
            call()
    assert read_flow_and_config(first.run, "r")[1].train.lr == 1e-3
    driver.release()
    start(store, second, lease=other)
    other.release()


def test_of_two_concurrent_starts_with_different_options_at_most_one_continues(tmp_path: Path) -> None:
    store, first = started(tmp_path, "--lr", "1e-3")
    for _ in range(4):
        barrier, won = threading.Barrier(2), []

        def join(lr: str, barrier: threading.Barrier = barrier, won: list[str] = won) -> None:
            lease = Lease(store, new_driver_lease_key(KEYS)).take()
            barrier.wait()
            try:
                start(store, config(tmp_path, "--lr", lr), lease=lease)
                won.append(lr)
            except RunError:
                pass
            barrier.wait()
            lease.release()

        in_threads(join, ("0.25", "0.5"))
        assert len(won) <= 1
        if won:
            assert read_flow_and_config(first.run, "r")[1].train.lr == float(won[0])
        start(store, first)


# ---- paths -----------------------------------------------------------------------------------------------------------


def test_every_option_that_names_a_file_or_a_function_is_known() -> None:
    from penstock.flows.config import OPTIONS

    known = {(section, name) for table in (FILES, FUNCTIONS) for section, names in table.items() for name in names}
    found = {
        (s, n)
        for s, n, _ in OPTIONS
        if n.endswith(("_path", "_load", "_dir", "_cache", "checkpoint", "_data", "_save"))
    }
    elsewhere = {("convert", "convert_load"), ("convert", "origin_hf_dir")}  # of `penstock convert`
    elsewhere |= {("eval", "eval_prompt_data"), ("rollout", "streaming_data"), ("train", "balance_data")}
    elsewhere |= {("debug", "custom_config_path"), ("debug", "memory_snapshot_path")}  # read at once; end of a name
    assert found - known == elsewhere


def test_resume_from_another_directory_finds_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def typed(directory: str, *words: str) -> PostTrainConfig:
        (tmp_path / directory).mkdir(exist_ok=True)
        monkeypatch.chdir(tmp_path / directory)
        files = ["--prompt-data", "data/*.jsonl@[0:5]", "s3://bucket/x.jsonl", "--custom-rm-path", "reward.py:score"]
        files += ["--eval-prompt-data", "e", "e.jsonl", "--dynamic-sampling-filter-path", "pkg.module:name"]
        return config(tmp_path / "store", *files, *words)

    first = typed("project")
    store = open_store(first.run)
    start(store, first)
    commit_round(store, first)
    here = str(tmp_path / "project")
    typed("elsewhere")
    flow, again = read_flow_and_resumed_config("r", ["--store", store.root])
    assert again.convert.hf_checkpoint == f"{here}/model"
    assert again.rollout.prompt_data == [f"{here}/data/*.jsonl@[0:5]", "s3://bucket/x.jsonl"]
    assert again.rollout.custom_rm_path == f"{here}/reward.py:score"
    assert again.rollout.dynamic_sampling_filter_path == "pkg.module:name"
    assert again.eval.data_sets == [("e", f"{here}/e.jsonl")]
    check_run_may_start(store, resolve(flow, again, store))
    start(store, again, flow)
    start(store, typed("project"), flow)
    assert store.list(f"{KEYS.prefix}/changes") == [], "nothing has changed"
    with pytest.raises(RunError, match="--custom-rm-path"):
        check_run_may_start(store, resolve(flow, typed("project", "--custom-rm-path", "other.py:score"), store))
    start(store, typed("moved"))
    recorded = latest_config(store, KEYS, read_existing_record(store, KEYS))[0]
    assert recorded.rollout.prompt_data[0].endswith("/moved/data/*.jsonl@[0:5]")


# ---- user-defined functions ------------------------------------------------------------------------------------------


def test_a_start_knows_which_functions_have_changed_since_the_last_one(tmp_path: Path) -> None:
    reward, hook = tmp_path / "mine.py", tmp_path / "hook.py"
    reward.write_text("def grade(args, sample): return 0")
    hook.write_text("def hook(args, samples): pass")
    words = ["--run", "r", "--hf-checkpoint", "model", "--custom-rm-path", f"{reward}:grade"]

    def start(*more: str) -> list[str]:
        run = ActiveRun(Store(str(tmp_path / "store")), KEYS, Flow.TRAIN, parse_config([*words, *more]))
        run.record_start("")
        return run.changed_functions()

    assert start() == [] and start() == []
    reward.write_text("def grade(args, sample): return 1")
    assert start() == ["custom_rm_path"] and start() == []
    with_hook = ["--custom-rollout-log-function-path", str(hook)]
    assert start(*with_hook) == []  # a function that is new has not changed
    hook.write_text("def hook(args, samples): return 1")
    assert start(*with_hook) == ["custom_rollout_log_function_path"]
    reward.unlink()
    assert start(*with_hook) == []  # preflight refuses the missing file
