"""The supervisor over small servers that die, hang and start when a test says so."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from small_servers import serve_json

from engines.sglang import control, supervisor
from engines.sglang.engine import GivenUp
from engines.sglang.supervisor import HealthCheck, Supervisor

VERSION = "run/3"
QUICK = HealthCheck(interval=0.05, timeout=0.2, failures=2, max_restarts=2)


class SmallServer:
    """What an engine's HTTP side says of itself."""

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


class SmallEngine:
    """An engine's place without Ray: as the real one, but its servers are threads of the test."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.num_begun = 0
        self.starts = True  # whether servers come up
        self.start_seconds = 0.0
        self.begin()

    def begin(self) -> None:
        self.num_begun += 1
        self.server: SmallServer | None = SmallServer()
        self._url: str | None = self.server.url
        self._ready = time.monotonic() + self.start_seconds

    def settle(self) -> None:
        pass

    def url(self, given_up: Callable[[], bool] = lambda: False) -> str:
        if self._url is None:
            self.begin()
        while time.monotonic() < self._ready:
            if given_up():
                raise GivenUp
            time.sleep(0.01)
        if not self.starts:
            self.kill()
            raise RuntimeError("the server ended with code 1 while starting: no such model")
        assert self._url is not None
        return self._url

    def alive(self) -> bool:
        return self.server is not None

    def answers(self) -> bool:
        return self.alive()

    def generates(self, timeout: float) -> bool:
        return self.alive() and control.generates(self.url(), timeout)

    def last_words(self) -> str:
        return f"engine {self.index} ended with code -9. The end of its log:\nthe last line"

    def die(self) -> None:
        if self.server is not None:
            self.server.die()
        self.server = None

    def kill(self) -> None:
        self.die()
        self._url = None


class World:
    """Two engines and what was published to whom."""

    def __init__(self) -> None:
        self.engines = [SmallEngine(0), SmallEngine(1)]
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
        made.bring_up()
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
        assert time.monotonic() < deadline, "nothing happened in 10 s"
        time.sleep(0.01)


def test_only_those_with_other_weights_are_published_to(world: World) -> None:
    world.publish([world.urls[1]])
    with world.supervisor() as running:
        assert running.live() == world.urls
    assert world.published[1:] == [[world.urls[0]]]
    world.supervisor()
    assert len(world.published) == 2, "all of them serve it already"


def test_a_dead_engine_leaves_the_list_and_comes_back_with_the_weights(world: World) -> None:
    with world.supervisor() as running:
        stays, goes = world.urls
        world.engines[1].start_seconds = 0.3
        world.engines[1].die()
        eventually(lambda: running.live() == [stays])
        eventually(lambda: len(running.live()) == 2)
        assert goes not in running.live() and running.live() == world.urls
        assert world.published[-1] == [world.urls[1]]


def test_an_engine_that_makes_no_tokens_is_replaced_after_so_many_looks(world: World) -> None:
    with world.supervisor() as running:
        hung = world.engines[0].server
        assert hung is not None
        hung.hangs = True
        eventually(lambda: hung.url not in running.live() and len(running.live()) == 2)
    assert [engine.num_begun for engine in world.engines] == [2, 1]


def test_the_budget_ends_in_the_cause(world: World) -> None:
    with world.supervisor(max_restarts=1) as running:
        world.engines[0].die()
        eventually(lambda: world.engines[0].num_begun == 2 and len(running.live()) == 2)
        world.engines[1].die()

        def hopeless() -> bool:
            try:
                running.live()
            except RuntimeError as error:
                return "--engine-restarts" in str(error) and "ended with code -9" in str(error) and "the last line" in str(error)
            return False

        eventually(hopeless)
    assert [engine.num_begun for engine in world.engines] == [2, 1]


def test_engines_that_do_not_start_any_more_spend_the_budget(world: World) -> None:
    with world.supervisor(max_restarts=2) as running:
        world.engines[0].starts = False
        world.engines[0].die()
        eventually(lambda: world.engines[0].num_begun == 3)
        eventually(lambda: running._failure is not None)
        with pytest.raises(RuntimeError, match=r"(?s)2 replacements.*while starting: no such model"):
            running.live()


def test_an_engine_found_dead_costs_nothing(world: World) -> None:
    world.engines[0].die()
    with world.supervisor(max_restarts=0) as running:
        assert running.live() == world.urls and len(world.urls) == 2


def test_an_engine_that_dies_while_it_is_published_to_is_replaced(world: World) -> None:
    def kill_once() -> None:
        world.before_publish = lambda: None
        world.engines[1].die()
        raise control.ServerGone("hung up")

    world.before_publish = kill_once
    assert world.supervisor().live() == world.urls
    assert [engine.num_begun for engine in world.engines] == [1, 2]
    world.publish = lambda urls: (_ for _ in ()).throw(ValueError("/dev/shm is too small"))  # type: ignore[method-assign]
    world.engines[0].die()
    with pytest.raises(ValueError, match="too small"):
        world.supervisor()


def test_after_the_block_nothing_is_changed_any_more(world: World) -> None:
    with world.supervisor() as running:
        world.engines[0].start_seconds = 60
        world.engines[0].die()
        eventually(lambda: world.engines[0].num_begun == 2)
        start = time.monotonic()
    assert time.monotonic() - start < 30, "nobody waits for a server that is not needed"
    eventually(lambda: not any(thread.name.startswith("engine-") for thread in threading.enumerate()))
    assert running._failure is None and len(world.published) == 1
