"""The commits of a run for its trackers: which belong to a child run, and what a checkpoint or evaluation refers to.

A tracker shows a run and its child runs like this:

<run>                      metrics over the rounds, config, commit records, reward curve, sample tables
  train-000000-000019      consumed rollouts; input model -> checkpoint 20
  eval-000020-<task>       scores of a checkpoint on a data set
  export-000020            exported model

The conversion of a source model does not belong to one run, since several runs may start from the same files:

convert-<fingerprint>      source model -> base, reference or teacher model

What was made from what over all runs of a store is in history/lineage_graph.py.
"""

from __future__ import annotations

from collections import defaultdict

from penstock.storage.commit import Commit, eval_rewards

KeyAndCommit = tuple[str, Commit]


class RunCommits:
    """An index of a run's commits, up to those being delivered to the tracker. `commits` is kind -> index -> (key,
    commit), without evaluations."""

    def __init__(self) -> None:
        self.commits: dict[str, dict[int, KeyAndCommit]] = defaultdict(dict)
        self.evals: dict[str, Commit] = {}  # by key, since evaluations of several data sets share an index

    def add(self, key: str, commit: Commit) -> None:
        """Add a commit. Its sample previews are not kept, since those of all rounds take hundreds of megabytes."""
        commit = commit.model_copy(update={"state": {**commit.state, "shown": bool(commit.state.get("shown"))}})
        if commit.kind == "eval":
            self.evals[key] = commit
        else:
            self.commits[commit.kind][commit.index] = key, commit

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

    def checkpoint(self, version: int) -> KeyAndCommit | None:
        """Return key and commit of the checkpoint of policy `version`, or None if there is none."""
        return self.commits["checkpoint"].get(version)

    def previous_checkpoint(self, version: int) -> int:
        """Return the policy version of the last checkpoint before `version`, or 0, the base model."""
        return max((index for index in self.commits["checkpoint"] if index < version), default=0)

    def next_checkpoint(self, version: int) -> KeyAndCommit | None:
        """Return key and commit of the first checkpoint after policy `version`, or None if there is none yet."""
        later = [index for index in self.commits["checkpoint"] if index > version]
        return self.commits["checkpoint"][min(later)] if later else None

    def since_previous_checkpoint(self, kind: str, version: int) -> list[KeyAndCommit]:
        """Return keys and commits of the rollouts or steps (`kind`) between the previous checkpoint and policy
        `version`: what that policy was trained on, and in."""
        commits = self.commits[kind]
        return [commits[r] for r in range(self.previous_checkpoint(version), version) if r in commits]

    def evaluations(self, versions: range) -> list[KeyAndCommit]:
        """Return keys and commits of the evaluations of the policies `versions`."""
        return [(key, commit) for key, commit in self.evals.items() if commit.policy_version in versions]

    def is_copy(self, key: str, commit: Commit) -> bool:
        """Return whether a commit is that of a fork's parent, copied to the fork."""
        if commit.kind == "step" and commit.index in self.commits["rollout"]:
            key, commit = self.commits["rollout"][commit.index]
        return key.startswith("runs/") and commit.writer not in ("", key.split("/")[1])

    def training_rewards(self) -> dict[int, float]:
        """Return the mean reward of each rollout that has one, by rollout index."""
        rollouts = sorted(self.commits["rollout"].items())
        rewards = {index: commit.summary.get("rollout/raw_reward") for index, (_, commit) in rollouts}
        return {index: reward for index, reward in rewards.items() if reward is not None}

    def eval_curves(self) -> dict[str, dict[int, float]]:
        """Return the mean rewards of all evaluations: data set -> policy version -> mean reward."""
        curves: dict[str, dict[int, float]] = defaultdict(dict)
        for commit in sorted(self.evals.values(), key=lambda commit: commit.index):
            for task, reward in eval_rewards(commit).items() if commit.listed_kind == "eval" else ():
                curves[task][commit.index] = reward
        return curves


def eval_name_from_key(commit_key: str) -> str:
    """Return the name of the evaluated data set, from the key of the commit."""
    return commit_key.rsplit("/", 1)[-1].removesuffix(".commit.json")
