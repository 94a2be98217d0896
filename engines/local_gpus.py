"""Read memory, compute capability, usage and energy of this machine's GPUs from the NVIDIA driver's library (NVML),
without importing torch or creating a CUDA context."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


class _Memory(ctypes.Structure):
    _fields_ = [(name, ctypes.c_ulonglong) for name in ("total", "free", "used")]  # bytes


class _Utilization(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint) for name in ("gpu", "memory")]  # percent of the driver's last sampling period


def visible_gpu_bytes() -> list[int]:
    """Return the total memory, in bytes, of every GPU that CUDA_VISIBLE_DEVICES allows; [] without GPUs or driver."""
    return select_visible_gpus([size for size in _query_gpus(total_gpu_bytes) if size])


def visible_gpu_capabilities() -> list[tuple[int, int]]:
    """Return the CUDA compute capability (major, minor) of every GPU that CUDA_VISIBLE_DEVICES allows; [] without GPUs
    or driver."""
    return select_visible_gpus([capability for capability in _query_gpus(compute_capability) if capability[0]])


def visible_gpu_usage() -> list[dict[str, float]]:
    """Return memory, utilization and power of every GPU that CUDA_VISIBLE_DEVICES allows, under MLflow's names of
    these metrics; values that the GPU does not report are missing. [] without GPUs or driver."""
    return select_visible_gpus(_query_gpus(gpu_usage))


def all_gpu_joules() -> list[float | None]:
    """Return the energy in joules that every GPU of this machine has used since its driver was loaded, or None for a
    GPU that has no such counter; [] without GPUs or driver."""
    return _query_gpus(gpu_joules)


def _query_gpus(query: Callable[[ctypes.CDLL, int], T]) -> list[T]:
    """Return `query(nvml, index)` for every GPU; [] without GPUs or driver."""
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
        return [query(nvml, index) for index in range(count.value)]
    finally:
        nvml.nvmlShutdown()


def total_gpu_bytes(nvml: ctypes.CDLL, index: int) -> int:
    """Return the total memory of GPU number `index` in bytes; 0 if NVML returns an error."""
    handle, memory = ctypes.c_void_p(), _Memory()
    if nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle)) != 0:
        return 0
    return int(memory.total) if nvml.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)) == 0 else 0


def gpu_usage(nvml: ctypes.CDLL, index: int) -> dict[str, float]:
    """Return memory, utilization and power of GPU number `index`, without values for which NVML returns an error."""
    handle, memory, utilization = ctypes.c_void_p(), _Memory(), _Utilization()
    power, limit = ctypes.c_uint(), ctypes.c_uint()  # milliwatts
    usage: dict[str, float] = {}
    if nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle)) != 0:
        return usage
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


def gpu_joules(nvml: ctypes.CDLL, index: int) -> float | None:
    """Return the energy in joules that GPU number `index` has used since its driver was loaded, or None if NVML
    returns an error (GPUs before Volta have no counter)."""
    handle, millijoules = ctypes.c_void_p(), ctypes.c_ulonglong()
    if nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle)) != 0:
        return None
    if nvml.nvmlDeviceGetTotalEnergyConsumption(handle, ctypes.byref(millijoules)) != 0:
        return None
    return millijoules.value / 1000


def compute_capability(nvml: ctypes.CDLL, index: int) -> tuple[int, int]:
    """Return the compute capability of GPU number `index`; (0, 0) if NVML returns an error."""
    handle, major, minor = ctypes.c_void_p(), ctypes.c_int(), ctypes.c_int()
    if nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle)) != 0:
        return 0, 0
    nvml.nvmlDeviceGetCudaComputeCapability(handle, ctypes.byref(major), ctypes.byref(minor))
    return major.value, minor.value


def select_visible_gpus(sizes: list[T]) -> list[T]:
    """Return the entries of `sizes` (one for each GPU, in bytes or not) whose GPUs CUDA_VISIBLE_DEVICES allows. If
    it names n GPUs by UUID, return the first n entries: UUIDs are not resolved."""
    setting = os.environ.get("CUDA_VISIBLE_DEVICES")
    if setting is None:
        return sizes
    names = [name.strip() for name in setting.split(",") if name.strip() and name.strip() != "-1"]
    if all(name.isdecimal() for name in names):
        return [sizes[int(name)] for name in names if int(name) < len(sizes)]
    return sizes[: len(names)]
