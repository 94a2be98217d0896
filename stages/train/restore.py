"""Restore a policy version in the trainer: load the newest checkpoint, then replay training of the rollouts after it.

The commits in the store define the policy versions. A step commit contains the rollout and the hashes of the resulting
weights, but not the weights: training on the committed rollout again reproduces them, without generation. The result of
such a replay must match its commit: bit for bit if the numerics fingerprints (hardware, libraries, placement) are
equal, otherwise by the metrics within `TOLERANCE`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from penstock.engines.local_gpus import ReadCounters, energy_metric
from penstock.engines.training import train_backend
from penstock.stages.train.reuse import Reuse
from penstock.stages.train.spec import AVERAGE, AuxiliaryModel, TrainResult
from penstock.stages.train.trainer_group import TrainerGroup
from penstock.storage.commit import ADAPTERS, CheckpointRef, Commit, Frozen, RunKeys, commit_key
from penstock.storage.errors import RunError
from penstock.storage.failpoints import failpoint
from penstock.storage.store import Store

TOLERANCE = {  # metric -> (absolute, relative) tolerance of a replay on other hardware or with another layout
    "train/loss": (0.02, 0.05),
    "train/grad_norm": (0.02, 0.10),
    "train/critic-loss": (0.02, 0.05),
    "train/critic-grad_norm": (0.02, 0.10),
}


class ReplayError(RuntimeError):
    """A replayed round or a loaded checkpoint does not match the hashes or metrics in its commit."""


class ReplayResult(Frozen):
    """Result of training a committed round again and comparing weights and metrics with its commit."""

    rollout_id: int
    verdict: Literal["equal bit for bit", "within tolerance", "DIFFERS"]
    why: str  # first difference, or ""
    digest: dict[str, str]  # parameter shard -> hash of its bits, after the replay
    metrics: dict[str, float]  # metrics of the replayed round, as in its step commit


class PolicyRestorer:
    """Restores, trains and saves the policy versions of one run.

    Methods that call the trainer several times hold `group.lock`, because another thread saves checkpoints during the
    next rollout.

    Args:
        group: the trainer's ranks; started if they are not running, restarted if they hold different states.
        base: checkpoint with the weights of version 0.
        provenance: further fields of every commit (config_hash, code_version).
        on_progress: called with a message before each load and each replayed round.
        read_counters: reads the energy counters of the trainer's GPUs.
    """

    def __init__(
        self,
        store: Store,
        keys: RunKeys,
        group: TrainerGroup,
        base: CheckpointRef,
        *,
        provenance: Mapping[str, Any] | None = None,
        on_progress: Callable[[str], None] = lambda message: None,
        read_counters: ReadCounters = dict,
    ) -> None:
        self.read_counters = read_counters
        self.store, self.keys, self.group, self.base = store, keys, group, base
        self.provenance = provenance or {}
        self.on_progress = on_progress

    def restore(self, version: int) -> None:
        """Bring every rank to policy `version`, which is the policy after `version` committed rounds: load the newest
        checkpoint up to it, unless the ranks hold that version or a later one, then replay the remaining rounds. Return
        at once if all ranks hold the version already.

        Raises:
            ReplayError: a replayed round differs from its commit.
            RunError: a round before `version` is not committed.
        """
        with self.group.lock:
            state = self.group.policy_state()
            current = state.version if state is not None and state.run == self.keys.run and state.clean else None
            if current == version:
                return
            newest = newest_checkpoint(self.store, self.keys, version)
            if current is None or not newest <= current <= version:
                current = newest
                self.load_checkpoint(current)
            for rollout_id in range(current, version):
                number = f"{rollout_id - current + 1} of {version - current}"
                self.on_progress(f"replaying training of rollout {rollout_id} ({number})")
                committed = self._read_commit(self.keys.step_prefix(rollout_id))
                trained = self.group.train(self._read_commit(self.keys.rollout_prefix(rollout_id)), rollout_id)
                _check_agreement(committed, trained, self.keys.step_prefix(rollout_id))

    def load_checkpoint(self, version: int) -> None:
        """Load the committed checkpoint of policy `version` on every rank; version 0 means the starting weights. Raises
        ReplayError if the loaded weights or optimizer state do not match the hashes in the checkpoint's commit."""
        checkpoint = self._read_commit(self.keys.checkpoint_prefix(version)) if version else None
        base_key = self.base.key
        if has_adapters(checkpoint) or self.group.spec.config.lora:
            base_key = adapter_base(self.store, self.keys, version, self.base.key)
            checkpoint = checkpoint if has_adapters(checkpoint) else None  # else its weights are the base
        base = self._read_model(base_key) if checkpoint is None or has_adapters(checkpoint) else None
        with self.group.lock:
            self.group.ensure_started()
            self.on_progress(f"loading checkpoint {version}" if version else "loading the starting weights")
            self.group.load(version, base, checkpoint, self._auxiliary_models(checkpoint, base_key))
            if checkpoint is None or not _has_same_numerics(checkpoint, self.group.fingerprint()):
                return
            loaded = {"digest": self.group.digest(), "optimizer_digest": self.group.optimizer_digest()}
        for name, what in (("digest", "weights"), ("optimizer_digest", "optimizer state")):
            before, after = checkpoint.state[name], loaded[name]
            before, after = _drop_models_absent_from(before, after), _drop_models_absent_from(after, before)
            if why := _describe_hash_difference(before, after):
                raise ReplayError(
                    f"checkpoint {self.keys.checkpoint_prefix(version)} has a hash mismatch of the {what} after "
                    f"loading: {why}. Check the storage and the installed libraries"
                )

    def train_round(self, rollout_id: int, reuse: Reuse | None = None) -> Commit:
        """Train on the committed rollout `rollout_id` and commit the result; return the existing commit if the round is
        committed already. `reuse`: the rounds that the run, a fork, trains on the rollouts of its parent.

        Raises:
            ReplayError: another attempt has committed this round with other weights.
            RunError: the rollout is not committed, or does not fill whole optimizer steps.
            GateFailed: the rollout is the parent's, and the policy has moved too far away from it.
        """
        prefix = self.keys.step_prefix(rollout_id)
        if existing := self.store.committed(prefix):
            return existing
        start, counters = time.perf_counter(), self.read_counters()
        is_reused = reuse is not None and rollout_id in reuse.rounds
        stores_tokens = self.group.spec.config.save_trained_tokens or is_reused
        attempt = self.store.new_attempt(prefix) if stores_tokens else None
        with self.group.lock:
            self.restore(rollout_id)
            rollout = self._read_commit(self.keys.rollout_prefix(rollout_id))
            restored = time.perf_counter()
            trained = self.group.train(rollout, rollout_id, attempt)
        for note in trained.notes:
            self.on_progress(note)
        train_time = time.perf_counter() - restored
        commit = Commit(
            kind="step",
            run=self.keys.run,
            index=rollout_id,
            policy_version=rollout_id + 1,
            attempt=attempt if trained.files else None,
            files=trained.files,
            inputs={"rollout": commit_key(self.keys.rollout_prefix(rollout_id))},
            seconds={
                "restore": restored - start,
                **trained.seconds,
                "dispatch": train_time - sum(trained.seconds.values()),
            },
            summary={
                **trained.metrics,
                "perf/train_time": train_time,
                **energy_metric("perf/train_energy_joules", counters, self.read_counters()),
            },
            state={
                "digest": trained.digest,
                "fingerprint": trained.fingerprint,
                "steps": trained.steps,
                "sample_uses": trained.sample_uses,
            },
            **self.provenance,
        )
        if reuse is not None and is_reused:
            commit.summary |= reuse.compare(self.store, rollout, commit)
        winner = self.store.commit(prefix, commit)
        if winner is not commit:
            _check_agreement(winner, trained, prefix)
        return winner

    def save_checkpoint(self, version: int) -> CheckpointRef:
        """Save policy `version` with optimizer, learning-rate scheduler and RNG states, and commit it. Idempotent and
        thread-safe.

        Every rank writes its files durably; the commit, with the list of all files, is written after the last rank has
        finished.
        """
        prefix = self.keys.checkpoint_prefix(version)
        commit = self.store.committed(prefix)
        if commit is None:
            attempt = self.store.new_attempt(prefix)
            with self.group.lock:
                self.restore(version)
                start, counters = time.perf_counter(), self.read_counters()
                saved = self.group.save(attempt)
                seconds, fingerprint = time.perf_counter() - start, self.group.fingerprint()
                energy = energy_metric("perf/save_energy_joules", counters, self.read_counters())
            step = {"step": commit_key(self.keys.step_prefix(version - 1))}
            inputs = step if version else {"model": self.base.key}
            state = {
                "digest": saved.digest,
                "optimizer_digest": saved.optimizer_digest,
                "fingerprint": fingerprint,
            }
            if adapters := self.group.spec.config.lora:
                inputs["base"] = adapter_base(self.store, self.keys, version - 1, self.base.key)
                state[ADAPTERS] = adapters.model_dump(mode="json")
            commit = Commit(
                kind="checkpoint",
                run=self.keys.run,
                index=version,
                policy_version=version,
                attempt=attempt,
                files=saved.files,
                inputs=inputs,
                seconds={"save": seconds},
                summary={"perf/save_model_time": seconds, **energy},
                state=state,
                **self.provenance,
            )
            failpoint("checkpoint-before-commit")
            commit = self.store.commit(prefix, commit)
        assert commit.attempt is not None
        return CheckpointRef(
            key=commit_key(prefix),
            uri=f"{self.store.uri}/{commit.attempt}",
            format=train_backend().checkpoint_format,
            policy_version=version,
        )

    def replay_round(self, rollout_id: int) -> ReplayResult:
        """Train a committed round again, starting from the policy that the ranks hold, and compare weights and metrics
        with the round's commit. Writes nothing to the store."""
        committed = self._read_commit(self.keys.step_prefix(rollout_id))
        trained = self.group.train(self._read_commit(self.keys.rollout_prefix(rollout_id)), rollout_id)
        why = _describe_hash_difference(committed.state["digest"], trained.digest)
        why = why or _describe_metric_difference(committed.summary, trained.metrics)
        is_exact = _has_same_numerics(committed, trained.fingerprint)
        too_far = why if is_exact else _describe_metric_beyond_tolerance(committed, trained)
        return ReplayResult(
            rollout_id=rollout_id,
            verdict="DIFFERS" if too_far else "within tolerance" if why else "equal bit for bit",
            why=too_far or why,
            digest=trained.digest,
            metrics=trained.metrics,
        )

    def influence_of_samples(
        self, rollout_id: int, evaluations: Sequence[Commit], contrast: Sequence[float]
    ) -> list[float]:
        """Return to first order how much training on each sample of a committed round has raised the sum of contrast x
        log-prob over the samples of `evaluations` (stages/train/influence.py). Writes nothing to the store.
        Afterwards the ranks do not hold a policy version. Raises the errors of `restore`.
        """
        rollout, objectives = self._read_commit(self.keys.rollout_prefix(rollout_id)), []
        with self.group.lock:
            for sign in (1, -1):
                self.restore(rollout_id)
                self.on_progress(f"{'raising' if sign > 0 else 'lowering'} the log-probs of the evaluated samples")
                objectives.append(self.group.objective_of_samples(rollout, evaluations, contrast, sign))
        return [(raised - lowered) / 2 for raised, lowered in zip(*objectives, strict=True)]

    def _auxiliary_models(self, checkpoint: Commit | None, base_key: str) -> dict[AuxiliaryModel, Commit]:
        """Return the commits of the reference, the teachers and the initial adapters that the ranks must load. The
        reference is left out if `checkpoint` contains a later one (--ref-update-interval), or if it is the base of the
        policy's adapters (`base_key`)."""
        refreshed = checkpoint is not None and any(
            f"{checkpoint.attempt}/reference/" in file.path for file in checkpoint.files
        )
        config = self.group.spec.config
        needed: dict[AuxiliaryModel, bool] = {
            "reference": config.uses_reference and not refreshed,
            **{name: True for name in config.auxiliary_models if name != "reference"},
            "adapter": config.lora is not None and config.lora.lora_load is not None and checkpoint is None,
        }
        models: dict[AuxiliaryModel, Commit] = {}
        for name in (name for name, is_needed in needed.items() if is_needed):
            key = (self.store.read_record(CheckpointRef, self.keys.origin_key(name)) or self.base).key
            if not (name == "reference" and config.lora and key == base_key):
                models[name] = self._read_model(key)
        return models

    def _read_commit(self, prefix: str) -> Commit:
        commit = self.store.committed(prefix)
        if commit is None:
            raise RunError(
                f"commit {commit_key(prefix)} is missing in the store, but is needed to restore the policy: if it was "
                "deleted, restore it from a backup"
            )
        return commit

    def _read_model(self, key: str) -> Commit:
        commit = self.store.read_record(Commit, key)
        if commit is None:
            raise RunError(
                f"model {key} is not in the store {self.store.uri!r}: convert the model again (`penstock convert`)"
            )
        return commit


