"""Follow a run: read each of its commits once, as they appear, with few requests to the store."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator

from penstock.storage.commit import Commit, RunKeys
from penstock.storage.file_store import NUM_REQUESTS
from penstock.storage.store import Store

LISTING_SECONDS = 10.0  # between two listings of checkpoints, exports and evaluations
ROUNDS = ("rollouts", "steps")


class CommitFeed:
    """The commits of a run, each of which is returned once, rounds in their order. The first call lists all
    directories. Later ones request the next rollout and the next step by name, because rounds are consecutive, and list
    the other directories, which are short, every LISTING_SECONDS."""

    def __init__(self, store: Store, keys: RunKeys) -> None:
        self.store = store
        self.keys = keys
        self.num_read = 0
        self._waiting: list[str] | None = None  # prefixes that were listed and are not read yet, in reverse order
        self._next = dict.fromkeys(ROUNDS, 0)  # kind -> number of the first round that is not known
        self._known: set[str] = set()  # prefixes of other commits
        self._evaluated: dict[str, int] = defaultdict(int)  # directory of a version -> number of evaluations
        self._listed_at = float("-inf")

    @property
    def num_waiting(self) -> int:
        """The number of commits that are known to exist and that `read` has not returned yet."""
        return len(self._waiting or ())

    def read(self, seconds: float) -> Iterator[Commit]:
        """Yield commits that no call has yielded before, for at most about `seconds`; the next call yields the rest."""
        deadline = time.monotonic() + seconds
        if self._waiting is None:
            self._waiting = list(reversed([*self._list_rounds(), *self._list_others()]))
        elif not self._waiting:
            self._waiting = list(reversed(self._list_others()))
        size = 1 if self.store.is_local else NUM_REQUESTS
        while self._waiting and time.monotonic() < deadline:
            batch = [self._waiting.pop() for _ in range(min(size, len(self._waiting)))]
            for commit in self.store.map_requests(self.store.committed, batch):
                if commit is not None:  # a checkpoint may have expired since the listing
                    yield self._count(commit)
        for kind in ROUNDS if not self._waiting else ():
            while time.monotonic() < deadline:
                commit = self.store.committed(f"{self.keys.prefix}/{kind}/{self._next[kind]:06d}")
                if commit is None:
                    break
                self._next[kind] += 1
                yield self._count(commit)

    def _list_rounds(self) -> list[str]:
        """Return the prefixes of all rollouts and steps, by round. A listing may be stale, so the next round after it
        is requested by name."""
        prefixes = []
        for kind in ROUNDS:
            directory = f"{self.keys.prefix}/{kind}"
            numbers = sorted(int(name) for name in self.store.committed_names(directory) if name.isdigit())
            consecutive = [number for position, number in enumerate(numbers) if number == position]
            self._next[kind] = len(consecutive)
            prefixes += [(number, f"{directory}/{number:06d}") for number in consecutive]
        return [prefix for _, prefix in sorted(prefixes)]

    def _list_others(self) -> list[str]:
        """Return the prefixes of new checkpoints, exports and evaluations, if it is time for a listing."""
        if time.monotonic() - self._listed_at < LISTING_SECONDS:
            return []
        self._listed_at = time.monotonic()
        directories = [f"{self.keys.prefix}/{kind}" for kind in ("checkpoints", "exports")]
        versions = [f"{self.keys.prefix}/evals/{name}" for name in self.store.list(f"{self.keys.prefix}/evals")]
        num_data_sets = max(self._evaluated.values(), default=0)
        # An old version is evaluated again only if it has fewer evaluations than others (it was postponed).
        directories += [
            each
            for each in versions
            if not num_data_sets or self._evaluated[each] < num_data_sets or each in versions[-2:]
        ]
        names = self.store.map_requests(self.store.committed_names, directories)
        new = [f"{directory}/{name}" for directory, of in zip(directories, names, strict=True) for name in of]
        new = [prefix for prefix in dict.fromkeys(new) if prefix not in self._known]
        self._known.update(new)
        return new

    def _count(self, commit: Commit) -> Commit:
        self.num_read += 1
        if commit.listed_kind == "eval":
            self._evaluated[f"{self.keys.prefix}/evals/{commit.index:06d}"] += 1
        return commit
