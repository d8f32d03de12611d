"""Let the allocator give out memory next that kernels of the default stream still use."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from deepspeed.runtime.engine import DeepSpeedEngine

from tests.software_gpu.library import DEVICE_TYPE

SIZES_BYTES = tuple(2**exponent for exponent in range(10, 20))


@contextmanager
def memory_in_use_before_backward() -> Iterator[None]:
    """Fill memory of many sizes on the current stream before each backward, and free it at once."""
    backward = DeepSpeedEngine.backward

    def use_memory_and_backward(self: Any, *args: Any, **kwargs: Any) -> Any:
        for size in SIZES_BYTES:
            torch.full((size,), 255, dtype=torch.uint8, device=DEVICE_TYPE)
        return backward(self, *args, **kwargs)

    with mock.patch.object(DeepSpeedEngine, "backward", use_memory_and_backward):
        yield
