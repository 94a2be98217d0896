"""The interface of observers, which are notified of the events of a run. An observer is a subclass of `Observer` that
overrides some of the methods `on_...`; `flows/reporting/observers.py` adds it to a run. It is a context manager that is
entered when the flow of the run starts, and exited when the flow ends."""

from __future__ import annotations

import contextvars
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Self

from penstock.engines.training import MemorySwitch
from penstock.flows.runtime.signals import patience_after
from penstock.storage.commit import Commit


class Observer:
    """Base class of observers. Each method is called at one kind of event, and does nothing by default."""

    def on_progress(self) -> None:
        """A stage has made progress. This is called very often."""

    def on_stage(self, name: str, rollout_id: int | None) -> None:
        """A stage starts."""

    def on_commit(self, key: str, commit: Commit, is_new: bool) -> None:
        """A stage has returned a commit, whose record has the store key `key`. `is_new`: the trackers do not have the
        commit yet."""

    def on_publish(
        self, version: int, urls: list[str], metrics: dict[str, float], switches: list[MemorySwitch]
    ) -> None:
        """Policy `version` was loaded into the engines at `urls`; `metrics` are those of the weight update. `switches`:
        each time since the previous update that state was moved between devices and host memory."""

    def on_overlap(self, rollout_id: int, metrics: dict[str, float]) -> None:
        """Round `rollout_id` of an asynchronous run is about to be trained. `metrics`: the waiting times of trainer and
        engines before it, and the number of rollouts that are ready."""

    def on_results(self, commits: list[Commit]) -> None:
        """The run has finished all stages; `commits` are all commits of the run."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *details: object) -> None:
        return None


class ThreadObserver(Observer, ABC):
    """Base class of observers with a thread of their own, which executes `run_thread` until `ended` is set at the end
    of the flow. The end waits for the thread, at most `patience` seconds."""

    def __init__(self, name: str, patience: float) -> None:
        self.ended = threading.Event()
        context = contextvars.copy_context()  # contains the address of Prefect's API
        self.thread = threading.Thread(target=context.run, args=(self.run_thread,), name=name, daemon=True)
        self._patience = patience

    @abstractmethod
    def run_thread(self) -> None:
        """Work until `ended` is set."""

    def __enter__(self) -> Self:
        self.thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *details: object) -> None:
        self.ended.set()
        self.thread.join(patience_after(kind) or self._patience)


class Observers(ExitStack):
    """The observers of a run."""

    def __init__(self) -> None:
        super().__init__()
        self._observers: list[Observer] = []

    def add(self, observer: Observer) -> None:
        """Enter an observer, and notify it of all later events."""
        self._observers.append(self.enter_context(observer))

    def tell(self, event: Callable[..., None], *args: Any) -> None:
        """Call the method `event`, for instance `Observer.on_progress`, of all observers in the order in which they
        were added."""
        for observer in self._observers:
            getattr(observer, event.__name__)(*args)
