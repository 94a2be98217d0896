"""Grading samples: who does it, under which time limit, and what becomes of a sample whose grader hangs or raises.

Rewards that are certain to end within microseconds are called in place. All others, and every function of the user's, run in
grading processes while generation goes on: a grader can neither stall the event loop nor crash the driver, and what hangs is
killed. Such a sample is `failed` with its reason in `metadata["error"]`, has no reward and is not trained. A wrong request is a
ValueError.
"""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

from stages.rewards.hub import reward_named
from stages.rewards.outcome import Outcome, Settings, outcome_of, rm_type_of
from stages.rewards.process import GradingProcess
from storage.plugins import load_function
from storage.sample import Sample


class Grader:
    """Grades samples. Processes start at first need and live until `close`; a context manager.

    Args:
        rm_type: built-in reward, unless a sample's metadata names another.
        custom_rm_path: function of the user's; it goes before any built-in reward.
        reward_key: which entry of a dictionary is the reward.
        timeout: seconds a sample.
        num_workers: grading processes.
        arguments: attributes of the `args` that a custom function gets.

    Raises:
        ValueError: no such built-in reward.
    """

    def __init__(
        self,
        rm_type: str | None = None,
        custom_rm_path: str | None = None,
        *,
        reward_key: str | None = None,
        timeout: float = 30.0,
        num_workers: int = 2,
        arguments: dict[str, Any] | None = None,
    ) -> None:
        if rm_type is not None:
            reward_named(rm_type)
        self.settings = Settings(rm_type, custom_rm_path, reward_key, timeout, arguments or {})
        self.num_workers = num_workers
        self._processes: list[GradingProcess] = []

    def __enter__(self) -> Grader:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def submit(self, sample: Sample) -> Future[Outcome]:
        """Begin to grade. The outcome is written into the sample by its owner (`Outcome.apply`)."""
        if self._is_instant(sample):
            future: Future[Outcome] = Future()
            future.set_result(outcome_of(sample, self.settings))
            return future
        if len(self._processes) < self.num_workers and all(process.num_pending for process in self._processes):
            self._processes.append(GradingProcess(self.settings))
        return min(self._processes, key=lambda process: process.num_pending).submit(sample)

    def grade(self, samples: list[Sample]) -> None:
        """Grade all of them and write the outcomes into them. Raises ValueError if the request is wrong."""
        futures = [self.submit(sample) for sample in samples]
        for sample, future in zip(samples, futures):
            future.result().apply(sample)

    def close(self) -> None:
        """End the grading processes."""
        for process in self._processes:
            process.close()
        self._processes = []

    def _is_instant(self, sample: Sample) -> bool:
        if self.settings.custom_rm_path:
            return False
        name = rm_type_of(sample, self.settings)
        try:
            return name is None or reward_named(name).instant
        except ValueError:
            return True  # an unknown name: `outcome_of` says so


def check_reward(rm_type: str | None, custom_rm_path: str | None) -> None:
    """Preflight: the built-in reward exists, the custom function loads. Raises ValueError."""
    if rm_type is not None:
        reward_named(rm_type)
    if custom_rm_path is not None:
        load_function(custom_rm_path)
