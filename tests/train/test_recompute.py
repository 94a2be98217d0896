"""A round recomputed from what is stored of it: against the stored cases, and against rounds of the real trainer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from random_rollouts import commit_rollouts

from penstock.flows.cli import main
from penstock.flows.config import PostTrainConfig
from penstock.flows.inspect.read_samples import load_round, texts_of
from penstock.flows.runtime.resolve import resolve
from penstock.flows.runtime.runs import create_run_record
from penstock.stages.train.batching import Batch, spread
from penstock.stages.train.build import build_models, load_auxiliary_model, load_initial
from penstock.stages.train.config import TrainConfig
from penstock.stages.train.recompute import METADATA, StoredRound, read_round_file, recompute, write_round_file
from penstock.stages.train.step import needs_old_logprobs, train_rollout
from penstock.storage.commit import Commit, RunKeys
from penstock.storage.errors import RunError
from penstock.storage.samples.sample import Sample, to_table
from penstock.storage.samples.shards import read_table, write_trained_tokens
from penstock.storage.store import Store
from tests.engines.megatron_reference import SHAPE
from tests.train.make_stored_cases import load
from tests.train.stored_cases import Case, Outputs, Rollout, compute, make_rollout

TOLERANCE = 1e-6  # of max(1, |x|)
STORED = [
    (case, outputs)
    for case, outputs in load()
    if "rollout" in case and "plugin_error" not in outputs and case["options"].get("loss_type") != "sft_loss"
][::5]  # neighbours differ in one option of the estimator or loss, which the stored numbers themselves cover


def stored_round(case: Case, outputs: Outputs) -> StoredRound:
    """Return a case as the store would have it: samples and trained tokens in float32."""
    batch, numbers = make_rollout(Rollout(**case["rollout"]), case["seed"])
    config = TrainConfig(**case["options"])
    samples = []
    for i, (start, end) in enumerate(zip(batch.offsets[:-1], batch.offsets[1:])):
        reward = float(batch.rewards[i])
        row = Sample(f"sample {i}", f"group {batch.group_index[i]}", f"trajectory {batch.trajectory_index[i]}", 7)
        row.token_ids = batch.token_ids[start:end].tolist()
        row.loss_mask = batch.loss_mask[start:end].astype(int).tolist()
        row.rollout_logprobs = batch.rollout_logprobs[start:end].tolist()
        row.reward = None if np.isnan(reward) else reward
        row.rewards = {name: reward**power for power, name in enumerate(config.gdpo_reward_weights, 1)}
        samples.append(row)
    num_steps = len(outputs["policy mean loss"])
    has_old = needs_old_logprobs(config, num_steps) and not config.use_rollout_logprobs
    tokens = {name: numbers[name] for name in ("entropy", "ref_logprobs", "values")}
    tokens |= {"trainer_teacher_logprobs": numbers["teacher_logprobs"], "step_logprobs": numbers["logprobs"]}
    tokens |= {"trainer_logprobs": numbers["old_logprobs" if has_old else "logprobs"]}
    tokens |= {"advantages": torch.from_numpy(outputs["advantages"])}
    offsets = pa.array(np.concatenate([[0], np.cumsum(batch.num_trained_tokens)]), pa.int32())
    trained = {
        name: pa.ListArray.from_arrays(offsets, pa.array(values.numpy(), pa.float32()))
        for name, values in tokens.items()
    }
    steps = [{"train/loss": loss} for loss in outputs["policy mean loss"]]
    about = {"run": "case", "round": 7, "steps": steps}
    return StoredRound(to_table(samples), pa.table(trained), config, about)


def largest_difference(found: Any, expected: np.ndarray) -> float:
    found = np.asarray(found, dtype=np.float64)
    assert found.shape == expected.shape
    return float(np.max(np.abs(found - expected) / np.maximum(1, np.abs(expected)), initial=0.0))


@pytest.mark.parametrize("family", sorted({case["family"] for case, _ in STORED}))
def test_stored_case_is_recomputed(family: str) -> None:
    """In float32: ratios of e^40 lose more digits than that, so these cases get a wider tolerance."""
    wrong, num_cases = {}, 0
    for case, outputs in STORED:
        drift = case["rollout"].get("drift", 0)
        if case["family"] != family or (drift > 10 and "dppo" in case["options"].get("policy_loss", "")):
            continue  # the mask of dppo jumps where float32 rounds the divergence to the bound
        num_cases += 1
        result = recompute(stored_round(case, outputs))
        assert result.problem == ""
        tolerance = TOLERANCE * (100 if drift > 10 else 1)
        pairs = {"whitened": "advantages", "loss": "policy loss"}
        found = {name: largest_difference(result.values[name], outputs[output]) for name, output in pairs.items()}
        found["step_losses"] = largest_difference(result.step_losses, outputs["policy mean loss"])
        for step in range(len(result.step_losses)):
            in_step = result.values["step"] == step
            assert not in_step.any() or float(result.values["weight"][in_step].sum()) == pytest.approx(1.0, abs=1e-12)
        if max(found.values()) > tolerance:
            wrong[case["name"]] = found
    assert num_cases and not wrong, f"{len(wrong)} of {num_cases} cases differ: {list(wrong.items())[:5]}"


# ---- rounds of the real trainer --------------------------------------------------------------------------------------

KEYS = RunKeys("trained")
KEEP = {"num_steps_per_rollout": 2, "keep_step_logprobs": True}
TIS = {"use_tis": True, "tis_level": "geometric", "tis_clip": 1.05}
ROUNDS: dict[str, dict[str, Any]] = {
    "gspo in two steps": {"advantage_estimator": "gspo", "use_kl_loss": True, "kl_loss_coef": 0.1, **TIS, **KEEP},
    "rloo with log-probs of the engine": {
        **{"advantage_estimator": "rloo", "use_rollout_logprobs": True, "num_steps_per_rollout": 2},
        **{"entropy_coef": 0.01, "calculate_per_token_loss": True},
    },
    "ppo": {"advantage_estimator": "ppo", "kl_coef": 0.1, "normalize_advantages": True, "gamma": 0.9, "lambd": 0.8},
    "reinforce_plus_plus_baseline": {
        "advantage_estimator": "reinforce_plus_plus_baseline",
        "normalize_advantages": True,
        "opd": {"opd_teacher_load": "teacher", "opd_kl_coef": 0.3},
        "opsm": {"opsm_delta": -1.0},
        **KEEP,
    },
    "divergence from a teacher": {
        "opd": {"opd_teacher_load": "teacher", "opd_kl_coef": 0.3, "opd_divergence": "jsd", "opd_top_k": 5},
        **KEEP,
    },
}


@pytest.fixture(scope="module")
def saved(world: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of three models."""
    directory = tmp_path_factory.mktemp("models")
    for seed, name in enumerate(("initial", "reference", "teacher")):
        build_models(SHAPE, TrainConfig(params_dtype="fp32", seed=seed)).policy.save(directory / name, None)
    return directory


