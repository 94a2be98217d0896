"""`penstock lineage REF`: what an artifact was made from and what was made from it. Writes nothing."""

from __future__ import annotations

import json
import time
from pathlib import Path, PurePosixPath
from typing import Any

from rich.markup import escape
from rich.tree import Tree

from penstock.flows.inspect.read_samples import print_samples
from penstock.flows.options.argv import format_bytes, short_repr, split_args
from penstock.flows.runtime.runs import open_named_store
from penstock.flows.terminal.console import wide_console
from penstock.storage.blobs import DIRECTORY
from penstock.storage.commit import eval_rewards, model_title
from penstock.storage.errors import check_rules
from penstock.storage.history.lineage_graph import REFERENCES, LineageGraph, Node, find_node, read_lineage
from penstock.storage.samples.shards import read_samples
from penstock.storage.store import Store

USAGE = f"""penstock lineage REF [--json | --dot] [--store URI ...]

  Prints what an artifact was made from and what was made from it, over all runs, forks and exports in the store.
  Consecutive rounds without a checkpoint, evaluation or fork between them are one line.

  REF is {REFERENCES},
  a prompt file, the hash in the name of a converted model (`Qwen3-0.6B (1650300d)`), or the key of a commit.

  --json   the complete graph around REF: every artifact and every edge
  --dot    the same for Graphviz:  penstock lineage my-run/20 --dot | dot -Tsvg > lineage.svg"""


def main(argv: list[str]) -> int:
    """Run the command. Return 0."""
    positional, own, rest = split_args(argv, {"--json": False, "--dot": False})
    found = f"; found {short_repr(' '.join(positional))}" if positional else ""
    rules = (
        (len(positional) != 1, f"penstock lineage needs one reference{found}: {REFERENCES}"),
        (len(own) > 1, "--json and --dot cannot be combined: give one of them"),
    )
    check_rules(rules)
    store = open_named_store(rest, "lineage")
    graph = read_lineage(store)
    node = find_node(graph, store, positional[0])
    if "--json" in own:
        print(json.dumps(to_json(graph, node), indent=1))
    elif "--dot" in own:
        print(to_dot(to_json(graph, node)))
    else:
        print_trees(graph, node, store, positional[0])
    return 0


def print_trees(graph: LineageGraph, node: Node, store: Store, reference: str) -> None:
    """Print the artifact that `reference` names, what it was made from, and what was made from it."""
    console = wide_console()
    run, _, of_run = reference.partition("/")
    kind, _, sample_id = of_run.partition("/")
    if kind == "sample" and node.commit is not None:
        print_samples(run, [next(s for s in read_samples(store, node.commit) if s.sample_id == sample_id)], store)
    console.print(f"[bold]{escape(title(node))}[/bold]  {escape(describe(node))}")
    inputs = Tree("made from")
    _add_inputs(graph, inputs, node, {node.id})
    if not inputs.children:
        inputs.add("nothing in the store")
    console.print(inputs, no_wrap=True, overflow="ellipsis")
    users = Tree("used for")
    _add_users(graph, users, node)
    if node.kind == "checkpoint":  # training after a checkpoint counts as made from it
        for later in (user for _, policy in node.inputs for user in _users(graph, graph.nodes[policy])):
            if later.kind == "step":
                _add_rounds(graph, users.add(f"run {escape(later.run)} from round {_index(later)}"), later)
    if not users.children:
        users.add("nothing yet")
    console.print(users, no_wrap=True, overflow="ellipsis")


# ---- trees -----------------------------------------------------------------------------------------------------------


