"""How the trainer comes to hold a policy, with a trainer whose weights are the list of rollouts it was trained on."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest

from stages.train.actor import TrainActor
from stages.train.config import TrainConfig
from stages.train.policy import (
    ReplayError,
    ensure_policy,
    load,
    newest_checkpoint,
    replay_round,
    save_checkpoint,
    train_round,
)
from stages.train.spec import Fenced, PolicyState, Saved, Trained
from storage.refs import CheckpointRef, Commit, RunKeys, commit_key
from storage.store import Store

KEYS = RunKeys("run")
FINGERPRINT = {"cpu": "this one", "bit_exact": True}


class ListTrainer:
    """Stands where a TrainerGroup would."""

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
        self.alone = nullcontext()

    def hold(self, version: int, clean: bool = True, run: str = "run") -> None:
        self.held = PolicyState(run=run, incarnation="i", version=version, clean=clean)

    def ensure_started(self) -> None: ...

    def state(self) -> PolicyState | None:
        return self.held

    def digest(self) -> dict[str, str]:
        return {"weights": "+".join(self.weights), **self.more}

    def fingerprint(self) -> dict:
        return self.numerics

    def optimizer_digest(self) -> dict[str, str]:
        return {"moments": str(self.moments)}

    def load(self, version: int, base: Commit | None, checkpoint: Commit | None, beside: dict[str, Commit]) -> None:
        commit = checkpoint or base
        assert commit is not None
        with self.store.reading(commit) as directory:
            self.weights, self.moments = json.loads((directory / "weights.json").read_text())
        self.moments += self.damage
        self.calls.append(f"load {version}")
        self.hold(version)

    def train(self, rollout: Commit, version: int) -> Trained:
        assert self.held is not None and self.held.clean and self.held.version == version == rollout.index
        self.weights = [*self.weights, f"r{rollout.index}"]
        self.calls.append(f"train {version}")
        self.hold(version + 1)
        metrics = {f"{self.prefix}loss": 0.5, f"{self.prefix}grad_norm": self.gradient}
        return Trained(metrics=metrics, steps=[metrics], seconds={"update": 0.0}, digest=self.digest(), fingerprint=self.numerics)

    def save(self, attempt: str) -> Saved:
        with self.store.writing(attempt) as out:
            (out.path / "weights.json").write_text(json.dumps([self.weights, self.moments]))
        return Saved(files=out.files, digest=self.digest(), optimizer_digest=self.optimizer_digest())


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
        write(store, KEYS.rollout(rollout_id), "rollout", rollout_id, [])
    return store


BASE = CheckpointRef(key=commit_key("models/base"), uri="", format="torch_dist", policy_version=0)


@pytest.fixture
def trained(store: Store) -> Store:
    """The run after four rounds, with a checkpoint of version 2."""
    group = ListTrainer(store)
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
    group = ListTrainer(trained)
    if held is not None:
        group.hold(*held)
        group.weights = weights_of(held[0]) if held[1] and held[2] == "run" else ["rubbish"]
    ensure_policy(trained, KEYS, group, version, base=BASE)
    assert group.weights == weights_of(version)
    assert group.held is not None and group.held.version == version and group.held.clean


def test_the_newest_checkpoint_that_is_not_beyond_is_loaded_and_only_the_rest_replayed(trained: Store) -> None:
    group = ListTrainer(trained)
    ensure_policy(trained, KEYS, group, 3, base=BASE)
    ensure_policy(trained, KEYS, group, 3, base=BASE)
    assert group.calls == ["load 2", "train 2"]
    ensure_policy(trained, KEYS, group, 1, base=BASE)
    assert group.calls[2:] == ["load 0", "train 0"]


def test_a_committed_round_is_not_trained_again(trained: Store) -> None:
    group = ListTrainer(trained)
    commit = train_round(trained, KEYS, group, 1, base=BASE)
    assert commit.state["digest"] == {"weights": "base+r0+r1"} and group.calls == []
    assert save_checkpoint(trained, KEYS, group, 2, base=BASE).policy_version == 2 and group.calls == []


def test_an_uncommitted_step_that_an_actor_has_applied_is_undone(trained: Store) -> None:
    group = ListTrainer(trained)
    group.hold(5)
    group.weights = [*weights_of(4), "zombie"]
    assert train_round(trained, KEYS, group, 4, base=BASE).state["digest"] == {"weights": "+".join(weights_of(5))}


def test_replay_must_give_the_committed_weights_under_the_same_fingerprint(trained: Store) -> None:
    group = ListTrainer(trained)
    group.hold(2)
    group.weights = ["rubbish"]
    with pytest.raises(ReplayError, match=r"000002 again gave other weights .* 1 of 1 tensors differ, first weights"):
        ensure_policy(trained, KEYS, group, 3, base=BASE)


def test_under_another_fingerprint_the_metrics_must_agree_within_the_tolerance(trained: Store) -> None:
    group = ListTrainer(trained, {"cpu": "another", "bit_exact": True})
    group.hold(2)
    group.weights, group.gradient = ["slightly other"], 1.05
    ensure_policy(trained, KEYS, group, 3, base=BASE)
    group.gradient = 1.5
    with pytest.raises(ReplayError, match=r"train/grad_norm 1.5, committed is 1: more than other hardware"):
        ensure_policy(trained, KEYS, group, 4, base=BASE)


def test_a_round_of_the_critic_alone_is_compared_by_what_it_has_trained(store: Store) -> None:
    first, other = ListTrainer(store), ListTrainer(store, {"cpu": "another", "bit_exact": True})
    first.prefix = other.prefix = "train/critic-"
    train_round(store, KEYS, first, 0, base=BASE)
    load(store, KEYS, other, 0, base=BASE)
    other.gradient = 2.0
    far = replay_round(store, KEYS, other, 0)
    assert far.verdict == "DIFFERS" and far.why.startswith("train/critic-grad_norm 2, committed is 1")


def test_a_missing_rollout_is_named(store: Store) -> None:
    with pytest.raises(ValueError, match=r"steps/000000.commit.json is not committed"):
        ensure_policy(store, KEYS, ListTrainer(store), 1, base=BASE)


def test_a_checkpoint_whose_optimizer_state_loads_differently_is_refused(trained: Store) -> None:
    group = ListTrainer(trained)
    group.damage = 1  # one moment comes back changed, all weights as saved
    with pytest.raises(ReplayError, match=r"000002 loads other optimizer state than was saved: 1 of 1 .* first moments"):
        ensure_policy(trained, KEYS, group, 2, base=BASE)
    group.numerics = {"cpu": "another", "bit_exact": True}
    ensure_policy(trained, KEYS, group, 2, base=BASE)


def test_a_fork_may_begin_to_have_a_critic_or_have_one_no_longer(trained: Store) -> None:
    group = ListTrainer(trained)
    commit = trained.committed(KEYS.checkpoint(2))
    assert commit is not None
    group.more = {"critic.weights": "new"}
    ensure_policy(trained, KEYS, group, 2, base=BASE)
    group.hold(0)
    group.damage = 1
    with pytest.raises(ReplayError, match="loads other optimizer state"):
        load(trained, KEYS, group, 2, base=BASE)
    saved = commit.model_copy(update={"state": commit.state | {"digest": commit.state["digest"] | {"critic.weights": "old"}}})
    trained.delete([commit_key(KEYS.checkpoint(2))])
    trained.commit(KEYS.checkpoint(2), saved)
    group.more, group.damage = {}, 0
    load(trained, KEYS, group, 2, base=BASE)
    group.more = {"critic.weights": "new"}
    with pytest.raises(ReplayError, match=r"loads other weights .* first critic\.weights"):
        load(trained, KEYS, group, 2, base=BASE)


def test_a_replayed_round_is_equal_or_near_or_differs_and_says_why(trained: Store) -> None:
    group = ListTrainer(trained)
    load(trained, KEYS, group, newest_checkpoint(trained, KEYS, 3), base=BASE)
    same = replay_round(trained, KEYS, group, 2)
    assert (same.verdict, same.why, same.digest) == ("equal bit for bit", "", {"weights": "base+r0+r1+r2"})
    group.gradient = 1.0000001  # the same weights but another number
    assert replay_round(trained, KEYS, group, 3).verdict == "DIFFERS"

    group.numerics = {"cpu": "another", "bit_exact": True}
    load(trained, KEYS, group, 0, base=BASE)
    assert replay_round(trained, KEYS, group, 0).verdict == "within tolerance"
    group.gradient = 2.0
    far = replay_round(trained, KEYS, group, 1)
    assert far.verdict == "DIFFERS" and far.why.startswith("train/grad_norm 2, committed is 1")


def actor_of(store: Store) -> TrainActor:
    spec = SimpleNamespace(run="run", store=store.uri, store_options={})
    return TrainActor(SimpleNamespace(spec=spec, hash="h"), 0, "i", "first driver")


def test_a_rank_obeys_only_the_driver_that_leads(store: Store) -> None:
    actor = actor_of(store)
    assert actor.call("first driver", "state").version == 0
    for method in ("state", "train", "save", "publish", "load"):
        with pytest.raises(Fenced, match="another driver has taken over the trainer of run 'run'"):
            actor.call("second driver", method)


def test_a_rank_is_unclean_while_its_weights_change_and_after_a_failure(store: Store) -> None:
    actor = actor_of(store)
    assert not actor.state().clean
    with actor._becoming(3):
        assert not actor.state().clean
    assert actor.state().clean and actor.state().version == 3
    with pytest.raises(ZeroDivisionError), actor._becoming(4):
        raise ZeroDivisionError
    assert not actor.state().clean and actor.state().version == 3