def train(directory: Path, saved: Path, options: dict[str, Any]) -> Store:
    """Return the store of a run with one round, trained by the real trainer in this process."""
    train = {"lr": 1e-2, "params_dtype": "fp32", "max_tokens_per_gpu": 120, **options}
    batches = {"rollout_batch_size": 4, "n_samples_per_prompt": 4, "rm_type": "random"}
    convert = {"hf_checkpoint": "/nowhere"}
    run = {"run": KEYS.run, "num_rollout": 1}
    given = PostTrainConfig.model_validate({"run": run, "convert": convert, "train": train, "rollout": batches})
    store = Store(str(directory / "store"))
    assert create_run_record(store, resolve("train", given, store))
    commit_rollouts(store, KEYS, 1)
    config = given.train
    models = build_models(SHAPE, config)
    for name, is_used in (("reference", config.uses_reference), ("teacher", config.loads_teacher)):
        if is_used:
            load_auxiliary_model(models, name, saved / name)
    load_initial(models, saved / "initial")
    rollout = store.committed(KEYS.rollout_prefix(0))
    assert rollout is not None
    table = read_table(store, rollout)
    batch = Batch.from_table(table, needs_rewards=True)
    trained = train_rollout(models, batch, config, keep_tokens=True)
    attempt = store.new_attempt(KEYS.step_prefix(0))
    with store.writing(attempt) as out:
        columns = {name: spread(values, trained.batch, batch).numpy() for name, values in trained.tokens.items()}
        write_trained_tokens(out.path, table["sample_id"], batch.num_trained_tokens, columns)
    step = Commit(kind="step", run=KEYS.run, policy_version=1, attempt=attempt, files=out.files)
    step.state = {"steps": trained.steps, "fingerprint": {"device": "this one"}}
    store.commit(KEYS.step_prefix(0), step)
    return store


