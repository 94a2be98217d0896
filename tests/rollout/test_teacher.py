"""--opd-type sglang: log-probs of a teacher's server, in the samples and in the trainer."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.flows.options.flags import parse_config
from penstock.stages.rollout import teacher
from penstock.stages.rollout.teacher import Teacher, token_logprobs
from penstock.stages.train.batching import Batch, read_teacher_logprobs
from penstock.stages.train.config import TrainConfig
from penstock.storage.errors import OptionError, PluginError, RunError
from penstock.storage.samples.sample import Sample, Status, from_table, to_table

TRAINED = Sample("a", "g", "t0", 0, token_ids=[5, 6, 7, 8], loss_mask=[0, 0, 1, 1], rollout_logprobs=[0, 0, -1, -2])


def sample(**changes: Any) -> Sample:
    fields = {name: getattr(TRAINED, name) for name in ("token_ids", "loss_mask", "rollout_logprobs")}
    return Sample("s", "g", "t", 0, **{"reward": 1.0, "status": Status.COMPLETED, **fields, **changes})


class Server(ThreadingHTTPServer):
    """Answers like SGLang's /generate: the log-prob of token t at position i is -t - i / 10."""

    failures = 0  # that the next requests get
    bodies: list[dict[str, Any]]


class Answer(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.bodies.append(body | {"path": self.path})
        if self.server.failures:
            self.server.failures -= 1
            self.send_error(503)
            return
        entries = [[None if i == 0 else -t - i / 10, t, None] for i, t in enumerate(body["input_ids"])]
        content = json.dumps({"text": "", "meta_info": {"input_token_logprobs": entries}}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *arguments: object) -> None: ...


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server(("127.0.0.1", 0), Answer)
    server.bodies = []
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()


def score(server: Server, *samples: Sample) -> None:
    async def run() -> None:
        await Teacher(f"127.0.0.1:{server.server_port}").score(samples)

    asyncio.run(run())


def test_trained_tokens_get_the_log_probs_of_the_teacher(server: Server) -> None:
    failed, masked, scored = (
        sample(status=Status.FAILED),
        sample(loss_mask=[0] * 4),
        sample(teacher_logprobs=[0.0, 0.0, -1.0, -1.0]),
    )
    first = sample()
    score(server, first, failed, masked, scored)
    assert first.teacher_logprobs == [0.0, 0.0, -7.2, -8.3]
    assert failed.teacher_logprobs is masked.teacher_logprobs is None and scored.teacher_logprobs[2] == -1.0
    [body] = server.bodies
    assert body["path"] == "/generate" and body["input_ids"] == [5, 6, 7, 8] and body["return_logprob"]
    assert body["logprob_start_len"] == 0 and body["sampling_params"]["max_new_tokens"] == 0


def test_failed_requests_are_repeated_until_the_limit(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    async def no_wait(seconds: float) -> None: ...

    monkeypatch.setattr(teacher.asyncio, "sleep", no_wait)
    server.failures = teacher.TRIES - 1
    first = sample()
    score(server, first)
    assert first.teacher_logprobs is not None and len(server.bodies) == teacher.TRIES
    server.failures = teacher.TRIES
    with pytest.raises(RuntimeError, match=f"--opd-teacher-url .* failed {teacher.TRIES} times, last with .*503"):
        score(server, sample())


@pytest.mark.parametrize(
    "answer",
    [
        {},
        {"meta_info": {}},
        {"meta_info": {"input_token_logprobs": [[None, 5, None]]}},
        {"meta_info": {"input_token_logprobs": [[None, 5, None], [-1.0, 9, None]]}},
        {"meta_info": {"input_token_logprobs": [[None, 5, None], [None, 6, None]]}},
    ],
)
def test_answer_without_the_log_probs_of_these_tokens_is_refused(answer: dict[str, Any]) -> None:
    with pytest.raises(RuntimeError, match="answered without the log-probs of the 2 tokens"):
        token_logprobs(answer, [5, 6])


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


def test_rollout_without_log_probs_of_the_teacher_is_refused() -> None:
    for table in (to_table([sample()]), to_table([sample()]).drop_columns(["teacher_logprobs"])):
        with pytest.raises(RunError, match="generated without --opd-type sglang"):
            read_teacher_logprobs(table, Batch.from_table(table, needs_rewards=True))


def test_log_probs_of_other_tokens_are_refused() -> None:
    with pytest.raises(PluginError, match="teacher_logprobs has length 3, but there are 4 tokens"):
        to_table([sample(teacher_logprobs=[0.0, 0.0, -1.0])])


# ---- options ---------------------------------------------------------------------------------------------------------

WORDS = ["--hf-checkpoint", "m", "--use-opd"]


def test_teacher_on_a_server_is_not_loaded_by_the_trainer(tmp_path: Path) -> None:
    config = parse_config([*WORDS, "--opd-type", "sglang", "--opd-teacher-url", "http://teacher:30000"])
    assert config.train.reads_teacher_logprobs and not config.train.loads_teacher
    own = parse_config([*WORDS, "--opd-type", "megatron", "--opd-teacher-load", "teacher"]).train
    assert own.loads_teacher and not own.reads_teacher_logprobs
    assert "opd_type" not in TrainConfig().model_dump()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--use-opd", "--opd-type", "sglang"], "--opd-type sglang and --opd-teacher-url need each other"),
        (["--opd-teacher-url", "http://t"], "--opd-type sglang and --opd-teacher-url need each other"),
        (["--use-opd", "--opd-type", "megatron"], "--use-opd and --opd-teacher-load need each other"),
        (["--opd-type", "sglang"], "--opd-type sglang has no effect without --use-opd"),
        (
            ["--use-opd", "--opd-type", "sglang", "--opd-teacher-load", "t", "--opd-teacher-url", "http://t"],
            "--use-opd and --opd-teacher-load need each other, unless --opd-type is sglang",
        ),
        (
            ["--use-opd", "--opd-type", "sglang", "--opd-teacher-url", "http://t", "--rollout-temperature", "0.8"],
            "log-probs at temperature 1, but --rollout-temperature is 0.8",
        ),
    ],
)
def test_contradictory_options_of_the_teacher_are_refused(words: list[str], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        parse_config(["--hf-checkpoint", "m", *words])
