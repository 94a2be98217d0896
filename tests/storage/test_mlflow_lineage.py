"""MLflow shows every artifact of a store once, with the lineage that the commits have, over runs, forks and exports."""

import json
import re
import shutil
from pathlib import Path

import pytest
from made_run import commit_files, commit_samples, config_of, make_run, write_data
from mlflow import MlflowClient
from mlflow.entities import Trace
from mlflow_content import Shown, check_content, shown_inputs

from penstock.flows import promotion
from penstock.flows.commands import fork
from penstock.flows.inspect.track import main as track
from penstock.flows.options.flags import parse_config
from penstock.flows.runtime.runs import read_flow_and_config
from penstock.storage.commit import CheckpointRef, Commit, RunKeys, commit_key, encode_commit
from penstock.storage.history.lineage_graph import read_lineage
from penstock.storage.history.run_record import Start, read_run_record, record_start
from penstock.storage.samples.shards import read_samples
from penstock.storage.store import Store, committed_prefixes
from penstock.storage.tracking import delivery

pytestmark = pytest.mark.integration

RUNS = ("r", "f", "n", "m", "c")  # a run, its fork, and runs that start from its export, checkpoint, and a copy of it


def start_from(store: Store, run: str, fingerprint: str, **inputs: str) -> None:
    """Convert a model, with which the run `run` will start."""
    key = commit_key(f"models/{fingerprint}")
    commit_files(store, f"models/{fingerprint}", {"w": b"base"}, kind="model", policy_version=0, inputs=inputs)
    base = CheckpointRef(key=key, uri="", format="torch_dist", policy_version=0)
    store.create(RunKeys(run).origin_key("base"), base.model_dump_json().encode())


def export(store: Store, keys: RunKeys, version: int) -> str:
    """Export a checkpoint of arbitrary bytes; return the directory."""
    fields = {"run": keys.run, "index": version, "policy_version": version}
    inputs = {"checkpoint": commit_key(keys.checkpoint_prefix(version))}
    prefix = keys.export_prefix(version)
    commit = commit_files(store, prefix, {"config.json": b"{}"}, kind="export", inputs=inputs, **fields)
    return store.path(commit.attempt or "")


