"""Check the race check itself, on programs whose order is known."""

from __future__ import annotations

import mmap
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from deep_opt_states.device.kernels.adam import AdamTensors, ElementRange, RangeUpdate
from deep_opt_states.device.kernels.arithmetic import Arithmetic, Tail
from deep_opt_states.device.kernels.fused import FusedAdam
from deep_opt_states.device.state_file import StateFile
from deep_opt_states.runtime.worker import Worker
from tests.kernels.adam_steps import BETAS, STEP
from tests.software_gpu import device
from tests.software_gpu.library import DEVICE_TYPE
from tests.software_gpu.racecheck import BETWEEN, HostMoment, checked_threads, take_races
from tests.software_gpu.settings import changed


def _races(program: Callable[[], object], *, of_freed_memory: bool = False) -> list[str]:
    """Return the races of the program. Most programs free their tensors while streams use them, which is left out."""
    with changed(racecheck=True), checked_threads():
        program()
        device.synchronize()
        return [race for race in take_races() if ("memory that was freed" in race) == of_freed_memory]


def _zeros(numel: int = 4) -> torch.Tensor:
    """Return a tensor of the device that every stream may use."""
    tensor = torch.zeros(numel, device=DEVICE_TYPE)
    device.synchronize()
    return tensor


def _pinned(numel: int = 4) -> torch.Tensor:
    return torch.zeros(numel).pin_memory()


def _on_stream(access: Callable[[], object], stream: Any = None) -> Any:
    """Access on a stream that no other one waits for, by default a new one, and return the stream."""
    stream = stream or device.Stream()
    with device.stream(stream):
        access()
    return stream


def streams_are_ordered_by_waits_only() -> None:
    waits: dict[str, Callable[[Any, Any], object]] = {
        "nothing": lambda first, second: None,
        "reversed": lambda first, second: first.wait_stream(second),
        "stream": lambda first, second: second.wait_stream(first),
        "event": lambda first, second: second.wait_event(first.record_event()),
        "host": lambda first, second: first.synchronize(),
        "device": lambda first, second: device.synchronize(),
    }
    for name, wait in waits.items():

        def program(wait: Callable[[Any, Any], object] = wait) -> None:
            tensor, second = _zeros(), device.Stream()
            first = _on_stream(lambda: tensor.fill_(1))
            wait(first, second)
            _on_stream(lambda: tensor + 1, second)

        found = _races(program)
        assert len(found) == (name in ("nothing", "reversed")), (name, found)
        for race in found:
            one, other = race.split(BETWEEN)
            assert "write on stream" in one, race
            assert "aten::fill_ in racecheck_checks.py" in one, race
            assert "read on stream" in other, race
            assert "aten::add in racecheck_checks.py" in other, race


def an_event_orders_only_the_operations_before_its_record() -> None:
    def program() -> None:
        tensor, first, second = _zeros(), device.Stream(), device.Stream()
        event = first.record_event()
        _on_stream(lambda: tensor.fill_(1), first)
        second.wait_event(event)
        _on_stream(lambda: tensor.fill_(2), second)

    assert len(_races(program)) == 1


def a_lucky_order_is_a_race() -> None:
    def program() -> None:
        tensor = _zeros()
        first = _on_stream(lambda: tensor.fill_(1))
        # The task is executed, but the program has not waited for it.
        device.call("drain")
        assert not first.query(), "a caller that only asks must be correct with that answer"
        _on_stream(lambda: tensor + 1)

    assert len(_races(program)) == 1


def reads_do_not_conflict_and_neither_do_writes_to_different_bytes() -> None:
    def program() -> None:
        tensor = _zeros()
        for _ in range(2):
            _on_stream(lambda: tensor.sum())
        device.synchronize()
        for part in (tensor[:2], tensor[2:]):
            _on_stream(lambda part=part: part.fill_(1))

    assert _races(program) == []


def a_read_and_a_write_are_remembered_after_later_reads() -> None:
    def write_after_a_read() -> None:
        tensor = _zeros()
        _on_stream(lambda: tensor.sum())
        second = _on_stream(lambda: tensor.sum())
        _on_stream(lambda: tensor.fill_(1), second)

    def read_after_a_write_and_a_read() -> None:
        tensor, second = _zeros(), device.Stream()
        second.wait_stream(_on_stream(lambda: tensor.fill_(1)))
        _on_stream(lambda: tensor.sum(), second)
        _on_stream(lambda: tensor.sum())

    for program in (write_after_a_read, read_after_a_write_and_a_read):
        assert len(_races(program)) == 1, program


# Waits of the host


