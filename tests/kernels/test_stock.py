"""Check the memory of stock's op as a fallback."""

from __future__ import annotations

import gc
import weakref

import torch

from deep_opt_states.device.kernels.stock import StockAdam
from deep_opt_states.runtime.worker import Worker
from tests.kernels.adam_steps import BETAS


def test_close_frees_the_memory_of_every_thread() -> None:
    kernel, worker = StockAdam(1, BETAS, adamw=True), Worker()
    memories: list[weakref.ref[torch.Tensor]] = []

    def scale() -> None:
        scaled = kernel.scaled_gradient(torch.ones(8), 0.5, torch.float32)
        memories.append(weakref.ref(scaled._base))

    scale()
    worker.submit(scale).result()
    one, other = (memory() for memory in memories)
    assert one is not None
    assert other is not None
    assert one is not other
    del one, other
    kernel.close()
    gc.collect()
    assert [memory() for memory in memories] == [None, None]
    worker.close()
