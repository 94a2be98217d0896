"""Relations between the commits of a run, for all trackers: child runs, consumed rollouts, rewards.

A tracker shows a run and its child runs like this:

<run>                      metrics over the rounds, config, commit records, reward curve, sample tables
  train-000000-000019      consumed rollouts; input model -> checkpoint 20
  eval-000020-<task>       scores of a checkpoint on a data set
  export-000020            exported model

The conversion of a source model does not belong to one run, since several runs may start from the same files:

convert-<fingerprint>      source model -> base, reference or teacher model
"""

from __future__ import annotations

from collections import defaultdict

from penstock.storage.refs import Commit


class Lineage:
    """An index of a run's commits, up to those being delivered to the tracker."""

    def __init__(self) -> None:
        self._commits: dict[str, dict[int, tuple[str, Commit]]] = defaultdict(dict)  # kind -> index -> key, commit
        self._evals: dict[str, Commit] = {}  # by key, since evaluations of several data sets share an index

    def add(self, key: str, commit: Commit) -> None:
        """Add a commit. Its sample previews are not kept, since those of all rounds take hundreds of megabytes."""
        commit = commit.model_copy(update={"state": {**commit.state, "shown": bool(commit.state.get("shown"))}})
        self._commits[commit.kind][commit.index] = key, commit
        if commit.kind == "eval":
            self._evals[key] = commit

    def child_run_name(self, key: str, commit: Commit) -> str:
        """Return the name of the tracker's child run in which the commit at `key` is logged, or "" if it is logged in
        the parent run."""
        match commit.kind:
            case "rollout" | "step" | "model":
                return ""
            case "checkpoint":
                first = self.previous_checkpoint(commit.index)
                return f"train-{first:06d}-{max(commit.index - 1, 0):06d}"
            case "eval":
                return f"eval-{commit.index:06d}-{eval_name_from_key(key)}"
        return f"{commit.kind}-{commit.index:06d}"

    def previous_checkpoint(self, version: int) -> int:
        """Return the policy version of the last checkpoint before `version`, or 0, the base model."""
        return max((index for index in self._commits["checkpoint"] if index < version), default=0)

    def next_checkpoint(self, version: int) -> tuple[str, Commit] | None:
        """Return key and commit of the first checkpoint after policy `version`, or None if there is none yet."""
        later = [index for index in self._commits["checkpoint"] if index > version]
        return self._commits["checkpoint"][min(later)] if later else None

    def model(self) -> tuple[str, Commit] | None:
        """Return key and commit of the base model, or None if the records do not contain it."""
        return self._commits["model"].get(0)

    def checkpoint(self, version: int) -> tuple[str, Commit] | None:
        """Return key and commit of the checkpoint of policy `version`, or None if there is none."""
        return self._commits["checkpoint"].get(version)

    def latest_checkpoint(self, version: int, before: float) -> tuple[str, Commit] | None:
        """Return key and commit of the last checkpoint up to policy `version` that was committed before a time in
        seconds since the epoch, or None if there is none."""
        checkpoints = sorted(self._commits["checkpoint"].items(), reverse=True)
        return next((c for index, c in checkpoints if index <= version and c[1].created_at <= before), None)

    def evaluations(self, version: int) -> list[tuple[str, Commit]]:
        """Return keys and commits of the evaluations of policy `version`."""
        return [(key, commit) for key, commit in self._evals.items() if commit.policy_version == version]

    def evaluated_checkpoints(self) -> list[int]:
        """Return the policy versions of this run, not of its parent, that have a checkpoint and an evaluation."""
        evaluated = {commit.policy_version for commit in self._evals.values()}
        checkpoints = self._commits["checkpoint"].items()
        return [version for version, saved in checkpoints if version in evaluated and not self.is_copy(*saved)]

    def evaluations_without_checkpoint(self, checkpoint: int) -> list[tuple[str, Commit]]:
        """Return keys and commits of the evaluations of policies between the previous checkpoint and `checkpoint`,
        which have no checkpoint."""
        versions = range(self.previous_checkpoint(checkpoint) + 1, checkpoint)
        return [(key, commit) for key, commit in self._evals.items() if commit.policy_version in versions]

    def scored_again(self, commit: Commit) -> tuple[str, Commit] | None:
        """Return key and commit of the evaluation whose samples the evaluation `commit` has scored again, or None."""
        key = commit.inputs.get("samples", "")
        return (key, self._evals[key]) if key in self._evals else None

    def is_copy(self, key: str, commit: Commit) -> bool:
        """Return whether a commit is that of a fork's parent, copied to the fork."""
        if commit.kind == "step" and commit.index in self._commits["rollout"]:
            key, commit = self._commits["rollout"][commit.index]
        return key.startswith("runs/") and run_of_attempt(commit) not in ("", key.split("/")[1])

    def steps(self, version: int) -> list[tuple[str, Commit]]:
        """Return keys and commits of the training rounds between the previous checkpoint and policy `version`."""
        steps = self._commits["step"]
        return [steps[r] for r in range(self.previous_checkpoint(version), version) if r in steps]

    def consumed_rollouts(self, version: int) -> list[tuple[str, Commit]]:
        """Return keys and commits of the rollouts trained on between the previous checkpoint and policy `version`."""
        rollouts = self._commits["rollout"]
        return [rollouts[r] for r in range(self.previous_checkpoint(version), version) if r in rollouts]

    def rounds_with_samples(self) -> set[int]:
        """Return the indices of the rollouts of this run, not of its parent, whose commits contain sample previews."""
        rollouts = self._commits["rollout"].items()
        return {i for i, (key, commit) in rollouts if commit.state["shown"] and not self.is_copy(key, commit)}

    def training_rewards(self) -> dict[int, float]:
        """Return the mean reward of each rollout that has one, by rollout index."""
        rollouts = sorted(self._commits["rollout"].items())
        rewards = {index: commit.summary.get("rollout/raw_reward") for index, (_, commit) in rollouts}
        return {index: reward for index, reward in rewards.items() if reward is not None}

    def eval_curves(self) -> dict[str, dict[int, float]]:
        """Return the mean rewards of all evaluations: data set -> policy version -> mean reward."""
        curves: dict[str, dict[int, float]] = defaultdict(dict)
        evaluations = (commit for commit in self._evals.values() if commit.listed_kind == "eval")
        for commit in sorted(evaluations, key=lambda commit: commit.index):
            for task, reward in eval_rewards(commit).items():
                curves[task][commit.index] = reward
        return curves


