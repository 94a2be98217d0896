"""How the trainer comes to hold a policy, with a trainer whose weights are the list of rollouts it was trained on."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from stages.train.actor import TrainActor
from stages.train.config import TrainConfig
from stages.train.policy import ReplayError, ensure_policy, save_checkpoint, train_round
from stages.train.spec import PolicyState, Trained
from storage.refs import CheckpointRef, Commit, RunKeys, commit_key
from storage.store import Store

KEYS = RunKeys("run")
FINGERPRINT = {"cpu": "this one", "bit_exact": True}


class ListTrainer:
    """Stands where a TrainerGroup would."""

    def __init__(self, fingerprint: dict | None = None) -> None:
        self.spec = SimpleNamespace(config=TrainConfig())
        self.weights: list[str] = []
        self.held: PolicyState | None = None
        self.calls: list[str] = []
        self.numerics = fingerprint or FINGERPRINT
        self.gradient = 1.0

    def hold(self, version: int, clean: bool = True, run: str = "run") -> None:
        self.held = PolicyState(run=run, incarnation="i", version=version, clean=clean)

    def ensure_started(self) -> None: ...

    def state(self) -> PolicyState | None:
        return self.held

    def digest(self) -> dict[str, str]:
        return {"weights": "+".join(self.weights)}

    def fingerprint(self) -> dict:
        return self.numerics

    def load(self, base: str | None, checkpoint: str | None, version: int) -> None:
        assert base or checkpoint
        self.weights = json.loads((Path(checkpoint or base or "") / "weights.json").read_text())
        self.calls.append(f"load {version}")
        self.hold(version)

    def train(self, rollout: Commit, version: int) -> Trained:
        assert self.held is not None and self.held.clean and self.held.version == version == rollout.index
        self.weights = [*self.weights, f"r{rollout.index}"]
        self.calls.append(f"train {version}")
        self.hold(version + 1)
        metrics = {"train/loss": 0.5, "train/grad_norm": self.gradient}
        return Trained(metrics=metrics, steps=[metrics], seconds={"update": 0.0}, digest=self.digest(), fingerprint=self.numerics)

    def save(self, directory: str) -> None:
        (Path(directory) / "weights.json").write_text(json.dumps(self.weights))


def write(store: Store, prefix: str, kind: str, index: int, content: list[str]) -> None:
    attempt = store.new_attempt(prefix)
    with store.writing(attempt) as out:
        (out.path / "weights.json").write_text(json.dumps(content))
    store.commit(prefix, Commit(kind=kind, index=index, attempt=attempt, files=out.files))


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """A run with five committed rollouts."""
    store = Store(str(tmp_path))
    write(store, "models/base", "model", 0, ["base"])
    for rollout_id in range(5):
        write(store, KEYS.rollout(rollout_id), "rollout", rollout_id, [])
    return store


BASE = CheckpointRef(key=commit_key("models/base"), uri="", format="torch_dist", policy_version=0)


@pytest.fixture
def trained(store: Store) -> Store:
    """The run after four rounds, with a checkpoint of version 2."""
    group = ListTrainer()
    for rollout_id in range(4):
        train_round(store, KEYS, group, rollout_id, base=BASE)
        if rollout_id == 1:
            save_checkpoint(store, KEYS, group, 2, base=BASE)
    assert group.calls == ["load 0", "train 0", "train 1", "train 2", "train 3"]
    return store


def weights_of(version: int) -> list[str]:
    return ["base", *(f"r{r}" for r in range(version))]


@pytest.mark.parametrize("version", range(5))
@pytest.mark.parametrize(
    "held", [None, (3, False, "run"), (2, True, "other"), (0, True, "run"), (1, True, "run"), (4, True, "run")]
)
def test_whatever_is_held_the_wanted_version_comes_of_it(trained: Store, version: int, held: tuple | None) -> None:
    group = ListTrainer()
    if held is not None:
        group.hold(*held)
        group.weights = weights_of(held[0]) if held[1] and held[2] == "run" else ["rubbish"]
    ensure_policy(trained, KEYS, group, version, base=BASE)
    assert group.weights == weights_of(version)
    assert group.held is not None and group.held.version == version and group.held.clean


def test_the_newest_checkpoint_that_is_not_beyond_is_loaded_and_only_the_rest_replayed(trained: Store) -> None:
    group = ListTrainer()
    ensure_policy(trained, KEYS, group, 3, base=BASE)
    ensure_policy(trained, KEYS, group, 3, base=BASE)
    assert group.calls == ["load 2", "train 2"]
    ensure_policy(trained, KEYS, group, 1, base=BASE)
    assert group.calls[2:] == ["load 0", "train 0"]


def test_a_committed_round_is_not_trained_again(trained: Store) -> None:
    group = ListTrainer()
    commit = train_round(trained, KEYS, group, 1, base=BASE)
    assert commit.state["digest"] == {"weights": "base+r0+r1"} and group.calls == []
    assert save_checkpoint(trained, KEYS, group, 2, base=BASE).policy_version == 2 and group.calls == []


def test_an_uncommitted_step_that_an_actor_has_applied_is_undone(trained: Store) -> None:
    group = ListTrainer()
    group.hold(5)
    group.weights = [*weights_of(4), "zombie"]
    assert train_round(trained, KEYS, group, 4, base=BASE).state["digest"] == {"weights": "+".join(weights_of(5))}


def test_replay_must_give_the_committed_weights_under_the_same_fingerprint(trained: Store) -> None:
    group = ListTrainer()
    group.hold(2)
    group.weights = ["rubbish"]
    with pytest.raises(ReplayError, match=r"000002 again gave other weights .* 1 of 1 tensors differ, first weights"):
        ensure_policy(trained, KEYS, group, 3, base=BASE)


def test_under_another_fingerprint_the_metrics_must_agree_within_the_tolerance(trained: Store) -> None:
    group = ListTrainer({"cpu": "another", "bit_exact": True})
    group.hold(2)
    group.weights, group.gradient = ["slightly other"], 1.05
    ensure_policy(trained, KEYS, group, 3, base=BASE)
    group.gradient = 1.5
    with pytest.raises(ReplayError, match=r"train/grad_norm 1.5, committed is 1: more than other hardware"):
        ensure_policy(trained, KEYS, group, 4, base=BASE)


def test_a_missing_rollout_is_named(store: Store) -> None:
    with pytest.raises(ValueError, match=r"steps/000000.commit.json is not committed"):
        ensure_policy(store, KEYS, ListTrainer(), 1, base=BASE)


def test_a_rank_is_unclean_while_its_weights_change_and_after_a_failure(store: Store) -> None:
    actor = TrainActor(SimpleNamespace(run="run", store=store.uri, store_options={}), 0, 1, "i", 1)
    assert not actor.state().clean
    with actor._becoming(3):
        assert not actor.state().clean
    assert actor.state().clean and actor.state().version == 3
    with pytest.raises(ZeroDivisionError), actor._becoming(4):
        raise ZeroDivisionError
    assert not actor.state().clean and actor.state().version == 3
