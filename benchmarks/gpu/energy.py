"""Read the energy that the GPU has used, by NVIDIA's management library."""

from __future__ import annotations

import ctypes
from functools import cache

import torch

JOULES_PER_UNIT = 1e-3
"""The library counts millijoules."""


def joules() -> float | None:
    """Return the energy that the current GPU has used since its driver was loaded; None if it does not report it."""
    used = ctypes.c_ulonglong()
    if (gpu := _gpu()) is None or gpu[0].nvmlDeviceGetTotalEnergyConsumption(gpu[1], ctypes.byref(used)) != 0:
        return None
    return used.value * JOULES_PER_UNIT


@cache
def _gpu() -> tuple[ctypes.CDLL, ctypes.c_void_p] | None:
    """Return the library and its handle of the current GPU; None without a GPU or without the library."""
    if not torch.cuda.is_available():
        return None
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    # The library numbers all GPUs, and CUDA only those that are visible to this process.
    uuid = f"GPU-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}"
    handle = ctypes.c_void_p()
    if library.nvmlInit_v2() != 0 or library.nvmlDeviceGetHandleByUUID(uuid.encode(), ctypes.byref(handle)) != 0:
        return None
    return library, handle