def newest_checkpoint(store: Store, keys: RunKeys, version: int) -> int:
    """Return the newest policy version <= `version` that has a committed checkpoint, or 0 (the starting weights)."""
    return max((v for v in store.committed_indices(f"{keys.prefix}/checkpoints") if v <= version), default=0)


def has_adapters(checkpoint: Commit | None) -> bool:
    """Return whether a checkpoint has only adapters, which need their base weights (`adapter_base`)."""
    return checkpoint is not None and ADAPTERS in checkpoint.state


def adapter_base(store: Store, keys: RunKeys, version: int, model: str) -> str:
    """Return the key of the commit with the base weights of a run's adapters at policy `version`: the newest checkpoint
    up to `version` if it has all weights (a fork of a run that trained them), else the base of its adapters. Without a
    checkpoint it is `model`, the model that the run started with."""
    newest = newest_checkpoint(store, keys, version)
    checkpoint = store.committed(keys.checkpoint_prefix(newest)) if newest else None
    if checkpoint is None:
        return model
    return checkpoint.inputs["base"] if has_adapters(checkpoint) else commit_key(keys.checkpoint_prefix(newest))


# ---- comparing -------------------------------------------------------------------------------------------------------


def _check_agreement(committed: Commit, trained: TrainResult, prefix: str) -> None:
    """Check that a training result matches its commit: equal weights if the numerics fingerprints are equal, otherwise
    metrics within `TOLERANCE`. Raises ReplayError."""
    if _has_same_numerics(committed, trained.fingerprint):
        why = _describe_hash_difference(committed.state["digest"], trained.digest)
        problem = (
            f"weights that differ from the committed ones, although hardware, libraries and parallel layout are the "
            f"same: {why}. Check for user-defined functions that have changed or use random numbers, faulty hardware "
            "and nondeterministic kernels; the commits are unchanged"
        )
    else:
        why = _describe_metric_beyond_tolerance(committed, trained)
        problem = (
            f"{why}. Resume with the hardware and placement of the original training: {committed.state['fingerprint']}"
        )
    if why:
        raise ReplayError(f"retraining {prefix} produced {problem}")


