"""Provide the device's functions under the names that ``torch.cuda`` has, so that code for CUDA can be run on it."""

from __future__ import annotations

import ctypes
import hashlib
import itertools
import math
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from tests.software_gpu.library import DEVICE_TYPE, CRange, HostWait, Launched, amounts, call, checked, library
from tests.software_gpu.settings import MachineRates, current

COMPUTE_ENGINE, NO_ENGINE = 2, 3


def register() -> None:
    """Load the device, and make this module ``torch.software_gpu``. Call this once per process."""
    library()
    current().apply()
    torch._register_device_module(DEVICE_TYPE, sys.modules[__name__])
    torch.utils.generate_methods_for_privateuse1_backend()


# Devices


def is_available() -> bool:
    return True


def is_initialized() -> bool:
    return not _is_in_bad_fork()


def _is_in_bad_fork() -> bool:
    """Return whether this process was forked from one that had used the device already, so that it cannot use it."""
    return bool(call("forked"))


def device_count() -> int:
    return 1


def current_device() -> int:
    return 0


def set_device(device: Any) -> None:
    """Do nothing: there is one device per process."""


device = nullcontext


def synchronize(device: Any = None) -> None:
    torch.accelerator.synchronize()


@dataclass(frozen=True)
class Properties:
    """The properties of the device that are read somewhere, as ``torch.cuda.get_device_properties`` returns them."""

    name: str
    total_memory: int
    multi_processor_count: int = 132
    major: int = 9
    minor: int = 0
    # No PCI device has this address, so the NUMA node of the GPU is not known.
    pci_domain_id: int = 0xFFFF
    pci_bus_id: int = 0xFF
    pci_device_id: int = 0x1F


def get_device_properties(device: Any = None) -> Properties:
    return Properties(get_device_name(), mem_get_info()[1])


def get_device_name(device: Any = None) -> str:
    """Return a name that emulated machines of different speeds do not share, since profiles are cached by it."""
    rates = current().rates
    kind = "software GPU" if rates == MachineRates() else "EMULATED GPU"
    return f"{kind} {hashlib.sha256(repr(rates).encode()).hexdigest()[:8]}"


def get_device_capability(device: Any = None) -> tuple[int, int]:
    return (9, 0)


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.bfloat16, torch.float16]


# Random numbers, which are the CPU's


manual_seed = manual_seed_all = torch.default_generator.manual_seed


def get_rng_state(device: Any = None) -> torch.Tensor:
    return torch.get_rng_state()


def set_rng_state(state: torch.Tensor, device: Any = None) -> None:
    torch.set_rng_state(state)


# Streams and events


