"""Write finished groups of a round to the round's journal in the store while other groups are still being generated.

A round that was killed or cancelled restarts with the same prompts. It takes from its journal every group that was
generated with the same sampling parameters and by the round's policy version (in asynchronous training: by one within
--max-staleness); only the other groups are generated. Journal entries are not training data: only the commit of the
round makes its samples available, so every sample is used once. Groups are journaled before they are graded, so all
rewards of a round come from the same reward function. The journal is optional: groups that cannot be written to it or
read from it are generated again.
"""

from __future__ import annotations

import hashlib
import json
import logging
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from penstock.stages.rollout.config import RolloutConfig
from penstock.stages.rollout.prompts.data_source import Group, RolloutRound, copy_sample, group_by_group_id
from penstock.storage.blobs import blob_sizes
from penstock.storage.commit import JOURNAL, Commit
from penstock.storage.errors import StoreError
from penstock.storage.preemption import Preempted
from penstock.storage.samples.sample import Sample, Status
from penstock.storage.samples.shards import read_samples, write_shards
from penstock.storage.store import Store

logger = logging.getLogger(__name__)


class Journal:
    """The journal of one round: numbered entries under `<prefix>.journal/`, each a commit with shards. With
    --rollout-journal-interval 0, no journal is written or read."""

    def __init__(self, store: Store, prefix: str, round: RolloutRound, config: RolloutConfig) -> None:
        self.store = store
        self.prefix = f"{prefix}{JOURNAL}"
        self.round = round
        self.interval = config.rollout_journal_interval
        depends_on = [  # options that change responses; journal entries written with other values are ignored
            config.sampling_params(),
            config.rollout_sampling_seeds,
            config.rollout_max_context_len,
            config.rollout_skip_special_tokens,
            config.custom_generate_function_path,
            config.max_turns,
        ]
        self.identity = hashlib.sha256(json.dumps(depends_on, sort_keys=True).encode()).hexdigest()[:16]
        self.finished: dict[str, Group] = {}  # group id -> its samples, from earlier attempts
        self._pending: list[Sample] = []
        self._num_entries = 0
        self._lock = threading.Lock()  # one writer at a time

    @contextmanager
    def flushed_on_error(self) -> Iterator[None]:
        """Flush the journal if the `with` block raises."""
        try:
            yield
        except (Exception, Preempted):
            self.flush()
            raise

    def load_finished_groups(self) -> None:
        """Read the groups that earlier attempts at this round have finished. Skip entries that were written for another
        policy version or other sampling options, or cannot be read."""
        if not self.interval:
            return
        round = self.round
        oldest = round.rollout_id - round.max_staleness if round.max_staleness else round.policy_version
        while entry := self.store.committed(self._entry_key(self._num_entries)):
            self._num_entries += 1
            is_fresh = oldest <= entry.policy_version <= round.policy_version
            if not is_fresh or entry.state.get("identity") != self.identity:
                continue
            try:
                groups = group_by_group_id(read_samples(self.store, entry))
            except (StoreError, OSError, ValueError) as error:
                logger.warning(
                    "cannot read a journal entry of round %d; its groups will be generated again: %s",
                    entry.index,
                    error,
                )
                continue
            self.finished |= {group[0].group_id: group for group in groups}  # the latest, if generated again

    def find_finished_group(self, group: Group) -> Group | None:
        """Return `group` with the responses that an earlier attempt wrote to the journal. Return None unless the
        journal has the same trajectories (ids, prompt, label, metadata, first tokens), each with a completed or
        truncated response."""
        finished, origins = self.finished.get(group[0].group_id, []), {sample.trajectory_id: sample for sample in group}
        if {sample.trajectory_id for sample in finished} != origins.keys():
            return None
        for sample in finished:
            origin = origins[sample.trajectory_id]
            same = all(getattr(sample, name) == getattr(origin, name) for name in ("group_id", "prompt", "label"))
            if not same or not origin.metadata.items() <= sample.metadata.items():
                return None
            length = len(origin.token_ids)
            if sample.sample_id == origin.sample_id and sample.token_ids[:length] != origin.token_ids:
                return None
            if sample.status not in (Status.COMPLETED, Status.TRUNCATED):
                return None
        return finished

    def add_finished_group(self, samples: Sequence[Sample]) -> None:
        """Add a finished group, which the next `flush` writes."""
        if self.interval:
            self._pending += [copy_sample(sample) for sample in samples]  # copies, because grading changes the samples

    def flush(self) -> None:
        """Write the groups added since the last flush. If writing fails, log a warning; the next flush retries."""
        with self._lock:
            samples = self._pending[:]
            if not samples:
                return
            try:
                self._write(samples)
            except (StoreError, OSError) as error:
                logger.warning(
                    "could not write %d finished samples to the journal; the next flush retries: %s",
                    len(samples),
                    error,
                )
                return
            del self._pending[: len(samples)]  # keeps groups that were added during the write

    def delete_entries(self) -> None:
        """Delete the journal of a committed round. Entries that cannot be deleted are left for `penstock gc`."""
        with self._lock:  # a flush in another thread must not write an entry after the deletion
            self._pending.clear()
            self.interval = 0.0
            if not self._num_entries:
                return
            try:
                self.store.delete([entry.key for entry in self.store.walk(self.prefix)])
            except (StoreError, OSError) as error:
                logger.warning("could not delete the journal %s; `penstock gc` will delete it: %s", self.prefix, error)

    def _entry_key(self, number: int) -> str:
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
            blobs=blob_sizes(self.store, (digest for sample in samples for digest in sample.images)),
            state={"identity": self.identity},
        )
        while True:  # use the next free number: another driver, presumed dead, may still write entries of the round
            committed = self.store.commit(self._entry_key(self._num_entries), commit)
            self._num_entries += 1
            if committed.attempt == attempt:
                return