def _has_same_numerics(committed: Commit, fingerprint: dict[str, Any]) -> bool:
    return committed.state["fingerprint"] == fingerprint and bool(fingerprint["bit_exact"])


def _describe_hash_difference(before: dict[str, str], after: dict[str, str]) -> str:
    """Describe the difference between two digests, or return ""."""
    names = sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
    return f"{len(names)} of {len(before)} tensors differ, first {names[0]}" if names else ""


def _describe_metric_difference(before: Mapping[str, float], after: Mapping[str, float]) -> str:
    """Describe the first metric, by name, that differs in any bit, or return "". The metrics perf/ (times) and reuse/
    (which the driver computes) are not compared."""
    names = sorted(name for name in before.keys() | after.keys() if not name.startswith(("perf/", "reuse/")))
    for name in names:
        old, new = before.get(name), after.get(name)
        if old != new and not (old is not None and new is not None and math.isnan(old) and math.isnan(new)):
            return f"{name} = {new!r} instead of the committed {old!r}"
    return ""


def _describe_metric_beyond_tolerance(committed: Commit, trained: TrainResult) -> str:
    """Describe the first metric that differs from the committed value by more than `TOLERANCE`, or return ""."""
    for name in (name for name in TOLERANCE if name in committed.summary):
        (absolute, relative), before, after = TOLERANCE[name], committed.summary[name], trained.metrics[name]
        if not math.isclose(before, after, rel_tol=relative, abs_tol=absolute):
            return (
                f"{name} = {after:.6g} instead of the committed {before:.6g}, which exceeds the tolerance for other "
                f"hardware or layouts (the larger of {absolute} and {relative:.0%})"
            )
    return ""


def _drop_models_absent_from(digest: dict[str, str], other: dict[str, str]) -> dict[str, str]:
    """Return `digest` without the hashes of critic, reference or moving average if `other` has none of this model: a
    forked run may have added or dropped these models."""
    models = ("critic", "reference", *AVERAGE)
    parts = tuple(part for part in (f"{name}." for name in models) if not any(name.startswith(part) for name in other))
    return {name: bits for name, bits in digest.items() if not name.startswith(parts)}
