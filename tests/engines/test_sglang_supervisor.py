"""The supervisor and the pool with small servers that die, hang and start as scripted."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from small_servers import SmallReplica, eventually

from penstock.engines.generation import EngineGone
from penstock.engines.options import HealthCheck
from penstock.engines.serving import supervisor
from penstock.engines.serving.pool import EnginePool
from penstock.engines.serving.server import ServerSpec
from penstock.engines.serving.supervisor import Supervisor

VERSION = "run/3"
QUICK = HealthCheck(interval=0.05, timeout=0.2, failures=2, max_restarts=2)


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
        eventually(lambda: running._failure is not None)
        with pytest.raises(RuntimeError, match=r"(?s)--engine-restarts.*exit code -9.*the last line"):
            running.live_urls()
    assert [engine.num_starts for engine in world.engines] == [2, 1]


def test_failed_starts_count_as_restarts(world: World) -> None:
    with world.supervisor(max_restarts=2) as running:
        world.engines[0].starts = False
        world.engines[0].die()
        eventually(lambda: world.engines[0].num_starts == 3)
        eventually(lambda: running._failure is not None)
        with pytest.raises(RuntimeError, match=r"(?s)all 2 restarts.*--engine-restarts.*no such model"):
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


def test_engines_in_use_get_new_weights_also_after_a_restart(world: World) -> None:
    newer: list[list[str]] = []

    def publish_newer(urls: list[str]) -> None:
        if len(newer) == 1:  # the second engine dies during the second update
            world.engines[1].die()
            newer.append([])
            raise EngineGone("hung up")
        newer.append(urls)
        for engine in world.engines:
            if engine.server is not None and engine.server.url in urls:
                engine.server.version = "run/4" if len(newer) == 1 else "run/5"

    with world.supervisor() as running:
        running.update("run/4", publish_newer)
        assert newer == [world.urls] and running.live_urls() == world.urls
        first = world.engines[0].server.url  # type: ignore[union-attr]
        running.update("run/5", publish_newer)
        assert newer[1:] == [[], [first]]
        eventually(lambda: len(newer) == 4 and running.live_urls() == world.urls)
        assert newer[3] == [world.urls[1]] and [engine.num_starts for engine in world.engines] == [1, 2]
        assert {engine.server.version for engine in world.engines if engine.server} == {"run/5"}


def test_engines_are_not_restarted_after_the_supervisor_exits(world: World) -> None:
    with world.supervisor() as running:
        world.engines[0].start_seconds = 3600  # the exit does not wait for it
        world.engines[0].die()
        eventually(lambda: world.engines[0].num_starts == 2)
    eventually(lambda: not any(thread.name.startswith("engine-") for thread in threading.enumerate()))
    assert running._failure is None and len(world.published) == 1


def test_release_of_memory_waits_for_starting_engines_and_skips_engines_that_cannot_start(world: World) -> None:
    cluster: Any = SimpleNamespace(
        check_alive=lambda: None, find_actor=lambda name: None, place_processes=lambda *sizes: []
    )
    pool = EnginePool(cluster, ServerSpec(model_path="/model"), num_engines=0)
    pool.replicas = list(world.engines)
    starting, failing = world.engines
    failing.starts = False
    starting.kill()
    starting.start_seconds = 0.2
    starting.launch_server()
    pool.release_memory()
    assert starting.server is not None and starting.server.allocated == set()
