"""Checks that hold for every run, on a CPU and on a GPU, and commands in the process of a test."""

from collections.abc import Callable

import pytest

from penstock.flows import cli
from penstock.storage.commit import RunKeys
from penstock.storage.store import Store


@pytest.fixture
def agrees() -> Callable[..., None]:
    """Checks that in every round trainer and engine held the same policy, and that the reference stayed where the
    run began."""

    def check(store: Store, keys: RunKeys, *, num_rounds: int, gap: float) -> None:
        for r in range(num_rounds):
            rollout, step = store.committed(keys.rollout_prefix(r)), store.committed(keys.step_prefix(r))
            assert rollout is not None and rollout.policy_version == r
            assert step is not None and step.policy_version == r + 1
            assert step.summary["train/train_rollout_logprob_abs_diff"] < gap
            kl = step.summary["train/kl_loss"]
            assert kl < 1e-8 if r == 0 else kl > 1e-6, f"round {r}: KL {kl}"

    return check


@pytest.fixture
def printed(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs `penstock` in this process and checks its exit code. Returns its output, or its errors if it fails."""

    def run(*words: str, code: int = 0) -> str:
        capsys.readouterr()
        exit_code = cli.main(words)
        out, err = capsys.readouterr()
        assert exit_code == code, err
        return err if code else out

    return run