def waits_of_the_host_order_later_work_and_other_calls_do_not() -> None:
    waits: dict[str, Callable[[torch.Tensor], object]] = {
        "item": lambda tensor: tensor[0].item(),
        "bool": lambda tensor: bool(tensor[0]),
        "tolist": lambda tensor: tensor.tolist(),
        "nonzero": lambda tensor: tensor.nonzero(),
        "equal": lambda tensor: torch.equal(tensor, tensor + 0),
        "cpu": lambda tensor: tensor.cpu(),
        "another dtype": lambda tensor: tensor.to("cpu", torch.bfloat16),
        "copy to the host": lambda tensor: torch.zeros(4).copy_(tensor),
        "copy from the host": lambda tensor: tensor.copy_(torch.zeros(4)),
        "stream": lambda _: device.current_stream().synchronize(),
        "event": lambda _: device.current_stream().record_event().synchronize(),
    }
    others: dict[str, Callable[[torch.Tensor], object]] = {
        "asynchronous copy": lambda tensor: tensor.to("cpu", non_blocking=True),
        "asynchronous copy to pageable memory": lambda tensor: torch.zeros(4).copy_(tensor, non_blocking=True),
        "operator": lambda tensor: tensor + 1,
        "number": lambda tensor: tensor[0].fill_(True),
        "event": lambda _: device.current_stream().record_event().query(),
    }
    for calls, races in ((waits, False), (others, True)):
        for name, call in calls.items():

            def program(call: Callable[[torch.Tensor], object] = call) -> None:
                tensor = torch.ones(4, device=DEVICE_TYPE)
                call(tensor)
                _on_stream(lambda: tensor.fill_(2))

            assert (len(_races(program)) > 0) == races, name


# Copies and page-locked memory


def a_copy_to_page_locked_memory_must_be_awaited_before_the_host_reads() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        for non_blocking in (True, False):

            def program(dtype: torch.dtype = dtype, non_blocking: bool = non_blocking) -> None:
                pinned = _pinned()
                pinned.copy_(torch.ones(4, dtype=dtype, device=DEVICE_TYPE), non_blocking=non_blocking)
                pinned + 1

            assert len(_races(program)) == non_blocking

    def new_tensor() -> None:
        copied = torch.ones(4, device=DEVICE_TYPE).to("cpu", non_blocking=True)
        copied + 1

    assert len(_races(new_tensor)) == 1


def a_copy_from_page_locked_memory_must_be_awaited_before_the_host_writes() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        for non_blocking in (True, False):

            def program(dtype: torch.dtype = dtype, non_blocking: bool = non_blocking) -> None:
                pinned = _pinned()
                pinned.to(DEVICE_TYPE, dtype=dtype, non_blocking=non_blocking)
                pinned.fill_(2)

            assert len(_races(program)) == non_blocking


def a_blocking_copy_that_converts_reads_the_host_memory_at_once() -> None:
    def program() -> None:
        pinned = _pinned()
        pinned.copy_(torch.ones(4, device=DEVICE_TYPE), non_blocking=True)
        pinned.to(DEVICE_TYPE, dtype=torch.bfloat16)

    assert len(_races(program)) == 1


# Threads


def threads_are_ordered_by_hand_overs_only() -> None:
    def run(task: Callable[[], object]) -> None:
        thread = threading.Thread(target=task, name="other")
        thread.start()
        thread.join()

    def unordered(*, waits: bool = False) -> None:
        pinned = _pinned()
        before = HostMoment()
        run(lambda: (before.order_this_thread(), pinned.fill_(1)))
        if waits:
            device.synchronize()
        pinned.fill_(2)

    def event() -> None:
        pinned, event = _pinned(), device.Event()
        pinned.fill_(1)
        event.record()
        run(lambda: (event.synchronize(), pinned + 1))

    assert len(_races(unordered)) == 1
    # A wait for the device does not wait for a thread.
    assert len(_races(lambda: unordered(waits=True))) == 1
    # An event covers the operations of the host before its record.
    assert _races(event) == []


def the_end_of_a_task_of_a_worker_is_known_to_whoever_waits_for_it() -> None:
    def program(wait: Callable[[Future[None]], object]) -> None:
        pinned, worker = _pinned(), Worker(name="a worker")
        wait(worker.submit(lambda: pinned.fill_(1)))
        pinned.fill_(2)
        worker.close()

    assert _races(lambda: program(lambda future: future.result())) == []
    assert _races(lambda: program(lambda future: future.exception())) == []
    (race,) = _races(lambda: program(lambda future: None))
    assert "thread a worker by aten::fill_" in race
    assert "thread MainThread by aten::fill_" in race


