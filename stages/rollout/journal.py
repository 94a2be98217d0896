"""What a round has finished before it is finished: groups made durable while others are still generated.

A round that was killed or given up begins again with the same prompts, and takes from its journal every group that the same policy
has answered under the same sampling; only the rest is generated. A journal makes nothing true: that a sample is used once is seen to
by the round's one commit. What lies in it is not graded, so that all rewards of a round come from the same reward function. It is a
help and never a must: what cannot be written or read is generated.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import threading
from collections import defaultdict
from collections.abc import Sequence

from stages.rollout.config import RolloutConfig
from stages.rollout.generate import sampling_params
from stages.rollout.round import Group, Round, copied
from storage.errors import StoreError
from storage.refs import Commit
from storage.sample import Sample, Status
from storage.shards import read_samples, write_shards
from storage.store import Store

logger = logging.getLogger(__name__)


class Journal:
    """The journal of one round: numbered entries under `<prefix>.journal/`, each a commit of its own with its shards.

    Args:
        store: where it lies.
        prefix: of the round.
        round: whose samples they are.
        config: sampling, and the interval (0 keeps no journal and reads none).
    """

    def __init__(self, store: Store, prefix: str, round: Round, config: RolloutConfig) -> None:
        self.store = store
        self.prefix = f"{prefix}.journal"
        self.round = round
        self.interval = config.rollout_journal_interval
        self.identity = _identity(config)
        self._finished: dict[str, Group] = {}  # group id -> its samples, from earlier attempts
        self._pending: list[Sample] = []
        self._num_entries = 0
        self._lock = threading.Lock()  # one writer at a time

    def read(self) -> None:
        """Find which groups earlier attempts have finished."""
        if not self.interval:
            return
        while entry := self.store.committed(self._key(self._num_entries)):
            self._num_entries += 1
            for group_id, samples in self._groups_of(entry).items():
                self._finished.setdefault(group_id, samples)

    def take(self, group: Group) -> Group | None:
        """The same group as an earlier attempt has finished it, if it has."""
        found = self._finished.get(group[0].group_id)
        return found if found and _continues(found, group) else None

    def add(self, samples: Sequence[Sample]) -> None:
        """A group is finished; it will be written with the others of its time."""
        if self.interval:
            self._pending += [copied(sample) for sample in samples]  # as they are now: not graded

    def flush(self) -> None:
        """Make everything durable that was added. A failure is only noted: the groups are kept for the next time."""
        with self._lock:
            samples = self._pending[:]
            if not samples:
                return
            try:
                self._write(samples)
            except (StoreError, OSError) as error:
                logger.warning("%d finished samples could not be journalled: %s", len(samples), error)
                return
            del self._pending[: len(samples)]  # others may have been added meanwhile

    def remove(self) -> None:
        """The round is committed: nobody needs this any more. What a failure leaves behind is for `penstock gc`."""
        with self._lock:  # a flush may still run in its thread, and would write an entry of a round that is over
            self._pending.clear()
            self.interval = 0.0
            if not self._num_entries:
                return
            try:
                self.store.delete([found.key for found in self.store.walk(self.prefix)])
            except (StoreError, OSError) as error:
                logger.warning("the journal %s stays: %s", self.prefix, error)

    async def keep(self) -> None:
        """Flush at every interval, until cancelled."""
        while self.interval:
            await asyncio.sleep(self.interval)
            await asyncio.to_thread(self.flush)

    # ---- inside ---------------------------------------------------------------------------------------------------------

    def _key(self, number: int) -> str:
        return f"{self.prefix}/{number:06d}"

    def _write(self, samples: list[Sample]) -> None:
        attempt = self.store.new_attempt(self.prefix)
        with self.store.writing(attempt) as out:
            write_shards(out.path, samples)
        commit = Commit(
            kind=self.round.kind,
            run=self.round.run,
            index=self.round.rollout_id,
            policy_version=self.round.policy_version,
            attempt=attempt,
            files=out.files,
            state={"identity": self.identity},
        )
        while True:  # another driver that is not dead after all may write entries of the same round
            stands = self.store.commit(self._key(self._num_entries), commit)
            self._num_entries += 1
            if stands.attempt == attempt:
                return

    def _groups_of(self, entry: Commit) -> dict[str, list[Sample]]:
        """Group id -> samples of an entry; nothing if it is of another policy, was sampled otherwise, or cannot be read."""
        groups: dict[str, list[Sample]] = defaultdict(list)
        if (entry.policy_version, entry.state.get("identity")) == (self.round.policy_version, self.identity):
            try:
                for sample in read_samples(self.store, entry):
                    groups[sample.group_id].append(sample)
            except (StoreError, OSError, ValueError) as error:
                logger.warning("a journal of round %d cannot be read, its groups are generated again: %s", entry.index, error)
                return {}
        return groups


def _continues(found: Group, group: Group) -> bool:
    """Whether these are answers to all samples of a group, as this attempt would have asked for them."""
    origins = {sample.trajectory_id: sample for sample in group}
    if {sample.trajectory_id for sample in found} != origins.keys():
        return False
    for sample in found:
        origin = origins[sample.trajectory_id]
        same = all(getattr(sample, name) == getattr(origin, name) for name in ("group_id", "rollout_id", "prompt", "label"))
        if not same or not origin.metadata.items() <= sample.metadata.items():
            return False
        length = len(origin.token_ids)
        if sample.sample_id == origin.sample_id and sample.token_ids[:length] != origin.token_ids:
            return False
        if sample.status not in (Status.COMPLETED, Status.TRUNCATED):
            return False
    return True


def _identity(config: RolloutConfig) -> str:
    """Hash of what the answers to a prompt depend on besides the policy."""
    parts = [
        sampling_params(config),
        config.rollout_sampling_seeds,
        config.rollout_max_context_len,
        config.rollout_skip_special_tokens,
        config.custom_generate_function_path,
        config.max_turns,
    ]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]
