"""Training on stored groups of earlier rounds (--replay-share): choice, reading, audit, and a run with engines."""

from __future__ import annotations

import runpy
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "storage"))
from made_run import commit_samples, config_of, make_run, write_data
from penstock_command import ROOT, penstock

from penstock.flows.commands.demo_model import make_tiny_data
from penstock.storage.commit import Commit, RunKeys, commit_key, record_digest
from penstock.storage.failpoints import VARIABLE
from penstock.storage.maintenance.audit import audit_run
from penstock.storage.samples.sample import Sample
from penstock.storage.samples.shards import StoredGroup, choose_replayed, read_table, read_with_replayed
from penstock.storage.store import Store

STORED = [StoredGroup(r, f"{r * 8 + g:09d}", r) for r in range(6) for g in range(8)]


def options(share: float = 0.5, staleness: int = 3, seed: int = 1234) -> dict[str, object]:
    return {"seed": seed, "replay": {"replay_share": share, "replay_max_staleness": staleness}}


def test_choice_has_the_number_of_the_share_and_keeps_the_bound() -> None:
    for rollout_id in range(1, 7):
        stored = [group for group in STORED if group.rollout_id < rollout_id]
        chosen = choose_replayed(stored, 8, options(), rollout_id)
        assert len(chosen) == len(set(chosen)) == 4
        assert all(1 <= rollout_id - group.oldest_version <= 3 for group in chosen)
        assert chosen == sorted(chosen), "in the order of rounds and groups"
    assert len(choose_replayed(STORED, 100, options(0.29), 6)) == 24, "all that are new enough"
    assert len(choose_replayed(STORED, 10, options(0.7, 9), 6)) == 7
    old = [StoredGroup(5, "000000041", 1), StoredGroup(5, "000000042", 3)]
    assert choose_replayed(old, 8, options(), 6) == old[1:], "the oldest token counts"


def test_choice_depends_on_seed_and_round_but_not_on_the_order_of_the_groups() -> None:
    chosen = choose_replayed(STORED, 8, options(), 6)
    assert sorted(choose_replayed(STORED[::-1], 8, options(), 6)) == chosen
    assert choose_replayed(STORED, 8, options(seed=5), 6) != chosen
    assert choose_replayed(STORED, 8, options(staleness=9), 6) != choose_replayed(STORED, 8, options(staleness=9), 7)
    counts = [sum(group in choose_replayed(STORED, 8, options(seed=s), 6) for s in range(400)) for group in STORED[24:]]
    assert min(counts) > 35 and max(counts) < 105, "every group has the same chance: 4 of 24"


def commit_round(store: Store, index: int) -> Commit:
    """Commit a rollout with four groups of three samples, whose samples are not neighbours."""
    samples = [
        Sample(f"{4 * index + g:09d}-{i}", f"{4 * index + g:09d}", f"{g}-{i}", index, policy_versions=(index, index))
        for i in range(3)
        for g in range(4)
    ]
    return commit_samples(store, f"runs/r/rollouts/{index:06d}", samples, kind="rollout", run="r", index=index)