@pytest.mark.parametrize("name", ROUNDS)
def test_round_of_the_trainer_is_exported_and_recomputed(
    name: str, saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store, file = train(tmp_path, saved, ROUNDS[name]), tmp_path / "round.parquet"
    assert main(["export", KEYS.run, "--round", "0", "--output", str(file), "--store", store.root]) == 0
    exported = capsys.readouterr().out
    assert "all optimizer steps are recomputed" in exported and "DIFFERS" not in exported
    step = store.committed(KEYS.step_prefix(0))
    assert step is not None
    stored = read_round_file(file)
    result = recompute(stored)
    assert len(result.step_losses) == ROUNDS[name].get("num_steps_per_rollout", 1)
    losses = np.array([metrics["train/loss"] for metrics in step.state["steps"]])
    assert largest_difference(result.step_losses, losses) <= TOLERANCE and np.abs(losses).max() > 1e-4
    assert largest_difference(result.values["whitened"], stored.tokens["advantages"].numpy()) <= TOLERANCE

    assert main(["samples", str(file), "--limit", "3"]) == 0
    listed = capsys.readouterr().out
    assert listed.count("\n0-") == 3 and "DIFFERS" not in listed
    assert main(["samples", KEYS.run, "--explain", "0-7", "--store", store.root]) == 0
    from_store = capsys.readouterr().out
    assert main(["samples", str(file), "--explain", "0-7"]) == 0
    from_file = capsys.readouterr().out
    for text in (from_store, from_file):  # token ids and the policy versions are the only differences
        assert "sample 0-7, group 0-0" in text and f"{result.step_losses[0]:.9g}" in text
        assert f"--advantage-estimator {stored.config.advantage_estimator}" in text
        divergence = "--opd-divergence jsd --opd-top-k 5 --opd-jsd-beta 0.5 --opd-kl-coef 0.3"
        assert (divergence in " ".join(text.split())) == stored.config.distills_vocabulary
    assert from_store.splitlines()[:20] == from_file.splitlines()[:20]


def test_several_steps_without_their_logprobs_are_not_recomputed(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = train(tmp_path, saved, {"num_steps_per_rollout": 2, "use_kl_loss": True})
    assert main(["samples", KEYS.run, "--explain", "0-7", "--store", store.root]) == 0
    out = capsys.readouterr().out
    assert (
        "the loss cannot be recomputed: the round has not stored step_logprobs" in out and "--keep-step-logprobs" in out
    )
    assert "the advantage that differs most" in out and "DIFFERS" not in out


def test_changed_number_is_reported_with_exit_code_1(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = train(tmp_path, saved, {})
    stored = load_round(store, KEYS, 0)
    for change, code in ((0.0, 0), (1e-4, 1), (float("nan"), 1)):
        stored.about["steps"][0]["train/loss"] += change
        write_round_file(stored, tmp_path / "changed.parquet")
        assert main(["samples", str(tmp_path / "changed.parquet")]) == code
        assert ("DIFFERS" in capsys.readouterr().out) == (code == 1)


# ---- the text --------------------------------------------------------------------------------------------------------


def made_round(**options: Any) -> StoredRound:
    """Return a round of two groups of three samples, trained with these options."""
    case = {"options": options, "rollout": {"groups": [0, 0, 0, 1, 1, 1], "lengths": [5, 1, 3, 2, 6, 4]}, "seed": 1}
    return stored_round(case, compute(case))


def test_baseline_and_deviation_give_the_advantage() -> None:
    for name in ("grpo", "rloo"):
        stored = made_round(advantage_estimator=name)
        texts = texts_of(stored, recompute(stored), 2)
        mean, others, std = map(float, texts["baseline"].replace(";", ",").split(","))
        reward = float(texts["reward"])
        expected = (reward - mean) / (std + 1e-6) if name == "grpo" else reward - others
        assert float(texts["estimated"]) == pytest.approx(expected, abs=1e-5) and expected != 0
        rewards = [float(text) for text in texts["group"].split(", ")]
        assert sum(rewards) / len(rewards) == pytest.approx(mean, abs=1e-5) and rewards[2] == reward
        tokens, in_step = int(texts["denominator"].split()[0]), int(texts["denominator"].split(", ")[1].split()[0])
        assert tokens == stored.batch.num_trained_tokens[2] and in_step == len(stored.batch.sample_index)
        trajectories = int(texts["denominator"].split()[-2])
        assert float(texts["weight"]) == pytest.approx(1 / (tokens * trajectories), rel=1e-5)


def test_baseline_of_trajectories_gives_the_advantage() -> None:
    rollout = {"groups": [0] * 5, "lengths": [5, 1, 3, 2, 6], "trajectories": [0, 0, 1, 2, 2]}
    case = {"options": {"baseline_over_trajectories": True}, "rollout": rollout, "seed": 1}
    stored = stored_round(case, compute(case))
    rewards = stored.batch.rewards
    means = [rewards[:2].mean(), rewards[2], rewards[3:].mean()]
    texts = texts_of(stored, recompute(stored), 4)
    mean, others, std = map(float, texts["baseline"].replace(";", ",").split(","))
    assert (mean, others, std) == pytest.approx((np.mean(means), np.mean(means[:2]), np.std(means, ddof=1)), abs=1e-5)
    assert float(texts["estimated"]) == pytest.approx((means[2] - mean) / std, abs=1e-4) and std > 0


# ---- the file --------------------------------------------------------------------------------------------------------


def test_file_has_no_texts_token_ids_or_secrets(tmp_path: Path) -> None:
    stored = made_round()
    table = stored.samples
    for name in ("prompt", "response", "label", "metadata"):
        column = table.schema.get_field_index(name)
        table = table.set_column(column, name, pa.array(["a private text"] * len(table)))
    stored.about.update(api_key="hunter2hunter2", url="https://user:letmein99@host/x", secret="env:MY_KEY")
    private = StoredRound(table, stored.trained, stored.config, stored.about)
    write_round_file(private, tmp_path / "round.parquet")
    content = (tmp_path / "round.parquet").read_bytes()
    read = pq.read_table(tmp_path / "round.parquet")
    shown = content + repr(read.to_pydict()).encode() + read.schema.metadata[METADATA]
    assert b"env:MY_KEY" in shown
    for private_part in (b"private", b"hunter2", b"letmein99"):
        assert private_part not in shown
    assert {token for tokens in read["token_ids"].to_pylist() for token in tokens} == {0}
    assert recompute(read_round_file(tmp_path / "round.parquet")).step_losses == recompute(stored).step_losses


def test_other_files_are_refused(tmp_path: Path) -> None:
    good = tmp_path / "good.parquet"
    write_round_file(made_round(), good)
    table = pq.read_table(good)
    metadata = json.loads(table.schema.metadata[METADATA])

    def with_metadata(**changes: Any) -> pa.Table:
        values = {name: value for name, value in (metadata | changes).items() if value is not None}
        return table.replace_schema_metadata(table.schema.metadata | {METADATA: json.dumps(values).encode()})

    shorter = pa.array([[0.0]] * len(table), pa.list_(pa.float32()))
    column = table.schema.get_field_index("trainer_logprobs")
    wrong = {
        "it lacks b'penstock_round'": table.replace_schema_metadata({}),
        "it has format 9": with_metadata(format=9),
        "it lacks 'train'": with_metadata(train=None),
        "no_such_option": with_metadata(train={"no_such_option": 1}),
        "functions that a file names are not called": with_metadata(
            train={"custom_advantage_function_path": "os:system"}
        ),
        "trainer_logprobs does not have one value": table.set_column(column, "trainer_logprobs", shorter),
        "loss_mask": table.drop_columns("loss_mask"),
        "schema version": table.replace_schema_metadata({METADATA: table.schema.metadata[METADATA]}),
    }
    for message, content in wrong.items():
        pq.write_table(content, tmp_path / "bad.parquet")
        with pytest.raises(RunError) as error:
            read_round_file(tmp_path / "bad.parquet")
        assert message in str(error.value), (message, str(error.value))
    cut = good.read_bytes()
    for content in (b"", b"no Parquet", cut[: len(cut) // 2] + cut[len(cut) // 2 + 50 :]):
        (tmp_path / "bad.parquet").write_bytes(content)
        with pytest.raises(RunError, match="is not the file of a round"):
            read_round_file(tmp_path / "bad.parquet")
    with pytest.raises(FileNotFoundError):
        read_round_file(tmp_path / "absent.parquet")
