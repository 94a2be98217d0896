"""The content of MLflow by the ids of a store's artifacts, and what it must be according to the store's commits."""

import json
import re
from collections import defaultdict
from collections.abc import Iterable

from mlflow import MlflowClient
from mlflow.entities import DatasetInput, Run

from penstock.storage.commit import commit_key
from penstock.storage.history.lineage_graph import LineageGraph, Node


class Shown:
    """The content of MLflow by the ids of the store's artifacts: keys of commits, paths of sources."""

    def __init__(self, client: MlflowClient) -> None:
        [experiment] = client.search_experiments(filter_string="name = 'penstock'")
        self.runs = [client.get_run(r.info.run_id) for r in client.search_runs([experiment.experiment_id])]
        self.named = {run.info.run_name: run for run in self.runs}
        self.models = list(client.search_logged_models([experiment.experiment_id]))
        self.model_ids = {m.model_id: m.tags.get("penstock.commit") or m.params["uri"] for m in self.models}

    def datasets(self, run: Run, context: str = "") -> set[str]:
        entries = run.inputs.dataset_inputs
        return self.ids_of([entry for entry in entries if context in ("", entry.tags[0].value)])

    def ids_of(self, entries: Iterable[DatasetInput]) -> set[str]:
        found = set()
        for entry in entries:
            uri = json.loads(entry.dataset.source)["uri"]
            match = re.search(r"runs/[^/]+/(rollouts|evals)/.*(?=/attempt-)", uri)
            found.add(commit_key(match[0]) if match else uri)
        return found

    def input_models(self, run: Run) -> set[str]:
        return {self.model_ids[model.model_id] for model in run.inputs.model_inputs}

    def output_models(self, run: Run) -> set[str]:
        return {self.model_ids[m.model_id] for m in (run.outputs.model_outputs if run.outputs else [])}

    def children(self) -> list[Run]:
        return [run for run in self.runs if run.data.tags.get("penstock.part") != "run"]

    def pages(self) -> dict[str, str]:
        """The description of each page, by the id in its URL."""
        pages = {run.info.run_id: run.data.tags.get("mlflow.note.content", "") for run in self.runs}
        return pages | {model.model_id: model.tags.get("mlflow.note.content", "") for model in self.models}


def inputs_of_checkpoint(graph: LineageGraph, node: Node) -> set[str]:
    """The rollouts since the previous checkpoint, and that checkpoint or the base model."""
    checkpoints = {dict(n.inputs)["step"]: n.id for n in graph.nodes.values() if n.kind == "checkpoint"}
    found, step = set(), graph.nodes[dict(node.inputs)["step"]]
    while True:
        inputs = dict(step.inputs)
        found.add(inputs["rollout"])
        before = inputs["policy"]
        if before in checkpoints or graph.nodes[before].kind == "model":
            return found | {checkpoints.get(before, before)}
        step = graph.nodes[before]


def expected_inputs(graph: LineageGraph) -> dict[str, set[str]]:
    """What each model was made from, and what each evaluation used. Steps are not shown by themselves."""
    expected = {}
    for node in graph.nodes.values():
        if node.kind == "checkpoint":
            expected[node.id] = inputs_of_checkpoint(graph, node)
        elif node.kind in ("model", "export"):
            expected[node.id] = {id for _, id in node.inputs}
        elif node.kind == "eval":
            steps = {dict(n.inputs)["step"]: n.id for n in graph.nodes.values() if n.kind == "checkpoint"}
            inputs = {steps.get(id, id) for _, id in node.inputs}
            expected[node.id] = {id for id in inputs if graph.nodes[id].kind != "step"}  # without a checkpoint
    return expected


def shown_inputs(shown: Shown) -> dict[str, set[str]]:
    """What MLflow shows as inputs of the runs that made a model or the samples of an evaluation."""
    found: dict[str, set[str]] = defaultdict(set)
    for run in shown.children():
        samples = shown.datasets(run, "samples")
        for output in shown.output_models(run) | samples:
            found[output] |= shown.input_models(run) | (shown.datasets(run) - samples)
    return dict(found)


def check_content(client: MlflowClient, graph: LineageGraph) -> None:
    """Check that MLflow has every artifact of a store once, nothing else, and the lineage of the commits."""
    shown = Shown(client)
    entries: dict[str, set[tuple[str, str]]] = defaultdict(set)
    for run in shown.runs:
        for entry in run.inputs.dataset_inputs:
            [id] = shown.ids_of([entry])
            entries[id].add((entry.dataset.name, entry.dataset.digest))
    assert {id: names for id, names in entries.items() if len(names) > 1} == {}
    artifacts = {node.id for node in graph.nodes.values() if node.kind != "step"}
    assert sorted([*shown.model_ids.values(), *entries]) == sorted(artifacts)
    assert shown_inputs(shown) == expected_inputs(graph)
