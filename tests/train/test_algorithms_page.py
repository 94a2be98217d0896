"""Run the examples of docs/algorithms.md."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from penstock.stages.train.algorithms.advantages import estimate_advantages
from penstock.stages.train.algorithms.losses import custom_loss, custom_weights, policy_loss
from tests.train.ragged import experience, options, ragged, sums
from tests.train.test_policy_losses import LENGTHS, made_up, tensors

PAGE = (Path(__file__).parents[2] / "docs" / "algorithms.md").read_text()


@pytest.fixture
def example(tmp_path: Path, request: pytest.FixtureRequest) -> str:
    """Return a file with the example of the parameter's name."""
    found = re.search(rf"```python {request.param}\n(.*?)```", PAGE, re.DOTALL)
    assert found is not None
    file = tmp_path / f"{request.param}.py"
    file.write_text(found[1])
    return str(file)


@pytest.mark.parametrize("example", ["advantages"], indirect=True)
def test_example_of_an_estimator_runs(example: str) -> None:
    found = estimate_advantages(experience(ragged(0)), options(custom_advantage_function_path=example)).advantages
    assert set(found.tolist()) == {0.0, 1.0}


@pytest.mark.parametrize("example", ["loss"], indirect=True)
def test_example_of_a_loss_runs(example: str) -> None:
    new, known, entropy = made_up(0)
    opts = options(custom_loss_function_path=example)
    loss, metrics = custom_loss(torch.tensor(new), torch.tensor(entropy), tensors(known), sums(LENGTHS), opts)
    assert loss.shape == (16,) and list(metrics) == ["train/sequence_logprob"]


@pytest.mark.parametrize("example", ["correction"], indirect=True)
def test_example_of_a_correction_runs(example: str) -> None:
    new, known, entropy = made_up(0, spread=0.1)
    opts = options(use_tis=True, custom_tis_function_path=example)
    loss, metrics = policy_loss(torch.tensor(new), torch.tensor(entropy), tensors(known), sums(LENGTHS), opts)
    assert torch.equal(loss == 0, metrics["train/mean_gap"] > 0.1) and 0 < (loss == 0).sum() < 16


@pytest.mark.parametrize("example", ["weights"], indirect=True)
def test_example_of_a_reducer_runs(example: str) -> None:
    trajectories = torch.tensor([0, 0, 1])
    assert custom_weights(example, trajectories, trajectories, 2).tolist() == [1 / 2048] * 3
