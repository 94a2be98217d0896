"""Rescore an evaluation: grade its stored samples with another reward, reward key or threshold.

Nothing is generated, and existing commits do not change: the result is committed as a new evaluation,
`evals/000020/<data set>@<hash of the scoring settings>`. The sample ids and metric names of the new evaluation contain
the same `@<hash>`, so that they are unique in the run.
"""

from __future__ import annotations

import hashlib
import json
import time
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from penstock.stages.eval.scores import compute_eval_metrics, group_by_prompt
from penstock.stages.rewards.grading import Grader
from penstock.storage.commit import Commit, RunKeys, commit_key
from penstock.storage.errors import RewardError, RunError
from penstock.storage.samples.sample import Sample, Status
from penstock.storage.samples.shards import read_samples, write_shards
from penstock.storage.store import Store


@dataclass(frozen=True)
class Scoring:
    """Settings that determine the rewards of stored samples, and which samples pass."""

    rm_type: str | None = None
    custom_rm_path: str | None = None
    reward_key: str | None = None
    rm_model_path: str | None = None
    rm_url: str | None = None
    pass_threshold: float | None = None
    evaluated_integers: bool = False  # --rm-evaluated-integers

    @property
    def hash(self) -> str:
        """Return the hash that names the rescored evaluation: of these settings, and of the file of a user-defined
        reward."""
        parts = [asdict(self), _source_digest(self.custom_rm_path)]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:8]


@dataclass(frozen=True)
class StoredEval:
    """An evaluation of a policy version on a data set, in the store."""

    keys: RunKeys
    version: int
    name: str  # name of the data set

    @property
    def prefix(self) -> str:
        """Return the key prefix of the evaluation's commit."""
        return self.keys.eval_prefix(self.version, self.name)

    @property
    def id_prefix(self) -> str:
        """Return the prefix that all sample, group and trajectory ids of the evaluation share."""
        return f"eval-{self.version:06d}-{self.name}-"


def rescore_stage(
    store: Store,
    source: StoredEval,
    scoring: Scoring,
    grader: Grader,
    *,
    max_response_len: int,
    require_pass_rate: bool,
    code_version: str,
) -> Commit:
    """Grade a stored evaluation again and commit the result; return the existing commit if this was done before.

    Args:
        store: store of the run.
        source: evaluation whose samples are graded again.
        scoring, grader: new scoring settings, whose hash names the new commit, and a grader with these settings.
        max_response_len: in tokens; decides whether a sample whose grading failed before is TRUNCATED or COMPLETED.
        require_pass_rate: raise OptionError if the rewards do not define pass@k.
    """
    old = store.committed(source.prefix)
    if old is None:
        raise RunError(
            f"run {source.keys.run!r} has no evaluation of policy version {source.version} on data set {source.name}: "
            "choose an existing evaluation with --version and --dataset"
        )
    target = replace(source, name=f"{source.name}@{scoring.hash}")
    if commit := store.committed(target.prefix):
        return commit
    start = time.perf_counter()
    samples = read_samples(store, old)
    read = time.perf_counter()
    _grade_again(samples, grader, max_response_len)
    for sample in samples:
        for field in ("sample_id", "group_id", "trajectory_id"):
            id = getattr(sample, field)
            assert id.startswith(source.id_prefix), f"id {id} does not begin with {source.id_prefix}"
            setattr(sample, field, target.id_prefix + id.removeprefix(source.id_prefix))
    graded = time.perf_counter()
    summary = compute_eval_metrics(
        samples, target.name, pass_threshold=scoring.pass_threshold, require_pass_rate=require_pass_rate
    )
    attempt = store.new_attempt(target.prefix)
    with store.writing(attempt) as out:
        write_shards(out.path, samples)
    fields: dict[str, Any] = old.model_dump(include={"kind", "run", "index", "policy_version", "config_hash", "blobs"})
    commit = Commit(
        **fields,
        attempt=attempt,
        files=out.files,
        inputs=old.inputs | {"samples": commit_key(source.prefix)},
        code_version=code_version,
        seconds={"read": read - start, "reward": graded - read, "write": time.perf_counter() - graded},
        summary=summary,
        state={"data_source": old.state.get("data_source"), "scoring": asdict(scoring)},
    )
    return store.commit(target.prefix, commit)


def _grade_again(samples: list[Sample], grader: Grader, max_response_len: int) -> None:
    """Grade all samples with a response again; samples without one remain failed. A sample whose earlier grading failed
    is first set back to COMPLETED or TRUNCATED."""
    answered = [sample for sample in samples if any(sample.loss_mask)]
    for sample in answered:
        if sample.status is Status.FAILED:
            sample.metadata.pop("error", None)
            sample.status = Status.TRUNCATED if sum(sample.loss_mask) >= max_response_len else Status.COMPLETED
    submitted = [(group, grader.submit_group(group)) for group in group_by_prompt(answered)]
    for group, outcomes in submitted:
        for sample, outcome in zip(group, outcomes):
            outcome.result().apply(sample)
    failures = [sample for sample in answered if sample.status is Status.FAILED]
    if answered and len(failures) == len(answered):
        reason = failures[0].metadata["error"]
        raise RewardError(
            f"grading of all {len(failures)} samples failed, the first with {reason!r}; the evaluation was not "
            "rescored: fix the reward and run the command again"
        )


def _source_digest(path: str | None) -> str:
    """Return the hash of the source file of a user-defined function, or "" without a function or file."""
    if path is None:
        return ""
    module = path.rpartition(":")[0] or (path if path.endswith(".py") else path.rpartition(".")[0])
    file = module
    if not module.endswith(".py"):
        spec = find_spec(module)
        file = (spec.origin or "") if spec else ""
    source = Path(file)
    return hashlib.sha256(source.read_bytes()).hexdigest() if source.is_file() else ""
