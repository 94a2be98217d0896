"""Read memory, compute capability, usage and energy of this machine's GPUs from the NVIDIA driver's library (NVML),
without importing torch or creating a CUDA context."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

Counters = Mapping[str, float]  # GPU id on its node -> joules since the driver was loaded
ReadCounters = Callable[[], Counters]  # `dict` reads no counters: no energy is then measured
T = TypeVar("T")


class _Memory(ctypes.Structure):
    _fields_ = [(name, ctypes.c_ulonglong) for name in ("total", "free", "used")]  # bytes


class _Utilization(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint) for name in ("gpu", "memory")]  # percent of the driver's last sampling period


def visible_gpu_bytes() -> list[int]:
    """Return the total memory, in bytes, of every GPU that CUDA_VISIBLE_DEVICES allows; [] without GPUs or driver."""

    def total(nvml: ctypes.CDLL, handle: ctypes.c_void_p) -> int:
        memory = _Memory()
        return int(memory.total) if nvml.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)) == 0 else 0

    return select_visible_gpus([size for size in _query_gpus(total) if size])


def visible_gpu_capabilities() -> list[tuple[int, int]]:
    """Return the CUDA compute capability (major, minor) of every GPU that CUDA_VISIBLE_DEVICES allows."""

    def capability(nvml: ctypes.CDLL, handle: ctypes.c_void_p) -> tuple[int, int]:
        major, minor = ctypes.c_int(), ctypes.c_int()
        nvml.nvmlDeviceGetCudaComputeCapability(handle, ctypes.byref(major), ctypes.byref(minor))
        return major.value, minor.value

    return select_visible_gpus([found for found in _query_gpus(capability) if found and found[0]])


def visible_gpu_usage() -> list[dict[str, float]]:
    """Return memory, utilization and power of every GPU that CUDA_VISIBLE_DEVICES allows, under MLflow's names of
    these metrics; values that the GPU does not report are missing. [] without GPUs or driver."""

    def measure(nvml: ctypes.CDLL, handle: ctypes.c_void_p) -> dict[str, float]:
        memory, utilization = _Memory(), _Utilization()
        power, limit = ctypes.c_uint(), ctypes.c_uint()  # milliwatts
        usage: dict[str, float] = {}
        if nvml.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)) == 0:
            usage["memory_usage_megabytes"] = memory.used / 1e6
            usage["memory_usage_percentage"] = 100 * memory.used / memory.total
        if nvml.nvmlDeviceGetUtilizationRates(handle, ctypes.byref(utilization)) == 0:
            usage["utilization_percentage"] = float(utilization.gpu)
        if nvml.nvmlDeviceGetPowerUsage(handle, ctypes.byref(power)) == 0:
            usage["power_usage_watts"] = power.value / 1000
            if nvml.nvmlDeviceGetEnforcedPowerLimit(handle, ctypes.byref(limit)) == 0 and limit.value:
                usage["power_usage_percentage"] = 100 * power.value / limit.value
        return usage

    return select_visible_gpus([usage or {} for usage in _query_gpus(measure)])


def _query_gpus(query: Callable[[ctypes.CDLL, ctypes.c_void_p], T]) -> list[T | None]:
    """Return `query(nvml, handle)` for every GPU, None for one that NVML cannot open; [] without GPUs or driver."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return []
    if nvml.nvmlInit_v2() != 0:
        return []
    try:
        count = ctypes.c_uint()
        if nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) != 0:
            return []
        results: list[T | None] = []
        for index in range(count.value):
            handle = ctypes.c_void_p()
            opened = nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle)) == 0
            results.append(query(nvml, handle) if opened else None)
        return results
    finally:
        nvml.nvmlShutdown()


def select_visible_gpus(values: list[T]) -> list[T]:
    """Return those of `values` (one value for each GPU of this machine) whose GPU CUDA_VISIBLE_DEVICES allows. If
    CUDA_VISIBLE_DEVICES names n GPUs by UUID, return the first n values: UUIDs are not resolved."""
    setting = os.environ.get("CUDA_VISIBLE_DEVICES")
    if setting is None:
        return values
    names = [name.strip() for name in setting.split(",") if name.strip() and name.strip() != "-1"]
    if all(name.isdecimal() for name in names):
        return [values[int(name)] for name in names if int(name) < len(values)]
    return values[: len(names)]


# ---- energy ----------------------------------------------------------------------------------------------------------


def all_counters() -> Counters:
    """Return the energy counters of all GPUs of this machine that have one (since Volta); {} without GPUs or driver."""

    def joules(nvml: ctypes.CDLL, handle: ctypes.c_void_p) -> float | None:
        millijoules = ctypes.c_ulonglong()
        status = nvml.nvmlDeviceGetTotalEnergyConsumption(handle, ctypes.byref(millijoules))
        return millijoules.value / 1000 if status == 0 else None

    return {str(gpu): value for gpu, value in enumerate(_query_gpus(joules)) if value is not None}


def read_counters(gpus: Iterable[tuple[str, str]], node: str) -> Counters:
    """Return the energy counters of `gpus` (pairs of Ray node id and GPU id) of this machine, whose node id is `node`.
    Return {} if `gpus` is empty, or if one of the GPUs is on another node, has no counter or has an id that is not a
    number (MIG): the energy of the remaining GPUs would be mistaken for that of all."""
    ids = set(gpus)
    if not ids or any(at != node or not gpu.isdecimal() for at, gpu in ids):
        return {}
    counters = all_counters()
    known = {gpu: counters[gpu] for _, gpu in ids if gpu in counters}
    return known if len(known) == len(ids) else {}


def used_joules(before: Counters, after: Counters) -> float | None:
    """Return the energy in joules that the GPUs used between two readings of their counters; None if it was not
    measured, or if the second reading is of other GPUs because processes have moved."""
    if not before or before.keys() != after.keys():
        return None
    return sum(after[gpu] - before[gpu] for gpu in before)


def energy_metric(name: str, before: Counters, after: Counters) -> dict[str, float]:
    """Return {name: joules used between two readings}, or {} where `used_joules` returns None."""
    joules = used_joules(before, after)
    return {} if joules is None else {name: joules}