def test_replayed_groups_are_read_whole_after_the_new_samples(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    rounds = [commit_round(store, index) for index in range(4)]
    table, replayed = read_with_replayed(store, rounds[3], rounds[1:3], options())
    new = read_table(store, rounds[3])
    assert table.slice(0, 12).equals(new) and [size for _, size in replayed] == [3, 3]
    ids = table["sample_id"].to_pylist()[12:]
    assert ids == [f"{group.group_id}-{i}" for group, _ in replayed for i in range(3)]
    assert {group.rollout_id for group, _ in replayed} <= {1, 2}
    assert read_with_replayed(store, rounds[3], [], {})[1] == []


# ---- the audit -------------------------------------------------------------------------------------------------------


def replayed_run(root: Path) -> tuple[Store, RunKeys, list]:
    """A run of two rounds with three groups of two samples, of which the second also replays one group of the first.
    Return it with what its commit must say about the replayed groups."""
    store = Store(str(root / "store"))
    words = ("--replay-share", "0.4", "--replay-max-staleness", "2")
    keys = make_run(store, config_of(store, write_data(root / "data.jsonl"), "r", *words), 2)
    train = {"seed": 1234, "replay": {"replay_share": 0.4, "replay_max_staleness": 2}}
    groups = [StoredGroup(0, f"{issue:09d}", 0) for issue in range(3)]
    (chosen,) = choose_replayed(groups, 3, train, 1)
    return store, keys, [[0, chosen.group_id, [[0, 2]]]]  # the samples have no tokens


def audit_with(store: Store, keys: RunKeys, replayed: object, rounds: Sequence[int] = (0,)) -> list[str]:
    key = commit_key(keys.step_prefix(1))
    step = store.committed(keys.step_prefix(1))
    assert step is not None
    inputs = {"rollout": step.inputs["rollout"]} | {f"replayed/{r}": commit_key(keys.rollout_prefix(r)) for r in rounds}
    changed_state = {"state": {**step.state, "replayed": replayed}, "inputs": inputs}
    record = step.model_dump(mode="json") | {"digest": "", **changed_state}
    changed = Commit.model_validate(record)
    store.delete([key])
    store.create(key, changed.model_copy(update={"digest": record_digest(record)}).model_dump_json().encode())
    return audit_run(store, keys).problems


def test_audit_accepts_only_the_groups_and_uses_that_the_options_give(tmp_path: Path) -> None:
    store, keys, right = replayed_run(tmp_path)
    (index, group_id, _), other = right[0], "000000000" if right[0][1] != "000000000" else "000000001"
    assert audit_with(store, keys, right) == []
    [problem] = audit_with(store, keys, right, rounds=[])
    assert "has other rollouts as inputs" in problem
    for wrong, sentence in (
        ([], f"lacks group {group_id} of round 0 among the replayed groups"),
        ([*right, [0, other, [[0, 2]]]], f"has group {other} of round 0 among the replayed groups"),
        ([[index, group_id, [[1, 2]]]], f"sample 0 of its replayed group {group_id} of round 0 was trained 1 times"),
        ([[index, group_id, [[0, 1]]]], f"its replayed group {group_id} of round 0 has 2"),
        ([3], "does not say how often each replayed sample was trained"),
    ):
        problems = audit_with(store, keys, wrong)
        assert len(problems) == 1 and sentence in problems[0], problems


# ---- with real engines -----------------------------------------------------------------------------------------------


@pytest.mark.integration
@pytest.mark.full
@pytest.mark.parametrize("mode", ["one rank", "two ranks, streaming", "images"])
def test_run_with_replayed_groups_survives_a_kill_and_replays_bit_for_bit(
    mode: str, prefect_api: dict[str, str], tiny_model: Path, tmp_path: Path
) -> None:
    store, keys, faults = Store(str(tmp_path / "store")), RunKeys("r"), tmp_path / "faults"
    faults.mkdir()
    model, data, further = tiny_model, make_tiny_data(tmp_path / "data")["train"], []
    if mode == "two ranks, streaming":
        further = ["--actor-num-gpus-per-node", "2", "--async-mode", "streaming", "--max-staleness", "1"]
    if mode == "images":
        runpy.run_path(str(ROOT / "examples/shapes/data.py"))["main"](str(tmp_path / "shapes"))
        model, data = tmp_path / "shapes/model", tmp_path / "shapes/train.jsonl"
        further = ["--multimodal-keys", '{"image": "images"}']
    words = f"""--hf-checkpoint {model} --prompt-data {data}
        --input-key prompt --label-key label --rm-type random --apply-chat-template --rollout-batch-size 4
        --n-samples-per-prompt 4 --rollout-max-response-len 8 --num-rollout 4 --num-steps-per-rollout 2
        --replay-share 0.5 --replay-max-staleness 2 --lr 1e-3 --trainer-threads 1 --check-logits false""".split()
    words += further
    command = [sys.executable, "-m", "penstock", "train", "--run", "r", *words, "--store", store.root]
    environment = {"PYTHONPATH": str(ROOT), **prefect_api, VARIABLE: str(faults)}
    driver = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wait_for(driver, lambda: store.committed(keys.step_prefix(1)) is not None)
    (faults / "train-mid-step").touch()
    wait_for(driver, (faults / "train-mid-step.reached").exists)
    driver.kill()
    driver.wait()
    (faults / "train-mid-step.reached").unlink()
    penstock("resume", "r", "--store", store.root, env=prefect_api)
    steps = [store.committed(keys.step_prefix(r)) for r in range(4)]
    replayed = [step.state["replayed"] if step else None for step in steps]
    assert [len(groups or ()) for groups in replayed] == [0, 2, 2, 2]
    assert all(r - 2 <= index < r for r, groups in enumerate(replayed) for index, *_ in groups or ())
    out = penstock("verify", "r", "--store", store.root, env=prefect_api).stdout
    assert "no problems found" in out
    if mode != "images":  # there, a sample fails if the random model generates an image token
        assert all(runs == [[1, 4]] for groups in replayed for *_, runs in groups or ())
        assert all(step and step.state["sample_uses"] == [[1, 16]] for step in steps)
        assert "samples were trained 88 times" in out
    assert (
        "4 of 4 rounds are equal bit for bit" in penstock("replay", "r", "--store", store.root, env=prefect_api).stdout
    )


def wait_for(driver: subprocess.Popen, reached: Callable[[], bool]) -> None:
    """Wait until `reached()` is true; fail if the driver ends before."""
    while not reached():
        assert driver.poll() is None, f"the driver ended with exit code {driver.returncode}"
        time.sleep(0.2)
