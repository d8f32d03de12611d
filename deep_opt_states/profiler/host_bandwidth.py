"""Host memory: what the cores read and write, with the operations that updates consist of.

Each probe works in all of a ``slab``, as it was touched and page-locked for the states in training.
"""

from __future__ import annotations

import time
from typing import Any

import torch

from deep_opt_states.device.interface import Device
from deep_opt_states.device.slab import HostSlab
from deep_opt_states.profiler.adam_throughput import HostUpdates
from deep_opt_states.profiler.host_states import HostStates
from deep_opt_states.profiler.method import Rates
from deep_opt_states.profiler.ranks import ProbeError

PARALLEL_NUMEL = 32768
"""What PyTorch gives a thread at least (``at::internal::GRAIN_SIZE``)."""


class UpdateInPlace:
    """fp32 multiplied in place: each byte is read and written."""

    def __init__(self, slab: HostSlab) -> None:
        self._memory = slab.tensor(0, slab.size_bytes // 4, torch.float32).fill_(1)
        self._factor, self._product = 2.0, 1.0

    def repeat(self) -> Rates:
        start_s = time.perf_counter()
        self._memory.mul_(self._factor)
        elapsed_s = time.perf_counter() - start_s
        self._product *= self._factor
        # Up and down by turns: a value that only shrank would become denormal, and slow.
        self._factor = 1 / self._factor
        return {"dram_update_bytes_per_s": 2 * self._memory.nbytes / elapsed_s}

    def verify(self) -> None:
        _require(bool((self._memory == self._product).all()), "products")


class Copied:
    """fp32 copied from one half of the slab to the other: each byte is read here and written there."""

    def __init__(self, slab: HostSlab) -> None:
        self._source, self._destination = _halves(slab, torch.float32)

    def repeat(self) -> Rates:
        start_s = time.perf_counter()
        self._destination.copy_(self._source)
        return {"dram_copy_bytes_per_s": 2 * self._source.nbytes / (time.perf_counter() - start_s)}

    def verify(self) -> None:
        _require(torch.equal(self._destination, self._source), "copied elements")


class CopyLatency(Copied):
    """Seconds that a copy between host buffers takes beside its bytes: of the smallest that all threads share.

    They have to be woken for it. Another thread has updated before, as in training, with threads of its own; OpenMP's
    wait for work without sleeping only while all of them together have a core each.
    """

    COPIES = 64

    def __init__(self, device: Device[Any], memory: HostStates) -> None:
        HostUpdates.as_in_training(memory).run()
        super().__init__(memory.slab)
        self._device = device
        self._small_numel = min(self._source.numel(), PARALLEL_NUMEL * torch.get_num_threads())

    def repeat(self) -> Rates:
        # A long one first, as there are in training: the system moves threads that are busy to cores of their own. Left
        # on one core they are woken sooner, and copy at half the speed.
        self._device.copy(self._destination, self._source)
        small = [whole.narrow(0, 0, self._small_numel) for whole in (self._destination, self._source)]
        start_s = time.perf_counter()
        for _ in range(self.COPIES):
            self._device.copy(*small)
        return {"copy_latency_s": (time.perf_counter() - start_s) / self.COPIES}


class Rounded:
    """fp32 rounded to bf16, from one half of the slab to the other; stock's CPU update ends with it."""

    def __init__(self, slab: HostSlab) -> None:
        self._source, self._destination = _halves(slab, torch.bfloat16)

    def repeat(self) -> Rates:
        start_s = time.perf_counter()
        self._destination.copy_(self._source)
        return {"rounding_params_per_s": self._source.numel() / (time.perf_counter() - start_s)}

    def verify(self) -> None:
        # bf16 has 8 bits of precision: to nearest, it is off by at most half of the last.
        error = self._destination.float().sub_(self._source).abs_()
        _require(bool((error <= self._source * 2**-8).all()), "rounded elements")


def _halves(slab: HostSlab, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ascending numbers in fp32, and room for as many in ``dtype``."""
    numel = slab.size_bytes // 2 // 4
    source = slab.tensor(0, numel, torch.float32)
    source.copy_(torch.arange(numel, dtype=torch.float32, device="cpu"))
    return source, slab.tensor(source.nbytes, numel, dtype).fill_(torch.nan)


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise ProbeError(f"the {what} in host memory are wrong")
