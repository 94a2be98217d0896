"""Energy that GPUs have used between two moments, from the counters of the NVIDIA driver."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from penstock.engines.local_gpus import all_gpu_joules

Counters = Mapping[str, float]  # GPU id on its node -> joules since the driver was loaded
ReadCounters = Callable[[], Counters]


def no_counters() -> Counters:
    """Return no counters: the energy is not measured."""
    return {}


def all_counters() -> Counters:
    """Return the energy counters of all GPUs of this machine that have one."""
    return {str(gpu): joules for gpu, joules in enumerate(all_gpu_joules()) if joules is not None}


def read_counters(gpus: Iterable[tuple[str, str]], node: str) -> Counters:
    """Return the energy counters of GPUs of this machine.

    Args:
        gpus: (Ray node id, GPU id) of each GPU.
        node: Ray's node id of this machine.

    Returns:
        {} if there are no GPUs, or if one is on another node, has no counter or is not named by a number (MIG): the sum
        of the others would look like the energy of all.
    """
    ids = set(gpus)
    if not ids or any(at != node or not gpu.isdecimal() for at, gpu in ids):
        return {}
    counters = all_counters()
    known = {gpu: counters[gpu] for _, gpu in ids if gpu in counters}
    return known if len(known) == len(ids) else {}


def used_joules(before: Counters, after: Counters) -> float | None:
    """Return the energy in joules that GPUs have used between two readings, or None if it was not measured, or if
    processes have moved to other GPUs in between."""
    if not before or before.keys() != after.keys():
        return None
    return sum(after[gpu] - before[gpu] for gpu in before)


def energy_metric(name: str, before: Counters, after: Counters) -> dict[str, float]:
    """Return {name: joules used between two readings}, or {} if they were not measured."""
    joules = used_joules(before, after)
    return {} if joules is None else {name: joules}
