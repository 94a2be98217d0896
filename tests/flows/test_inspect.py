"""`penstock lineage` and `penstock samples` on a run, a fork of it, and a run that starts from its export."""

import json
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.flows.cli import main
from penstock.flows.commands.fork import main as fork
from penstock.flows.inspect import lineage_trees
from penstock.flows.inspect.read_samples import describe_sample
from penstock.flows.terminal.console import wide_console
from penstock.storage.commit import CheckpointRef, Commit, RunKeys, commit_key
from penstock.storage.history.lineage_graph import LineageGraph, find_node, read_lineage
from penstock.storage.samples.sample import Sample, Status
from penstock.storage.store import Store, committed_prefixes
from tests.storage.made_run import commit_files, config_of, make_run, write_data


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """Run `r` (6 rounds, checkpoints 2 and 5, evaluation and export of 5), its fork `f` at round 4 with 2 more rounds,
    and run `g`, whose base model was converted from the export; the store was moved after that."""
    place = tmp_path_factory.mktemp("inspect")
    old = Store(str(place / "old"))
    data = write_data(place / "data.jsonl")
    config = config_of(old, data)
    keys = make_run(old, config, rounds=6, save=(2, 5), score=(2, 5))
    checkpoint = {"checkpoint": commit_key(keys.checkpoint_prefix(5))}
    fields = {"kind": "export", "run": "r", "index": 5, "policy_version": 5, "inputs": checkpoint}
    export = commit_files(old, keys.export_prefix(5), {"model.safetensors": b"w"}, **fields)
    fork(["r", "--at", "4", "--name", "f", "--store", old.root])
    make_run(old, config_of(old, data, "f"), rounds=6, save=(6,))
    model = {"kind": "model", "policy_version": 0, "inputs": {"hf_checkpoint": old.path(export.attempt or "")}}
    commit_files(old, "models/def", {"weights": b"exported"}, **model)
    base = CheckpointRef(key="models/def.commit.json", uri="", format="torch_dist", policy_version=0)
    old.create("runs/g/base.json", base.model_dump_json().encode())
    make_run(old, config_of(old, data, "g"), rounds=1)
    warm = {"kind": "model", "policy_version": 0, "inputs": {"checkpoint": "/models/warm"}}
    commit_files(old, "models/megatron-0123456789abcdef", {"weights": b"w"}, **warm)
    scored = {"kind": "eval", "run": "r", "index": 5, "policy_version": 5, "summary": {"eval/sums@1a2b3c4d": 0.5}}
    scored["inputs"] = {"samples": commit_key(keys.eval_prefix(5, "sums"))}
    scored["state"] = {"scoring": {"custom_rm_path": "/rewards/exact.py:score", "rm_type": None}}
    commit_files(old, keys.eval_prefix(5, "sums@1a2b3c4d"), {"part": b"s"}, **scored)
    (place / "old").rename(place / "runs")
    return Store(str(place / "runs"))


@pytest.fixture(scope="module")
def graph(store: Store) -> LineageGraph:
    return read_lineage(store)


def names(nodes) -> set[str]:
    return {node.name for node in nodes}


def test_graph_has_every_commit_once_and_every_input_of_a_commit_is_an_edge(store: Store, graph: LineageGraph) -> None:
    prefixes = [prefix for run in ("r", "f", "g") for prefix in committed_prefixes(store, RunKeys(run))]
    models = ("models/abc", "models/def", "models/megatron-0123456789abcdef")
    keys = {commit_key(prefix) for prefix in [*prefixes, *models]}
    copies = {key for key in keys if key.startswith("runs/f/") and key.replace("/f/", "/r/") in keys}
    copies -= {commit_key(RunKeys("f").rollout_prefix(r)) for r in (4, 5)}
    copies -= {commit_key(RunKeys("f").step_prefix(r)) for r in (4, 5)}
    assert {node.id for node in graph.nodes.values() if node.commit} == keys - copies and copies == set(graph.originals)
    for key in keys - copies:
        commit = graph.nodes[key].commit
        assert isinstance(commit, Commit)
        inputs = dict(graph.nodes[key].inputs)
        for role, value in commit.inputs.items():
            assert inputs[role] == (graph.resolve(value) if value.endswith(".commit.json") else inputs[role])
            assert key in graph.users[inputs[role]]


