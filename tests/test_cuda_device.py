"""Check the CUDA device against a simulated CUDA runtime, which needs no GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from deep_opt_states.device import cuda
from deep_opt_states.device.cuda import CudaDevice
from deep_opt_states.device.slab import HostMemoryError

SUCCESS, OUT_OF_MEMORY, NOT_REGISTERED = 0, 2, 713


class CudaError(RuntimeError):
    pass


class Runtime:
    """A test double for the parts of ``torch`` that our device uses.

    As in CUDA, the last error stays until a call reads it.
    """

    def __init__(self, register: int = SUCCESS, unregister: int = SUCCESS) -> None:
        self._results = {"register": register, "unregister": unregister}
        self.calls: list[str] = []
        self.last_error = SUCCESS
        self.cuda = SimpleNamespace(
            CudaError=CudaError,
            check_error=self._check_error,
            cudart=lambda: SimpleNamespace(
                cudaHostRegister=lambda address, size_bytes, flags: self._result("register"),
                cudaHostUnregister=lambda address: self._result("unregister"),
            ),
            device=self._current,
            set_device=lambda device: self.calls.append(f"set {device}"),
            synchronize=lambda: self.calls.append("synchronize"),
            Event=self._event,
        )
        self.device = torch.device
        self.events: list[dict[str, bool]] = []

    def _result(self, call: str) -> int:
        self.calls.append(call)
        self.last_error = self._results[call] or self.last_error
        return self._results[call]

    @staticmethod
    def _check_error(result: int) -> None:
        if result != SUCCESS:
            raise CudaError(f"refused ({result})")

    @contextmanager
    def _current(self, device: torch.device) -> Iterator[None]:
        self.calls.append(f"with {device}")
        yield

    def _event(self, **options: bool) -> object:
        self.events.append(options)
        return SimpleNamespace()

    def ones(self, numel: int, device: torch.device) -> None:
        """Raise and clear the last error of any call, as ``C10_CUDA_KERNEL_LAUNCH_CHECK`` does after a launch."""
        self.calls.append("launch")
        error, self.last_error = self.last_error, SUCCESS
        if error != SUCCESS:
            raise RuntimeError(f"CUDA error: stale ({error})")


def device_on(runtime: Runtime, monkeypatch: pytest.MonkeyPatch, index: int = 0) -> CudaDevice:
    monkeypatch.setattr(cuda, "torch", runtime)
    return CudaDevice(index)


def test_a_refused_lock_leaves_no_error_for_the_next_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = Runtime(register=OUT_OF_MEMORY)
    slab = device_on(runtime, monkeypatch).host_slab(1000)
    with pytest.raises(HostMemoryError, match=r"refused: refused \(2\)"):
        slab.lock()
    # The next launch may be that of the collective in which the ranks agree on the error.
    runtime.ones(1, torch.device("cuda"))


def test_a_lock_that_succeeds_launches_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = Runtime()
    device_on(runtime, monkeypatch).host_slab(1000).lock()
    assert runtime.calls[:1] == ["register"]
    assert "launch" not in runtime.calls


def test_memory_is_unregistered_once_nothing_is_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check it on a thread whose current device is another one, such as a thread that collects garbage."""
    runtime = Runtime()
    slab = device_on(runtime, monkeypatch, index=3).host_slab(1000)
    slab.lock()
    slab.close()
    slab.close()
    assert runtime.calls == ["register", "with cuda:3", "synchronize", "unregister"]


def test_a_failure_to_unregister_leaves_no_error_either(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = Runtime(unregister=NOT_REGISTERED)
    slab = device_on(runtime, monkeypatch).host_slab(1000)
    slab.lock()
    with pytest.raises(CudaError, match="713"):
        slab.close()
    assert runtime.last_error == SUCCESS


def test_a_thread_enters_the_device_by_making_it_current(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = Runtime()
    device_on(runtime, monkeypatch, index=5).enter_thread()
    assert runtime.calls == ["set cuda:5"]


def test_a_host_that_waits_for_an_event_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = Runtime()
    device_on(runtime, monkeypatch).event()
    assert runtime.events == [{"enable_timing": True, "blocking": True}]


def test_pytorch_has_the_names_that_the_simulated_runtime_replaces() -> None:
    """Check the names. Only a build of PyTorch for CUDA can call them, but every build has them."""
    used: Any = torch.cuda
    for name in ("CudaError", "check_error", "cudart", "device", "set_device", "synchronize", "Event"):
        assert hasattr(used, name), name
