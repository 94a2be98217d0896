"""Restoring policies, with a trainer whose weights are the list of rollouts that it was trained on."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.stages.train.actor import TrainActor
from penstock.stages.train.config import TrainConfig
from penstock.stages.train.diagnostics.config import DiagnosticsConfig
from penstock.stages.train.restore import PolicyRestorer, ReplayError, newest_checkpoint
from penstock.stages.train.spec import FencedError, PolicyState, SaveResult, TrainResult
from penstock.storage.commit import CheckpointRef, Commit, FileRecord, RunKeys, commit_key
from penstock.storage.errors import RunError
from penstock.storage.store import Store

KEYS = RunKeys("run")
FINGERPRINT = {"cpu": "this one", "bit_exact": True}


class ListTrainer:
    """Replaces a TrainerGroup."""

    def __init__(self, store: Store, fingerprint: dict | None = None) -> None:
        self.store = store
        self.spec = SimpleNamespace(config=TrainConfig())
        self.weights: list[str] = []
        self.held: PolicyState | None = None
        self.calls: list[str] = []
        self.numerics = fingerprint or FINGERPRINT
        self.gradient = 1.0
        self.prefix = "train/"
        self.more: dict[str, str] = {}  # further digests, e.g. of a critic
        self.moments = self.damage = 0
        self.lock = nullcontext()

    def hold(self, version: int, clean: bool = True, run: str = "run") -> None:
        self.held = PolicyState(run=run, incarnation="i", version=version, clean=clean)

    def ensure_started(self) -> None: ...

    def policy_state(self) -> PolicyState | None:
        return self.held

    def digest(self) -> dict[str, str]:
        return {"weights": "+".join(self.weights), **self.more}

    def fingerprint(self) -> dict:
        return self.numerics

    def optimizer_digest(self) -> dict[str, str]:
        return {"moments": str(self.moments)}

    def load(self, version: int, base: Commit | None, checkpoint: Commit | None, auxiliary: dict[str, Commit]) -> None:
        commit = checkpoint or base
        assert commit is not None
        with self.store.reading(commit) as directory:
            self.weights, self.moments = json.loads((directory / "weights.json").read_text())
        self.moments += self.damage
        self.calls.append(f"load {version}")
        self.hold(version)

    def train(self, rollout: Commit, version: int, attempt: str | None = None, earlier: object = ()) -> TrainResult:
        assert self.held is not None and self.held.clean and self.held.version == version == rollout.index
        self.weights = [*self.weights, f"r{rollout.index}"]
        self.calls.append(f"train {version}")
        self.hold(version + 1)
        metrics = {f"{self.prefix}loss": 0.5, f"{self.prefix}grad_norm": self.gradient}
        return TrainResult(
            metrics=metrics,
            steps=[metrics],
            seconds={"update": 0.0},
            digest=self.digest(),
            fingerprint=self.numerics,
            sample_uses=[(1, 4)],
            files=self.write(attempt) if attempt is not None else [],
        )

    def write(self, attempt: str) -> list[FileRecord]:
        with self.store.writing(attempt) as out:
            (out.path / "tokens").write_text("tokens")
        return out.files

    def save(self, attempt: str) -> SaveResult:
        with self.store.writing(attempt) as out:
            (out.path / "weights.json").write_text(json.dumps([self.weights, self.moments]))
        return SaveResult(files=out.files, digest=self.digest(), optimizer_digest=self.optimizer_digest())


def write(store: Store, prefix: str, kind: str, index: int, content: list[str]) -> None:
    attempt = store.new_attempt(prefix)
    with store.writing(attempt) as out:
        (out.path / "weights.json").write_text(json.dumps([content, 0]))
    store.commit(prefix, Commit(kind=kind, index=index, attempt=attempt, files=out.files))


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """A run with five committed rollouts."""
    store = Store(str(tmp_path))
    write(store, "models/base", "model", 0, ["base"])
    for rollout_id in range(5):
        write(store, KEYS.rollout_prefix(rollout_id), "rollout", rollout_id, [])
    return store


BASE = CheckpointRef(key=commit_key("models/base"), uri="", format="torch_dist", policy_version=0)


def restorer(store: Store, group: Any) -> PolicyRestorer:
    return PolicyRestorer(store, KEYS, group, BASE)


@pytest.fixture
def trained(store: Store) -> Store:
    """The run after four rounds, with a checkpoint of version 2."""
    group = ListTrainer(store)
    for rollout_id in range(4):
        restorer(store, group).train_round(rollout_id)
        if rollout_id == 1:
            restorer(store, group).save_checkpoint(2)
    assert group.calls == ["load 0", "train 0", "train 1", "train 2", "train 3"]
    return store


def weights_of(version: int) -> list[str]:
    return ["base", *(f"r{r}" for r in range(version))]


@pytest.mark.parametrize(
    "held", [None, (3, False, "run"), (2, True, "other"), (0, True, "run"), (1, True, "run"), (4, True, "run")]
)
def test_restore_reaches_every_version_from_any_state(trained: Store, held: tuple | None) -> None:
    for version in range(5):
        group = ListTrainer(trained)
        if held is not None:
            group.hold(*held)
            group.weights = weights_of(held[0]) if held[1] and held[2] == "run" else ["rubbish"]
        restorer(trained, group).restore(version)
        assert group.weights == weights_of(version)
        assert group.held is not None and group.held.version == version and group.held.clean


def test_restore_loads_the_newest_earlier_checkpoint_and_replays_only_the_rest(trained: Store) -> None:
    group = ListTrainer(trained)
    restorer(trained, group).restore(3)
    restorer(trained, group).restore(3)
    assert group.calls == ["load 2", "train 2"]
    restorer(trained, group).restore(1)
    assert group.calls[2:] == ["load 0", "train 0"]


def test_restore_skips_rounds_before_a_newer_checkpoint(trained: Store) -> None:
    group = ListTrainer(trained)
    group.hold(1)
    group.weights = weights_of(1)
    restorer(trained, group).restore(3)
    assert group.calls == ["load 2", "train 2"] and group.weights == weights_of(3)


def test_a_committed_round_is_not_trained_again(trained: Store) -> None:
    group = ListTrainer(trained)
    commit = restorer(trained, group).train_round(1)
    assert commit.state["digest"] == {"weights": "base+r0+r1"} and group.calls == []
    assert commit.state["sample_uses"] == [[1, 4]]
    assert restorer(trained, group).save_checkpoint(2).policy_version == 2 and group.calls == []


def test_an_uncommitted_step_of_an_actor_is_undone(trained: Store) -> None:
    group = ListTrainer(trained)
    group.hold(5)
    group.weights = [*weights_of(4), "zombie"]
    assert restorer(trained, group).train_round(4).state["digest"] == {"weights": "+".join(weights_of(5))}


def test_replay_with_other_weights_and_equal_fingerprint_fails(trained: Store) -> None:
    group = ListTrainer(trained)
    group.hold(2)
    group.weights = ["rubbish"]
    with pytest.raises(ReplayError, match=r"000002 .* 1 of 1 tensors differ, first weights"):
        restorer(trained, group).restore(3)


def test_a_critic_only_round_is_compared_by_the_metrics_of_the_critic(store: Store) -> None:
    first, other = ListTrainer(store), ListTrainer(store, {"cpu": "another", "bit_exact": True})
    first.prefix = other.prefix = "train/critic-"
    restorer(store, first).train_round(0)
    restorer(store, other).load_checkpoint(0)
    other.gradient = 2.0
    far = restorer(store, other).replay_round(0)
    assert far.verdict == "DIFFERS" and "train/critic-grad_norm" in far.why


def test_a_missing_rollout_is_named(store: Store) -> None:
    with pytest.raises(RunError, match=r"steps/000000.commit.json"):
        restorer(store, ListTrainer(store)).restore(1)


def test_a_checkpoint_that_loads_another_optimizer_state_fails(trained: Store) -> None:
    group = ListTrainer(trained)
    group.damage = 1  # one moment is changed, all weights are as saved
    with pytest.raises(ReplayError, match=r"000002 .* optimizer state .* first moments"):
        restorer(trained, group).restore(2)
    group.numerics = {"cpu": "another", "bit_exact": True}
    restorer(trained, group).restore(2)


def test_a_fork_may_add_or_drop_a_critic(trained: Store) -> None:
    group = ListTrainer(trained)
    commit = trained.committed(KEYS.checkpoint_prefix(2))
    assert commit is not None
    group.more = {"critic.weights": "new"}
    restorer(trained, group).restore(2)
    group.hold(0)
    group.damage = 1
    with pytest.raises(ReplayError, match="optimizer state"):
        restorer(trained, group).load_checkpoint(2)
    saved = commit.model_copy(
        update={"state": commit.state | {"digest": commit.state["digest"] | {"critic.weights": "old"}}}
    )
    trained.delete([commit_key(KEYS.checkpoint_prefix(2))])
    trained.commit(KEYS.checkpoint_prefix(2), saved)
    group.more, group.damage = {}, 0
    restorer(trained, group).load_checkpoint(2)
    group.more = {"critic.weights": "new"}
    with pytest.raises(ReplayError, match=r"weights .* first critic\.weights"):
        restorer(trained, group).load_checkpoint(2)


def test_replay_round_reports_verdict_and_difference(trained: Store) -> None:
    group = ListTrainer(trained)
    restorer(trained, group).load_checkpoint(newest_checkpoint(trained, KEYS, 3))
    same = restorer(trained, group).replay_round(2)
    assert (same.verdict, same.why, same.digest) == ("equal bit for bit", "", {"weights": "base+r0+r1+r2"})
    group.gradient = 1.0000001  # equal weights, but another metric
    assert restorer(trained, group).replay_round(3).verdict == "DIFFERS"

    group.numerics = {"cpu": "another", "bit_exact": True}
    restorer(trained, group).load_checkpoint(0)
    assert restorer(trained, group).replay_round(0).verdict == "within tolerance"
    group.gradient = 2.0
    far = restorer(trained, group).replay_round(1)
    assert far.verdict == "DIFFERS" and "train/grad_norm" in far.why


def actor_of(store: Store) -> TrainActor:
    spec = SimpleNamespace(diagnostics=DiagnosticsConfig(), run="run", engine=None, store=store.uri, store_options={})
    return TrainActor(SimpleNamespace(spec=spec, hash="h"), 0, "i", "first driver")


def test_a_rank_rejects_calls_of_a_driver_that_does_not_lead(store: Store) -> None:
    actor = actor_of(store)
    assert actor.call("first driver", "state").version == 0
    for method in ("state", "train", "save", "publish", "load"):
        with pytest.raises(FencedError, match="'run'"):
            actor.call("second driver", method)


def test_a_rank_is_not_clean_during_a_change_of_weights_and_after_a_failure(store: Store) -> None:
    actor = actor_of(store)
    assert not actor.state().clean
    with actor._changing_weights_to(3):
        assert not actor.state().clean
    assert actor.state().clean and actor.state().version == 3
    with pytest.raises(ZeroDivisionError), actor._changing_weights_to(4):
        raise ZeroDivisionError
    assert not actor.state().clean and actor.state().version == 3