def _add_inputs(graph: LineageGraph, tree: Tree, node: Node, shown: set[str]) -> None:
    inputs = [graph.nodes[source] for _, source in node.inputs]
    if node.kind == "step":
        rounds = [node]  # the steps of the same run up to `node`
        while True:
            policies = _inputs(graph, rounds[0], "policy")
            if not policies or policies[0].kind != "step" or policies[0].run != node.run:
                break
            rounds.insert(0, policies[0])
        tree = tree.add(_describe_rounds(graph, rounds))
        sources = [
            source
            for step in rounds
            for rollout in _inputs(graph, step, "rollout")
            for role, source in rollout.inputs
            if role != "policy"
        ]
        others = [graph.nodes[id] for _, id in rounds[0].inputs if graph.nodes[id].kind != "rollout"]
        inputs = [graph.nodes[id] for id in dict.fromkeys(sources)] + others
    for source in inputs:
        if source.kind == "step":
            _add_inputs(graph, tree, source, shown)
            continue
        branch = tree.add(_label(source) + (" (see above)" if source.id in shown else ""))
        if source.id not in shown:
            shown.add(source.id)
            _add_inputs(graph, branch, source, shown)


def _add_users(graph: LineageGraph, tree: Tree, node: Node) -> None:
    started = set()  # runs whose rounds are shown from their first use of `node` on
    users = _users(graph, node)
    shown = []
    for user in (user for user in users if not _is_below_other(user, users)):
        # A rollout, made from a prompt file or a policy, is shown with its steps: a fork may train it again.
        steps = [step for step in _users(graph, user) if step.kind == "step"] if user.kind == "rollout" else []
        shown += steps or [user]
    for user in shown:
        if user.kind != "step":
            branch = tree.add(_label(user))
            _add_users(graph, branch, user)
        elif user.run not in started:
            started.add(user.run)
            fork_or_start = node.kind in ("model", "source") or user.run != node.run
            branch = tree.add(f"run {escape(user.run)} from round {_index(user)}") if fork_or_start else tree
            _add_rounds(graph, branch, user)


def _add_rounds(graph: LineageGraph, tree: Tree, step: Node) -> None:
    """Add a step and the later rounds of its run, with everything that was made from them."""
    rounds = []
    while step:
        rounds.append(step)
        users = _users(graph, step)
        later = next((user for user in users if user.kind == "step" and user.run == step.run), None)
        others = [user for user in users if user.kind not in ("rollout", "step") and not _is_below_other(user, users)]
        forks = [user for user in users if user.kind == "step" and user.run != step.run]
        if others or forks or later is None:
            tree.add(_describe_rounds(graph, rounds))
            rounds = []
        for user in others:
            branch = tree.add(_label(user))
            _add_users(graph, branch, user)
        for fork in forks:
            _add_rounds(graph, tree.add(f"fork {escape(fork.run)} from round {_index(fork)}"), fork)
        if later is None:
            break
        step = later


def _users(graph: LineageGraph, node: Node) -> list[Node]:
    users = [graph.nodes[id] for id in dict.fromkeys(graph.users.get(node.id, ()))]
    return sorted(users, key=lambda user: user.commit.created_at if user.commit else 0.0)


def _is_below_other(user: Node, others: list[Node]) -> bool:
    """Return whether `user` is an evaluation that is shown below its checkpoint, or a regraded evaluation that is shown
    below the evaluation: one of `others`."""
    above = [other.id for other in others]
    return any(role in ("checkpoint", "samples") and id in above for role, id in user.inputs)


def _inputs(graph: LineageGraph, node: Node, role: str) -> list[Node]:
    return [graph.nodes[id] for name, id in node.inputs if name == role]


# ---- text ------------------------------------------------------------------------------------------------------------

_MAX_PATH = 48  # characters of a prompt file or a source model in a tree


def title(node: Node) -> str:
    """Return the name of an artifact for people: as `penstock lineage` accepts it, but a converted model by its source
    and 8 characters of its hash, regraded samples by their reward, and a long path by its end."""
    commit = node.commit
    if commit is None:
        path = PurePosixPath(node.id)
        short = str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else node.id
        return short if len(short) <= _MAX_PATH else "/".join(("...", *path.parts[-2:]))
    if commit.kind == "model":
        source = next(iter(commit.inputs.values()), "")
        return f"{model_title(source)} ({PurePosixPath(node.name).name.removeprefix('megatron-')[:8]})"
    if commit.listed_kind == "regrade":
        scoring = commit.state["scoring"]
        reward = PurePosixPath(scoring["custom_rm_path"] or scoring["rm_type"] or "rewards of the rows").name
        return f"{node.name.rpartition('@' if commit.kind == 'eval' else '/')[0]} ({reward})"
    return node.name


