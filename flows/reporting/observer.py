"""What happens in a run, for those who are told about it: an observer is a class with some of the methods `on_...`, and
one row of `flows/reporting/observers.py`. It is entered when the run starts and left when it ends."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Self

from penstock.engines.training import MemorySwitch
from penstock.storage.commit import Commit


class Observer:
    """Is told what happens in a run. The methods do nothing by default."""

    def on_progress(self) -> None:
        """A stage has moved: called very often."""

    def on_stage(self, name: str, rollout_id: int | None) -> None:
        """A stage starts."""

    def on_commit(self, key: str, commit: Commit, is_new: bool) -> None:
        """A stage returns a commit, whose record is at `key`. It is new unless the trackers had it before."""

    def on_publish(self, version: int, metrics: dict[str, float], switches: list[MemorySwitch]) -> None:
        """Engines have got policy `version`. `switches`: moves of state between devices and host memory since the
        weight update before."""

    def on_overlap(self, rollout_id: int, metrics: dict[str, float]) -> None:
        """Round `rollout_id` will be trained; `metrics` say how generation and training overlapped before."""

    def on_results(self, commits: list[Commit]) -> None:
        """The run's work is done; `commits` are all of the run."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *details: object) -> None:
        return None


class Observers(ExitStack):
    """The observers of a run."""

    def __init__(self) -> None:
        super().__init__()
        self._observers: list[Observer] = []

    def add(self, observer: Observer) -> None:
        """Enter an observer. From now on it is told what happens."""
        self._observers.append(self.enter_context(observer))

    def tell(self, event: Callable[..., None], *args: Any) -> None:
        """Call a method of `Observer` of all observers, in the order of their rows."""
        for observer in self._observers:
            getattr(observer, event.__name__)(*args)
