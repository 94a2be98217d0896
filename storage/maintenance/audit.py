"""The audit of `penstock verify`: commit records, file hashes, inputs, order of rounds, samples and prompts of a run.

It only reads the store, and needs neither an engine nor torch. The run may continue during the audit. prompt_audit.py
checks the samples, deletion.py finds unused files.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field

import numpy as np

from penstock.storage.blobs import blob_key, read_blob
from penstock.storage.commit import (
    CheckpointRef,
    Commit,
    FileRecord,
    RunKeys,
    commit_key,
    decode_record,
    has_matching_digest,
)
from penstock.storage.disk import map_in_threads, size_mismatch_error
from penstock.storage.errors import RunError, StoreError
from penstock.storage.history.run_record import RunRecord, read_run_record, read_schedule_changes, read_starts
from penstock.storage.maintenance.deletion import expired_versions, find_orphans, read_tombstone, tombstone_key
from penstock.storage.maintenance.prompt_audit import (
    PromptAudit,
    ServedRound,
    describe_use_problems,
    max_staleness,
    read_round,
)
from penstock.storage.store import Store, committed_prefixes, origin_roles

NUM_FILES = 8  # read concurrently


@dataclass
class Audit:
    """The result of an audit: counts, and one sentence per problem."""

    run: str
    problems: list[str] = field(default_factory=list)
    num_commits: Counter[str] = field(default_factory=Counter)  # by kind
    num_files: int = 0
    num_bytes: int = 0
    num_samples: int = 0  # in rollouts; evaluations are not counted
    num_prompts: int = 0  # with samples in rollouts
    num_epochs: int = 0  # started epochs of the prompt data
    num_sample_uses: int = 0  # how often samples were trained, over all rounds
    num_off_policy: int = 0  # rollouts of later rounds that the initial weights generated
    num_expired: int = 0  # checkpoints with a tombstone
    num_orphans: int = 0  # files that no commit and no live process needs (deletion.py)
    orphan_bytes: int = 0


def audit_run(store: Store, keys: RunKeys, *, verify_hashes: bool = True) -> Audit:
    """Check everything that a run has committed. Without `verify_hashes`, only the sizes of models, checkpoints and
    exports are checked; hashes of sample shards always are."""
    audit = _RunAudit(store, keys, Audit(keys.run))
    record = audit.read_records()
    commits = audit.read_commits()
    audit.audit_files(commits, verify_hashes)
    audit.audit_inputs(commits)
    audit.audit_keys(commits)
    audit.audit_rounds(commits)
    audit.audit_samples(record, commits)
    audit.count_orphaned_files()
    return audit.result


def kind_and_index(prefix: str) -> tuple[str, int]:
    """Return the kind and the index that a commit record must contain, derived from the prefix of its stage."""
    directory, number = prefix.split("/")[2:4]
    return directory.removesuffix("s"), int(number)


@dataclass(frozen=True)
class _RunAudit:
    """The checks of one run. Each method appends the problems it finds to `result`."""

    store: Store
    keys: RunKeys
    result: Audit

    def add_problem(self, problem: str | Exception) -> None:
        self.result.problems.append(str(problem).partition("\n")[0])

    def read_records(self) -> RunRecord | None:
        """Return run.json, or None if it is damaged or missing. Report this as a problem, and also every damaged record
        of the run's starts and schedule changes."""
        store, keys = self.store, self.keys
        for read in (read_starts, read_schedule_changes):
            try:
                read(store, keys)
            except StoreError as error:
                self.add_problem(error)
        try:
            record = read_run_record(store, keys)
        except StoreError as error:
            self.add_problem(error)
            return None
        if record is None:
            if not store.list(keys.prefix):
                raise RunError(f"store {store.uri} has no run {keys.run!r}: check the name, or pass the right --store")
            self.add_problem(f"{keys.record} is missing: restore it from a backup")
        return record

    def read_commits(self) -> dict[str, Commit]:
        """Return the commits of the run and of the models that it started with: prefix in the store -> commit. Damaged
        commit records and missing records of these models are problems."""
        store, keys = self.store, self.keys
        prefixes = committed_prefixes(store, keys)
        origins = {name: data for name in origin_roles(store, keys) if (data := store.read(keys.origin_key(name)))}
        if prefixes and "base" not in origins:
            self.add_problem(
                f"{keys.origin_key('base')} is missing, so the run's initial model is unknown: restore it from a backup"
            )
        model_keys: set[str] = set()
        for name, data in origins.items():
            try:
                model_keys.add(decode_record(CheckpointRef, keys.origin_key(name), data).key)
            except StoreError as error:
                self.add_problem(error)
        prefixes += sorted(key.removesuffix(commit_key("")) for key in model_keys)
        records = store.map_requests(lambda prefix: store.read(commit_key(prefix)), prefixes)
        commits: dict[str, Commit] = {}
        for prefix, data in zip(prefixes, records, strict=True):
            key = commit_key(prefix)
            try:
                if data is None:
                    if prefix.startswith("models/"):
                        self.add_problem(
                            f"{key}, the record of an initial model of the run, is missing: convert the model again"
                        )
                    continue
                commits[prefix] = decode_record(Commit, key, data)
                if not has_matching_digest(data):
                    self.add_problem(
                        f"{key} was modified after it was written (digest mismatch): restore it from a backup"
                    )
            except StoreError as error:
                self.add_problem(error)
        self.result.num_commits.update(commit.kind for commit in commits.values())
        return commits

    def audit_files(self, commits: dict[str, Commit], verify_hashes: bool) -> None:
        """Check size and, with `verify_hashes`, content of every committed file and blob, except sample shards, which
        `audit_samples` checks."""
        store, blobs = self.store, {d: prefix for prefix, commit in commits.items() for d in commit.blobs}
        files = [(prefix, commit, record) for prefix, commit in commits.items() for record in commit.files]
        # Prefix of the stage, key of the file, its size, and its record if it is not a blob.
        jobs: list[tuple[str, str, int, FileRecord | None]] = [
            (prefix, record.path, record.bytes, record)
            for prefix, commit, record in files
            if commit.kind not in ("rollout", "eval")
        ]
        jobs += [(prefix, blob_key(digest), commits[prefix].blobs[digest], None) for digest, prefix in blobs.items()]
        self.result.num_files = len(files) + len(blobs)
        self.result.num_bytes = sum(record.bytes for _, _, record in files)
        self.result.num_bytes += sum(commits[prefix].blobs[digest] for digest, prefix in blobs.items())

        def describe_damage(job: tuple[str, str, int, FileRecord | None]) -> str | None:
            (prefix, key, num_bytes, record), problem = job, ""
            try:
                if (size := store.size(key)) != num_bytes:
                    problem = str(size_mismatch_error(key, num_bytes, size))
                elif verify_hashes and record is None:
                    read_blob(store, key.rpartition("/")[2])
                elif verify_hashes:  # one file at a time: temporary files of a whole checkpoint may not fit on the disk
                    with store.reading(commits[prefix].model_copy(update={"files": [record]})):
                        pass
            except StoreError as error:
                problem = str(error)
            if not problem or store.read(commit_key(prefix)) is None:  # the checkpoint expired during the audit
                return None
            return problem if record else f"{problem} (an image of {prefix})"

        self.result.problems += [problem for problem in map_in_threads(describe_damage, jobs, NUM_FILES) if problem]

    def audit_inputs(self, commits_by_prefix: dict[str, Commit]) -> None:
        """Check that every commit record named as an input of a commit exists, unless it is the deleted record of an
        expired checkpoint, which has a tombstone. Damaged tombstones are problems, too."""
        known = {commit_key(prefix) for prefix in commits_by_prefix}
        for version in expired_versions(self.store, self.keys):
            prefix = self.keys.checkpoint_prefix(version)
            try:
                if read_tombstone(self.store, prefix):
                    known.add(commit_key(prefix))
                    self.result.num_expired += 1
            except StoreError as error:
                self.add_problem(error)
        inputs = [(prefix, role, key) for prefix, c in commits_by_prefix.items() for role, key in c.inputs.items()]
        for prefix, role, key in inputs:
            if not key.endswith(commit_key("")) or key in known:
                continue
            tombstone = tombstone_key(key.removesuffix(commit_key("")))
            if self.store.read(key) is None and self.store.read(tombstone) is None:
                self.add_problem(
                    f"{commit_key(prefix)} has as input the {role} {key}, which does not exist: restore {key} from a "
                    "backup"
                )

    def audit_keys(self, commits_by_prefix: dict[str, Commit]) -> None:
        """Check that kind, run, index, policy version and input of every commit record match the key of the record."""
        keys = self.keys
        for prefix, commit in commits_by_prefix.items():
            if prefix.startswith("models/"):
                continue
            kind, index = kind_and_index(prefix)
            recorded = (commit.kind, commit.index, commit.run or keys.run)
            if recorded != (kind, index, keys.run):
                self.add_problem(
                    f"{commit_key(prefix)} contains {recorded[0]} {recorded[1]} of run {recorded[2]!r}; "
                    f"it must contain {kind} {index} of run {keys.run!r}"
                )
            version = index + 1 if kind == "step" else index
            # Version 0 generates all rounds of --debug-rollout-only; demonstrations have version -1.
            earlier = kind == "rollout" and commit.policy_version in (-1, 0)
            oldest = version - max_staleness(commit)
            self.result.num_off_policy += earlier and 0 == commit.policy_version < oldest
            if kind != "regrade" and not oldest <= commit.policy_version <= version and not earlier:
                allowed = f"{version}" if oldest == version else f"{oldest} to {version}"
                self.add_problem(
                    f"{commit_key(prefix)} has policy version {commit.policy_version}; it must be {allowed}"
                )
            sources = {"step": ("rollout", keys.rollout_prefix), "export": ("checkpoint", keys.checkpoint_prefix)}
            sources["regrade"] = ("samples", keys.rollout_prefix)
            if kind in sources:
                role, prefix_of = sources[kind]
                was, needed = commit.inputs.get(role), commit_key(prefix_of(index))
                if was != needed:
                    self.add_problem(f"{commit_key(prefix)} has the {role} {was} as input; it must be {needed}")

    def audit_rounds(self, commits: dict[str, Commit]) -> None:
        """Check that rounds are consecutive, and that checkpoints, evaluations and exports are of trained versions."""
        indices: dict[str, list[int]] = defaultdict(list)
        for prefix in commits:
            if not prefix.startswith("models/"):
                kind, index = kind_and_index(prefix)
                indices[kind].append(index)
        for kind in ("rollout", "step"):
            if missing := set(range(max(indices[kind], default=-1) + 1)) - set(indices[kind]):
                self.add_problem(f"{kind} {min(missing)} is not committed, but {kind} {max(indices[kind])} is")
        num_trained = len(indices["step"])
        for kind in ("checkpoint", "eval", "export"):
            last = max(indices[kind], default=0)
            # The step is read again, since the run may have committed it during the audit.
            if last > num_trained and self.store.read(commit_key(self.keys.step_prefix(last - 1))) is None:
                self.add_problem(
                    f"{kind} {last} has a policy version that was not trained: the run has {num_trained} trained "
                    "rounds; restore its missing steps from a backup"
                )

    def audit_samples(self, run_record: RunRecord | None, commits_by_prefix: dict[str, Commit]) -> None:
        """Check the sample shards: that sample ids are unique, that every prompt was issued once per epoch, and that
        every sample was trained as often as the options say."""
        store, result = self.store, self.result
        prefixes = sorted(prefix for prefix, commit in commits_by_prefix.items() if commit.kind in ("rollout", "eval"))
        rounds = map_in_threads(
            lambda prefix: read_round(store, prefix, commits_by_prefix[prefix]), prefixes, NUM_FILES
        )
        for round in rounds:
            result.problems += round.problems
        parent = run_record.parent if run_record else None
        prompts = PromptAudit(set(parent.restarts if parent else ()))
        ids: list[np.ndarray] = []
        earlier: dict[int, ServedRound] = {}
        for prefix, round in zip(prefixes, rounds, strict=True):
            commit = commits_by_prefix[prefix]
            if commit.kind == "eval":
                result.problems += PromptAudit(set()).audit_round(prefix, commit, round, one_epoch=True)
                continue
            result.num_samples += len(round.ids)
            result.num_prompts += len(round.served)
            result.problems += prompts.audit_round(prefix, commit, round)
            ids.append(round.ids)
            if parent and commit.index in parent.reused_rounds and commit.writer == self.keys.run:
                self.add_problem(
                    f"{commit_key(prefix)} has files of the run itself, but a fork with --reuse-rollouts trains round "
                    f"{commit.index} on the samples of {parent.run}: restore the record from a backup"
                )
            self.audit_sample_uses(
                run_record, commits_by_prefix.get(self.keys.step_prefix(commit.index)), round, earlier
            )
            earlier[commit.index] = round
        result.num_epochs = prompts.num_epochs
        hashed = np.concatenate(ids) if ids else np.empty(0, dtype=np.uint64)
        if repeated := len(hashed) - len(np.unique(hashed)):
            self.add_problem(f"{self.keys.prefix}: {repeated} sample ids are used more than once")

    def audit_sample_uses(
        self, run_record: RunRecord | None, step: Commit | None, round: ServedRound, earlier: dict[int, ServedRound]
    ) -> None:
        """Check how often the commit of a round's step says that each sample was trained, also those that were replayed
        from `earlier` rounds."""
        train = run_record.config_of_round(step.index).get("train", {}) if run_record and step else {}
        if step is None or "ppo_epochs" not in train or round.problems:
            return
        key = commit_key(self.keys.step_prefix(step.index))
        oldest = step.index - train["replay"]["replay_max_staleness"] if train.get("replay") else step.index
        stored = {index: served for index, served in earlier.items() if index >= oldest}
        if any(served.problems for served in stored.values()):
            return
        problems = describe_use_problems(key, step, round, train, stored)
        self.result.problems += problems
        if not problems:
            runs = [step.state["sample_uses"], *(runs for *_, runs in step.state.get("replayed", []))]
            self.result.num_sample_uses += sum(use * number for of_group in runs for use, number in of_group)

    def count_orphaned_files(self) -> None:
        """Count the run's files that no commit and no live process needs, and their bytes."""
        try:
            orphans = find_orphans(self.store, self.keys.run, older_than=0.0)
        except StoreError as error:  # a damaged record, perhaps of another run
            self.add_problem(error)
            return
        self.result.num_orphans = sum(len(orphan.files) for orphan in orphans)
        self.result.orphan_bytes = sum(orphan.bytes for orphan in orphans)