def test_lineage_crosses_fork_export_and_moved_store(store: Store, graph: LineageGraph) -> None:
    g, forked = find_node(graph, store, "g/step/0"), find_node(graph, store, "f/6")
    export = {"r/export/5", "r/checkpoint/5", *(f"r/step/{r}" for r in range(5)), "models/abc", "models/def"}
    assert export <= names(graph.ancestors(g.id)) and "r/step/5" not in names(graph.ancestors(g.id))
    of_fork = names(graph.ancestors(forked.id))
    assert {"f/step/5", "f/step/4", "r/step/3", "r/rollout/0", "models/abc"} <= of_fork
    assert not {"r/step/4", "f/step/3"} & of_fork
    users = names(graph.descendants(find_node(graph, store, "r/rollout/3").id))
    assert {"r/checkpoint/5", "r/eval/5/sums", "r/export/5", "f/checkpoint/6", "g/step/0"} <= users
    assert not {"r/checkpoint/2", "r/eval/2/sums"} & users
    assert "r/eval/5/sums" in names(graph.descendants(find_node(graph, store, "r/5").id))


@pytest.mark.parametrize(
    ("reference", "name"),
    [
        ("r", "r/step/5"),
        ("r/5", "r/checkpoint/5"),
        ("f/checkpoint/2", "r/checkpoint/2"),
        ("r/eval/5", "r/eval/5/sums"),
        ("r/sample/000000004-01", "r/rollout/1"),
        ("f/prompt/000000004", "r/rollout/1"),
        ("r/sample/eval-000005-sums-000000000-00", "r/eval/5/sums"),
        ("models/def", "models/def"),
        ("0123456789", "models/megatron-0123456789abcdef"),
        ("runs/r/steps/000002.commit.json", "r/step/2"),
    ],
)
def test_reference_names_an_artifact(store: Store, graph: LineageGraph, reference: str, name: str) -> None:
    assert find_node(graph, store, reference).name == name


def test_reference_may_be_a_path_relative_to_the_current_directory(
    store: Store, graph: LineageGraph, monkeypatch: pytest.MonkeyPatch
) -> None:
    [data] = [node.id for node in graph.nodes.values() if node.id.endswith("data.jsonl")]
    monkeypatch.chdir(Path(data).parent)
    assert find_node(graph, store, "data.jsonl").id == data


@pytest.mark.parametrize("damage", ["missing", "damaged"])
def test_samples_of_other_rounds_are_found_if_a_shard_is_lost(
    damage: str, store: Store, tmp_path: Path, printed: Callable[..., str]
) -> None:
    place = str(shutil.copytree(store.root, tmp_path / "copy"))
    [shard] = Path(place).glob("runs/r/rollouts/000000/attempt-*/part-*.parquet")
    shard.unlink() if damage == "missing" else shard.write_bytes(b"not Parquet")
    assert "r/rollout/1  6 samples" in printed("lineage", "r/sample/000000004-01", "--store", place)
    error = printed("lineage", "r/sample/000000001-01", "--store", place, code=2)
    assert "runs/r/rollouts/000000 is missing or damaged" in error and error.count("\n") == 1


def test_printed_trees_name_rounds_forks_and_runs(store: Store, printed: Callable[..., str]) -> None:
    lines = printed("lineage", "r/2", "--store", store.root).splitlines()
    text = [line.strip("│├└─ ") for line in lines]
    assert text[1:3] == ["made from", "rounds 0 to 1 of r: 12 samples, reward 0.250"]
    used = text[text.index("used for") :]
    for start in ("r/eval/2/sums", "run r from round 2", "fork f from round 4", "r/export/5", "run g from round 0"):
        assert any(line.startswith(start) for line in used), start
    assert "sample 000000004-01" in printed("lineage", "r/sample/000000004-01", "--store", store.root)


