"""The lineage of a store: what was made from what, over all runs, forks, exports and converted models.

The graph is read from the commit records alone. A node is a commit, or an artifact outside of the store (a prompt file,
a Hugging Face model). The inputs of a node, by role:

    model        the source that it was converted from: a model directory, or an export or a checkpoint of this store;
                 for a directory that `penstock export` wrote, also the files of the run that were copied
    rollout      the policy that generated it, and the prompt files
    step         the rollout that it trained on, the policy before it, and the reference and teacher models
    checkpoint   the step that made its weights, or the model for policy version 0
    eval         the evaluated policy, its checkpoint if there is one, and the prompt files
    export       the checkpoint
    regrade      the rollout whose samples were graded again

"The policy" of version v is the step that made it, or the converted model for version 0, because a checkpoint may
expire while the step remains. An image (a blob) is in the graph only if it is asked for, as an input of the rollouts
and evaluations that list it: a round may have thousands. A fork contains copies of its parent's commits; the graph has
only the originals.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from penstock.storage.blobs import DIRECTORY
from penstock.storage.commit import STAGE_KINDS, CheckpointRef, Commit, RunKeys, attempt_in_path, commit_key
from penstock.storage.errors import RunError, StoreError
from penstock.storage.history.run_record import read_run_record
from penstock.storage.store import Store, committed_prefixes, origin_roles, read_stages


@dataclass(frozen=True)
class Node:
    """One artifact: a commit, or something outside of the store."""

    id: str  # key of the commit record, or path or URI of the artifact
    commit: Commit | None = None
    inputs: tuple[tuple[str, str], ...] = ()  # (role, id of the input)

    @property
    def kind(self) -> str:
        """Return the kind of the commit, or "source" for an artifact outside of the store."""
        return self.commit.kind if self.commit else "source"

    @property
    def run(self) -> str:
        """Return the run that made this node, or "" for models and sources."""
        return self.id.split("/")[1] if self.kind in STAGE_KINDS else ""

    @property
    def name(self) -> str:
        """Return the reference to this node that `penstock lineage` accepts, e.g. `my-run/checkpoint/20`."""
        if self.kind not in STAGE_KINDS:
            return self.id.removesuffix(commit_key(""))
        run, directory, index, *task = self.id.removeprefix("runs/").removesuffix(commit_key("")).split("/")
        return "/".join([run, directory.removesuffix("s"), str(int(index)), *task])


@dataclass
class LineageGraph:
    """All artifacts of a store, with edges from each artifact to its inputs."""

    nodes: dict[str, Node] = field(default_factory=dict)
    users: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))  # id -> ids of what was made from it
    originals: dict[str, str] = field(default_factory=dict)  # key of a copy in a fork -> key of the original
    models: dict[str, dict[str, str]] = field(default_factory=dict)  # run -> role (base, reference, teacher) -> key

    def resolve(self, key: str) -> str:
        """Return the key of a commit, or of the original if it is a copy in a fork."""
        while key in self.originals:
            key = self.originals[key]
        return key

    def policy(self, run: str, version: int) -> str:
        """Return the id of the step or model that made policy `version` of a run, or "" if there is none."""
        if version == 0:
            return self.models[run].get("base", "")
        return self.resolve(commit_key(RunKeys(run).step_prefix(version - 1)))

    def ancestors(self, id: str) -> list[Node]:
        """Return everything that the artifact was made from, directly or indirectly, nearest first."""
        return self._reachable(id, lambda id: [source for _, source in self.nodes[id].inputs])

    def descendants(self, id: str) -> list[Node]:
        """Return everything that was made from the artifact, directly or indirectly, nearest first."""
        return self._reachable(id, lambda id: self.users.get(id, []))

    def _reachable(self, start: str, neighbours: Callable[[str], list[str]]) -> list[Node]:
        ids = dict.fromkeys([start])
        queue = [start]
        for id in queue:
            new = [other for other in dict.fromkeys(neighbours(id)) if other not in ids]
            ids |= dict.fromkeys(new)
            queue += new
        return [self.nodes[id] for id in queue[1:]]


def read_lineage(store: Store) -> LineageGraph:
    """Read the commits of all runs and models of a store, and return their lineage."""
    graph = LineageGraph()
    runs = [run for run in store.list("runs") if store.read(RunKeys(run).record)]
    by_key = {commit_key(prefix): commit for run in runs for prefix, commit in read_stages(store, RunKeys(run)).items()}
    models = [f"models/{name}" for name in store.committed_names("models")]
    conversions = zip(models, store.map_requests(store.committed, models), strict=True)
    by_key |= {commit_key(prefix): commit for prefix, commit in conversions if commit}
    for run in runs:
        keys = RunKeys(run)
        origins = {role: store.read_record(CheckpointRef, keys.origin_key(role)) for role in origin_roles(store, keys)}
        graph.models[run] = {role: model.key for role, model in origins.items() if model}
        graph.originals |= find_originals(store, keys, by_key)
    own = {key: commit for key, commit in by_key.items() if key not in graph.originals}
    graph.nodes = {key: Node(key, commit) for key, commit in own.items()}
    attempts = {commit.attempt: key for key, commit in own.items() if commit.attempt}
    for key, commit in own.items():
        graph.nodes[key] = Node(key, commit, tuple(inputs_of(graph, key, commit, attempts)))
        for _, source in graph.nodes[key].inputs:
            graph.nodes.setdefault(source, Node(source))
            graph.users[source].append(key)
    return graph


def find_originals(store: Store, keys: RunKeys, commits: dict[str, Commit]) -> dict[str, str]:
    """Return the commits of a fork that are copies of its parent's commits: key of the copy -> key of the original."""
    record = read_run_record(store, keys)
    if record is None or record.parent is None:
        return {}
    copies = {}
    for key, commit in commits.items():
        if key.startswith(f"{keys.prefix}/"):
            original = RunKeys(record.parent.run).prefix + key.removeprefix(keys.prefix)
            other = commits.get(original)  # missing if the parent's checkpoint has expired
            if other and (other.attempt, other.created_at) == (commit.attempt, commit.created_at):
                copies[key] = original
    return copies