def run_of_attempt(commit: Commit) -> str:
    """Return the run that wrote a commit's files; "" for models, which belong to no run, and commits without files."""
    parts = (commit.attempt or "").split("/")
    return parts[1] if parts[0] == "runs" else ""


def eval_name_from_key(commit_key: str) -> str:
    """Return the name of the evaluated data set, from the key of the commit."""
    return commit_key.rsplit("/", 1)[-1].removesuffix(".commit.json")


def eval_metrics(key: str, commit: Commit) -> dict[str, float]:
    """Return the metrics of an evaluation; `perf/*` and `rollout/*` become `eval/<task>/perf/*` and
    `eval/<task>/rollout/*`.

    Otherwise they would collide with the metrics of the training rollout, and with those of other evaluated data sets.
    """
    return {
        name if name.startswith("eval/") else f"eval/{eval_name_from_key(key)}/{name}": value
        for name, value in commit.summary.items()
    }


def eval_rewards(commit: Commit) -> dict[str, float]:
    """Return the mean reward of each data set that `commit` evaluated: its metrics `eval/<task>`, but not
    `eval/<task>-pass@4` and similar."""
    names = [name for name in commit.summary if name.startswith("eval/") and name.count("/") == 1]
    tasks = [name for name in names if not any(name.startswith(f"{other}-") for other in names)]
    return {name.removeprefix("eval/"): commit.summary[name] for name in tasks}
