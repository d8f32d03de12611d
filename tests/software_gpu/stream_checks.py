"""Check streams and events: order, concurrency, waits of streams and of the host, and the adversaries."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from tests.software_gpu import device
from tests.software_gpu.library import DEVICE_TYPE
from tests.software_gpu.settings import changed

TIMEOUT_S = 100.0
"""How long a check waits for an event that must come, on a machine that is busy with other tests."""


class _Gate:
    """A task that keeps a stream busy until the host opens the gate."""

    def __init__(self) -> None:
        self._open = threading.Event()
        self.opened: list[bool] = []

    def close_stream(self, stream: torch.Stream) -> None:
        with device.stream(stream):
            device.launch(lambda: self.opened.append(self._open.wait(TIMEOUT_S)), "gate")

    def open(self) -> None:
        self._open.set()


def work_of_one_stream_is_executed_in_order() -> None:
    with changed(jitter_s=1e-4):
        tensor = torch.zeros(8, device=DEVICE_TYPE)
        for number in range(60):
            tensor.mul_(3).add_(number).remainder_(101)
        expected = 0
        for number in range(60):
            expected = (expected * 3 + number) % 101
        assert tensor.tolist() == [expected] * 8


def work_of_two_streams_is_executed_at_the_same_time() -> None:
    gate, first, second = _Gate(), device.Stream(), device.Stream()
    gate.close_stream(first)
    with device.stream(second):
        device.launch(gate.open, "open")
    first.synchronize()
    assert gate.opened == [True]


def every_thread_has_a_current_stream_of_its_own() -> None:
    seen: list[torch.Stream] = []
    side = device.Stream()
    with device.stream(side):
        thread = threading.Thread(target=lambda: seen.append(device.current_stream()))
        thread.start()
        thread.join()
        assert device.current_stream() == side
    assert seen == [device.default_stream()]
    assert device.current_stream() == device.default_stream() != side


def an_event_that_was_never_recorded_is_over() -> None:
    event = device.Event(enable_timing=True)
    assert event.query()
    event.synchronize()
    device.current_stream().wait_event(event)
    device.synchronize()
    with pytest.raises(ValueError, match="must be recorded"):
        event.elapsed_time(event)


def an_event_stands_for_its_last_record() -> None:
    gate, side, event = _Gate(), device.Stream(), device.Event()
    event.record(side)
    event.synchronize()
    gate.close_stream(side)
    assert event.query()
    assert not side.query()
    event.record(side)
    assert not event.query()
    gate.open()
    event.synchronize()
    assert event.query()
    assert side.query()


def elapsed_time_needs_two_events_with_timing_that_are_over() -> None:
    gate, side = _Gate(), device.Stream()
    plain = device.Event()
    begin, end = device.Event(enable_timing=True), device.Event(enable_timing=True)
    plain.record(side)
    begin.record(side)
    gate.close_stream(side)
    end.record(side)
    with pytest.raises(RuntimeError, match="must be completed"):
        begin.elapsed_time(end)
    gate.open()
    side.synchronize()
    assert begin.elapsed_time(end) > 0
    with pytest.raises(ValueError, match="enable_timing"):
        plain.elapsed_time(end)


def _written_after_a_gate(wait: str) -> list[float]:
    """Return the values that the default stream reads while a side stream writes late, with or without a wait."""
    gate, side = _Gate(), device.Stream()
    tensor = torch.zeros(4, device=DEVICE_TYPE)
    device.synchronize()
    gate.close_stream(side)
    with device.stream(side):
        tensor.fill_(1)
        event = device.Event()
        event.record()
    if wait == "event":
        device.current_stream().wait_event(event)
    elif wait == "stream":
        device.current_stream().wait_stream(side)
    seen = tensor * 2
    if wait != "none":
        gate.open()
    device.current_stream().synchronize()
    gate.open()
    return seen.tolist()


def a_stream_waits_for_events_and_streams() -> None:
    assert _written_after_a_gate("event") == [2] * 4
    assert _written_after_a_gate("stream") == [2] * 4
    assert _written_after_a_gate("none") == [0] * 4


def a_wait_for_a_stream_is_for_what_was_issued_before() -> None:
    gate, side = _Gate(), device.Stream()
    device.current_stream().wait_stream(side)
    gate.close_stream(side)
    assert torch.ones(2, device=DEVICE_TYPE).tolist() == [1, 1]
    gate.open()


def waits_of_the_host_let_other_python_threads_run() -> None:
    """Wait for a stream that another Python thread has to open: with the GIL held, the gate would stay closed."""
    tensor = torch.ones(50_000, device=DEVICE_TYPE)
    on_host = torch.empty(50_000)
    event = device.Event()
    waits = {
        "device": device.synchronize,
        "stream": device.current_stream().synchronize,
        "event": event.synchronize,
        "item": lambda: tensor[0].item(),
        "to the host": tensor.cpu,
        "pageable": lambda: on_host.copy_(tensor, non_blocking=True),
        "from the host": lambda: tensor.copy_(on_host),
        "nonzero": tensor.nonzero,
        "empty_cache": device.empty_cache,
    }
    for name, wait in waits.items():
        gate = _Gate()
        gate.close_stream(device.current_stream())
        event.record()
        other = threading.Thread(target=gate.open)
        # The thread starts when this one releases the GIL, and mostly not earlier than in the wait.
        threading.Timer(0.01, other.start).start()
        wait()
        assert gate.opened == [True], name


def an_error_of_a_task_is_raised_at_every_wait_of_the_host_until_it_is_taken() -> None:
    def fail() -> None:
        raise ValueError("the launched function failed")

    device.launch(fail, "fail")
    device.launch(lambda: 1 // 0, "fails later")
    torch.ones(3, device=DEVICE_TYPE).add_(1)
    for wait in (device.synchronize, device.current_stream().synchronize, torch.ones(1, device=DEVICE_TYPE).item):
        with pytest.raises(RuntimeError, match=r"(?s)earlier task: .*in fail.*the launched function failed"):
            wait()
    assert "the launched function failed" in device.take_error()
    assert device.take_error() == ""
    device.synchronize()


def an_error_of_an_operator_is_raised_where_the_host_waits_and_not_where_it_is_issued() -> None:
    rows = torch.nn.functional.embedding(torch.tensor([5], device=DEVICE_TYPE), torch.ones(3, 2, device=DEVICE_TYPE))
    with pytest.raises(RuntimeError, match="out of range"):
        rows.cpu()
    assert device.take_error() != ""


def backward_runs_on_the_stream_of_forward() -> None:
    seen: dict[str, tuple[str, int]] = {}

    class StreamOfBackward(torch.autograd.Function):
        @staticmethod
        def forward(ctx: torch.autograd.function.FunctionCtx, tensor: torch.Tensor, name: str) -> torch.Tensor:
            ctx.name = name  # type: ignore[attr-defined]
            return tensor * 2

        @staticmethod
        def backward(ctx: torch.autograd.function.FunctionCtx, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
            seen[ctx.name] = threading.current_thread().name, device.current_stream().stream_id  # type: ignore[attr-defined]
            return grad * 2, None

    side = device.Stream()
    with changed(lazy=True, lazy_s=100.0):
        weight = torch.ones(1000, device=DEVICE_TYPE, requires_grad=True)
        side.wait_stream(device.current_stream())
        with device.stream(side):
            between = StreamOfBackward.apply(weight, "side")
        device.current_stream().wait_stream(side)
        StreamOfBackward.apply(between, "default").sum().backward()
        assert weight.grad is not None
        assert weight.grad.tolist() == [4] * 1000
    assert {name: stream for name, (_, stream) in seen.items()} == {"side": side.stream_id, "default": 0}
    assert threading.main_thread().name not in [thread for thread, _ in seen.values()]


def a_lazy_stream_executes_nothing_before_a_wait() -> None:
    with changed(lazy=True, lazy_s=100.0):
        executed: list[int] = []
        side = device.Stream()
        event = device.Event()
        with device.stream(side):
            device.launch(lambda: executed.append(1), "first")
            event.record()
            device.launch(lambda: executed.append(2), "second")
        time.sleep(0.05)
        assert executed == []
        assert not event.query()
        # Another stream that waits executes nothing either before the host waits for it.
        device.current_stream().wait_event(event)
        device.launch(lambda: executed.append(3), "third")
        time.sleep(0.05)
        assert executed == []
        device.current_stream().synchronize()
        assert executed == [1, 3]
        side.synchronize()
        assert executed == [1, 3, 2]


def eager_tasks_are_executed_when_they_are_issued() -> None:
    """Let some tasks overtake all others, which are lazy."""
    side = device.Stream()
    for eager, expected in {"on default stream": [1, 0, 0], "on other streams": [0, 1, 0], "copies": [0, 0, 1]}.items():
        executed = [0, 0]
        tensor, pinned = torch.ones(1, device=DEVICE_TYPE), torch.zeros(1, pin_memory=True)
        device.synchronize()
        with changed(lazy=True, lazy_s=100.0, eager=eager):
            third = device.Stream() if eager == "copies" else None
            device.launch(lambda: executed.__setitem__(0, 1), "on the default stream")  # noqa: B023
            with device.stream(side):
                device.launch(lambda: executed.__setitem__(1, 1), "on another stream")  # noqa: B023
            if third is not None:
                with device.stream(third):
                    pinned.copy_(tensor, non_blocking=True)
            assert [*executed, int(pinned.item())] == expected, eager


def a_lazy_stream_makes_progress_without_a_wait() -> None:
    with changed(lazy=True, lazy_s=0.02):
        executed = threading.Event()
        device.launch(executed.set, "set")
        assert executed.wait(TIMEOUT_S)


def _delays(seed: int) -> list[float]:
    with changed(jitter_s=1e-3, seed=seed, trace=True):
        for _ in range(20):
            device.launch(lambda: None, "nothing")
        device.synchronize()
        delays = [span.end_s - span.start_s for span in device.take_spans() if span.name == "jitter"]
    return [round(delay, 9) for delay in delays]


def delays_of_jitter_follow_from_the_seed() -> None:
    first = _delays(1)
    assert len(set(first)) == 20
    assert max(first) <= 1e-3
    assert _delays(1) == first
    assert not set(_delays(2)) & set(first)


def threads_that_allocate_wait_and_collect_garbage_do_not_deadlock() -> None:
    """Let threads wait, allocate beyond the capacity, and free on streams' threads, all at once."""
    rounds, failures = 60, []
    retries = device.memory_stats()["num_alloc_retries"]

    def allocate() -> None:
        for _ in range(rounds // 3):
            # The cache of the round before is of another stream, so it has to be emptied.
            with device.stream(device.Stream()):
                kept = [torch.ones(2_000_000, device=DEVICE_TYPE) for _ in range(3)]
                assert kept[-1][0].item() == 1
                del kept

    def free_on_the_thread_of_a_stream() -> None:
        with device.stream(device.Stream()):
            for _ in range(rounds):
                held = [torch.ones(300_000, device=DEVICE_TYPE)]
                held[0].record_stream(device.default_stream())
                device.launch(held.clear, "clear")
                device.current_stream().synchronize()

    def empty() -> None:
        for _ in range(rounds):
            device.empty_cache()
            device.memory_stats()

    def wait() -> None:
        event = device.Event()
        for _ in range(rounds):
            device.launch(lambda: sum(range(1000)), "sum")
            event.record()
            event.synchronize()
            torch.ones(100_000).to(DEVICE_TYPE, non_blocking=True).cpu()

    def run(work: object) -> None:
        try:
            work()  # type: ignore[operator]
        except Exception as error:  # noqa: BLE001 (the check shows it)
            failures.append(error)

    # The live segments of all threads fit: 40 MiB of each thread that allocates, and 22 MiB of the others.
    with changed(memory_bytes=device.memory_reserved() + 110 * 2**20, jitter_s=1e-4):
        threads = [
            threading.Thread(target=run, args=[work])
            for work in (allocate, allocate, free_on_the_thread_of_a_stream, empty, wait)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(TIMEOUT_S)
            assert not thread.is_alive(), "deadlock"
    assert failures == [], failures
    assert device.memory_stats()["num_alloc_retries"] > retries
