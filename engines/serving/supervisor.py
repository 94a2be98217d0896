"""Supervise inference engines while they serve one policy version: restart dead engines and send them the weights.

A supervisor is active while one stage (rollout or evaluation) generates. One thread per engine checks twice a second
that the server's process runs and, every `HealthCheck.interval` seconds, that the engine generates tokens.
`EngineClient` gets the engines' addresses from `Supervisor.live_urls` and resends the requests of dead engines.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from penstock.engines.cluster import ClusterLost
from penstock.engines.generation import EngineGone
from penstock.engines.options import HealthCheck
from penstock.engines.serving.replica import Replica, StartCancelled

TICK = 0.5  # seconds between checks that a server's process runs; one check takes about a millisecond
logger = logging.getLogger(__name__)

Publish = Callable[[list[str]], None]  # sends the current weights to the engines at these addresses
Listener = Callable[[list[str]], None]  # called with the addresses of the live engines whenever these change


@dataclass(eq=False)
class Supervisor:
    """Restart engines that die or hang, and send them the weights of one policy version. Call `restart_and_publish`
    first; threads supervise the engines inside the `with` block."""

    replicas: Sequence[Replica]
    version: str
    publish: Publish  # called from several threads, one call at a time; the engines then report `version`
    health: HealthCheck
    listener: Listener = lambda urls: None  # for instance updates a router
    check: Callable[[], None] = lambda: None  # raises if the engines' Ray has died (`Cluster.check_alive`)
    _live: dict[int, str] = field(default_factory=dict)  # index of a replica -> its address
    _lock: threading.Lock = field(default_factory=threading.Lock)  # one start, kill or weight update at a time
    _stopped: threading.Event = field(default_factory=threading.Event)
    _failure: Exception | None = None
    _num_restarts: int = 0

    def restart_and_publish(self) -> None:
        """Start or restart engines and send weights until every engine serves the supervisor's policy version.

        Restarts of engines that were already dead before the call do not count towards `health.max_restarts`, because
        no requests were running; restarts of engines that die during the call count.
        Raises ConnectionError if a weight update failed although all engines are healthy; the caller may retry.
        """
        for replica in restart_dead_engines(self.replicas):
            logger.warning("%s died before generation started; restarted it", replica.label)
        while stale := [replica for replica in self.replicas if _weight_version_or_error(replica) != self.version]:
            try:
                self.publish([replica.wait_for_url() for replica in stale])
                versions = {replica.wait_for_url(): _weight_version_or_error(replica) for replica in stale}
                wrong = [f"{url} reports {version!r}" for url, version in versions.items() if version != self.version]
                if not wrong:
                    continue  # check all again: restoring the trainer may have released the memory of other engines
                problem = f"after sending the weights of {self.version!r}, {', '.join(wrong)}"
            except ClusterLost:
                raise
            except ConnectionError as error:
                problem = str(error)
            dead = [replica for replica in stale if not replica.generates_tokens(self.health.timeout)]
            if not dead:
                raise ConnectionError(f"{problem}; all engines are healthy: retry the weight update")
            for replica in dead:
                self._count_restart(replica, f"{problem}\n{replica.exit_report()}")
                replica.kill()
                replica.launch_server()
            restart_dead_engines(dead)
        self._set_live({replica.index: replica.wait_for_url() for replica in self.replicas})

    def __enter__(self) -> Supervisor:
        for replica in self.replicas:
            threading.Thread(
                target=self._supervise, args=(replica,), name=f"engine-{replica.index}", daemon=True
            ).start()
        return self

    def __exit__(self, *exception: object) -> None:
        # The threads are not joined, because a thread may be blocked in the check of a stuck engine. Once `_stopped` is
        # set, no thread restarts an engine or publishes weights.
        with self._lock:
            self._stopped.set()

    def update(self, version: str, publish: Publish) -> None:
        """Send the weights of `version` to the live engines while they generate, and to engines restarted later. Raises
        ConnectionError if it failed although all engines generate; the caller may retry."""
        with self._lock:
            self.version, self.publish = version, publish
            live = [replica for replica in self.replicas if replica.index in self._live]
            while live:
                try:
                    return publish([self._live[replica.index] for replica in live])
                except ConnectionError:
                    healthy = [replica for replica in live if replica.generates_tokens(self.health.timeout)]
                    if len(healthy) == len(live):
                        raise
                    live = healthy

    def live_urls(self) -> list[str]:
        """Return the addresses of the engines that serve the policy version; empty while all engines are restarting."""
        self.check()
        if self._failure is not None:
            raise self._failure
        return list(self._live.values())

    def _set_live(self, live: dict[int, str]) -> None:
        self._live = live
        self.listener(list(live.values()))

    def _supervise(self, replica: Replica) -> None:
        """Check one engine, and restart it if it is dead or stuck, until the supervisor exits. Runs in a thread."""
        num_failures, due = 0, time.monotonic() + self.health.interval
        try:
            while not self._stopped.wait(TICK):
                if not replica.alive():
                    self._restart(replica, replica.exit_report())
                elif time.monotonic() < due:
                    continue
                elif replica.generates_tokens(self.health.timeout):
                    num_failures = 0
                elif (num_failures := num_failures + 1) >= self.health.failures and replica.alive():
                    cause = f"generated no token in {num_failures} health checks in a row: {replica.exit_report()}"
                    self._restart(replica, cause)
                    num_failures = 0
                due = time.monotonic() + self.health.interval
        except StartCancelled:
            return
        except Exception as error:
            if not self._stopped.is_set():  # `live_urls` raises the error in the caller's thread
                logger.warning("supervision of %s failed, so the stage fails: %s", replica.label, error)
                self._failure = error

    def _restart(self, replica: Replica, cause: str) -> None:
        """Restart an engine and send it the weights, with retries, until it serves the policy version or the supervisor
        exits."""
        self._set_live({index: url for index, url in self._live.items() if index != replica.index})
        start = time.monotonic()
        while True:
            with self._lock:
                if self._stopped.is_set():
                    return
                self._count_restart(replica, cause)
                replica.kill()
                replica.launch_server()
            try:
                url = replica.wait_for_url(cancelled=self._stopped.is_set)
            except RuntimeError as error:
                cause = str(error)
                continue
            try:
                with self._lock:
                    if self._stopped.is_set():
                        return
                    if replica.weight_version() != self.version:
                        self.publish([url])
                break
            except ConnectionError as error:
                if isinstance(error, ClusterLost) or replica.generates_tokens(self.health.timeout):
                    raise
                cause = f"{error}\n{replica.exit_report()}"
        self._set_live({**self._live, replica.index: url})
        seconds = time.monotonic() - start
        logger.warning("%s restarted in %.1f s; it serves policy version %s", replica.label, seconds, self.version)

    def _count_restart(self, replica: Replica, cause: str) -> None:
        """Count and log a restart. Raises RuntimeError if all `health.max_restarts` restarts are used up."""
        limit = self.health.max_restarts
        if self._num_restarts >= limit:
            raise RuntimeError(
                f"{replica.label} failed, and this stage has already used all {limit} restarts of engines: raise "
                f"--engine-restarts, or fix the cause: {cause}"
            )
        self._num_restarts += 1
        logger.warning(
            "restarting %s (restart %d of %d in this stage): %s", replica.label, self._num_restarts, limit, cause
        )


def restart_dead_engines(replicas: Sequence[Replica]) -> list[Replica]:
    """Wait until all engines have started, then restart in parallel the engines that do not answer."""
    for replica in replicas:
        replica.finish_adoption()
    for replica in replicas:
        replica.wait_for_url()
    dead = [replica for replica in replicas if not replica.answers_requests()]
    for replica in dead:
        replica.kill()
        replica.launch_server()
    for replica in dead:
        replica.wait_for_url()
    return dead


def _weight_version_or_error(replica: Replica) -> str:
    """Return the weight version that an engine reports, or "nothing (<error>)" if the engine does not answer."""
    try:
        return replica.weight_version()
    except (EngineGone, RuntimeError) as error:
        return f"nothing ({error})"
