"""A user-defined function that changes a rollout before the update (--rollout-data-postprocess-path)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from penstock.stages.train.algorithms.advantages import estimate_advantages
from penstock.stages.train.algorithms.experience import Estimate, Experience
from penstock.stages.train.algorithms.postprocess import postprocess_rollout
from penstock.stages.train.batching import Batch, spread
from penstock.stages.train.config import TrainConfig
from penstock.stages.train.microbatches import compute_loss_weights
from penstock.storage.errors import PluginError

LENGTHS = [5, 4, 3, 6]
MASK = [[0, 0, 1, 0, 1], [0, 1, 1, 1], [0, 0, 0], [0, 0, 0, 1, 1, 1]]  # the second token of a response is a tool's


@pytest.fixture
def rollout() -> tuple[Batch, Experience, Estimate]:
    mask = np.concatenate([np.array(row, dtype=bool) for row in MASK])
    num_tokens, rng = int(mask.sum()), np.random.default_rng(0)
    batch = Batch(
        offsets=np.cumsum([0, *LENGTHS]),
        token_ids=np.arange(sum(LENGTHS)),
        loss_mask=mask,
        rollout_logprobs=rng.normal(size=len(mask)).astype(np.float32),
        rewards=np.array([1.0, 0.0, np.nan, 3.0]),
        group_index=np.array([0, 0, 1, 1]),
        trajectory_index=np.arange(4),
        rollout_id=7,
    )
    experience = Experience(
        sample_index=torch.from_numpy(batch.sample_index),
        rewards=torch.from_numpy(batch.rewards),
        group_index=torch.from_numpy(batch.group_index),
        rollout_logprobs=torch.from_numpy(batch.rollout_logprobs[batch.trained_positions]).double(),
        old_logprobs=torch.from_numpy(rng.normal(size=num_tokens)),
    )
    return batch, experience, estimate_advantages(experience, TrainConfig())


def run(body: str, rollout: tuple[Batch, Experience, Estimate], tmp_path: Path) -> tuple[Batch, Experience, Estimate]:
    path = tmp_path / f"f{abs(hash(body))}.py"
    path.write_text(f"def postprocess(args, rollout_id, rollout_data):\n    {body}\n")
    return postprocess_rollout(str(path), *rollout, TrainConfig())


def test_function_sees_responses_and_changes_nothing(rollout: tuple, tmp_path: Path) -> None:
    body = (
        "assert rollout_id == 7 and args.advantage_estimator == 'grpo'\n"
        "    assert rollout_data['response_lengths'] == [3, 3, 0, 3]\n"
        "    assert [mask.tolist() for mask in rollout_data['loss_masks']] == [[1, 0, 1], [1, 1, 1], [], [1, 1, 1]]\n"
        "    assert [len(tokens) for tokens in rollout_data['tokens']] == [5, 4, 3, 6]\n"
        "    assert rollout_data['log_probs'][0][1] == 0 and rollout_data['raw_reward'][3] == 3"
    )
    batch, experience, estimate = run(body, rollout, tmp_path)
    assert batch is rollout[0]
    assert torch.equal(experience.old_logprobs, rollout[1].old_logprobs)
    assert torch.equal(estimate.advantages, rollout[2].advantages)


def test_masked_tokens_are_as_if_the_rollout_had_recorded_them_so(rollout: tuple, tmp_path: Path) -> None:
    body = "rollout_data['loss_masks'][1][1] = 0; rollout_data['loss_masks'][3][:] = 0"
    batch, experience, estimate = run(body, rollout, tmp_path)
    mask = rollout[0].loss_mask.copy()
    mask[[7, 15, 16, 17]] = False
    expected = replace(rollout[0], loss_mask=mask)
    assert np.array_equal(batch.loss_mask, mask) and batch.num_trained_tokens.tolist() == [2, 2, 0, 0]
    kept = mask[rollout[0].trained_positions]
    assert torch.equal(experience.old_logprobs, rollout[1].old_logprobs[kept])
    assert torch.equal(experience.sample_index, torch.from_numpy(expected.sample_index))
    assert torch.equal(estimate.advantages, rollout[2].advantages[kept])
    config = TrainConfig(global_batch_size=4)
    assert torch.equal(compute_loss_weights(batch, config).weights, compute_loss_weights(expected, config).weights)
    assert spread(estimate.advantages, batch, rollout[0])[~torch.from_numpy(kept)].tolist() == [0.0] * 4


def test_changed_advantages_and_log_probs_are_read_back(rollout: tuple, tmp_path: Path) -> None:
    body = (
        "rollout_data['advantages'] = [2 * values for values in rollout_data['advantages']]\n"
        "    rollout_data['log_probs'][1][0] = -9.0"
    )
    batch, experience, estimate = run(body, rollout, tmp_path)
    assert batch is rollout[0] and torch.equal(estimate.advantages, 2 * rollout[2].advantages)
    assert experience.old_logprobs[2] == -9.0
    assert torch.equal(experience.old_logprobs[3:], rollout[1].old_logprobs[3:])


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return rollout_data", "returned a value"),
        ("rollout_data['metadata'] = []", "adds or removes 'metadata'"),
        ("rollout_data['rewards'][0] = 5.0", "changes 'rewards' of rollout_data, which the update does not read"),
        ("rollout_data['loss_masks'][0][1] = 1", "sets loss_masks to a value other than 0 or 1"),
        ("rollout_data['advantages'][0] = rollout_data['advantages'][0][:1]", r"'advantages' .* the shape \[1\]"),
        ("rollout_data['advantages'][0][0] = float('inf')", "not finite"),
        ("rollout_data['advantages'] = []", "without one tensor for each of 4 samples"),
    ],
)
def test_change_that_is_not_read_back_is_refused(body: str, message: str, rollout: tuple, tmp_path: Path) -> None:
    with pytest.raises(PluginError, match=message) as raised:
        run(body, rollout, tmp_path)
    assert "postprocess of" in str(raised.value)


def test_log_probs_of_the_engine_are_one_entry_with_use_rollout_logprobs(rollout: tuple, tmp_path: Path) -> None:
    batch, experience, estimate = rollout
    engine = replace(experience, old_logprobs=experience.rollout_logprobs)
    body = "assert 'log_probs' not in rollout_data; rollout_data['rollout_log_probs'][1][0] = -9.0"
    _, changed, _ = run(body, (batch, engine, estimate), tmp_path)
    assert changed.old_logprobs[2] == changed.rollout_logprobs[2] == -9.0


def test_log_probs_of_the_teacher_cannot_change_after_the_advantages(rollout: tuple, tmp_path: Path) -> None:
    batch, experience, estimate = rollout
    distilled = replace(experience, teacher_logprobs=torch.zeros_like(experience.rollout_logprobs))
    body = "rollout_data['loss_masks'][1][0] = 0"
    assert len(run(body, (batch, distilled, estimate), tmp_path)[1].teacher_logprobs) == 7
    with pytest.raises(PluginError, match=r"changes 'teacher_log_probs' .* which the update does not read"):
        run("rollout_data['teacher_log_probs'][0][0] = -1.0", (batch, distilled, estimate), tmp_path)


Outcome = tuple[str, str]  # hash of the results, or description of the error


@pytest.fixture
def set_other_rank(monkeypatch: pytest.MonkeyPatch) -> Callable[[Outcome | None], None]:
    """Sets the outcome of rank 1, while this process is rank 0; None: the same as that of rank 0."""

    def set_outcome(other: Outcome | None) -> None:
        def all_gather(outcomes: list[Outcome], own: Outcome) -> None:
            outcomes[:] = [own, own if other is None else other]

        monkeypatch.setattr(torch.distributed, "all_gather_object", all_gather)

    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    return set_outcome


@pytest.mark.parametrize(
    ("body", "other", "error", "message"),
    [
        ("pass", ("0", ""), PluginError, "different results on the 2 ranks .*arguments alone"),
        ("pass", ("", "OSError: x"), PluginError, r"fails on rank 1 .*\(OSError: x\).*arguments alone"),
        ("open('/absent')", ("0", ""), PluginError, r"fails on rank 0 .*FileNotFoundError.*arguments alone"),
        ("return 1", ("0", ""), PluginError, "fails on rank 0 .*returned a value.*arguments alone"),
        ("open('/absent')", None, FileNotFoundError, "/absent"),
        ("return 1", None, PluginError, "^postprocess of .* returned a value"),
    ],
)
def test_ranks_that_differ_are_named_in_the_error(
    body: str,
    other: Outcome | None,
    error: type[Exception],
    message: str,
    rollout: tuple,
    tmp_path: Path,
    set_other_rank: Callable[[Outcome | None], None],
) -> None:
    set_other_rank(None)
    run("pass", rollout, tmp_path)
    set_other_rank(other)
    with pytest.raises(error, match=message):
        run(body, rollout, tmp_path)


def test_advantages_that_differ_between_ranks_are_refused(
    rollout: tuple, tmp_path: Path, set_other_rank: Callable[[Outcome | None], None]
) -> None:
    set_other_rank(("0", ""))
    path = tmp_path / "own.py"
    path.write_text("def advantages(experience, options): return experience.old_logprobs\n")
    with pytest.raises(PluginError, match=r"own\.py .*rank.*arguments alone"):
        estimate_advantages(rollout[1], TrainConfig(custom_advantage_function_path=str(path)))