def score_again(store: Store, keys: RunKeys, version: int) -> None:
    """Commit an evaluation that scores the samples of an existing one again, as `penstock regrade`."""
    source = keys.eval_prefix(version, "sums")
    old = store.committed(source)
    assert old is not None
    fields = {"run": keys.run, "index": version, "policy_version": version, "summary": {"eval/sums@0a": 0.5}}
    inputs = old.inputs | {"samples": commit_key(source)}
    commit_samples(
        store, f"{source}@0a", list(read_samples(store, old)), kind="eval", inputs=inputs, state=old.state, **fields
    )


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four rounds of `r`, the fork `f` at round 3 with two more rounds, `n`, which starts from the export of `r`, and
    `m`, which starts from a checkpoint of `r` (--load) and whose evaluation was scored again, and `c`, which starts
    from what `penstock export` has written."""
    root = tmp_path_factory.mktemp("made")
    store = Store(str(root / "runs"))  # the path of the store looks like a part of a key
    data = write_data(root / "data.jsonl")
    start_from(store, "r", "abc", hf_checkpoint="/hf/tiny")
    keys = make_run(store, config_of(store, data), 4, save=(2, 4), score=(0, 2, 4))
    directory = export(store, keys, 4)
    fork.main(["r", "--at", "3", "--name", "f", "--store", store.root])
    _, config = read_flow_and_config(parse_config(["--store", store.root]).run, "f")
    make_run(store, config, 5, save=(5,), score=(5,))
    start_from(store, "n", "def", hf_checkpoint=directory)
    make_run(store, config_of(store, data, "n", "--hf-checkpoint", directory), 2, save=(2,), score=(0, 1, 2))
    checkpoint = store.committed(keys.checkpoint_prefix(2))
    assert checkpoint is not None and checkpoint.attempt is not None
    start_from(store, "m", "megatron-12345678", checkpoint=store.path(checkpoint.attempt))
    start_from(store, "c", "fed", hf_checkpoint="/hf/copy", export=checkpoint.attempt)
    make_run(store, config_of(store, data, "c"), 1)
    score_again(store, make_run(store, config_of(store, data, "m"), 1, save=(1,), score=(1,)), 1)
    promote_first(store, 2)
    promote_first(store, 4)
    promotion.main(["--to", "math", "--rollback", "--store", store.root])
    return root


def promote_first(store: Store, version: int) -> None:
    words = [f"r/{version}", "--to", "math", "--data-set", "sums", "--force", "--store", store.root]
    assert promotion.main(words) == 0


@pytest.fixture
def store(template: Path, tmp_path: Path) -> Store:
    """A copy of the store, for a test that changes it."""
    return Store(str(shutil.copytree(template / "runs", tmp_path / "runs")))


@pytest.fixture(scope="module")
def sent(template: Path, empty_database: Path) -> tuple[Store, MlflowClient]:
    """The store, and MLflow with all of its runs. Read only."""
    store, database = Store(str(template / "runs")), template / "mlflow.db"
    database.write_bytes(empty_database.read_bytes())
    send(store, database, "--all", "--mlflow-trace-samples", "2")
    return store, send(store, database, "r", "f", "--mlflow-trace-samples", "2")  # again: it changes nothing


def send(store: Store, database: Path, *words: str) -> MlflowClient:
    assert track([*words, "--to", "mlflow", "--tracking-uri", f"sqlite:///{database}", "--store", store.root]) == 0
    return MlflowClient(f"sqlite:///{database}")


def test_every_artifact_is_shown_once_with_its_lineage(sent: tuple[Store, MlflowClient]) -> None:
    store, client = sent
    check_content(client, read_lineage(store))
    shown = Shown(client)
    names = [run.info.run_name for run in shown.runs]
    assert sorted(name for name in names if name.startswith(("convert", "r", "f", "n"))) == [
        *("convert-12345678", "convert-abc", "convert-def", "convert-fed", "f", "n", "r")
    ]
    assert sorted(name for name in names if name.startswith("train")) == [
        *("train-000000-000000", "train-000000-000001", "train-000000-000001"),
        *("train-000002-000003", "train-000002-000004"),
    ]


def test_links_lead_back(sent: tuple[Store, MlflowClient]) -> None:
    shown = Shown(sent[1])
    pages = shown.pages()
    links = {
        (page, target) for page, text in pages.items() for target in re.findall(r"/(?:runs|models)/([\w-]+)", text)
    }
    assert {target for _, target in links} <= set(pages)
    main_runs = {run.info.run_id for run in shown.runs if run.data.tags.get("penstock.part") == "run"}
    # Parts link to the run; its page lists them by itself (child runs, logged models, tables of samples).
    one_way = {(a, b) for a, b in links if (b, a) not in links and b not in main_runs}
    assert one_way == set()
    runs = {(run.data.tags.get("penstock.run"), run.info.run_name): run.info.run_id for run in shown.runs}
    fork, parent, new, loading = (runs[name, name] for name in ("f", "r", "n", "m"))
    models = {model.name: model.model_id for model in shown.models}
    evaluated, trained = runs["n", "eval-000001-sums"], runs["n", "train-000000-000001"]  # version 1 was not saved
    again, original = runs["m", "eval-000001-sums@0a"], runs["m", "eval-000001-sums"]
    pairs = {(models["r-000004-export"], new), (models["r-000002"], loading), (evaluated, trained), (again, original)}
    assert {(fork, parent)} | pairs | {(b, a) for a, b in pairs} <= links


def test_new_commits_are_shown_in_the_run_and_its_parts(store: Store, database: Path) -> None:
    """Regraded rounds are curves of the run; a train run has the metrics and parameters of its rounds."""
    key = RunKeys("n").step_prefix(2)
    store.commit(key, Commit(kind="step", run="n", index=2, policy_version=3, summary={"train/loss": 0.5}))
    fields = {"kind": "checkpoint", "run": "n", "index": 3, "policy_version": 3, "inputs": {"step": commit_key(key)}}
    commit_files(store, RunKeys("n").checkpoint_prefix(3), {"w": b"3"}, **fields)
    keys = RunKeys("n")
    for r in range(2):
        prefix, inputs = keys.regrade_prefix(r, "0123abcd"), {"samples": commit_key(keys.rollout_prefix(r))}
        fields = {"run": "n", "index": r, "inputs": inputs, "summary": {"regrade@0123abcd/changed": 5.0 + r}}
        commit_files(store, prefix, {"part-00000.parquet.txt": b"rewards"}, kind="regrade", **fields)
    client = send(store, database, "n", "--mlflow-trace-samples", "0")
    runs = Shown(client).named
    history = client.get_metric_history(runs["n"].info.run_id, "regrade_at_0123abcd/changed")
    assert [(point.step, point.value) for point in history] == [(0, 5.0), (1, 6.0)]
    assert not [name for name in runs if "regrade" in name]
    train = runs["train-000002-000002"]
    assert [(p.step, p.value) for p in client.get_metric_history(train.info.run_id, "train/loss")] == [(2, 0.5)]
    params = {name: value for name, value in runs["n"].data.params.items() if name.startswith("train.")}
    assert params and train.data.params == params
    assert traces_of(client) == []


def test_evaluation_that_is_delivered_before_its_checkpoint_is_linked(
    store: Store, database: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delivery, "_BATCH", 1)
    client = send(store, database, "n")
    prefixes = [prefix for prefix in committed_prefixes(store, RunKeys("n")) if "/checkpoints/" in prefix]
    for prefix in prefixes:
        path = Path(store.path(commit_key(prefix)))
        commit = Commit.model_validate_json(path.read_text())
        commit.created_at += 1000
        path.write_bytes(encode_commit(commit))
    late = Shown(send(store, tmp_path / "late.db", "n"))
    assert shown_inputs(late) == shown_inputs(Shown(client))


@pytest.mark.full
def test_track_in_any_order_gives_the_same_objects(sent: tuple[Store, MlflowClient], database: Path) -> None:
    store, client = sent
    for run in (*reversed(RUNS), "r"):
        send(store, database, run)
    first, second = Shown(MlflowClient(f"sqlite:///{database}")), Shown(client)
    assert sorted(first.model_ids.values()) == sorted(second.model_ids.values())
    assert sorted(r.info.run_name for r in first.runs) == sorted(r.info.run_name for r in second.runs)
    for name in RUNS:
        a, b = (shown.named[name] for shown in (first, second))
        assert (a.data.metrics, first.datasets(a)) == (b.data.metrics, second.datasets(b))


def test_versions_and_aliases_follow_from_commits_and_decisions(sent: tuple[Store, MlflowClient]) -> None:
    _, client = sent
    found = {(v.name, v.version): v for v in client.search_model_versions(max_results=100)}
    policies = {key: version.tags["penstock.policy"] for key, version in found.items()}
    own = {("r", 1): "r/2", ("r", 2): "r/4", ("f", 1): "f/5", ("n", 1): "n/2", ("m", 1): "m/1"}
    assert policies == own | {("math", 1): "r/2", ("math", 2): "r/4"}
    aliases = {name: client.get_registered_model(name).aliases for name in ("r", "math")}
    assert aliases == {"r": {"candidate": 2}, "math": {"champion": 1, "candidate": 2}}
    [model_id] = re.findall(r"models/(m-\w+)", found["math", 1].description)
    model = client.get_logged_model(model_id)
    assert [entry["name"] for entry in json.loads(model.tags["mlflow.modelVersions"])] == ["r", "math"]
    assert model.tags["penstock.commit"] == commit_key(RunKeys("r").checkpoint_prefix(2))


def test_runs_of_one_name_have_their_own_registered_versions(database: Path, tmp_path: Path) -> None:
    data = write_data(tmp_path / "data.jsonl")
    for place, versions in (("first", (1, 2)), ("second", (1,)), ("second", (1,))):
        store = Store(str(tmp_path / place))
        make_run(store, config_of(store, data), versions[-1], save=versions, score=versions)
        client = send(store, database, "r")
    found = sorted(client.search_model_versions("name = 'r'"), key=lambda version: int(version.version))
    assert [version.tags["penstock.policy"] for version in found] == ["r/1", "r/2", "r/1"]
    uris = [client.get_logged_model(re.findall(r"models/(m-\w+)", v.description)[0]).params["uri"] for v in found]
    assert [uri.removeprefix(f"{tmp_path}/").split("/")[0] for uri in uris] == ["first", "first", "second"]
    assert client.get_registered_model("r").aliases == {"candidate": 3}


def test_promotion_is_shown_at_once_and_one_without_mlflow_says_so_in_one_line(
    store: Store, database: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    client = send(store, database, "r")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{database}")
    promote_first(store, 4)
    assert client.get_model_version_by_alias("math", "champion").tags["penstock.policy"] == "r/4"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    capsys.readouterr()
    promote_first(store, 2)
    [line] = [line for line in capsys.readouterr().out.splitlines() if "MLflow" in line]
    assert "penstock report r --to mlflow" in line


def test_run_page_shows_user_source_commit_and_flow_run(store: Store, database: Path) -> None:
    url = "http://127.0.0.1:4200/runs/flow-run/f0"
    record_start(store, RunKeys("r"), Start(user="ada", flow_run=url))
    run = Shown(send(store, database, "r")).named["r"]
    record = read_run_record(store, RunKeys("r"))
    assert record is not None
    expected = {
        "mlflow.user": "ada",
        "mlflow.source.name": "penstock train",
        "mlflow.source.git.commit": record.code_version.partition("+")[2],
        "penstock.flow_run": url,
    }
    assert {name: run.data.tags[name] for name in expected} == expected
    assert "`penstock lineage r --store " in run.data.tags["mlflow.note.content"]
    assert f"Prefect flow runs: [start 1]({url})" in run.data.tags["mlflow.note.content"]


def test_checkpoint_lists_its_files(sent: tuple[Store, MlflowClient]) -> None:
    store, client = sent
    model = next(model for model in Shown(client).models if model.name == "r-000002")
    assert model.params["num_files"] == "2"
    location = Path(model.artifact_location.removeprefix("file://"))
    rows = (location / "files.csv").read_text().splitlines()
    commit = store.committed(RunKeys("r").checkpoint_prefix(2))
    assert commit is not None and len(rows) == 1 + len(commit.files)
    assert all(any(file.xxh3 in row and str(file.bytes) in row for row in rows) for file in commit.files)


def traces_of(client: MlflowClient) -> list[Trace]:
    [experiment] = client.search_experiments(filter_string="name = 'penstock'")
    return client.search_traces(locations=[experiment.experiment_id])


def test_traces_of_a_round_are_logged_once_and_linked(sent: tuple[Store, MlflowClient]) -> None:
    client = sent[1]
    traces: dict[str, list[Trace]] = {run: [] for run in RUNS}
    for trace in traces_of(client):
        traces[trace.info.tags["penstock.shards"].partition("/")[0]].append(trace)
    assert {run: len(found) // 2 for run, found in traces.items()} == {"r": 4, "f": 2, "n": 2, "m": 1, "c": 1}
    shown = Shown(client)
    for trace in traces["r"]:
        round = int(trace.info.tags["penstock.round"])
        assert trace.info.tags["penstock.shards"] == f"r/rollout/{round:06d}"
        model = shown.model_ids[trace.info.trace_metadata["mlflow.modelId"]]
        assert model == ("models/abc.commit.json" if round < 2 else "runs/r/checkpoints/000002.commit.json")
        assert [span.name for span in trace.data.spans] == ["sample"]  # these samples have no tokens
        assert {a.name: a.feedback.value for a in trace.info.assessments if a.feedback} == {"reward": 0.25}
        assert trace.info.execution_duration is None  # of a sample it is not measured


def test_lost_shards_keep_nothing_else_from_mlflow(
    store: Store, database: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for round, damage in ((1, Path.unlink), (2, lambda shard: shard.write_bytes(b"not Parquet"))):
        commit = store.committed(RunKeys("r").rollout_prefix(round))
        assert commit is not None
        damage(Path(store.path(commit.files[0].path)))
    client = send(store, database, "r", "--mlflow-trace-samples", "2")
    assert len(traces_of(client)) == 2 * 2
    assert sum(model.name == "r-000004" for model in Shown(client).models) == 1
    assert "no traces of round 1" in caplog.text and "no traces of round 2" in caplog.text
