"""List and read the commit records of a run."""

from __future__ import annotations

from penstock.storage.refs import Commit, RunKeys, commit_key
from penstock.storage.store import Store


def committed_prefixes(store: Store, keys: RunKeys) -> list[str]:
    """Return the store prefixes of a run's committed stages: rollouts, steps, checkpoints, exports, then evaluations.

    The commit record of a stage is at `commit_key(prefix)`.
    """
    suffix = commit_key("")
    prefixes = [
        f"{keys.prefix}/{kind}/{index:06d}"
        for kind in ("rollouts", "steps", "checkpoints", "exports")
        for index in store.committed_indices(f"{keys.prefix}/{kind}")
    ]
    for version in store.list(f"{keys.prefix}/evals"):
        directory = f"{keys.prefix}/evals/{version}"
        prefixes += [
            f"{directory}/{name.removesuffix(suffix)}" for name in store.list(directory) if name.endswith(suffix)
        ]
    return prefixes


def read_commits(store: Store, keys: RunKeys) -> list[Commit]:
    """Return all commits of a run in the order of their creation."""
    commits = [commit for prefix in committed_prefixes(store, keys) if (commit := store.committed(prefix))]
    return sorted(commits, key=lambda commit: commit.created_at)