def describe(node: Node) -> str:
    """Return a short description of an artifact: size, reward, time."""
    commit = node.commit
    if commit is None:
        return "image" if node.id.startswith(f"{DIRECTORY}/") else "outside of the store"
    parts = ["converted model"] if commit.kind == "model" else []
    if commit.kind == "rollout":
        parts.append(f"{commit.num_samples():,} samples of policy version {commit.policy_version}")
    if commit.blobs:
        parts.append(f"{len(commit.blobs):,} images")
    if commit.kind in ("model", "checkpoint", "export"):
        parts.append(format_bytes(sum(file.bytes for file in commit.files)))
    rewards = eval_rewards(commit).values() if commit.kind == "eval" else [commit.summary.get("rollout/raw_reward")]
    parts += [f"reward {reward:.3f}" for reward in rewards if reward is not None]
    parts.append(time.strftime("%Y-%m-%d %H:%M", time.localtime(commit.created_at)))
    return ", ".join(parts)


def _label(node: Node) -> str:
    return f"{escape(title(node))}  [dim]{escape(describe(node))}[/dim]" if node.commit else escape(title(node))


def _index(node: Node) -> int:
    return node.commit.index if node.commit else 0


def _describe_rounds(graph: LineageGraph, steps: list[Node]) -> str:
    """Return one line for consecutive rounds of a run."""
    rollouts = [rollout.commit for step in steps for rollout in _inputs(graph, step, "rollout") if rollout.commit]
    numbers = f"round {_index(steps[0])}" if len(steps) == 1 else f"rounds {_index(steps[0])} to {_index(steps[-1])}"
    rewards = [commit.summary["rollout/raw_reward"] for commit in rollouts if "rollout/raw_reward" in commit.summary]
    change = " -> ".join(f"{reward:.3f}" for reward in dict.fromkeys([*rewards[:1], *rewards[-1:]]))
    samples = f"{sum(commit.num_samples() for commit in rollouts):,} samples"
    return escape(f"{numbers} of {steps[0].run}: {samples}" + (f", reward {change}" if change else ""))


# ---- the complete graph ----------------------------------------------------------------------------------------------


def to_json(graph: LineageGraph, node: Node) -> dict[str, Any]:
    """Return the graph around `node`: its ancestors, its descendants, and the edges between all of them."""
    ancestors, descendants = graph.ancestors(node.id), graph.descendants(node.id)
    nodes = {each.id: each for each in (node, *ancestors, *descendants)}
    described: list[dict[str, Any]] = []
    for each in nodes.values():
        described.append({"id": each.id, "name": each.name, "title": title(each), "kind": each.kind})
        if (commit := each.commit) is not None:
            described[-1] |= {
                "run": each.run or None,
                "index": commit.index,
                "policy_version": commit.policy_version,
                "created_at": commit.created_at,
                "bytes": sum(file.bytes for file in commit.files),
                "samples": commit.num_samples(),
                "digest": commit.digest,
            }
    return {
        "artifact": node.id,
        "ancestors": [other.id for other in ancestors],
        "descendants": [other.id for other in descendants],
        "nodes": described,
        "edges": [
            {"from": source, "to": each.id, "role": role}
            for each in nodes.values()
            for role, source in each.inputs
            if source in nodes
        ],
    }


_SHAPES = {"source": "note", "rollout": "folder", "step": "ellipse", "eval": "diamond", "regrade": "diamond"}
_SHAPES |= dict.fromkeys(("model", "checkpoint", "export"), "box3d")


def to_dot(complete: dict[str, Any]) -> str:
    """Return the graph of `to_json` in Graphviz's language."""
    lines = ["digraph lineage {", "  rankdir=LR"]
    for node in complete["nodes"]:
        lines.append(f"  {json.dumps(node['id'])} [label={json.dumps(node['title'])}, shape={_SHAPES[node['kind']]}]")
    for edge in complete["edges"]:
        label = json.dumps(edge["role"])
        lines.append(f"  {json.dumps(edge['from'])} -> {json.dumps(edge['to'])} [label={label}]")
    return "\n".join([*lines, "}"])
