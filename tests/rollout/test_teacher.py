"""--opd-teacher-engine and --opd-teacher-url: log-probs of a teacher's server, in the samples and in the trainer."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from scripted_engine import json_server

from penstock.engines.cluster import Cluster
from penstock.engines.generation import Scores
from penstock.engines.serving.pool import start_pool
from penstock.engines.sglang import client
from penstock.engines.sglang.client import parse_scores
from penstock.flows.config import Flow
from penstock.flows.options.flags import parse_config
from penstock.flows.runtime.engine_options import TEACHER as SERVED
from penstock.flows.runtime.engine_options import device_counts, run_placement, teacher_options
from penstock.flows.runtime.preflight import check_teacher
from penstock.stages.rollout.config import RolloutConfig
from penstock.stages.rollout.group import ServingTeacher, open_teacher
from penstock.stages.rollout.prompts.data_source import add_hint
from penstock.stages.rollout.prompts.source import PromptSource
from penstock.stages.train.batching import Batch, read_teacher_logprobs
from penstock.storage.errors import DataError, ModelError, OptionError, PluginError, RunError
from penstock.storage.samples.sample import HINT, TEACHER, Sample, Status, from_table, to_table
from tests.engines.stub_engine import StubBackend, StubClient

TRAINED = Sample("a", "g", "t0", 0, token_ids=[5, 6, 7, 8], loss_mask=[0, 0, 1, 1], rollout_logprobs=[0, 0, -1, -2])


def sample(**changes: Any) -> Sample:
    fields = {name: getattr(TRAINED, name) for name in ("token_ids", "loss_mask", "rollout_logprobs")}
    return Sample("s", "g", "t", 0, **{"reward": 1.0, "status": Status.COMPLETED, **fields, **changes})


class Server:
    """Answers like SGLang's /generate: the log-prob of token t at position i is -t - i / 10."""

    def __init__(self) -> None:
        self.failures = 0  # that the next requests get
        self.bodies: list[dict[str, Any]] = []
        self.address = ""

    def answer(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        self.bodies.append(body | {"path": path})
        if self.failures:
            self.failures -= 1
            return 503, None
        [input_ids] = body["input_ids"]
        entries = [[None if i == 0 else -t - i / 10, t, None] for i, t in enumerate(input_ids)]
        tops = [
            [[-j - t / 8, t + j, None] for j in (1, 0, 2)[: body["top_logprobs_num"]]] if i else None
            for i, t in enumerate(input_ids if body.get("top_logprobs_num") else [])
        ]
        return 200, [{"text": "", "meta_info": {"input_token_logprobs": entries, "input_top_logprobs": tops}}]


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    with json_server(server.answer) as server.address:
        yield server


def score(serving: str | dict[str, str] | ServingTeacher, *samples: Sample, top_k: int = 0, **options: Any) -> None:
    async def run() -> None:
        named = {"": serving} if isinstance(serving, str) else serving
        servers, own = (named, None) if isinstance(named, dict) else ({}, named)
        async with open_teacher(RolloutConfig(**options), servers, own, top_k) as teacher:
            assert teacher is not None
            await teacher.score(samples)

    asyncio.run(run())


def test_trained_tokens_get_the_log_probs_of_the_teacher(server: Server) -> None:
    failed, masked, scored = (
        sample(status=Status.FAILED),
        sample(loss_mask=[0] * 4),
        sample(teacher_logprobs=[0.0, 0.0, -1.0, -1.0]),
    )
    first = sample()
    score(server.address + "/", first, failed, masked, scored)
    assert first.teacher_logprobs == [0.0, 0.0, -7.2, -8.3]
    assert failed.teacher_logprobs is masked.teacher_logprobs is None and scored.teacher_logprobs[2] == -1.0
    [body] = server.bodies
    assert body["path"] == "/generate" and body["input_ids"] == [[5, 6, 7, 8]] and body["return_logprob"]
    assert body["logprob_start_len"] == 0 and body["sampling_params"]["max_new_tokens"] == 0


def test_trained_tokens_get_the_most_probable_tokens_of_the_teacher(server: Server) -> None:
    first, masked = sample(), sample(loss_mask=[0, 0, 0, 1])
    score(server.address, first, masked, top_k=3)
    assert {body["top_logprobs_num"] for body in server.bodies} == {3}
    assert first.teacher_top_ids.tolist() == [0] * 6 + [7, 8, 9, 8, 9, 10], "most probable first"
    assert first.teacher_top_logprobs[6:].tolist() == [-7 / 8, -1 - 7 / 8, -2 - 7 / 8, -1.0, -2.0, -3.0]
    assert masked.teacher_top_ids.tolist() == [0] * 9 + [8, 9, 10]
    table = to_table([first, sample(reward=None), masked])
    restored = from_table(table)
    assert restored[0].teacher_top_ids == first.teacher_top_ids.tolist() and restored[1].teacher_top_ids is None
    assert to_table(restored).equals(table) and "teacher_prompt_ids" not in table.column_names


def test_each_sample_is_scored_by_the_teacher_that_its_prompt_names(server: Server) -> None:
    other = Server()
    with json_server(other.answer) as other.address:
        urls = {"math": server.address + "/", "code": other.address}
        rows = [sample(metadata={TEACHER: name}, token_ids=[5, 6, 7, i]) for i, name in enumerate(["math", "code"] * 2)]
        score(urls, *rows)
        for each, numbers in ((server, [0, 2]), (other, [1, 3])):
            assert sorted(body["input_ids"][0][3] for body in each.bodies) == numbers
        with pytest.raises(DataError, match="names the teacher 'law', but --opd-teacher-url has code, math"):
            score(urls, sample(metadata={TEACHER: "law"}))


def test_request_waits_while_the_engine_of_the_run_restarts(server: Server) -> None:
    addresses, first = [[], []], sample()
    score(lambda: nullcontext(lambda: addresses.pop() if addresses else [server.address]), first)
    assert first.teacher_logprobs == [0.0, 0.0, -7.2, -8.3] and len(server.bodies) == 1 and not addresses


def test_failed_requests_are_repeated_until_the_limit(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "MAX_BACKOFF", 0.0)
    server.failures = client.NUM_TRIES - 1
    first = sample()
    score(server.address, first)
    assert first.teacher_logprobs is not None and len(server.bodies) == client.NUM_TRIES
    server.failures = client.NUM_TRIES
    with pytest.raises(RuntimeError, match=f"--opd-teacher-url .* no log-probs: .* all {client.NUM_TRIES} .*503"):
        score(server.address, sample())


def test_a_server_that_is_not_an_engine_is_named() -> None:
    with json_server(lambda path, body: (200, {})) as address, pytest.raises(RuntimeError, match="--opd-teacher-url"):
        score(address, sample())


def test_the_teacher_speaks_the_protocol_of_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    class Client(StubClient):
        async def score(self, input_ids: list[int], top_k: int = 0) -> Scores:
            return Scores([-float(id) for id in input_ids], [], [])

    monkeypatch.setattr(StubBackend, "connect", lambda backend, urls, timeout: Client(urls))
    first = sample()
    score("http://teacher:1", first, engine="tests.engines.stub_engine:StubBackend")
    assert first.teacher_logprobs == [0.0, 0.0, -7.0, -8.0]


LOGPROBS = [[None, 5, None], [-1.5, 6, None]]


@pytest.mark.parametrize(
    ("answer", "top_k"),
    [
        ({}, 0),
        ({"input_token_logprobs": LOGPROBS[:1]}, 0),
        ({"input_token_logprobs": [LOGPROBS[0], [-1.0, 9, None]]}, 0),
        ({"input_token_logprobs": [LOGPROBS[0], [None, 6, None]]}, 0),
        ({"input_token_logprobs": LOGPROBS, "input_top_logprobs": None}, 2),
        ({"input_token_logprobs": LOGPROBS, "input_top_logprobs": [None, [[-1.0, 5, None]]]}, 2),
    ],
)
def test_answer_without_the_log_probs_of_these_tokens_is_refused(answer: dict[str, Any], top_k: int) -> None:
    with pytest.raises(RuntimeError, match="without the log-probs of the 2 given tokens"):
        parse_scores({"meta_info": answer}, [5, 6], top_k)


def test_last_token_of_the_vocabulary_which_sglang_reports_as_0_has_its_log_prob() -> None:
    answer = {"meta_info": {"input_token_logprobs": [[None, 5, None], [-1.5, 0, None]]}}
    assert parse_scores(answer, [5, 63]).logprobs == [0.0, -1.5]


# ---- the column ------------------------------------------------------------------------------------------------------


def test_trainer_reads_the_stored_log_probs() -> None:
    rows = [
        sample(teacher_logprobs=[0.0, 0.0, -7.0, -8.0]),
        sample(reward=None, status=Status.FAILED),
        sample(teacher_logprobs=[0.0, 0.0, -3.0, -4.0]),
    ]
    table = to_table(rows)
    assert [row.teacher_logprobs for row in from_table(table)] == [row.teacher_logprobs for row in rows]
    logprobs = read_teacher_logprobs(table, Batch.from_table(table, needs_rewards=True))
    assert np.array_equal(logprobs, np.array([0, 0, -7, -8, 0, 0, 0, 0, 0, 0, -3, -4], np.float32))


def test_missing_log_probs_and_those_of_other_tokens_are_refused() -> None:
    table = to_table([sample()])
    with pytest.raises(RunError, match="generated without a teacher: start a new run with --opd-teacher-engine"):
        read_teacher_logprobs(table, Batch.from_table(table, needs_rewards=True))
    with pytest.raises(PluginError, match="teacher_logprobs has length 3, but there are 4 tokens"):
        to_table([sample(teacher_logprobs=[0.0, 0.0, -1.0])])


# ---- options ---------------------------------------------------------------------------------------------------------

WORDS = ["--hf-checkpoint", "m", "--use-opd"]


def test_teacher_on_a_server_is_not_loaded_by_the_trainer() -> None:
    config = parse_config([*WORDS, "--opd-teacher-url", "http://teacher:30000"])
    assert config.train.reads_teacher_logprobs and not config.train.loads_teacher
    own = parse_config([*WORDS, "--opd-teacher-load", "teacher"]).train
    assert own.loads_teacher and not own.reads_teacher_logprobs
    assert own.auxiliary_models == {"teacher": "teacher"}


def test_one_or_several_teachers_are_given_with_the_same_flag() -> None:
    several = parse_config([*WORDS, "--opd-teacher-load", "b=/b", "a=/a"]).train
    assert several.auxiliary_models == {"teacher.a": "/a", "teacher.b": "/b"} and several.teacher_names == ["a", "b"]
    for words in (["http://h:1/?a=b"], ["http://g:1", "--opd-teacher-url", "http://h:1/?a=b"]):  # the last one counts
        config = parse_config([*WORDS, "--opd-teacher-url", *words])
        assert config.train.opd is not None and {*config.train.opd.opd_teacher_url} == {""}
    config = parse_config([*WORDS, "--opd-teacher-url", "http://g:1", "--opd-teacher-url", "a=http://h:1"])
    assert config.train.opd is not None and {*config.train.opd.opd_teacher_url} == {"a"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--use-opd", "needs one kind of teacher"),
        ("--opd-teacher-engine t --opd-teacher-url http://t", "needs one kind of teacher"),
        ("--opd-teacher-num-gpus 2", r"\[train.opd.engine\] needs --opd-teacher-engine"),
        (
            "--opd-teacher-url http://t --rollout-temperature 0.8",
            "log-probs at temperature 1, but --rollout-temperature is 0.8",
        ),
        (
            "--opd-self --opd-hint-key h --custom-generate-function-path f.py",
            "--custom-generate-function-path may change the tokens",
        ),
        (
            "--opd-teacher-url http://t --opd-divergence jsd --opd-top-k 4 --rollout-function-path f.py",
            "--rollout-function-path may change the tokens",
        ),
        ("--opd-hint-template x", "must contain {prompt} and {hint}"),
    ],
)
def test_contradictory_options_of_the_teacher_are_refused(words: str, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        parse_config(["--hf-checkpoint", "m", *words.split()])


# ---- the engine of the run -------------------------------------------------------------------------------------------


def own_teacher(model: Path, *words: str) -> list[str]:
    return [*WORDS, "--opd-teacher-engine", str(model), *words]


def test_own_teacher_has_an_engine_beside_those_of_the_policy(tmp_path: Path) -> None:
    words = ["--opd-teacher-num-gpus", "2", "--actor-num-gpus-per-node", "2", "--rollout-num-gpus", "6"]
    words += ["--rollout-num-gpus-per-engine", "3", "--engine-port", "30000", "--sglang-context-length", "64"]
    config = parse_config(own_teacher(tmp_path, *words))
    options = teacher_options(config)
    assert options is not None and options.spec.model_path == str(tmp_path)
    assert (options.spec.role, options.spec.port, options.spec.args) == ("teacher", 0, {})
    assert options.num_engines_to_start(has_gpus=True) == 1 and options.gpus_per_engine == 2
    assert config.train.auxiliary_models == {}, "the trainer loads no teacher"
    placement = run_placement(config)
    assert (placement.end_of_engines(4), placement.total_gpus(4)) == (11, 14)  # engines: GPUs 4-6 and 8-10
    assert device_counts(Flow.TRAIN, config) == (2, 8, False)
    assert teacher_options(parse_config([*WORDS, "--opd-teacher-url", "http://t"])) is None


def test_teacher_whose_tokens_have_other_ids_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    words = ["--hf-checkpoint", str(tiny_model), "--rollout-max-response-len", "32"]
    check_teacher(parse_config([*words, *own_teacher(tiny_model)[2:]]))
    other = shutil.copytree(tiny_model, tmp_path / "other")
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    first, second = list(vocabulary)[-2:]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(ModelError, match=f"the teacher {other} has the id .* but the policy has"):
        check_teacher(parse_config([*words, *own_teacher(other)[2:]]))


@pytest.mark.integration
def test_engine_of_the_teacher_scores_and_ends_with_its_pool(
    cluster: Cluster, tiny_model: Path, tmp_path: Path
) -> None:
    options = teacher_options(parse_config(own_teacher(tiny_model)))
    assert options is not None
    pool = start_pool(cluster, options.replace_spec_fields(log_dir=str(tmp_path)))
    first, second = sample(), sample()
    with pool.serving(SERVED, lambda urls: None) as urls:
        score(lambda: nullcontext(urls), first, second)
        [pid] = [replica.place().pid for replica in pool.replicas]
    assert first.teacher_logprobs == second.teacher_logprobs and max(first.teacher_logprobs[2:]) < 0
    server = psutil.Process(pid)
    pool.stop()
    server.wait(timeout=30)


# ---- several teachers, and hints, in the prompts ---------------------------------------------------------------------


def test_columns_of_teacher_and_hint_become_metadata_and_the_prompt_of_the_teacher(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1 + 1 {hint}?"}]
    rows = [{"input": messages, "domain": "math", "demo": "It is {prompt} 2.", "metadata": {"n": 1}}]
    rows += [{"input": "2 + 2", "domain": "code", "demo": 4}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = RolloutConfig(prompt_data=[str(path)], opd_teacher_key="domain", opd_hint_key="demo")
    prompts, _ = PromptSource.open(config).take(PromptSource.open(config).restore(None), 2, None)
    assert [prompt.metadata for prompt in prompts] == [
        {"n": 1, TEACHER: "math", HINT: "It is {prompt} 2."},
        {TEACHER: "code", HINT: "4"},
    ]
    hinted = [add_hint(prompt, "{prompt}\n{hint}") for prompt in prompts]
    assert hinted == [[messages[0], {"role": "user", "content": "1 + 1 {hint}?\nIt is {prompt} 2."}], "2 + 2\n4"]
    assert prompts[0].content == messages, "the policy's prompt is not changed"

    path.write_text(json.dumps({"input": "3", "domain": "math", "demo": ""}) + "\n")
    with pytest.raises(DataError, match="column 'demo' is empty"):
        PromptSource.open(config)
    path.write_text(json.dumps({"input": "3", "domain": "math"}) + "\n")
    with pytest.raises(DataError, match=r"has no column 'demo'.*--opd-hint-key"):
        PromptSource.open(config)


def test_prompts_that_name_an_unknown_teacher_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"input": "1", "domain": "math"}\n{"input": "1", "domain": "law"}\n')
    words = [*WORDS, "--prompt-data", str(path), "--opd-teacher-key", "domain", "--opd-teacher-load", "math=x"]
    check_teacher(parse_config([*words, "law=y"]))
    with pytest.raises(DataError, match=r"names the teacher 'law' .* but the run has code, math"):
        check_teacher(parse_config([*words, "code=y"]))
    words = [word for word in words if word not in ("--opd-teacher-key", "domain")]
    with pytest.raises(DataError, match=r"names the teacher None .* correct the row, --opd-teacher-key"):
        check_teacher(parse_config(words))
