"""remote_rm against a real server on this machine."""

import asyncio
import contextlib
import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import pytest

from stages.rewards import remote
from stages.rewards.grading import Grader, check_reward
from storage.sample import Sample, Status


class Server(ThreadingHTTPServer):
    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.bodies: list[dict[str, str]] = []
        self.failures: dict[str, list[int]] = {}  # response -> statuses to answer before the reward

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/grade"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.bodies.append(body)
        response = body["response"]
        failures = self.server.failures.get(response, [])
        if response == "slow":
            time.sleep(1.5)
        status = failures.pop(0) if failures else 200
        answers = {"dict": {"score": 0.5, "length": 3}, "text": "good", "list": [1]}
        content = b"no JSON" if response == "garbage" else json.dumps(answers.get(response, len(response))).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        with contextlib.suppress(BrokenPipeError):  # whoever asked slowly has hung up
            self.wfile.write(content)

    def log_message(self, *args: object) -> None: ...


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def samples(*responses: str) -> list[Sample]:
    return [
        Sample(f"{i}", "g", f"{i}", 0, prompt="p", label="l", response=r, status=Status.COMPLETED)
        for i, r in enumerate(responses)
    ]


def test_what_is_asked_and_answered(server: Server) -> None:
    server.failures = {"again": [503, 429], "refused": [404]}
    batch = samples("four", "again", "refused", "garbage", "text", "list", "slow", "dict", r"in a \boxed{box}")
    batch[-1].metadata["rm_type"] = "boxed_remote_rm"
    start = time.monotonic()
    with Grader("remote_rm", rm_url=server.url, reward_key="score", num_workers=1, timeout=5) as grader:
        grader.grade(batch)
    assert [sample.reward for sample in batch] == [4.0, 5.0, None, None, None, None, 4.0, 0.5, 3.0]
    assert batch[7].rewards == {"score": 0.5, "length": 3.0}
    errors = [sample.metadata.get("error", "") for sample in batch]
    assert "refuses with status 404" in errors[2] and "no JSON" in errors[3]
    assert all("remote_rm" in error and "returned no number" in error for error in errors[4:6])
    assert server.bodies[0].keys() == {"prompt", "response", "label"}
    counts = [sum(body["response"] == name for body in server.bodies) for name in ("again", "refused", "garbage")]
    assert counts == [3, 1, 1], "what may pass is tried again, what the server has decided is not"
    assert time.monotonic() - start < 20


def test_a_server_that_is_away_costs_the_time_limit_and_says_why() -> None:
    batch = samples("a", "b")
    with Grader("remote_rm", rm_url="http://127.0.0.1:9/", num_workers=1, timeout=1.5) as grader:
        grader.grade(batch)
    for sample in batch:
        assert sample.status is Status.FAILED
        assert "--rm-url http://127.0.0.1:9/ still fails at attempt" in sample.metadata["error"]
        assert "Connect" in sample.metadata["error"]


def test_a_server_that_is_slow_is_named(server: Server) -> None:
    [sample] = samples("slow")
    with Grader("remote_rm", rm_url=server.url, num_workers=1, timeout=0.5) as grader:
        grader.grade([sample])
    assert "still fails at attempt 1, with TimeoutError" in sample.metadata["error"]


def test_pauses_grow_to_thirty_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses = []

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)

    async def down(url: str, body: object, seconds: float) -> object:
        raise remote._Passing("down")

    monkeypatch.setattr(remote, "_post", down)
    monkeypatch.setattr(remote.asyncio, "sleep", sleep)
    with pytest.raises(RuntimeError, match="still fails at attempt 10, with down"):
        asyncio.run(remote.remote_rm(SimpleNamespace(rm_url="u", reward_timeout=1e6), samples("a")[0]))
    limits = [1, 2, 4, 8, 16, 30, 30, 30, 30]
    assert len(pauses) == 9 and all(limit / 2 <= pause <= limit for pause, limit in zip(pauses, limits))
    assert len(set(pauses)) == 9, "drawn at random"


def test_a_url_is_needed_before_anything_starts() -> None:
    with pytest.raises(ValueError, match="give its address with --rm-url"):
        check_reward("boxed_remote_rm", None)
    with pytest.raises(ValueError, match="give its address with --rm-url"):
        Grader("remote_rm")
    [sample] = samples("a")
    sample.metadata["rm_type"] = "remote_rm"
    with pytest.raises(ValueError, match="give its address with --rm-url"), Grader("random") as grader:
        grader.grade([sample])
