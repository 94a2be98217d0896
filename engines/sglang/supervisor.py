"""Engines under watch: every one alive and serving one policy version, the dead replaced at once, the newcomers given the weights.

Lasts as long as a stage that generates. One thread per engine looks whether its process runs (twice a second) and, at every interval,
whether tokens come out of it. Whoever generates asks `live` for addresses and sends again what an engine has taken to its grave.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence

from pydantic import BaseModel, ConfigDict, Field

from engines.cluster import ClusterLost
from engines.sglang import control
from engines.sglang.engine import Engine, GivenUp
from engines.sglang.external import ExternalEngine

TICK = 0.5  # seconds between looks at a server's process; one is a call of a millisecond
logger = logging.getLogger(__name__)

Publish = Callable[[list[str]], None]
Listener = Callable[[list[str]], None]  # told the addresses of the live engines whenever they change
AnyEngine = Engine | ExternalEngine


class HealthCheck(BaseModel):
    """How engines are watched, and how often they may be replaced."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    interval: float = Field(default=10.0, gt=0)  # seconds between looks at whether tokens come out
    timeout: float = Field(default=30.0, gt=0)  # seconds for one look; SGLang itself waits up to 20 s for its scheduler
    failures: int = Field(default=3, ge=1)  # looks in a row without an answer, after which an engine is replaced
    max_restarts: int = Field(default=3, ge=0)  # replacements in one stage


