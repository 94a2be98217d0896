"""Read memory and compute capability of this machine's GPUs from the NVIDIA driver's library (NVML), without importing
torch or creating a CUDA context."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


class _Memory(ctypes.Structure):
    _fields_ = [(name, ctypes.c_ulonglong) for name in ("total", "free", "used")]  # bytes


def visible_gpu_bytes() -> list[int]:
    """Return the total memory, in bytes, of every GPU that CUDA_VISIBLE_DEVICES allows; [] without GPUs or driver."""
    return select_visible_gpus([size for size in _query_gpus(total_gpu_bytes) if size])


def visible_gpu_capabilities() -> list[tuple[int, int]]:
    """Return the CUDA compute capability (major, minor) of every GPU that CUDA_VISIBLE_DEVICES allows; [] without GPUs
    or driver."""
    return select_visible_gpus([capability for capability in _query_gpus(compute_capability) if capability[0]])


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
