"""The observer that writes status.json of a run, from which `penstock watch` shows what happens between commits."""

from __future__ import annotations

import os
import platform
import threading
import time
from collections import deque
from typing import Self

from penstock.engines.training import MemorySwitch
from penstock.flows.reporting.observer import Observer
from penstock.flows.runtime.display import Display
from penstock.flows.runtime.runs import ActiveRun
from penstock.flows.runtime.signals import patience_after
from penstock.storage.history.run_status import (
    STATUS_SECONDS,
    Lane,
    RunStatus,
    StatusActivity,
    StatusMessage,
    StatusPhase,
)

FIRST_WRITE_SECONDS = 1.0  # the start of the run is recorded by then
MAX_PHASES = 40
MACHINE_SAMPLES = 60  # five minutes
MAX_TEXT = 400  # characters of a message
MACHINE_METRICS = ("utilization_percentage", "memory_usage_megabytes")  # ends of their names
LAST_WRITE_SECONDS = 5.0  # to wait for the last write at the end of a run
LANES: dict[str, Lane] = {"restore": "trainer"}  # stage without a commit -> its lane, if not "driver"


class StatusWriter(Observer):
    """Overwrites status.json every STATUS_SECONDS from a thread. A failure is printed once, and the run continues."""

    def __init__(self, run: ActiveRun, display: Display) -> None:
        self.run = run
        self.display = display
        self._phases: deque[StatusPhase] = deque(maxlen=MAX_PHASES)  # weight updates, moves of memory
        self._machine: deque[dict[str, float]] = deque(maxlen=MACHINE_SAMPLES)
        self._queue: dict[str, float] = {}
        self._failed = False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._write_until_end, name="status", daemon=True)

    def on_publish(self, version: int, metrics: dict[str, float], switches: list[MemorySwitch]) -> None:
        now = time.time()
        for switch in switches:
            lane: Lane = "engines" if switch.name.startswith("engines") else "trainer"
            phase = StatusPhase(lane=lane, phase=switch.name, start=switch.at - switch.seconds, end=switch.at)
            self._phases.append(phase)
        start = now - metrics["perf/update_weights_time"]
        for lane in ("trainer", "engines"):
            self._phases.append(StatusPhase(lane=lane, phase="publish", index=version, start=start, end=now))

    def on_overlap(self, rollout_id: int, metrics: dict[str, float]) -> None:
        self._queue = metrics

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *details: object) -> None:
        self._stop.set()
        self._thread.join(patience_after(kind) or LAST_WRITE_SECONDS)

    def status(self) -> RunStatus:
        """Return the record of this moment."""
        panel, now = self.display.panel, time.time()
        offset = now - time.monotonic()
        if panel.machine.get("system/cpu_utilization_percentage"):  # 0 before it was measured twice
            shown = {name: value for name, value in panel.machine.items() if name.endswith(MACHINE_METRICS)}
            self._machine.append({"at": round(now, 1), **{name: round(value, 1) for name, value in shown.items()}})
        names = dict.fromkeys(name for row in self._machine for name in row)
        activities = [
            StatusActivity(
                title=a.title[:MAX_TEXT], stage=a.stage, since=a.started_at + offset, done=a.done, total=a.total
            )
            for a in list(panel.activities)
        ]
        ended = [
            StatusPhase(
                lane=LANES.get(a.stage, "driver"), phase=a.stage, start=a.started_at + offset, end=a.ended_at + offset
            )
            for a in list(panel.ended_activities)
            if a.stage in ("convert", "restore", "promote") and a.ended_at is not None
        ]
        messages = [
            StatusMessage(at=at, level=level, text=text[:MAX_TEXT])  # type: ignore[arg-type]
            for level, lines in panel.messages.items()
            for at, text in list(lines)
        ]
        return RunStatus(
            at=now,
            start=self.run.start,
            host=platform.node(),
            pid=os.getpid(),
            phase=panel.phase[:MAX_TEXT],
            activities=activities,
            phases=sorted([*ended, *list(self._phases)], key=lambda phase: phase.start),
            engines=panel.engines()[:MAX_TEXT],
            queue=self._queue,
            machine={name: [row.get(name) for row in self._machine] for name in names},  # by column: names once
            messages=sorted(messages, key=lambda message: message.at),
        )

    def _write_until_end(self) -> None:
        wait = FIRST_WRITE_SECONDS
        while not self._stop.wait(wait):
            self._write()
            wait = STATUS_SECONDS
        self._write()

    def _write(self) -> None:
        try:
            self.run.store.replace(self.run.keys.status, self.status().model_dump_json().encode())
        except Exception as error:  # of the store's driver, or a full disk: the run does not depend on it
            if not self._failed:
                self._failed = True
                self.display.forward(
                    f"the status of the run is not written ({type(error).__name__}: {str(error)[:200]}); retrying, "
                    "`penstock watch` shows only its commits until then"
                )
