"""Provide DeepSpeed with the device as an accelerator, with the answers that its accelerator for CUDA gives."""

from __future__ import annotations

from typing import Any

import torch
from deepspeed.accelerator.abstract_accelerator import DeepSpeedAccelerator
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

from tests.software_gpu import device
from tests.software_gpu.library import DEVICE_TYPE
from tests.software_gpu.process_group import BACKEND


class SoftwareAccelerator(CPU_Accelerator):
    """DeepSpeed's accelerator for the device. Its operators, such as CPU Adam, are those of the CPU accelerator."""

    def __init__(self) -> None:
        super().__init__()
        self._name = DEVICE_TYPE
        self._communication_backend_name = BACKEND

    def is_synchronized_device(self) -> bool:
        return False

    # Devices. Every process has one, with the index 0.

    def device_name(self, device_index: Any = None) -> str:
        return DEVICE_TYPE if device_index is None else f"{DEVICE_TYPE}:0"

    def device(self, device_index: Any = None) -> Any:
        return device.device(device_index)

    def current_device(self) -> int:
        return 0

    def current_device_name(self) -> str:
        return f"{DEVICE_TYPE}:0"

    def device_count(self) -> int:
        return 1

    def synchronize(self, device_index: Any = None) -> None:
        device.synchronize()

    def on_accelerator(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == DEVICE_TYPE

    # Streams and events

    @property
    def Stream(self) -> Any:
        return device.Stream

    @property
    def Event(self) -> Any:
        return device.Event

    def stream(self, stream: torch.Stream | None) -> Any:
        return device.stream(stream)

    def current_stream(self, device_index: Any = None) -> device.Stream:
        return device.current_stream()

    def default_stream(self, device_index: Any = None) -> device.Stream:
        return device.default_stream()

    # Memory

    _torch_pins_host_memory = True
    pin_memory = DeepSpeedAccelerator.pin_memory
    _torch_pin_memory = DeepSpeedAccelerator._torch_pin_memory
    _torch_empty_pinned = DeepSpeedAccelerator._torch_empty_pinned

    def empty_cache(self) -> None:
        device.empty_cache()

    def memory_allocated(self, device_index: Any = None) -> int:
        return device.memory_allocated()

    def max_memory_allocated(self, device_index: Any = None) -> int:
        return device.max_memory_allocated()

    def reset_max_memory_allocated(self, device_index: Any = None) -> None:
        device.reset_peak_memory_stats()

    def memory_cached(self, device_index: Any = None) -> int:
        return device.memory_reserved()

    def max_memory_cached(self, device_index: Any = None) -> int:
        return device.max_memory_reserved()

    def reset_max_memory_cached(self, device_index: Any = None) -> None:
        device.reset_peak_memory_stats()

    def memory_stats(self, device_index: Any = None) -> dict[str, int]:
        return device.memory_stats()

    def reset_peak_memory_stats(self, device_index: Any = None) -> None:
        device.reset_peak_memory_stats()

    def memory_reserved(self, device_index: Any = None) -> int:
        return device.memory_reserved()

    def max_memory_reserved(self, device_index: Any = None) -> int:
        return device.max_memory_reserved()

    def total_memory(self, device_index: Any = None) -> int:
        return device.mem_get_info()[1]

    def available_memory(self, device_index: Any = None) -> int:
        return device.mem_get_info()[0]

    # Dtypes, and constructors of tensors from lists, as ``torch.cuda.FloatTensor`` is one

    def is_fp16_supported(self) -> bool:
        return True

    def supported_dtypes(self) -> list[torch.dtype]:
        return [torch.float, torch.half, torch.bfloat16]

    @property
    def FloatTensor(self) -> Any:
        return lambda data: torch.tensor(data, dtype=torch.float32, device=DEVICE_TYPE)

    @property
    def ByteTensor(self) -> Any:
        return lambda data: torch.tensor(data, dtype=torch.uint8, device=DEVICE_TYPE)