def Event(enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> torch.Event:
    return torch.Event(torch.device(DEVICE_TYPE, 0), enable_timing=enable_timing, blocking=blocking)


class DeviceStream(torch.Stream):
    def __new__(cls, device: Any = None, priority: int = 0, **identity: Any) -> DeviceStream:
        if identity:
            return super().__new__(cls, **identity)
        return super().__new__(cls, torch.device(DEVICE_TYPE, 0), priority=priority)


Stream = DeviceStream


def _as_stream(stream: torch.Stream) -> DeviceStream:
    return DeviceStream(stream_id=stream.stream_id, device_index=stream.device_index, device_type=stream.device_type)


def current_stream(device: Any = None) -> DeviceStream:
    return _as_stream(torch.accelerator.current_stream())


def default_stream(device: Any = None) -> DeviceStream:
    return DeviceStream(stream_id=0, device_index=0, device_type=torch._C._autograd.DeviceType.PrivateUse1.value)


set_stream = torch.accelerator.set_stream


@contextmanager
def stream(stream: torch.Stream | None) -> Iterator[None]:
    if stream is None:
        yield
        return
    before = current_stream()
    set_stream(stream)
    try:
        yield
    finally:
        set_stream(before)


# Memory


mem_get_info = torch.accelerator.get_memory_info
"""Returns the free and the total bytes. Bytes in the cache of the allocator are not free."""

memory_stats = torch.accelerator.memory_stats
memory_allocated, max_memory_allocated = torch.accelerator.memory_allocated, torch.accelerator.max_memory_allocated
memory_reserved, max_memory_reserved = torch.accelerator.memory_reserved, torch.accelerator.max_memory_reserved
reset_peak_memory_stats, empty_cache = torch.accelerator.reset_peak_memory_stats, torch.accelerator.empty_cache


def memory_stats_as_nested_dict(device: Any = None) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    for name, value in memory_stats().items():
        inner = nested
        *parts, last = name.split(".")
        for part in parts:
            inner = inner.setdefault(part, {})
        inner[last] = value
    return nested


def empty_host_cache() -> None:
    call("empty_host_cache")


_ERRORS = {
    1: "invalid argument",
    712: "part or all of the requested memory range is already mapped",
    713: "pointer does not correspond to a registered memory region",
}


class SoftwareGpuError(RuntimeError):
    def __init__(self, code: int) -> None:
        super().__init__(f"software GPU error {code}: {_ERRORS[code]}")


CudaError = SoftwareGpuError


class DeviceRuntime:
    @staticmethod
    def cudaHostRegister(address: int, size_bytes: int, flags: int) -> int:
        if size_bytes <= 0:
            return 1
        return 0 if call("register", address, size_bytes) else 712

    @staticmethod
    def cudaHostUnregister(address: int) -> int:
        return 0 if call("unregister", address) else 713


def cudart() -> DeviceRuntime:
    return DeviceRuntime()


def check_error(code: int) -> None:
    if code:
        raise CudaError(code)


# Kernels of our own


_launched: dict[int, Callable[[], None]] = {}
_tickets = itertools.count(1)


@Launched
def _run(ticket: int) -> None:
    """Run a launched function on the stream's thread. An error is raised at the next wait of the host."""
    try:
        _launched.pop(ticket)()
    except BaseException:  # noqa: BLE001 (the next wait of the host raises it)
        call("set_error", traceback.format_exc().encode())


def launch(
    function: Callable[[], None],
    name: str,
    *,
    reads: Sequence[torch.Tensor] = (),
    writes: Sequence[torch.Tensor] = (),
    gpu_s: float = 0.0,
    latency_s: float = 0.0,
) -> None:
    """Enqueue ``function`` as a kernel. It holds no tensors of the device, but works on ``host_view`` of them."""
    _enqueue(function, name, COMPUTE_ENGINE, amounts(gpu=gpu_s), latency_s, ranges(reads, writes))


def _enqueue(
    function: Callable[[], None], name: str, engine: int, used: Any, latency_s: float, accessed: Any = ()
) -> None:
    ticket = next(_tickets)
    _launched[ticket] = function
    stream, accessed = current_stream().stream_id, accessed or ranges()
    checked("launch", stream, _run, ticket, name.encode(), engine, used, latency_s, accessed, len(accessed))


def ranges(reads: Sequence[torch.Tensor] = (), writes: Sequence[torch.Tensor] = ()) -> Any:
    found = [
        CRange(tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes, writing)
        for tensors, writing in ((reads, False), (writes, True))
        for tensor in tensors
    ]
    return (CRange * len(found))(*found)


def _sleep(cycles: int) -> None:
    """Keep the current stream busy, at 2 GHz as ``device/cuda.py`` assumes it."""
    _enqueue(lambda: None, "sleep", NO_ENGINE, amounts(), cycles / 2e9)


def host_view(address: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return a CPU tensor over contiguous memory of the device. Only a launched function may use it."""
    numel = math.prod(shape)
    if numel == 0:
        return torch.empty(tuple(shape), dtype=dtype)
    size_bytes = numel * dtype.itemsize
    memory = (ctypes.c_char * size_bytes).from_address(real_address(address))
    return torch.frombuffer(memory, dtype=dtype).view(tuple(shape))


def real_address(address: int) -> int:
    return int(call("real_address", address))


# Observations of tests


class TaskSpan(NamedTuple):
    """A task of a stream, in emulated seconds since the library was loaded. Waits of streams are named ``wait``."""

    stream: int
    name: str
    start_s: float
    end_s: float


def take_spans() -> list[TaskSpan]:
    """Return the spans since the last call; the setting ``trace`` must be on."""
    lines = (line.split("\t") for line in call("take_spans").decode().splitlines())
    return [TaskSpan(int(stream), name, float(start), float(end)) for stream, name, start, end in lines]


def take_lag_s() -> float:
    """Return the longest time by which a thread of this machine was behind the emulated one since the last call."""
    return float(call("take_lag_s"))


def take_error() -> str:
    buffer = ctypes.create_string_buffer(20_000)
    call("take_error", buffer, len(buffer))
    return buffer.value.decode()


class Wait(NamedTuple):
    """A moment at which a host thread waited for the device: why, in which thread, and the callers, nearest first."""

    reason: str
    thread: str
    callers: tuple[str, ...]


_NO_CALLBACK = HostWait()


@contextmanager
def recorded_host_waits() -> Iterator[list[Wait]]:
    waits: list[Wait] = []

    @HostWait
    def record(reason: bytes) -> None:
        stack = traceback.extract_stack(sys._getframe(1), limit=12)
        callers = tuple(f"{frame.filename.rpartition('/')[2]}:{frame.name}" for frame in reversed(stack))
        waits.append(Wait(reason.decode(), threading.current_thread().name, callers))

    call("on_host_wait", record)
    try:
        yield waits
    finally:
        call("on_host_wait", _NO_CALLBACK)


@contextmanager
def host_work(**used: float) -> Iterator[None]:
    """Let the work inside take emulated time: ``cpu`` in seconds, ``host_memory`` in bytes."""
    work = call("begin_host_work", amounts(**used))
    try:
        yield
    finally:
        call("end_host_work", work)