class Supervisor:
    """Watches engines while they serve one version. A context manager; entering needs `bring_up` before.

    Args:
        engines: all of them.
        version: what they are to call their weights.
        publish: gives the weights to servers at these addresses, which then report `version`. Called from several threads, one at a time.
        health: intervals and the budget.
        listener: of changes, a router for instance.
        check: raises if what all engines depend on is gone (`Cluster.check`).
    """

    def __init__(
        self,
        engines: Sequence[AnyEngine],
        version: str,
        publish: Publish,
        health: HealthCheck,
        listener: Listener = lambda urls: None,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self.engines = engines
        self.version = version
        self.publish = publish
        self.health = health
        self.listener = listener
        self.check = check
        self._live: dict[int, str] = {}  # number of an engine -> its address
        self._lock = threading.Lock()  # one change at a time: an engine begun or ended, weights published
        self._ended = threading.Event()
        self._failure: Exception | None = None
        self._num_restarts = 0

    def bring_up(self) -> None:
        """Wait until every engine runs and serves the version. Those found dead are replaced outside the budget, for nothing has
        been lost with them; those that die meanwhile are not.

        Raises:
            RuntimeError: one could not start, or too many died; with the last log lines.
        """
        for engine in revived(self.engines):
            logger.warning("engine %d was dead and has been replaced", engine.index)
        while stale := [engine for engine in self.engines if _version(engine) != self.version]:
            try:
                self.publish([engine.url() for engine in stale])
                wrong = [f"{engine.url()} serves {found!r}" for engine in stale if (found := _version(engine)) != self.version]
                if not wrong:
                    break
                problem = f"after {self.version!r} was published, {', '.join(wrong)}"
            except ClusterLost:
                raise
            except ConnectionError as error:
                problem = str(error)
            dead = [engine for engine in stale if not engine.generates(self.health.timeout)]
            if not dead:
                raise ConnectionError(f"{problem}; yet all engines answer: the weights will be published again")
            for engine in dead:
                self._spend(engine, f"{problem}\n{engine.last_words()}")
                engine.kill()
                engine.begin()
            revived(dead)
        self._now_live({engine.index: engine.url() for engine in self.engines})

    def __enter__(self) -> Supervisor:
        for engine in self.engines:
            threading.Thread(target=self._watch, args=(engine,), name=f"engine-{engine.index}", daemon=True).start()
        return self

    def __exit__(self, *exception: object) -> None:
        # The threads are not waited for (one may sit in a look at a hung engine), but after this none of them changes anything.
        with self._lock:
            self._ended.set()

    def live(self) -> list[str]:
        """Addresses of the engines that serve the version right now; none while all of them are being replaced.

        Raises:
            RuntimeError: too many engines have died; with the last log lines of the last one. Or whatever kept a newcomer from its weights.
            ClusterLost: our Ray has died, whether or not a thread that watches an engine has noticed.
        """
        self.check()
        if self._failure is not None:
            raise self._failure
        return list(self._live.values())

    # ---- inside ---------------------------------------------------------------------------------------------------------

    def _now_live(self, live: dict[int, str]) -> None:
        self._live = live
        self.listener(list(live.values()))

    def _watch(self, engine: AnyEngine) -> None:
        """The life of one thread."""
        num_failures, due = 0, time.monotonic() + self.health.interval
        try:
            while not self._ended.wait(TICK):
                if not engine.alive():
                    self._replace(engine, engine.last_words())
                elif time.monotonic() < due:
                    continue
                elif engine.generates(self.health.timeout):
                    num_failures = 0
                elif (num_failures := num_failures + 1) >= self.health.failures and engine.alive():
                    self._replace(engine, f"no token came out at {num_failures} looks in a row: {engine.last_words()}")
                    num_failures = 0
                due = time.monotonic() + self.health.interval
        except GivenUp:
            return
        except Exception as error:
            if not self._ended.is_set():  # the block learns of it from `live`
                logger.warning("engine %d: %s", engine.index, error)
                self._failure = error

    def _replace(self, engine: AnyEngine, cause: str) -> None:
        """Start another server in its place until one serves the version.

        Raises:
            GivenUp: the block has ended meanwhile. A server that was begun goes on starting, for the next block.
            RuntimeError: the budget is spent.
        """
        self._now_live({index: url for index, url in self._live.items() if index != engine.index})
        start = time.monotonic()
        while True:
            with self._lock:
                self._go_on()
                self._spend(engine, cause)
                engine.kill()
                engine.begin()
            try:
                url = engine.url(given_up=self._ended.is_set)
            except RuntimeError as error:
                cause = str(error)
                continue
            try:
                with self._lock:
                    self._go_on()
                    if control.weight_version(url) != self.version:
                        self.publish([url])
                break
            except ClusterLost:
                raise
            except ConnectionError as error:
                if engine.generates(self.health.timeout):
                    raise
                cause = f"{error}\n{engine.last_words()}"
        self._now_live({**self._live, engine.index: url})
        logger.warning("engine %d serves %s again after %.1f s", engine.index, self.version, time.monotonic() - start)

    def _spend(self, engine: AnyEngine, cause: str) -> None:
        """Count one replacement. Raises RuntimeError if that is one too many."""
        if self._num_restarts >= self.health.max_restarts:
            raise RuntimeError(
                f"an engine has died and {self._num_restarts} replacements within one stage are all that --engine-restarts "
                f"allows. The last one dead: {cause}"
            )
        self._num_restarts += 1
        logger.warning("engine %d is replaced (%d of %d): %s", engine.index, self._num_restarts, self.health.max_restarts, cause)

    def _go_on(self) -> None:
        if self._ended.is_set():
            raise GivenUp


def revived(engines: Sequence[AnyEngine]) -> list[AnyEngine]:
    """Wait until all have started; replace those that are dead or do not answer, side by side. Returns those replaced.

    Raises:
        RuntimeError: one could not start, with its last log lines.
    """
    for engine in engines:
        engine.settle()
    for engine in engines:
        engine.url()
    dead = [engine for engine in engines if not engine.answers()]
    for engine in dead:
        engine.kill()
        engine.begin()
    for engine in dead:
        engine.url()
    return dead


def _version(engine: AnyEngine) -> str:
    """What an engine serves; nothing of a dead one."""
    try:
        return control.weight_version(engine.url())
    except (control.ServerGone, RuntimeError) as error:
        return f"nothing ({error})"