def test_printed_names_have_no_hash_and_each_artifact_is_one_line_of_a_terminal(
    store: Store, printed: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lineage_trees, "wide_console", lambda: wide_console(60))
    lines = [line.strip("│├└─ ") for line in printed("lineage", "r/5", "--store", store.root).splitlines()]
    assert sum(line.startswith("r/eval/5/sums (exact.py:score)  reward 0.5") for line in lines) == 1
    assert sum(line.startswith("r/5 (def)  converted model") for line in lines) == 1
    assert not any("1a2b3c4d" in line or len(line) > 60 for line in lines)
    assert sum(line.endswith("data.jsonl") for line in lines) == 1, "the end of a long path"
    assert printed("lineage", "01234567", "--store", store.root).startswith("warm (01234567)  converted model, 1 B")


def test_json_and_dot_have_the_complete_graph(store: Store, graph: LineageGraph, printed: Callable[..., str]) -> None:
    result = json.loads(printed("lineage", "r/5", "--json", "--store", store.root))
    node = find_node(graph, store, "r/5")
    assert result["ancestors"] == [other.id for other in graph.ancestors(node.id)]
    assert {(edge["from"], edge["to"]) for edge in result["edges"]} >= {(source, node.id) for _, source in node.inputs}
    dot = printed("lineage", "r/5", "--dot", "--store", store.root)
    assert dot.count(" -> ") == len(result["edges"]) and dot.startswith("digraph") and '"g/step/0"' in dot


def test_samples_of_a_prompt_side_by_side(store: Store, printed: Callable[..., str]) -> None:
    def samples(*words: str) -> list[dict]:
        lines = printed("samples", "r", *words, "--prompt", "3", "--json", "--store", store.root).splitlines()
        return [json.loads(line) for line in lines]

    evaluated = samples("--eval", "sums")
    assert [(s["rollout_id"], s["metadata"]["source"]["row"]) for s in evaluated] == [(2, 3), (5, 3)]
    trained = samples()
    assert len({s["rollout_id"] for s in trained}) > 1 and {s["metadata"]["source"]["row"] for s in trained} == {3}
    words = ["samples", "r", "--prompt", trained[0]["sample_id"], "--rounds", "0,1,2,3"]
    assert "round" in printed(*words, "--store", store.root)


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ({"reward": 1.0, "format": 0.5}, "reward 1.000, format 0.500"),
        ({"correct": 1.0, "format": 0.5}, "reward 1.000, correct 1.000, format 0.500"),
        ({"score": 1.0, "reward": 0.25}, "reward 1.000, score 1.000, reward 0.250"),
    ],
)
def test_a_reward_is_printed_once(rewards: dict[str, float], expected: str) -> None:
    sample = Sample("s", "g", "s", 0, reward=1.0, rewards=rewards, status=Status.COMPLETED)
    assert describe_sample(sample).partition(", completed")[0] == expected


def test_worst_samples_come_first_and_the_limit_holds(store: Store, printed: Callable[..., str]) -> None:
    words = ["samples", "r", "--round", "1", "--worst", "--limit", "3", "--json"]
    lines = printed(*words, "--store", store.root).splitlines()
    assert len(lines) == 3 and {json.loads(line)["rollout_id"] for line in lines} == {1}


@pytest.mark.parametrize("rounds", [1, 5])
def test_printed_commands_for_a_run_that_diverges_work_on_every_run(
    rounds: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (Path(__file__).parents[2] / "docs" / "troubleshooting.md").read_text()
    commands = page.partition("```bash\n")[2].partition("```")[0].splitlines()
    assert len(commands) == 3 and all("my-run" in command for command in commands)
    monkeypatch.chdir(tmp_path)
    store = Store("penstock-store")
    make_run(store, config_of(store, write_data(tmp_path / "data.jsonl"), "my-run"), rounds=rounds)
    assert [main(shlex.split(command, comments=True)[1:]) for command in commands] == [0, 0, 0]
