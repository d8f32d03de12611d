"""Check the time model: its rules on a clock of its own, and emulated durations of copies and kernels on the device."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from functools import partial
from unittest import mock

import pytest
import torch

from deep_opt_states.device.kernels import triton_adam
from deep_opt_states.device.kernels.arithmetic import Arithmetic, Tail
from deep_opt_states.device.kernels.triton_adam import TritonAdam
from tests.kernels.adam_steps import BETAS, STEP, random_tensors
from tests.software_gpu import device
from tests.software_gpu.adam_kernel import SoftwareAdamKernel
from tests.software_gpu.library import DEVICE_TYPE, RESOURCES, UNLIMITED, Amounts, amounts, call
from tests.software_gpu.ranks import on_device
from tests.software_gpu.settings import MachineRates, changed

H2D, D2H, COMPUTE, NONE = range(4)
Work = tuple[int, dict[str, float], float, float]
"""The engine of a piece of work, what it uses, the moment at which it starts or later, and its latency."""


def work(engine: int, start_s: float = 0.0, latency_s: float = 0.0, **used: float) -> Work:
    return engine, used, start_s, latency_s


def ends_of(capacities: dict[str, float], *works: Work) -> object:
    """Return when each of ``works`` ends on an idle machine whose other resources are unlimited."""
    count = len(works)
    doubles = ctypes.c_double * count
    ends = doubles()
    engines, used, start_s, latency_s = zip(*works, strict=True)
    call(
        "simulate",
        count,
        Amounts(*(capacities.get(name, UNLIMITED) for name in RESOURCES)),
        (ctypes.c_int32 * count)(*engines),
        (ctypes.c_double * (count * len(RESOURCES)))(*(amount for each in used for amount in amounts(**each))),
        doubles(*latency_s),
        doubles(*start_s),
        ends,
    )
    return pytest.approx(list(ends), abs=1e-8)


def elapsed_ms(issue: Callable[[], object], rates: MachineRates, *, execute_first: bool = False) -> float:
    # The first call of an operator takes long, since PyTorch then imports its meta kernel.
    issue()
    with changed(rates=rates, execute_first=execute_first):
        for sleep_s in (0.2, 2, 20):
            begin, end = events(2)
            issued_from_s = time.monotonic()
            device._sleep(int(sleep_s * 2e9))
            begin.record()
            issue()
            end.record()
            issued_s = time.monotonic() - issued_from_s
            end.synchronize()
            # If all was in the queue before the first task started, nothing started late because it was issued late.
            if issued_s < sleep_s:
                return begin.elapsed_time(end)
    raise AssertionError("this machine is too slow to issue the work")


def events(count: int) -> list[torch.Event]:
    return [device.Event(enable_timing=True) for _ in range(count)]


def milliseconds(expected: float) -> object:
    """Return an object that is equal to durations in milliseconds that differ from this one by rounding alone."""
    return pytest.approx(expected, rel=1e-6)


@on_device
def test_an_engine_executes_its_work_in_order_alongside_the_other_engines() -> None:
    copy = work(H2D, 2, 0.5, h2d=30)
    assert ends_of({"h2d": 10}, copy) == [5.5]
    assert ends_of({}, copy) == [2.5]
    works = [
        work(H2D, h2d=10),
        work(H2D, 0.5, 0.25, h2d=20),
        work(H2D, 9, h2d=10),
        work(D2H, d2h=10),
        work(COMPUTE, gpu=3),
    ]
    assert ends_of({"h2d": 10, "d2h": 5, "gpu": 1}, *works) == [1, 3.25, 10, 2, 3]


@on_device
def test_copies_and_updates_of_the_cpu_share_the_link_and_host_memory() -> None:
    link = {"h2d": 10, "d2h": 10, "both_directions": 15}
    up, down = work(H2D, h2d=30, both_directions=30), work(D2H, d2h=30, both_directions=30)
    assert ends_of(link, up, down) == [4, 4]
    # The longer copy has the link for itself once the shorter one has ended, after 2 s at 7.5 bytes per second.
    assert ends_of(link, up, work(D2H, d2h=15, both_directions=15)) == [3.5, 2]
    assert ends_of({**link, "both_directions": 20}, up, down) == [3, 3]
    machine = {"h2d": 50, "host_memory": 100, "cpu": 1, "gpu": 1}
    update, copy = work(NONE, cpu=1, host_memory=100), work(H2D, h2d=50, host_memory=50)
    assert ends_of(machine, update) == [1]
    assert ends_of(machine, copy) == [1]
    # Work that does not use the full resource is not slowed down.
    assert ends_of(machine, update, copy, work(COMPUTE, gpu=1)) == [1.5, 1.5, 1]


@on_device
def test_work_that_is_added_late_ends_as_if_it_had_been_added_in_time() -> None:
    """Add work after the clock has passed its start, as a thread does that was woken late."""
    machine = {"h2d": 10, "d2h": 10, "both_directions": 15}
    late = [work(H2D, number * 1.5, 0.5, h2d=10) for number in range(20)]
    assert ends_of(machine, work(NONE, 50), *late) == [50, *(1.5 * (number + 1) for number in range(20))]
    # A flow that runs is slowed down for the time in which it should have shared the link.
    up, down = work(H2D, h2d=30, both_directions=30), work(D2H, d2h=30, both_directions=30)
    assert ends_of(machine, up, work(NONE, 1), down) == [4, 1, 4]


@on_device
def test_copies_take_their_bytes_over_the_rate_of_their_direction() -> None:
    host, on_gpu = torch.zeros(1_000_000, pin_memory=True), torch.zeros(1_000_000, device=DEVICE_TYPE)
    rates = MachineRates(h2d=4e8, d2h=2e8, copy_latency_s=1e-3)
    assert elapsed_ms(lambda: on_gpu.copy_(host, non_blocking=True), rates) == milliseconds(11)
    assert elapsed_ms(lambda: host.copy_(on_gpu, non_blocking=True), rates) == milliseconds(21)
    pinned, on_gpu = host[:10_000], on_gpu[:10_000]
    # Pageable copies take more of host memory.
    pageable, rates = torch.zeros(10_000), MachineRates(host_memory=1e7)
    assert elapsed_ms(lambda: on_gpu.copy_(pinned, non_blocking=True), rates) == milliseconds(4)
    assert elapsed_ms(lambda: on_gpu.copy_(pageable, non_blocking=True), rates) == milliseconds(12)
    assert elapsed_ms(lambda: on_gpu.copy_(pageable, non_blocking=True), MachineRates(pageable=1e7)) == milliseconds(4)
    assert elapsed_ms(lambda: on_gpu.copy_(pinned, non_blocking=True), MachineRates(pageable=1e7)) < 1


@on_device
def test_products_take_their_flops_and_other_kernels_their_bytes() -> None:
    a, b = torch.zeros(40, 50, device=DEVICE_TYPE), torch.zeros(50, 60, device=DEVICE_TYPE)
    batch, bias = torch.zeros(3, 40, 50, device=DEVICE_TYPE), torch.zeros(60, device=DEVICE_TYPE)
    rates = MachineRates(flops_per_s=1e8, device_bytes_per_s=1e6, launch_s=2e-3)
    product = 2 * 40 * 50 * 60 / 1e5
    assert elapsed_ms(lambda: torch.mm(a, b), rates) == milliseconds(2 + product)
    assert elapsed_ms(lambda: torch.addmm(bias, a, b), rates) == milliseconds(2 + product)
    assert elapsed_ms(lambda: torch.bmm(batch, batch.mT), rates) == milliseconds(2 + 3 * 2 * 40 * 50 * 40 / 1e5)
    assert elapsed_ms(lambda: a.add_(1), rates) == milliseconds(2 + 8000 / 1e3)
    assert elapsed_ms(lambda: torch.add(a, 1, out=a), MachineRates(launch_s=2e-3)) == milliseconds(2)
    launched = partial(device.launch, lambda: None, "nothing", gpu_s=5e-3, latency_s=1e-3)
    assert elapsed_ms(launched, rates) == milliseconds(6)


@on_device
def test_the_gpu_adam_updates_at_the_rate_of_the_emulated_machine() -> None:
    tensors, _ = random_tensors(1003, torch.bfloat16, None, seed=3)
    on_gpu = tensors.map(lambda tensor: tensor.to(DEVICE_TYPE))
    with mock.patch.object(triton_adam, "_import_kernel", return_value=(SoftwareAdamKernel(), {})):
        adam = TritonAdam(Arithmetic(1, Tail.UNFUSED), BETAS, adamw=True, device=on_gpu.grad.device)
    adam.begin_step([STEP])
    rates = MachineRates(adam_params_per_s=1e5)
    assert elapsed_ms(lambda: adam.update(0, on_gpu), rates, execute_first=True) == milliseconds(10.03)


@on_device
def test_kernels_of_other_streams_are_executed_between_the_kernels_that_a_product_stands_for() -> None:
    side = device.Stream()
    a, b = torch.zeros(40, 50, device=DEVICE_TYPE), torch.zeros(50, 60, device=DEVICE_TYPE)
    host, on_gpu = torch.zeros(7_500, pin_memory=True), torch.zeros(7_500, device=DEVICE_TYPE)
    product_s = 0.08

    def ends_ms(kernels: int) -> tuple[float, float]:
        """Return when a kernel ends that follows a copy of 30 ms, and when it and a concurrent product have ended."""
        rates = MachineRates(
            h2d=1e6, flops_per_s=2 * 40 * 50 * 60 / product_s, launch_s=2e-3, kernels_per_product=kernels
        )
        begin, side_end = events(2)

        def on_two_streams() -> None:
            begin.record()
            side.wait_event(begin)
            torch.mm(a, b)
            with device.stream(side):
                on_gpu.copy_(host, non_blocking=True)
                device.launch(lambda: None, "kernel", gpu_s=0.005)
                side_end.record()
            device.current_stream().wait_stream(side)

        both_ms = elapsed_ms(on_two_streams, rates)
        return begin.elapsed_time(side_end), both_ms

    assert ends_ms(1) == (milliseconds(87), milliseconds(87))
    assert ends_ms(4) == (milliseconds(47), milliseconds(87))


@on_device
def test_kernels_of_the_model_are_slowed_down_by_copies() -> None:
    host, on_gpu = torch.zeros(10_000, pin_memory=True), torch.zeros(10_000, device=DEVICE_TYPE)
    model, side, started = torch.zeros(50_000, device=DEVICE_TYPE), device.Stream(), device.Event()

    def beside_a_copy() -> None:
        started.record()
        side.wait_event(started)
        with device.stream(side):
            on_gpu.copy_(host, non_blocking=True)
        model.add_(1)

    # A kernel of 100 ms and a copy of 40 ms: 40 ms at three quarters of the speed, and then the rest.
    slow = {"h2d": 1e6, "device_bytes_per_s": 2e6}
    assert elapsed_ms(beside_a_copy, MachineRates(**slow, slowed_by_copies=0.25)) == milliseconds(110)
    assert elapsed_ms(beside_a_copy, MachineRates(**slow)) == milliseconds(100)


def _beside_work_of_the_host(rates: MachineRates, issue: Callable[[], object]) -> None:
    """Issue work while the host works, until after the end, or for longer if this machine is slow to issue the work."""
    for work_s in (0.2, 2, 20):
        issued_from_s = time.monotonic()
        with changed(rates=rates):
            with device.host_work(cpu=work_s):
                issue()
                issued_s = time.monotonic() - issued_from_s
            device.synchronize()
        if issued_s < work_s / 4:
            return
    raise AssertionError("this machine is too slow to issue the work")


@on_device
def test_work_of_the_host_slows_kernels_of_the_model_down_and_not_updates() -> None:
    model, (begin, end, updated) = torch.zeros(20_000, device=DEVICE_TYPE), events(3)

    def issue() -> None:
        begin.record()
        model.add_(1)
        end.record()
        device.launch(lambda: None, "an update", gpu_s=0.01)
        updated.record()

    _beside_work_of_the_host(MachineRates(device_bytes_per_s=2e6, slowed_by_host_work=0.5), issue)
    assert begin.elapsed_time(end) > 79
    assert end.elapsed_time(updated) == milliseconds(10)
