"""The reward remote_rm against a local HTTP server."""

import asyncio
import contextlib
import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import pytest

from penstock.stages.rewards import builtin as remote
from penstock.stages.rewards.grading import check_reward_options
from penstock.stages.rollout.config import RolloutConfig
from penstock.storage.errors import RewardError
from penstock.storage.samples.sample import Status
from tests.forked_worker import forked_workers  # noqa: F401 fixture
from tests.rewards.make_grader import make_grader, samples


class Server(ThreadingHTTPServer):
    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.bodies: list[dict[str, str]] = []
        self.failures: dict[str, list[int]] = {}  # response -> statuses to answer before the reward
        self.num_active = self.max_active = 0
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/grade"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        with self.server.lock:
            self.server.num_active += 1
            self.server.max_active = max(self.server.max_active, self.server.num_active)
        try:
            self.answer()
        finally:
            with self.server.lock:
                self.server.num_active -= 1

    def answer(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.bodies.append(body)
        response = body["response"]
        failures = self.server.failures.get(response, [])
        deadline = time.monotonic() + 2
        while response == "slow" and self.server.max_active < 2 and time.monotonic() < deadline:
            time.sleep(0.01)  # until another request is there
        status = failures.pop(0) if failures else 200
        answers = {"dict": {"score": 0.5, "length": 3}, "text": "good", "list": [1]}
        content = b"not JSON" if response == "garbage" else json.dumps(answers.get(response, len(response))).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        with contextlib.suppress(BrokenPipeError):  # the client closed the connection
            self.wfile.write(content)

    def log_message(self, *args: object) -> None: ...


@pytest.fixture(autouse=True)
def short_backoff(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "MAX_BACKOFF", 0.1)  # the forked processes of graders have it, too


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_answers_become_rewards_and_only_transient_failures_are_retried(server: Server) -> None:
    server.failures = {"again": [503, 429], "refused": [404]}
    names = ("four", "again", "refused", "garbage", "text", "list", "slow", "dict", r"in a \boxed{box}")
    batch = samples(*names, prompt="p", label="l")
    batch[-1].metadata["rm_type"] = "boxed_remote_rm"
    with make_grader("remote_rm", rm_url=server.url, reward_key="score", timeout=5) as grader:
        grader.grade(batch)
    assert [sample.reward for sample in batch] == [4.0, 5.0, None, None, None, None, 4.0, 0.5, 3.0]
    assert batch[7].rewards == {"score": 0.5, "length": 3.0}
    errors = [sample.metadata.get("error", "") for sample in batch]
    assert "404" in errors[2] and "JSON" in errors[3]
    for error in errors[4:6]:
        assert "remote_rm" in error and error.startswith("the reward function returned no number: ")
    assert server.bodies[0].keys() == {"prompt", "response", "label"}
    counts = [sum(body["response"] == name for body in server.bodies) for name in ("again", "refused", "garbage")]
    assert counts == [3, 1, 1], "only transient failures may be retried"
    assert server.max_active > 1, "requests must be concurrent"


@pytest.mark.full
def test_slow_server_fails_the_sample_with_a_timeout(server: Server) -> None:
    [sample] = samples("slow")
    with make_grader("remote_rm", rm_url=server.url, timeout=0.3) as grader:
        grader.grade([sample])
    assert "TimeoutError" in sample.metadata["error"]


def test_unreachable_server_fails_the_sample_with_its_url_and_reason() -> None:
    batch = samples("a", "b")
    with make_grader("remote_rm", rm_url="http://127.0.0.1:9/", timeout=0.5) as grader:
        grader.grade(batch)
    for sample in batch:
        assert sample.status is Status.FAILED
        assert "--rm-url http://127.0.0.1:9/ " in sample.metadata["error"]
        assert "Connect" in sample.metadata["error"]


def test_backoff_is_jittered_and_grows_to_thirty_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses = []

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)

    def down(url: str, **options: object) -> object:
        raise OSError("down")

    monkeypatch.setattr(remote, "MAX_BACKOFF", 30.0)
    monkeypatch.setattr(remote, "_session", SimpleNamespace(post=down))
    monkeypatch.setattr(remote.asyncio, "sleep", sleep)
    with pytest.raises(RuntimeError, match=r"10.*down"):
        asyncio.run(remote.remote_rm(SimpleNamespace(rm_url="u", reward_timeout=1e6), samples("a")[0]))
    limits = [1, 2, 4, 8, 16, 30, 30, 30, 30]
    assert len(pauses) == 9 and all(limit / 2 <= pause <= limit for pause, limit in zip(pauses, limits))
    assert len(set(pauses)) == 9, "the backoff must be jittered"


def test_remote_rm_without_rm_url_is_rejected() -> None:
    with pytest.raises(RewardError, match="--rm-url"):
        check_reward_options(RolloutConfig(rm_type="boxed_remote_rm"))
    with pytest.raises(RewardError, match="--rm-url"):
        make_grader("remote_rm")
    [sample] = samples("a")
    sample.metadata["rm_type"] = "remote_rm"
    with pytest.raises(RewardError, match="--rm-url"), make_grader("random") as grader:
        grader.grade([sample])
