"""Which policy the trainer holds, and how it comes to hold another: the newest checkpoint, then the committed rollouts after it.

The store is the only judge. A step commit has no weights behind it; it says that training this rollout gives weights with this
digest, so weights can be had again at any time by replaying, without generation. A replay is held against its commit: bit for bit
where the numerics fingerprints are equal, within `TOLERANCE` of the metrics otherwise. Who calls this, and when, is the flow's.

Whatever takes several calls of the group holds `group.alone`: a checkpoint is saved by another thread, beside the next rollout.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import Any, Literal

from stages.train.config import TrainConfig
from stages.train.group import TrainerGroup
from stages.train.spec import Beside, Trained
from storage.errors import RunError
from storage.faults import reach
from storage.refs import CheckpointRef, Commit, Frozen, RunKeys, StepRef, commit_key
from storage.store import Store

TOLERANCE = {  # absolute, relative; for replays on other hardware or layouts, of what a round has trained
    "train/loss": (0.02, 0.05),
    "train/grad_norm": (0.02, 0.10),
    "train/critic-loss": (0.02, 0.05),
    "train/critic-grad_norm": (0.02, 0.10),
}

Progress = Callable[[str], None]


class ReplayError(RuntimeError):
    """Training a committed rollout again gave other weights than the run has committed."""


def ensure_policy(
    store: Store, keys: RunKeys, group: TrainerGroup, version: int, *, base: CheckpointRef, on_progress: Progress | None = None
) -> None:
    """Make every rank hold policy `version` of the run, cleanly.

    Args:
        store: where the run lies.
        keys: of the run.
        group: the trainer; started if it is not running, started anew if its ranks disagree.
        version: number of trained rounds; all of them must be committed.
        base: the weights of version 0.
        on_progress: told in a sentence what is restored and replayed.

    Raises:
        ReplayError: a replayed round differs from its commit.
        RunError: a round before `version` is not committed.
    """
    with group.alone:
        state = group.state()
        held = state.version if state is not None and state.run == keys.run and state.clean else None
        if held == version:
            return
        if held is None or held > version:
            held = newest_checkpoint(store, keys, version)
            load(store, keys, group, held, base=base, on_progress=on_progress)
        for rollout_id in range(held, version):
            if on_progress is not None:
                on_progress(f"replaying training of rollout {rollout_id} ({rollout_id - held + 1} of {version - held})")
            committed = _committed(store, keys.step(rollout_id))
            trained = group.train(_committed(store, keys.rollout(rollout_id)), rollout_id)
            _must_agree(committed, trained, keys.step(rollout_id))


def newest_checkpoint(store: Store, keys: RunKeys, version: int) -> int:
    """The version of the newest committed checkpoint that is not beyond `version`; 0, the starting weights, if there is none."""
    return max((v for v in store.committed_indices(f"{keys.prefix}/checkpoints") if v <= version), default=0)


def load(
    store: Store, keys: RunKeys, group: TrainerGroup, version: int, *, base: CheckpointRef, on_progress: Progress | None = None
) -> None:
    """Make every rank hold the committed checkpoint `version`, or the starting weights if it is 0.

    Raises:
        ReplayError: what is loaded is not what was saved.
    """
    if on_progress is not None:
        on_progress(f"loading checkpoint {version}" if version else "loading the starting weights")
    commit = _committed(store, keys.checkpoint(version)) if version else None
    begin = _record(store, base.key) if commit is None else None
    with group.alone:
        group.ensure_started()
        group.load(version, begin, commit, _beside(store, keys, group.spec.config, base, commit))
        if commit is None or not _bitwise(commit.state, group.fingerprint()):
            return
        loaded = {"digest": group.digest(), "optimizer_digest": group.optimizer_digest()}
    for name, what in (("digest", "weights"), ("optimizer_digest", "optimizer state")):
        saved = commit.state.get(name, loaded[name])  # a checkpoint of an older release has no digest of its optimizer
        saved, found = _without_beginners(saved, loaded[name]), _without_beginners(loaded[name], saved)
        if found != saved:
            raise ReplayError(
                f"checkpoint {keys.checkpoint(version)} loads other {what} than was saved: {_difference(saved, found)}"
            )


def _without_beginners(one: dict[str, str], other: dict[str, str]) -> dict[str, str]:
    """Without a critic or a reference that only `one` has: a fork may begin to have them, or have them no longer."""
    parts = tuple(part for part in ("critic.", "reference.") if not any(name.startswith(part) for name in other))
    return {name: bits for name, bits in one.items() if not name.startswith(parts)}


def _beside(
    store: Store, keys: RunKeys, config: TrainConfig, base: CheckpointRef, checkpoint: Commit | None
) -> dict[Beside, Commit]:
    """Records of the models that the policy is compared with, as far as its checkpoint does not hold them."""
    refreshed = checkpoint is not None and any(f"{checkpoint.attempt}/reference/" in file.path for file in checkpoint.files)
    wanted: dict[Beside, bool] = {"reference": config.uses_reference and not refreshed, "teacher": config.use_opd}
    found: dict[Beside, Commit] = {}
    for name in (name for name, needed in wanted.items() if needed):
        pinned = store.read_json(keys.origin(name))
        found[name] = _record(store, CheckpointRef.model_validate(pinned).key if pinned else base.key)
    return found


def train_round(
    store: Store,
    keys: RunKeys,
    group: TrainerGroup,
    rollout_id: int,
    *,
    base: CheckpointRef,
    config_hash: str = "",
    code_version: str = "",
    on_progress: Progress | None = None,
) -> Commit:
    """Train the committed rollout `rollout_id` and commit what came of it. Safe to call twice.

    Raises:
        ReplayError: another attempt has committed this round with other weights.
        RunError: the rollout is not committed, or does not fill whole optimizer steps.
    """
    prefix = keys.step(rollout_id)
    if commit := store.committed(prefix):
        return commit
    start = time.perf_counter()
    with group.alone:
        ensure_policy(store, keys, group, rollout_id, base=base, on_progress=on_progress)
        rollout = _committed(store, keys.rollout(rollout_id))
        ensured = time.perf_counter()
        trained = group.train(rollout, rollout_id)
    spent = time.perf_counter() - ensured
    commit = Commit(
        kind="step",
        run=keys.run,
        index=rollout_id,
        policy_version=rollout_id + 1,
        inputs={"rollout": commit_key(keys.rollout(rollout_id))},
        config_hash=config_hash,
        code_version=code_version,
        seconds={"restore": ensured - start, **trained.seconds, "dispatch": spent - sum(trained.seconds.values())},
        summary={**trained.metrics, "perf/train_time": spent},
        state={"digest": trained.digest, "fingerprint": trained.fingerprint, "steps": trained.steps},
    )
    standing = store.commit(prefix, commit)
    if standing is not commit:
        _must_agree(standing, trained, prefix)
    return standing


def save_checkpoint(
    store: Store,
    keys: RunKeys,
    group: TrainerGroup,
    version: int,
    *,
    base: CheckpointRef,
    config_hash: str = "",
    code_version: str = "",
    on_progress: Progress | None = None,
) -> CheckpointRef:
    """Save policy `version` with optimizer, scheduler and random states, and commit it. Safe to call twice, and from a thread.

    The ranks make their files durable; the commit, which names them all, comes when every rank has.
    """
    prefix = keys.checkpoint(version)
    commit = store.committed(prefix)
    if commit is None:
        attempt = store.new_attempt(prefix)
        with group.alone:
            ensure_policy(store, keys, group, version, base=base, on_progress=on_progress)
            start = time.perf_counter()
            saved = group.save(attempt)
            seconds, fingerprint = time.perf_counter() - start, group.fingerprint()
        commit = Commit(
            kind="checkpoint",
            run=keys.run,
            index=version,
            policy_version=version,
            attempt=attempt,
            files=saved.files,
            inputs={"step": commit_key(keys.step(version - 1))} if version else {"model": base.key},
            config_hash=config_hash,
            code_version=code_version,
            seconds={"save": seconds},
            summary={"perf/save_model_time": seconds},
            state={"digest": saved.digest, "optimizer_digest": saved.optimizer_digest, "fingerprint": fingerprint},
        )
        reach("checkpoint-before-commit")
        commit = store.commit(prefix, commit)
    assert commit.attempt is not None
    return CheckpointRef(key=commit_key(prefix), uri=f"{store.uri}/{commit.attempt}", format="torch_dist", policy_version=version)


def step_ref(keys: RunKeys, commit: Commit) -> StepRef:
    """The reference to a step commit."""
    return StepRef(key=commit_key(keys.step(commit.index)), rollout_id=commit.index, policy_version=commit.policy_version)


# ---- comparing --------------------------------------------------------------------------------------------------------------


class Replayed(Frozen):
    """How a round that was trained again compares with its commit."""

    rollout_id: int
    verdict: Literal["equal bit for bit", "within tolerance", "DIFFERS"]
    why: str  # what differs, if anything does
    digest: dict[str, str]  # of the weights, now


def replay_round(store: Store, keys: RunKeys, group: TrainerGroup, rollout_id: int) -> Replayed:
    """Train a committed round again, on the policy that the group holds, and compare weights and metrics. Nothing is committed."""
    committed = _committed(store, keys.step(rollout_id))
    trained = group.train(_committed(store, keys.rollout(rollout_id)), rollout_id)
    other_bits = _other_weights(committed, trained) or _other_metrics(committed.summary, trained.metrics)
    if not other_bits:
        return Replayed(rollout_id=rollout_id, verdict="equal bit for bit", why="", digest=trained.digest)
    too_far = other_bits if _bitwise(committed.state, trained.fingerprint) else _beyond_tolerance(committed, trained)
    verdict: Literal["DIFFERS", "within tolerance"] = "DIFFERS" if too_far else "within tolerance"
    return Replayed(rollout_id=rollout_id, verdict=verdict, why=too_far or other_bits, digest=trained.digest)


def _must_agree(committed: Commit, trained: Trained, prefix: str) -> None:
    """Raises ReplayError unless the weights are equal, or the metrics near enough where the bits cannot be."""
    if _bitwise(committed.state, trained.fingerprint):
        if why := _other_weights(committed, trained):
            raise ReplayError(
                f"training {prefix} again gave other weights than are committed, although nothing that decides the bits has "
                f"changed: {why}. Look for hardware or library trouble; the run's commits are intact"
            )
    elif why := _beyond_tolerance(committed, trained):
        raise ReplayError(
            f"training {prefix} again gave {why}. Resume with the hardware and placement of before: {committed.state['fingerprint']}"
        )


def _other_weights(committed: Commit, trained: Trained) -> str:
    before = committed.state["digest"]
    return _difference(before, trained.digest) if before != trained.digest else ""


def _other_metrics(before: Mapping[str, float], after: Mapping[str, float]) -> str:
    """The first number that is not the same to the last bit; times and speeds never are."""
    names = sorted(name for name in before.keys() | after.keys() if not name.startswith("perf/"))
    for name in names:
        old, new = before.get(name), after.get(name)
        if old != new and not (old is not None and new is not None and math.isnan(old) and math.isnan(new)):
            return f"{name} {new!r}, committed is {old!r}"
    return ""


def _beyond_tolerance(committed: Commit, trained: Trained) -> str:
    for name in (name for name in TOLERANCE if name in committed.summary):
        (absolute, relative), before, after = TOLERANCE[name], committed.summary[name], trained.metrics[name]
        if not math.isclose(before, after, rel_tol=relative, abs_tol=absolute):
            return (
                f"{name} {after:.6g}, committed is {before:.6g}: more than other hardware or another layout explains (allowed: the "
                f"larger of {absolute} and {relative:.0%})"
            )
    return ""


def _bitwise(state: dict[str, Any], fingerprint: dict[str, Any]) -> bool:
    return state["fingerprint"] == fingerprint and bool(fingerprint["bit_exact"])


def _difference(before: dict[str, str], after: dict[str, str]) -> str:
    names = sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
    return f"{len(names)} of {len(before)} tensors differ, first {names[0]}"


def _committed(store: Store, prefix: str) -> Commit:
    commit = store.committed(prefix)
    if commit is None:
        raise RunError(
            f"{commit_key(prefix)} is not committed, but is needed to restore the policy: was it deleted from the store?"
        )
    return commit


def _record(store: Store, key: str) -> Commit:
    data = store.read(key)
    if data is None:
        raise RunError(f"{key} is not in the store {store.uri!r}: convert the model again (`penstock convert`)")
    return Commit.model_validate_json(data)
