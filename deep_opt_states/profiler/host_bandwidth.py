"""Measure the bandwidth of host memory with the operations that updates consist of.

Each probe works in a whole ``slab``, which was touched and page-locked like the states' memory in training.
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
"""The smallest number of elements that PyTorch gives a thread (``at::internal::GRAIN_SIZE``)."""


class UpdateInPlace:
    """A probe that multiplies fp32 elements in place, which reads and writes each byte."""

    def __init__(self, slab: HostSlab) -> None:
        self._memory = slab.tensor(0, slab.size_bytes // 4, torch.float32).fill_(1)
        self._factor, self._product = 2.0, 1.0

    def repeat(self) -> Rates:
        """Multiply once and return the bytes read and written per second."""
        start_s = time.perf_counter()
        self._memory.mul_(self._factor)
        elapsed_s = time.perf_counter() - start_s
        self._product *= self._factor
        # Multiply and divide alternately: a value that only shrinks becomes denormal, and slow.
        self._factor = 1 / self._factor
        return {"dram_update_bytes_per_s": 2 * self._memory.nbytes / elapsed_s}

    def verify(self) -> None:
        """Raise ``ProbeError`` if a product is wrong."""
        _require(bool((self._memory == self._product).all()), "products")


class HostCopy:
    """A probe that copies fp32 elements from one half of the slab to the other."""

    def __init__(self, slab: HostSlab) -> None:
        self._source, self._destination = _halves(slab)

    def repeat(self) -> Rates:
        """Copy once and return the bytes read and written per second."""
        start_s = time.perf_counter()
        self._destination.copy_(self._source)
        return {"dram_copy_bytes_per_s": 2 * self._source.nbytes / (time.perf_counter() - start_s)}

    def verify(self) -> None:
        """Raise ``ProbeError`` if a copied element is wrong."""
        _require(torch.equal(self._destination, self._source), "copied elements")


class HostCopyLatency(HostCopy):
    """A probe of the fixed cost of a copy between host buffers: it times the smallest copies that all threads share.

    The threads have to be woken for each copy. As in training, another thread has run an update before, with OpenMP
    threads of its own. OpenMP's threads spin while they wait for work only if there are at least as many cores as
    OpenMP threads in all.
    """

    COPIES = 64
    """Small copies per repetition."""

    def __init__(self, device: Device[Any], memory: HostStates) -> None:
        HostUpdates.with_training_threads(memory).run()
        super().__init__(memory.slab)
        self._device = device
        self._small_numel = min(self._source.numel(), PARALLEL_NUMEL * torch.get_num_threads())

    def repeat(self) -> Rates:
        """Copy everything once, then time small copies, and return the seconds per small copy."""
        # Copy much first, as training does: the system moves busy threads to cores of their own. Threads that share
        # a core are woken sooner, and copy at half the speed.
        self._device.copy(self._destination, self._source)
        small = [whole.narrow(0, 0, self._small_numel) for whole in (self._destination, self._source)]
        start_s = time.perf_counter()
        for _ in range(self.COPIES):
            self._device.copy(*small)
        return {"copy_latency_s": (time.perf_counter() - start_s) / self.COPIES}


def _halves(slab: HostSlab) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a source of ascending numbers and a destination of NaN, both fp32 and half of the slab."""
    numel = slab.size_bytes // 2 // 4
    source = slab.tensor(0, numel, torch.float32)
    source.copy_(torch.arange(numel, dtype=torch.float32, device="cpu"))
    return source, slab.tensor(source.nbytes, numel, torch.float32).fill_(torch.nan)


def _require(holds: bool, results: str) -> None:
    if not holds:
        raise ProbeError(f"the {results} in host memory are wrong")
