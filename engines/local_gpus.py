"""Read memory, compute capability, usage and energy of this machine's GPUs from the NVIDIA driver's library (NVML),
without importing torch or creating a CUDA context."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import NamedTuple, TypeVar

Counters = Mapping[str, float]  # GPU id on its node -> joules since the driver was loaded
ReadCounters = Callable[[], Counters]  # `dict` reads no counters: no energy is then measured
T = TypeVar("T")


class _Memory(ctypes.Structure):
    _fields_ = [(name, ctypes.c_ulonglong) for name in ("total", "free", "used")]  # bytes


class _Utilization(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint) for name in ("gpu", "memory")]  # percent of the driver's last sampling period


class GpuReading(NamedTuple):
    """What NVML reports about one GPU; 0, None or missing where it reports nothing."""

    total_bytes: int = 0
    capability: tuple[int, int] = (0, 0)  # CUDA compute capability (major, minor)
    joules: float | None = None  # energy since the driver was loaded; GPUs since Volta count it
    # memory, utilization and power, under MLflow's names of these metrics
    usage: Mapping[str, float] = MappingProxyType({})


def visible_gpu_bytes() -> list[int]:
    """Return the total memory, in bytes, of every GPU that CUDA_VISIBLE_DEVICES allows; [] without GPUs or driver."""
    return select_visible_gpus([gpu.total_bytes for gpu in read_gpus() if gpu.total_bytes])


def visible_gpu_capabilities() -> list[tuple[int, int]]:
    """Return the CUDA compute capability (major, minor) of every GPU that CUDA_VISIBLE_DEVICES allows."""
    return select_visible_gpus([gpu.capability for gpu in read_gpus() if gpu.capability[0]])


def visible_gpu_usage() -> list[Mapping[str, float]]:
    """Return `GpuReading.usage` of every GPU that CUDA_VISIBLE_DEVICES allows."""
    return select_visible_gpus([gpu.usage for gpu in read_gpus()])


def read_gpus() -> list[GpuReading]:
    """Return what NVML reports about every GPU of this machine; [] without GPUs or driver."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return []
    if nvml.nvmlInit_v2() != 0:
        return []
    count, readings = ctypes.c_uint(), []
    if nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) != 0:
        count.value = 0
    for index in range(count.value):
        handle, memory, utilization = ctypes.c_void_p(), _Memory(), _Utilization()
        major, minor, energy = ctypes.c_int(), ctypes.c_int(), ctypes.c_ulonglong()  # energy in millijoules
        power, limit = ctypes.c_uint(), ctypes.c_uint()  # milliwatts
        if nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle)) != 0:
            readings.append(GpuReading())
            continue
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
        nvml.nvmlDeviceGetCudaComputeCapability(handle, ctypes.byref(major), ctypes.byref(minor))
        has_energy = nvml.nvmlDeviceGetTotalEnergyConsumption(handle, ctypes.byref(energy)) == 0
        joules = energy.value / 1000 if has_energy else None
        readings.append(GpuReading(int(memory.total), (major.value, minor.value), joules, usage))
    nvml.nvmlShutdown()
    return readings


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
    """Return the energy counters of all GPUs of this machine that have one; {} without GPUs or driver."""
    return {str(index): gpu.joules for index, gpu in enumerate(read_gpus()) if gpu.joules is not None}


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
