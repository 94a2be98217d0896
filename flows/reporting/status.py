"""The observer that writes status.json of a run, from which `penstock watch` shows what happens between commits."""

from __future__ import annotations

import os
import platform
import time
from collections import deque
from typing import get_args

from penstock.engines.training import MemorySwitch
from penstock.flows.reporting.observer import ThreadObserver
from penstock.flows.runtime.display import Display
from penstock.flows.runtime.processes import Processes
from penstock.flows.runtime.runs import ActiveRun
from penstock.storage.disk import map_in_threads
from penstock.storage.history.run_status import (
    STATUS_SECONDS,
    Group,
    RunStatus,
    StatusActivity,
    StatusLane,
    StatusMessage,
    StatusPhase,
)

FIRST_WRITE_SECONDS = 1.0  # the start of the run is recorded by then
MAX_PHASES = 40
SERIES_SAMPLES = 60  # five minutes
MAX_TEXT = 400  # characters of a message
MACHINE_METRICS = ("utilization_percentage", "memory_usage_megabytes")  # ends of their names
LAST_WRITE_SECONDS = 5.0  # to wait for the last write at the end of a run
ANSWER_SECONDS, NUM_REQUESTS = 1.0, 16  # of an engine that is asked for its queue; at the same time
GROUPS: dict[str, Group] = {"rollout": "engines", "evaluation": "evaluation"}  # pool -> group of lanes


class StatusWriter(ThreadObserver):
    """Overwrites status.json every STATUS_SECONDS. A failure is printed once, and the run continues."""

    def __init__(self, run: ActiveRun, display: Display, processes: Processes) -> None:
        super().__init__("status", LAST_WRITE_SECONDS)
        self.run = run
        self.display = display
        self.processes = processes
        self._phases: deque[StatusPhase] = deque(maxlen=MAX_PHASES)  # weight updates, moves of memory, starts
        self._lanes: dict[str, StatusLane] = {}
        self._series: deque[dict[str, float]] = deque(maxlen=SERIES_SAMPLES)
        self._queue: dict[str, float] = {}
        self._failed = False

    def on_publish(
        self, version: int, urls: list[str], metrics: dict[str, float], switches: list[MemorySwitch]
    ) -> None:
        now = time.time()
        for switch in switches:
            lanes = ["engines" if switch.name.startswith("engines") else "trainer"]
            phase = StatusPhase(lanes=lanes, phase=switch.name, start=switch.at - switch.seconds, end=switch.at)
            self._phases.append(phase)
        lanes = ["trainer"]
        for role, group in GROUPS.items():
            pool = self.processes.pools.get(role)
            updated = {replica.label: replica.known_url in urls for replica in (pool.replicas if pool else ())}
            is_whole = updated and all(updated.values())
            lanes += [group] if is_whole else [name for name, is_updated in updated.items() if is_updated]
        start = now - metrics["perf/update_weights_time"]
        self._phases.append(StatusPhase(lanes=lanes, phase="publish", index=version, start=start, end=now))

    def on_overlap(self, rollout_id: int, metrics: dict[str, float]) -> None:
        self._queue = metrics

    def status(self) -> RunStatus:
        """Return the record of this moment."""
        panel, now = self.display.panel, time.time()
        offset = now - time.monotonic()
        self._read_lanes(now)
        sample = self._count_requests()
        if panel.machine.get("system/cpu_utilization_percentage"):  # 0 before it was measured twice
            shown = {name: value for name, value in panel.machine.items() if name.endswith(MACHINE_METRICS)}
            sample |= {name: round(value, 1) for name, value in shown.items()}
        if sample:
            self._series.append({"at": round(now, 1), **sample})
        names = dict.fromkeys(name for row in self._series for name in row)
        activities = [
            StatusActivity(
                title=a.title[:MAX_TEXT], stage=a.stage, since=a.started_at + offset, done=a.done, total=a.total
            )
            for a in list(panel.activities.running)
        ]
        ended = [
            StatusPhase(
                lanes=["trainer" if a.stage == "restore" else "driver"],
                phase=a.stage,
                start=a.started_at + offset,
                end=a.ended_at + offset,
            )
            for a in list(panel.activities.ended)
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
            lanes=sorted(self._lanes.values(), key=lambda lane: get_args(Group).index(lane.group)),
            phases=sorted([*ended, *list(self._phases)], key=lambda phase: phase.start),
            engines=panel.engines()[:MAX_TEXT],
            queue=self._queue,
            series={name: [row.get(name) for row in self._series] for name in names},  # by column: names once
            messages=sorted(messages, key=lambda message: message.at),
        )

    def _read_lanes(self, now: float) -> None:
        """Update the lanes by the processes that run. Those that have ended keep their lane."""
        trainer, pools = self.processes.started_trainer, dict(self.processes.pools)
        replicas = [(group, each) for role, group in GROUPS.items() if role in pools for each in pools[role].replicas]
        ranks = trainer.places() if trainer else []
        gpus = {"trainer": [(rank.node, gpu) for rank in ranks for gpu in rank.gpu_ids]}
        gpus |= {replica.label: replica.gpus() for _, replica in replicas}
        nodes = list(dict.fromkeys(node for of_lane in gpus.values() for node, _ in of_lane))
        without_gpus = "external" if self.processes.engine_options.external else "CPU"
        for group, replica in replicas:
            known = self._lanes.get(name := replica.label)
            since = known.starting_since if known else None
            if replica.known_url is None:
                since = since or now
            elif since is not None:
                self._phases.append(StatusPhase(lanes=[name], phase="start", start=since, end=now))
                since = None
            devices = describe_gpus(gpus[name], nodes) or without_gpus
            self._lanes[name] = StatusLane(name=name, group=group, devices=devices, starting_since=since)
        if ranks:
            devices = describe_gpus(gpus["trainer"], nodes) or f"CPU, {len(ranks)} rank{'s'[: len(ranks) - 1]}"
            self._lanes["trainer"] = StatusLane(name="trainer", group="trainer", devices=devices)

    def _count_requests(self) -> dict[str, float]:
        """Return how many requests run and wait in each engine that answers."""
        replicas = [each for pool in list(self.processes.pools.values()) for each in pool.replicas if each.known_url]

        counts = map_in_threads(
            lambda replica: replica.client.num_requests(replica.known_url or "", ANSWER_SECONDS), replicas, NUM_REQUESTS
        )
        return {
            f"requests/{name}/{replica.label}": float(number)
            for replica, numbers in zip(replicas, counts, strict=True)
            if numbers is not None
            for name, number in zip(("running", "waiting"), numbers, strict=True)
        }

    def run_thread(self) -> None:
        wait = FIRST_WRITE_SECONDS
        while not self.ended.wait(wait):
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


def describe_gpus(gpus: list[tuple[str, str]], nodes: list[str]) -> str:
    """Return (node, GPU id) pairs in words, nodes by their position in `nodes` if there are several: "GPU 0", "GPUs
    0-3", "node 1: GPUs 0-7"."""
    parts = []
    for number, node in enumerate(nodes):
        if ids := [gpu for of_node, gpu in gpus if of_node == node]:
            is_range = len(ids) > 1 and all(map(str.isdecimal, ids)) and int(ids[-1]) - int(ids[0]) == len(ids) - 1
            words = f"GPU{'s'[: len(ids) - 1]} {f'{ids[0]}-{ids[-1]}' if is_range else ', '.join(ids)}"
            parts.append(f"node {number}: {words}" if len(nodes) > 1 else words)
    return "; ".join(parts)[:MAX_TEXT]