def the_accesses_of_the_cpu_kernel_are_known() -> None:
    adam = FusedAdam(Arithmetic(16, Tail.UNFUSED), BETAS, adamw=True, num_threads=1)
    adam.begin_step([STEP])
    names = ("master", "exp_avg", "exp_avg_sq", "grad", "param")
    for name in names:

        def program(name: str = name) -> None:
            tensors = AdamTensors(**{other: _pinned() for other in names})
            getattr(tensors, name).copy_(torch.ones(4, device=DEVICE_TYPE), non_blocking=True)
            adam.update_ranges([RangeUpdate(sub_group=0, tensors=tensors, element_range=ElementRange.whole(4))])

        (race,) = _races(program)
        assert ("read" if name == "grad" else "write") + " on thread MainThread by CPU Adam" in race


def transfers_to_disk_are_known() -> None:
    def program(transfer: Callable[..., None], *, waits: bool) -> None:
        pinned = _pinned(mmap.PAGESIZE // 4)
        pinned.copy_(torch.ones(mmap.PAGESIZE // 4, device=DEVICE_TYPE), non_blocking=True)
        if waits:
            device.synchronize()
        transfer(memoryview(pinned.numpy()).cast("B"), 0)

    with tempfile.TemporaryDirectory() as folder:
        file = StateFile(Path(folder), mmap.PAGESIZE)
        file.reserve(0, mmap.PAGESIZE)
        for name, access in (("write", "read on thread MainThread by a write"), ("read", "write on thread MainThread")):
            assert _races(lambda name=name: program(getattr(file, name), waits=True)) == []
            (race,) = _races(lambda name=name: program(getattr(file, name), waits=False))
            assert access in race


# Memory of the device


def another_stream_must_wait_for_the_stream_that_allocated_the_memory() -> None:
    def program(*, waits: bool) -> None:
        own, other = device.Stream(), device.Stream()
        with device.stream(own):
            tensor = torch.empty(4, device=DEVICE_TYPE)
        if waits:
            other.wait_stream(own)
        _on_stream(lambda: tensor.fill_(1), other)
        own.wait_stream(other)

    assert _races(lambda: program(waits=True)) == []
    (race,) = _races(lambda: program(waits=False))
    assert "the last owner" in race


def memory_must_not_be_freed_while_another_stream_uses_it() -> None:
    def program(how: str) -> None:
        side, tensor = device.Stream(), torch.ones(4, device=DEVICE_TYPE)
        side.wait_stream(device.current_stream())
        with device.stream(side):
            tensor[1:].sum()
        if how == "recorded":
            tensor.record_stream(side)
        elif how == "recorded on a stream that waits":
            caller = device.Stream()
            caller.wait_stream(side)
            tensor.record_stream(caller)
        elif how == "recorded on a stream that does not wait":
            tensor.record_stream(device.Stream())
        elif how == "waited":
            device.current_stream().wait_stream(side)
        elif how == "host waited":
            side.synchronize()
        del tensor

    for how in ("nothing", "recorded on a stream that does not wait"):
        assert len(_races(lambda how=how: program(how), of_freed_memory=True)) == 1, how
    for how in ("recorded", "recorded on a stream that waits", "waited", "host waited"):
        assert _races(lambda how=how: program(how), of_freed_memory=True) == [], how


# Collectives


def a_collective_is_complete_when_the_current_stream_has_waited_for_it() -> None:
    def program(*, asynchronous: bool, waits: bool) -> None:
        output, source = torch.empty(2, device=DEVICE_TYPE), torch.ones(2, device=DEVICE_TYPE)
        handle = dist.all_gather_into_tensor(output, source, async_op=asynchronous)
        if waits:
            handle.wait()
        source.fill_(2)
        output + 1
        device.synchronize()

    assert _races(lambda: program(asynchronous=False, waits=False)) == []
    assert _races(lambda: program(asynchronous=True, waits=True)) == []
    assert len(_races(lambda: program(asynchronous=True, waits=False))) == 2


def a_collective_keeps_its_tensors_alive_only_until_it_is_waited_for() -> None:
    def program(waiter: Any) -> None:
        output, source = torch.empty(2, device=DEVICE_TYPE), torch.ones(2, device=DEVICE_TYPE)
        handle = dist.all_gather_into_tensor(output, source, async_op=True)
        with device.stream(waiter):
            handle.wait()
        del output, source

    assert _races(lambda: program(device.default_stream()), of_freed_memory=True) == []
    assert len(_races(lambda: program(device.Stream()), of_freed_memory=True)) == 2


def threads_of_autograd_count_as_the_one_that_waits_for_them() -> None:
    def program() -> None:
        weight = torch.ones(4, device=DEVICE_TYPE, requires_grad=True)
        (weight * 2).sum().backward()
        assert weight.grad is not None
        weight.grad.add_(1)

    assert _races(program) == []
