"""Which policy the trainer holds, and how it comes to hold another: the newest checkpoint, then the committed rollouts after it.

The store is the only judge. A step commit has no weights behind it; it says that training this rollout gives weights with this
digest, so weights can be had again at any time by replaying, without generation. A replay is held against its commit: bit for bit
where the numerics fingerprints are equal, within `TOLERANCE` of the metrics otherwise. Who calls this, and when, is the flow's.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from stages.train.group import TrainerGroup
from stages.train.spec import Trained
from storage.refs import CheckpointRef, Commit, RunKeys, StepRef, commit_key
from storage.store import Store

TOLERANCE = {
    "train/loss": (0.02, 0.05),
    "train/grad_norm": (0.02, 0.10),
}  # absolute, relative; for replays on other hardware or layouts

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
        ValueError: a round before `version` is not committed.
    """
    state = group.state()
    held = state.version if state is not None and state.run == keys.run and state.clean else None
    if held == version:
        return
    if held is None or held > version:
        held = _restore(store, keys, group, version, base, on_progress)
    for rollout_id in range(held, version):
        if on_progress is not None:
            on_progress(f"replaying training of rollout {rollout_id} ({rollout_id - held + 1} of {version - held})")
        committed = _committed(store, keys.step(rollout_id))
        _compare(committed, group.train(_committed(store, keys.rollout(rollout_id)), rollout_id), keys.step(rollout_id))


def _restore(
    store: Store, keys: RunKeys, group: TrainerGroup, version: int, base: CheckpointRef, on_progress: Progress | None
) -> int:
    """Load the newest committed checkpoint that is not beyond `version`; returns its version."""
    saved = [v for v in store.committed_indices(f"{keys.prefix}/checkpoints") if v <= version]
    newest = saved[-1] if saved else 0
    if on_progress is not None:
        on_progress(f"loading checkpoint {newest}" if newest else "loading the starting weights")
    group.ensure_started()
    commit = _committed(store, keys.checkpoint(newest)) if newest else None
    with ExitStack() as open_for_reading:
        needs_base = commit is None or group.spec.config.use_kl_loss
        model = open_for_reading.enter_context(store.reading(_record(store, base.key))) if needs_base else None
        checkpoint = open_for_reading.enter_context(store.reading(commit)) if commit else None
        group.load(str(model) if model else None, str(checkpoint) if checkpoint else None, newest)
    if commit is None:
        return 0
    digest = group.digest()
    if _bitwise(commit.state, group.fingerprint()) and digest != commit.state["digest"]:
        raise ReplayError(
            f"checkpoint {keys.checkpoint(newest)} loads other weights than were saved: "
            f"{_difference(commit.state['digest'], digest)}"
        )
    return newest


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
        ValueError: the rollout is not committed, or does not fill whole optimizer steps.
    """
    prefix = keys.step(rollout_id)
    if commit := store.committed(prefix):
        return commit
    start = time.perf_counter()
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
        _compare(standing, trained, prefix)
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
    """Save policy `version` with optimizer, scheduler and random states, and commit it. Safe to call twice."""
    prefix = keys.checkpoint(version)
    commit = store.committed(prefix)
    if commit is None:
        ensure_policy(store, keys, group, version, base=base, on_progress=on_progress)
        start = time.perf_counter()
        attempt = store.new_attempt(prefix)
        with store.writing(attempt) as out:
            group.save(str(out.path))
        commit = store.commit(
            prefix,
            Commit(
                kind="checkpoint",
                run=keys.run,
                index=version,
                policy_version=version,
                attempt=attempt,
                files=out.files,
                inputs={"step": commit_key(keys.step(version - 1))} if version else {"model": base.key},
                config_hash=config_hash,
                code_version=code_version,
                seconds={"save": time.perf_counter() - start},
                summary={"perf/save_model_time": time.perf_counter() - start},
                state={"digest": group.digest(), "fingerprint": group.fingerprint()},
            ),
        )
    assert commit.attempt is not None
    return CheckpointRef(key=commit_key(prefix), uri=f"{store.uri}/{commit.attempt}", format="torch_dist", policy_version=version)


def step_ref(keys: RunKeys, commit: Commit) -> StepRef:
    """The reference to a step commit."""
    return StepRef(key=commit_key(keys.step(commit.index)), rollout_id=commit.index, policy_version=commit.policy_version)


# ---- comparing --------------------------------------------------------------------------------------------------------------


def _compare(committed: Commit, trained: Trained, prefix: str) -> None:
    if _bitwise(committed.state, trained.fingerprint):
        if committed.state["digest"] != trained.digest:
            raise ReplayError(
                f"training {prefix} again gave other weights than are committed, although nothing that decides the bits has "
                f"changed: {_difference(committed.state['digest'], trained.digest)}. Look for hardware or library trouble; the "
                "run's commits are intact"
            )
        return
    for name, (absolute, relative) in TOLERANCE.items():
        before, after = committed.summary[name], trained.metrics[name]
        if not math.isclose(before, after, rel_tol=relative, abs_tol=absolute):
            raise ReplayError(
                f"training {prefix} again gave {name} {after:.6g}, committed is {before:.6g}: more than other hardware or "
                f"another layout explains (allowed: the larger of {absolute} and {relative:.0%}). Resume with the hardware and "
                f"placement of before: {committed.state['fingerprint']}"
            )


def _bitwise(state: dict[str, Any], fingerprint: dict[str, Any]) -> bool:
    return state["fingerprint"] == fingerprint and bool(fingerprint["bit_exact"])


def _difference(before: dict[str, str], after: dict[str, str]) -> str:
    names = sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
    return f"{len(names)} of {len(before)} tensors differ, first {names[0]}"


def _committed(store: Store, prefix: str) -> Commit:
    commit = store.committed(prefix)
    if commit is None:
        raise ValueError(
            f"{commit_key(prefix)} is not committed, but is needed to restore the policy: was it deleted from the store?"
        )
    return commit


def _record(store: Store, key: str) -> Commit:
    data = store.read(key)
    if data is None:
        raise ValueError(f"{key} is not in the store {store.uri!r}: convert the model again (`penstock convert`)")
    return Commit.model_validate_json(data)
