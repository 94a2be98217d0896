"""Grading the stored samples of an evaluation again, by another reward or under another key. Nothing is generated, and nothing that is
committed changes: the outcome is a commit of its own beside the old one, `evals/000020/<data set>@<hash of how it was scored>`.

Its samples have ids with the same `@<hash>` in them, so that an id stays unique in the run, and its numbers have it in their names.
"""

from __future__ import annotations

import hashlib
import json
import time
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from stages.eval.score import groups_of, score
from stages.rewards.grading import Grader
from storage.errors import RewardError, RunError
from storage.refs import Commit, RunKeys, commit_key
from storage.sample import Sample, Status
from storage.shards import read_samples, write_shards
from storage.store import Store


@dataclass(frozen=True)
class Scoring:
    """Everything that the rewards of given samples depend on, and what passes."""

    rm_type: str | None = None
    custom_rm_path: str | None = None
    reward_key: str | None = None
    rm_model_path: str | None = None
    rm_url: str | None = None
    pass_threshold: float | None = None
    evaluated_integers: bool = False

    @property
    def hash(self) -> str:
        """Of these and of the source of the user's own function: an edited one is another way to score."""
        settings = asdict(self)
        if not self.evaluated_integers:
            del settings["evaluated_integers"]  # evaluations that were scored before it was an option keep their names
        parts = [settings, _source_digest(self.custom_rm_path)]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:8]


def rescore_stage(
    store: Store,
    keys: RunKeys,
    version: int,
    name: str,
    scoring: Scoring,
    grader: Grader,
    *,
    max_response_len: int,
    require_pass_rate: bool = False,
    code_version: str = "",
) -> Commit:
    """Grade one evaluation again and commit it, unless it was scored so before.

    Args:
        store: where the run lies.
        keys: of the run.
        version: policy version.
        name: of the data set.
        scoring: how; it names the commit.
        grader: made of `scoring`.
        max_response_len: under which the samples were generated: tells what was truncated of those whose grader had failed.
        require_pass_rate: pass@k must be there.
        code_version: for the commit.

    Raises:
        RewardError: this was not evaluated, the reward is wrong or fails for every sample, or pass@k is required and it is not known
            what passes.
        StoreError: the stored samples are damaged.
    """
    old = store.committed(keys.eval(version, name))
    if old is None:
        raise RunError(f"run {keys.run!r} has no evaluation of version {version} on {name}")
    new_name = f"{name}@{scoring.hash}"
    prefix = keys.eval(version, new_name)
    if commit := store.committed(prefix):
        return commit
    start = time.perf_counter()
    samples = read_samples(store, old)
    read = time.perf_counter()
    _grade(samples, grader, max_response_len)
    for sample in samples:
        _rename(sample, f"eval-{version:06d}-{name}-", f"eval-{version:06d}-{new_name}-")
    graded = time.perf_counter()
    summary = score(samples, new_name, pass_threshold=scoring.pass_threshold, require_pass_rate=require_pass_rate)
    attempt = store.new_attempt(prefix)
    with store.writing(attempt) as out:
        write_shards(out.path, samples)
    fields: dict[str, Any] = old.model_dump(include={"kind", "run", "index", "policy_version", "config_hash"})
    seconds = {"read": read - start, "reward": graded - read, "write": time.perf_counter() - graded}
    commit = Commit(
        **fields,
        attempt=attempt,
        files=out.files,
        inputs=old.inputs | {"samples": commit_key(keys.eval(version, name))},
        code_version=code_version,
        seconds=seconds,
        summary=summary,
        state={"data_source": old.state.get("data_source"), "scoring": asdict(scoring)},
    )
    return store.commit(prefix, commit)


def _grade(samples: list[Sample], grader: Grader, max_response_len: int) -> None:
    """Replace the rewards. What had no response stays failed; what had one and failed in its grader gets its status back."""
    answered = [sample for sample in samples if any(sample.loss_mask)]
    for sample in answered:
        if sample.status is Status.FAILED:
            sample.metadata.pop("error", None)
            sample.status = Status.TRUNCATED if sum(sample.loss_mask) >= max_response_len else Status.COMPLETED
    groups = groups_of(answered)
    outcomes = [grader.submit_group(group) for group in groups]
    for group, of_group in zip(groups, outcomes):
        for sample, outcome in zip(group, of_group):
            outcome.result().apply(sample)
    failures = [sample for sample in answered if sample.status is Status.FAILED]
    if answered and len(failures) == len(answered):
        reason = failures[0].metadata["error"]
        raise RewardError(
            f"all {len(failures)} samples failed, the first with {reason!r}: repair the reward; nothing is committed"
        )


def _rename(sample: Sample, before: str, after: str) -> None:
    for field in ("sample_id", "group_id", "trajectory_id"):
        found = getattr(sample, field)
        assert found.startswith(before), f"{found} is no id of {before}"
        setattr(sample, field, after + found.removeprefix(before))


def _source_digest(path: str | None) -> str:
    """Hash of the file in which a user's function lies; empty if there is none."""
    if path is None:
        return ""
    place = path.rpartition(":")[0] or (path if path.endswith(".py") else path.rpartition(".")[0])
    file = place
    if not place.endswith(".py"):
        found = find_spec(place)
        file = (found.origin or "") if found else ""
    source = Path(file)
    return hashlib.sha256(source.read_bytes()).hexdigest() if source.is_file() else ""