def inputs_of(graph: LineageGraph, key: str, commit: Commit, attempts: dict[str, str]) -> Iterator[tuple[str, str]]:
    """Yield the inputs of a commit as (role, id)."""
    run = key.split("/")[1]
    versions = {"rollout": commit.policy_version, "eval": commit.policy_version, "step": commit.index}
    if (version := versions.get(commit.kind, -1)) >= 0 and (policy := graph.policy(run, version)):
        yield "policy", policy
    checkpoint = graph.resolve(commit_key(RunKeys(run).checkpoint_prefix(commit.policy_version)))
    if commit.kind == "eval" and checkpoint in graph.nodes:
        yield "checkpoint", checkpoint
    if commit.kind == "step":
        yield from ((role, model) for role, model in graph.models[run].items() if role != "base")
    for role, value in commit.inputs.items():
        if value.endswith(commit_key("")):
            yield role, graph.resolve(value)
        else:  # a path, perhaps that of an attempt in this store before the store was moved
            yield role, attempts.get(attempt_in_path(value) or "", value)


# ---- references ------------------------------------------------------------------------------------------------------

REFERENCES = (
    "RUN, RUN/20 (a checkpoint), RUN/rollout/19, RUN/step/19, RUN/eval/20/DATA_SET, RUN/export/20, RUN/sample/ID, "
    "RUN/prompt/ID, RUN/regrade/19/HASH, blobs/SHA256 (an image)"
)


def find_node(graph: LineageGraph, store: Store, reference: str) -> Node:
    """Return the artifact that a reference names (see REFERENCES); for samples and prompts, their rollout."""
    if reference.startswith(f"{DIRECTORY}/"):
        digest = reference.removeprefix(f"{DIRECTORY}/")
        users = [node for node in graph.nodes.values() if node.commit and digest in node.commit.blobs]
        graph.nodes |= {reference: Node(reference)} if users else {}
        for node in users:
            graph.nodes[node.id] = replace(node, inputs=(*node.inputs, ("image", reference)))
            graph.users[reference].append(node.id)
    for id in (reference, commit_key(reference), str(Path(reference).absolute())):
        if id in graph.nodes:
            return graph.nodes[id]
    hashes = ("models/", "models/megatron-") if len(reference) >= 8 else ()  # of a converted model, or its beginning
    if models := [id for id in graph.nodes for start in hashes if id.startswith(f"{start}{reference}")]:
        return graph.nodes[models[0]]
    run, _, rest = reference.partition("/")
    problem = f"run {run!r} has no {rest or 'trained policy'}"
    if run not in graph.models:
        problem = f"store {store.uri} has no run {run!r} (it has: {', '.join(sorted(graph.models)) or 'none'})"
    elif (id := find_id(graph, store, run, rest)) in graph.nodes:
        return graph.nodes[id]
    raise RunError(f"{problem}: give one of {REFERENCES}")


def find_id(graph: LineageGraph, store: Store, run: str, rest: str) -> str:
    """Return the id of the artifact that `rest`, the part of a reference after the run, names; "" or an id that the
    graph does not contain if there is none."""
    kind, _, value = rest.partition("/")
    keys = RunKeys(run)
    if not kind:
        return graph.policy(run, max(store.committed_indices(f"{keys.prefix}/steps"), default=-1) + 1)
    if kind in ("sample", "prompt"):
        prefix = find_samples(store, keys, "sample_id" if kind == "sample" else "group_id", value)
        return prefix and graph.resolve(commit_key(prefix))
    if kind.isdecimal() and not value:
        kind, value = "checkpoint", kind
    index, _, data_set = value.partition("/")
    if kind not in STAGE_KINDS or not index.isdecimal():
        return ""
    prefix = f"{keys.prefix}/{kind}s/{int(index):06d}"
    if kind in ("eval", "regrade") and not data_set:
        names = store.committed_names(prefix)
        return graph.resolve(commit_key(f"{prefix}/{names[0]}")) if names else ""
    return graph.resolve(commit_key(f"{prefix}/{data_set}" if data_set else prefix))


def find_samples(store: Store, keys: RunKeys, column: str, value: str) -> str:
    """Return the prefix of the rollout or evaluation of a run whose trained samples have `value` in `column`, or "".
    Raises StoreError if a missing or damaged shard may have it."""
    unreadable = ""
    for prefix in committed_prefixes(store, keys):
        commit = store.committed(prefix)
        if commit is None or commit.kind not in ("rollout", "eval"):
            continue
        shards = [store.path(shard.path) for shard in commit.shards()]
        try:
            if shards and pq.read_table(shards, columns=[column], filesystem=store.fs, filters=[(column, "=", value)]):
                return prefix
        except (OSError, pa.ArrowException):
            unreadable = unreadable or prefix
    if unreadable:
        raise StoreError(
            f"{column} {value!r} was not found in the readable shards of run {keys.run!r}, and a shard of {unreadable} "
            f"is missing or damaged: restore that shard from a backup (`penstock verify {keys.run}` prints its path)"
        )
    return ""
