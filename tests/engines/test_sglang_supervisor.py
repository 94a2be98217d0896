"""The supervisor with small servers that die, hang and start as scripted."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from small_servers import serve_json

from penstock.engines.backends import engine_backend
from penstock.engines.generation import EngineGone
from penstock.engines.options import HealthCheck
from penstock.engines.serving import supervisor
from penstock.engines.serving.replica import Replica, StartCancelled
from penstock.engines.serving.supervisor import Supervisor
from penstock.engines.weights.routes import ProcessPlace

VERSION = "run/3"
QUICK = HealthCheck(interval=0.05, timeout=0.2, failures=2, max_restarts=2)


class SmallServer:
    """The HTTP answers of an engine."""

    def __init__(self) -> None:
        self.version = "run/0"
        self.hangs = False
        self.http = serve_json(self._say)
        self.url = f"http://127.0.0.1:{self.http.server_port}"

    def _say(self, path: str) -> dict[str, Any]:
        if path == "/health_generate" and self.hangs:
            time.sleep(0.4)
        return {"weight_version": self.version}

    def die(self) -> None:
        self.http.shutdown()
        self.http.server_close()


class SmallReplica(Replica):
    """A replica without Ray, whose servers are threads of the test."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.client = engine_backend().connect(lambda: [])
        self.num_starts = 0
        self.starts = True  # whether servers come up
        self.start_seconds = 0.0
        self.launch_server()

    def launch_server(self) -> None:
        self.num_starts += 1
        self.server: SmallServer | None = SmallServer()
        self.known_url = self.server.url
        self._ready = time.monotonic() + self.start_seconds

    def finish_adoption(self) -> None:
        pass

    def wait_for_url(self, cancelled: Callable[[], bool] = lambda: False) -> str:
        if self.known_url is None:
            self.launch_server()
        while time.monotonic() < self._ready:
            if cancelled():
                raise StartCancelled
            time.sleep(0.01)
        if not self.starts:
            self.kill()
            raise RuntimeError("the server failed to start: no such model")
        assert self.known_url is not None
        return self.known_url

    def alive(self) -> bool:
        return self.server is not None

    def answers(self) -> bool:
        return self.alive()

    def generates_tokens(self, timeout: float) -> bool:
        return self.alive() and self.client.generates_tokens(self.wait_for_url(), timeout)

    def weight_version(self) -> str:
        return self.client.weight_version(self.wait_for_url())

    def place(self) -> ProcessPlace:
        return ProcessPlace("")

    def pid(self) -> int:
        return 0

    def log_tail(self, num_lines: int = 25) -> str:
        return "the last line"

    def release(self) -> None:
        self.kill()

    def exit_report(self) -> str:
        return f"engine {self.index} died (exit code -9); tail of its log:\nthe last line"

    def die(self) -> None:
        if self.server is not None:
            self.server.die()
        self.server = None

    def kill(self) -> None:
        self.die()
        self.known_url = None


class World:
    """Two engines, and the addresses of every publish."""

    def __init__(self) -> None:
        self.engines = [SmallReplica(0), SmallReplica(1)]
        self.published: list[list[str]] = []
        self.before_publish: Callable[[], None] = lambda: None

    def publish(self, urls: list[str]) -> None:
        self.before_publish()
        self.published.append(urls)
        for engine in self.engines:
            if engine.server is not None and engine.server.url in urls:
                engine.server.version = VERSION

    def supervisor(self, **health: Any) -> Supervisor:
        made = Supervisor(self.engines, VERSION, self.publish, QUICK.model_copy(update=health))  # type: ignore[arg-type]
        made.restart_and_publish()
        return made

    @property
    def urls(self) -> list[str]:
        return [engine.server.url for engine in self.engines if engine.server is not None]


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    monkeypatch.setattr(supervisor, "TICK", 0.01)
    world = World()
    yield world
    for engine in world.engines:
        engine.kill()


def eventually(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline, "timed out after 10 s"
        time.sleep(0.01)


def test_only_engines_with_other_weights_are_published_to(world: World) -> None:
    world.publish([world.urls[1]])
    with world.supervisor() as running:
        assert running.live_urls() == world.urls
    assert world.published[1:] == [[world.urls[0]]]
    world.supervisor()
    assert len(world.published) == 2, "all of them serve it already"


def test_a_dead_engine_is_delisted_and_returns_with_the_weights(world: World) -> None:
    with world.supervisor() as running:
        stays, goes = world.urls
        world.engines[1].start_seconds = 0.3
        world.engines[1].die()
        eventually(lambda: running.live_urls() == [stays])
        eventually(lambda: len(running.live_urls()) == 2)
        assert goes not in running.live_urls() and running.live_urls() == world.urls
        assert world.published[-1] == [world.urls[1]]


def test_an_engine_that_generates_no_tokens_is_restarted_after_failed_checks(world: World) -> None:
    with world.supervisor() as running:
        hung = world.engines[0].server
        assert hung is not None
        hung.hangs = True
        eventually(lambda: hung.url not in running.live_urls() and len(running.live_urls()) == 2)
    assert [engine.num_starts for engine in world.engines] == [2, 1]


def test_too_many_restarts_raise_with_the_last_cause(world: World) -> None:
    with world.supervisor(max_restarts=1) as running:
        world.engines[0].die()
        eventually(lambda: world.engines[0].num_starts == 2 and len(running.live_urls()) == 2)
        world.engines[1].die()

        def failed() -> bool:
            try:
                running.live_urls()
            except RuntimeError as error:
                return (
                    "--engine-restarts" in str(error) and "exit code -9" in str(error) and "the last line" in str(error)
                )
            return False

        eventually(failed)
    assert [engine.num_starts for engine in world.engines] == [2, 1]


def test_failed_starts_count_as_restarts(world: World) -> None:
    with world.supervisor(max_restarts=2) as running:
        world.engines[0].starts = False
        world.engines[0].die()
        eventually(lambda: world.engines[0].num_starts == 3)
        eventually(lambda: running._failure is not None)
        with pytest.raises(RuntimeError, match=r"(?s)2 of 2.*--engine-restarts.*no such model"):
            running.live_urls()


def test_an_engine_that_is_dead_at_entry_does_not_count_as_a_restart(world: World) -> None:
    world.engines[0].die()
    with world.supervisor(max_restarts=0) as running:
        assert running.live_urls() == world.urls and len(world.urls) == 2


def test_an_engine_that_dies_during_publish_is_restarted(world: World) -> None:
    def kill_once() -> None:
        world.before_publish = lambda: None
        world.engines[1].die()
        raise EngineGone("hung up")

    world.before_publish = kill_once
    assert world.supervisor().live_urls() == world.urls
    assert [engine.num_starts for engine in world.engines] == [1, 2]
    world.publish = lambda urls: (_ for _ in ()).throw(ValueError("/dev/shm is too small"))  # type: ignore[method-assign]
    world.engines[0].die()
    with pytest.raises(ValueError, match="too small"):
        world.supervisor()


def test_engines_are_not_restarted_after_the_supervisor_exits(world: World) -> None:
    with world.supervisor() as running:
        world.engines[0].start_seconds = 60
        world.engines[0].die()
        eventually(lambda: world.engines[0].num_starts == 2)
        start = time.monotonic()
    assert time.monotonic() - start < 30, "the exit does not wait for a starting server"
    eventually(lambda: not any(thread.name.startswith("engine-") for thread in threading.enumerate()))
    assert running._failure is None and len(world.published) == 1
