"""Give the plugin and stock DeepSpeed the same EMULATED disk, which reads and writes with given rates.

The plugin's files are real ones, and its transfers take at least the time that they would take on the emulated disk.
Stock's swapper gets a handle with the interface of ``deepspeed.ops.aio.aio_handle`` whose transfers take the same time,
because its own needs libaio.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from deepspeed.ops.op_builder import AsyncIOBuilder

from deep_opt_states.device.state_file import StateFile
from deep_opt_states.zero.start import disk
from perf_model.prediction.cost import DiskRates


class ThrottledDisk:
    """A disk that reads and writes with ``rates``, in bytes per second. Transfers in one direction follow each other.

    ``rates.both`` is either the sum of the others, or the rate of a disk that reads and writes one after the other.
    Transfers take time only while ``takes_time()``.
    """

    def __init__(self, rates: DiskRates, takes_time: Callable[[], bool]) -> None:
        self.rates = rates
        self._takes_time = takes_time
        self._at_once = rates.both > max(rates.read, rates.write)
        self._free_at_s: dict[str, float] = {}
        self._sizes: dict[str, dict[object, int]] = {"read": {}, "write": {}}
        """The bytes of each transfer, by its place on the disk: an update reads and writes each place once."""
        self._lock = threading.Lock()

    @contextmanager
    def transfer(self, direction: str, place: object, size_bytes: int) -> Iterator[None]:
        """Let the transfer inside, "read" or "write", take as long as on the disk."""
        end_s = 0.0
        if self._takes_time():
            with self._lock:
                lane = direction if self._at_once else "both"
                start_s = max(time.monotonic(), self._free_at_s.get(lane, 0.0))
                end_s = self._free_at_s[lane] = start_s + size_bytes / getattr(self.rates, direction)
                self._sizes[direction][place] = size_bytes
        yield
        time.sleep(max(0.0, end_s - time.monotonic()))

    @property
    def update_bytes(self) -> dict[str, int]:
        """Return the bytes that one update reads and writes."""
        return {direction: sum(sizes.values()) for direction, sizes in self._sizes.items()}

    @property
    def bound_s(self) -> float:
        """Return the seconds that the transfers of one update take at least."""
        seconds = [size / getattr(self.rates, direction) for direction, size in self.update_bytes.items()]
        return float(max(seconds) if self._at_once else sum(seconds))

    @contextmanager
    def for_plugin(self) -> Iterator[None]:
        """Read and write the plugin's files through the disk inside this context."""

        def throttled(direction: str, method: Callable[..., None]) -> Callable[..., None]:
            def wrapped(file: StateFile, memory: memoryview, offset_bytes: int) -> None:
                with self.transfer(direction, (file, offset_bytes), len(memory)):
                    method(file, memory, offset_bytes)

            return wrapped

        with ExitStack() as patches:
            for direction in ("read", "write"):
                method = throttled(direction, getattr(StateFile, direction))
                patches.enter_context(mock.patch.object(StateFile, direction, method))
            patches.enter_context(mock.patch.object(disk, "measure_disks", return_value=self.rates))
            yield


@contextmanager
def swapper_on(disks: Mapping[str, ThrottledDisk]) -> Iterator[None]:
    """Let stock's swapper read and write through ``disks``, by folder, inside this context."""
    buffers: list[torch.Tensor] = []
    operator = SimpleNamespace(aio_handle=lambda **_: AioHandle(disks, buffers))
    with mock.patch.object(AsyncIOBuilder, "load", return_value=operator):
        yield


class AioHandle:
    """The methods of DeepSpeed's ``aio_handle`` that its swappers of optimizer states call, on ``disks`` by folder.

    As with ``intra_op_parallelism`` of 1, DeepSpeed's default, one thread does all transfers in their order. All
    handles know all ``buffers``: a pipelined swapper's come from its handle for writes.
    """

    def __init__(self, disks: Mapping[str, ThrottledDisk], buffers: list[torch.Tensor]) -> None:
        self._disks, self._buffers = disks, buffers
        self._thread = ThreadPoolExecutor(1)
        self._pending: list[Future[None]] = []

    def new_cpu_locked_tensor(self, numel: int, like: torch.Tensor) -> torch.Tensor:
        """Return a buffer for transfers. DeepSpeed's is locked in memory, but pageable for CUDA, as this one is."""
        self._buffers.append(torch.empty(numel, dtype=like.dtype))
        return self._buffers[-1]

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Return whether ``tensor`` lies in a buffer."""
        pointers = [buffer.untyped_storage().data_ptr() for buffer in self._buffers]
        return tensor.untyped_storage().data_ptr() in pointers

    def async_pread(self, tensor: torch.Tensor, path: str, _: int) -> int:
        """Start to read the file ``path`` to ``tensor``."""
        return self._submit("read", path, tensor, lambda memory: Path(path).open("rb").readinto(memory))

    def async_pwrite(self, tensor: torch.Tensor, path: str, _: int) -> int:
        """Start to write ``tensor`` to the file ``path``."""
        return self._submit("write", path, tensor, lambda memory: Path(path).write_bytes(memory))

    def wait(self) -> int:
        """Wait for all transfers, and return their number."""
        pending, self._pending = self._pending, []
        for future in pending:
            future.result()
        return len(pending)

    def _submit(self, direction: str, path: str, tensor: torch.Tensor, transfer: Callable[[memoryview], Any]) -> int:
        memory = memoryview(tensor.view(torch.uint8).numpy().data)

        (disk,) = (disk for folder, disk in self._disks.items() if path.startswith(folder))

        def run() -> None:
            with disk.transfer(direction, path, len(memory)):
                transfer(memory)

        self._pending.append(self._thread.submit(run))
        return 0
