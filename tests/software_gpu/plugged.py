"""Train on the device: give it to DeepSpeed as the accelerator, and to the plugin in the place of ``torch.cuda``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch
from deepspeed.accelerator import get_accelerator, set_accelerator
from deepspeed.accelerator.abstract_accelerator import DeepSpeedAccelerator
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

from deep_opt_states.device import cuda
from deep_opt_states.device.kernels import choice, triton_adam
from deep_opt_states.host import machine
from deep_opt_states.zero import plugin
from deep_opt_states.zero.start import devices
from deep_opt_states.zero.start.devices import AcceleratorChoice
from tests.software_gpu import device
from tests.software_gpu.adam_kernel import SoftwareAdamKernel
from tests.software_gpu.library import DEVICE_TYPE
from tests.software_gpu.process_group import BACKEND, SoftwareProcessGroup
from tests.software_gpu.racecheck import RaceError, checked_threads, take_races
from tests.software_gpu.settings import Settings, applied

KERNEL = SoftwareAdamKernel()


class SoftwareAccelerator(CPU_Accelerator):
    """DeepSpeed's accelerator for the device. Its operators, such as CPU Adam, are the CPU accelerator's."""

    def __init__(self) -> None:
        super().__init__()
        self._name = DEVICE_TYPE
        self._communication_backend_name = BACKEND

    def is_synchronized_device(self) -> bool:
        return False

    def device_name(self, device_index: Any = None) -> str:
        return DEVICE_TYPE if device_index is None else f"{DEVICE_TYPE}:0"

    def on_accelerator(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == DEVICE_TYPE

    Stream, Event, stream = device.Stream, staticmethod(device.Event), staticmethod(device.stream)

    # Memory

    _torch_pins_host_memory = True
    pin_memory = DeepSpeedAccelerator.pin_memory
    _torch_pin_memory = DeepSpeedAccelerator._torch_pin_memory
    _torch_empty_pinned = DeepSpeedAccelerator._torch_empty_pinned

    # Dtypes, and constructors of tensors from lists, as ``torch.cuda.FloatTensor`` is one

    def is_fp16_supported(self) -> bool:
        return True

    def supported_dtypes(self) -> list[torch.dtype]:
        return [torch.float, torch.half, torch.bfloat16]

    FloatTensor = staticmethod(partial(torch.tensor, dtype=torch.float32, device=DEVICE_TYPE))
    ByteTensor = staticmethod(partial(torch.tensor, dtype=torch.uint8, device=DEVICE_TYPE))


for _name, _function in {
    **{
        name: getattr(device, name)
        for name in (
            *("empty_cache", "memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"),
            *("memory_stats", "reset_peak_memory_stats", "device", "current_device", "device_count", "synchronize"),
            *("current_stream", "default_stream"),
        )
    },
    "current_device_name": lambda: f"{DEVICE_TYPE}:0",
    "memory_cached": device.memory_reserved,
    "max_memory_cached": device.max_memory_reserved,
    "total_memory": lambda: device.mem_get_info()[1],
    "available_memory": lambda: device.mem_get_info()[0],
}.items():
    setattr(SoftwareAccelerator, _name, lambda self, device_index=None, function=_function: function())


class TorchWithDevice:
    cuda = device

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def device(type_: str, index: int | None = None) -> torch.device:
        return torch.device(DEVICE_TYPE if type_ == "cuda" else type_, index)

    class _C:
        """The private part of ``torch`` that ``device/cuda.py`` calls."""

        _host_emptyCache = staticmethod(device.empty_host_cache)


TORCH: Any = TorchWithDevice()


@contextmanager
def plugged(settings: Settings | None = None, chunk_bytes: int = cuda.CHUNK_BYTES) -> Iterator[None]:
    """Train on the registered device inside this context, in which engines must be created and destroyed."""
    original = get_accelerator()
    settings = settings or Settings()
    with applied(settings), ExitStack() as patches:
        if settings.racecheck:
            patches.enter_context(checked_threads())
        for module in (cuda, devices, choice):
            patches.enter_context(mock.patch.object(module, "torch", TORCH))
        patches.enter_context(mock.patch.object(triton_adam, "_import_kernel", return_value=(KERNEL, {})))
        patches.enter_context(mock.patch.object(machine, "has_cuda", return_value=True))
        for name in ("current_device", "get_device_properties"):
            patches.enter_context(mock.patch.object(torch.cuda, name, getattr(device, name)))
        chosen = AcceleratorChoice(cuda.CudaDevice(0, chunk_bytes), slots_on_host=False)
        patches.enter_context(mock.patch.object(plugin, "choose_device", return_value=chosen))
        patches.enter_context(mock.patch.object(SoftwareProcessGroup, "host_tensors", False))
        devices._no_gpu_adam.cache_clear()
        set_accelerator(SoftwareAccelerator())
        try:
            yield
            device.synchronize()
            if races := take_races():
                raise RaceError("\n".join(races))
        finally:
            set_accelerator(original)
            devices._no_gpu_adam.cache_clear()
