"""Check copies: which ones block the host, which ones read and write late, and where dtypes are converted."""

from __future__ import annotations

import itertools
import mmap

import pytest
import torch

from tests.software_gpu import device
from tests.software_gpu.library import DEVICE_TYPE
from tests.software_gpu.settings import changed

NUMEL = 100_000
"""More than the bytes of a pageable copy that is staged."""

FEW = 1000
"""Few enough to be staged."""


def _on_device(value: float, numel: int = NUMEL) -> torch.Tensor:
    tensor = torch.full((numel,), value, device=DEVICE_TYPE)
    device.synchronize()
    return tensor


def _reasons(waits: list[device.Wait]) -> list[str]:
    return [wait.reason for wait in waits]


def a_copy_to_pinned_memory_is_there_after_a_wait_and_not_before() -> None:
    with changed(lazy=True, lazy_s=100.0):
        source, target = _on_device(1), torch.zeros(NUMEL, pin_memory=True)
        with device.recorded_host_waits() as waits:
            target.copy_(source, non_blocking=True)
        assert waits == []
        assert target.tolist() == [0] * NUMEL
        device.synchronize()
        assert target.tolist() == [1] * NUMEL


def a_copy_from_pinned_memory_reads_what_is_there_when_it_is_executed() -> None:
    with changed(lazy=True, lazy_s=100.0):
        for numel in (FEW, NUMEL):
            source, target = torch.ones(numel).pin_memory(), _on_device(0, numel)
            with device.recorded_host_waits() as waits:
                target.copy_(source, non_blocking=True)
            assert waits == []
            source.fill_(2)
            assert target.tolist() == [2] * numel


def a_copy_to_pageable_memory_blocks_the_host() -> None:
    with changed(lazy=True, lazy_s=100.0):
        for numel in (FEW, NUMEL):
            source, target = _on_device(1, numel), torch.zeros(numel)
            with device.recorded_host_waits() as waits:
                target.copy_(source, non_blocking=True)
            assert _reasons(waits) == ["copy D2H, pageable"]
            assert target.tolist() == [1] * numel


def a_small_copy_from_pageable_memory_is_staged_and_a_large_one_blocks_the_host() -> None:
    with changed(lazy=True, lazy_s=100.0):
        for numel, reasons in ((FEW, []), (NUMEL, ["copy H2D, pageable"])):
            source, target = torch.ones(numel), _on_device(0, numel)
            with device.recorded_host_waits() as waits:
                target.copy_(source, non_blocking=True)
            assert _reasons(waits) == reasons
            source.fill_(2)
            assert target.tolist() == [1] * numel


def registered_memory_is_copied_as_pinned_memory_is() -> None:
    pages = mmap.mmap(-1, NUMEL * 4)
    host = torch.frombuffer(pages, dtype=torch.float32)
    assert device.cudart().cudaHostRegister(host.data_ptr(), NUMEL * 4, 0) == 0
    with changed(lazy=True, lazy_s=100.0):
        source = _on_device(1)
        with device.recorded_host_waits() as waits:
            host.copy_(source, non_blocking=True)
            source.copy_(host, non_blocking=True)
        assert waits == []
        assert host.tolist() == [0] * NUMEL
        device.synchronize()
        assert host.tolist() == [1] * NUMEL
    assert device.cudart().cudaHostUnregister(host.data_ptr()) == 0


def a_range_that_is_registered_in_part_is_refused() -> None:
    """Check the rule of ``cuMemcpyAsync``: memory must be registered as a whole, or not at all."""
    pages = mmap.mmap(-1, NUMEL * 4)
    host = torch.frombuffer(pages, dtype=torch.float32)
    assert device.cudart().cudaHostRegister(host.data_ptr(), NUMEL * 2, 0) == 0
    with pytest.raises(RuntimeError, match="invalid argument: a copy leaves page-locked memory"):
        _on_device(1).copy_(host, non_blocking=True)
    assert device.cudart().cudaHostUnregister(host.data_ptr()) == 0


def blocking_copies_are_recorded_with_their_callers() -> None:
    pinned, tensor = torch.zeros(NUMEL, pin_memory=True), _on_device(1)
    with device.recorded_host_waits() as waits:
        pinned.copy_(tensor)
        tensor.copy_(pinned)
        tensor[:FEW].copy_(torch.zeros(FEW))
        tensor.cpu()
        tensor[0].item()
    assert _reasons(waits) == [
        "copy D2H, blocking",
        "copy H2D, blocking",
        "copy H2D, blocking",
        "copy D2H, blocking",
        "item",
    ]
    for wait in waits:
        assert wait.thread == "MainThread"
        assert wait.callers[0] == "copy_checks.py:blocking_copies_are_recorded_with_their_callers"


def to_the_host_without_blocking_allocates_pinned_memory() -> None:
    with changed(lazy=True, lazy_s=100.0):
        source = _on_device(1)
        with device.recorded_host_waits() as waits:
            target = source.to("cpu", non_blocking=True)
        assert waits == []
        assert target.is_pinned()
        assert not source.cpu().is_pinned()
        assert target.tolist() == [1] * NUMEL, "the blocking copy was behind on the same stream"


def _names_of_work(target: torch.Tensor, source: torch.Tensor, *, non_blocking: bool) -> list[str]:
    """Return the names of the tasks that the streams executed for a copy, without frees."""
    with changed(trace=True):
        device.take_spans()
        target.copy_(source, non_blocking=non_blocking)
        device.synchronize()
        names = [span.name for span in device.take_spans()]
    return [name for name in names if name != "free"]


def dtypes_are_converted_on_the_device_unless_the_copy_blocks() -> None:
    host = torch.ones(NUMEL, dtype=torch.bfloat16).pin_memory()
    tensor = _on_device(3)
    assert _names_of_work(tensor, host, non_blocking=True) == ["copy H2D", "copy"]
    assert _names_of_work(host, tensor, non_blocking=True) == ["copy", "copy D2H"]
    assert _names_of_work(tensor, host, non_blocking=False) == ["copy H2D, pageable"]
    assert _names_of_work(host, tensor, non_blocking=False) == ["copy D2H, pageable"]


def copies_of_every_layout_and_dtype_have_the_values_of_the_cpu() -> None:
    layouts = {
        "contiguous": lambda whole: whole[:6, :8],
        "transposed": lambda whole: whole[:8, :6].t(),
        "strided": lambda whole: whole[:12:2, ::2][:, :8],
        "shifted": lambda whole: whole[3:9, 5:13],
        "expanded": lambda whole: whole[0, :8].expand(6, 8),
    }
    dtypes = (torch.float32, torch.bfloat16, torch.float16, torch.int64)
    base = (torch.arange(400.0) * 0.75 - 100).view(20, 20)
    devices = (("cpu", DEVICE_TYPE), (DEVICE_TYPE, "cpu"), (DEVICE_TYPE, DEVICE_TYPE))
    compared = 0
    for (to_name, to_layout), (from_name, from_layout) in itertools.product(layouts.items(), layouts.items()):
        if to_name == "expanded":
            continue
        for to_dtype, from_dtype, (to, source), non_blocking, pinned in itertools.product(
            dtypes, dtypes, devices, (False, True), (False, True)
        ):
            if pinned and to == source:
                continue
            expected = torch.zeros(20, 20, dtype=to_dtype)
            to_layout(expected).copy_(from_layout(base.to(from_dtype)))
            wholes = [torch.zeros(20, 20, dtype=to_dtype), base.to(from_dtype)]
            if pinned:
                wholes = [whole.pin_memory() for whole in wholes]
            target, read = wholes[0].to(to), wholes[1].to(source)
            if pinned and to == "cpu":
                target = wholes[0]
            to_layout(target).copy_(from_layout(read), non_blocking=non_blocking)
            device.synchronize()
            case = (to_name, from_name, to_dtype, from_dtype, to, source, non_blocking, pinned)
            assert torch.equal(target.cpu(), expected), case
            compared += 1
    assert compared == 4 * 5 * 16 * (2 * 4 + 2)


def sizes_that_differ_are_broadcast_or_refused() -> None:
    target = torch.zeros(3, 4, device=DEVICE_TYPE)
    target.copy_(torch.arange(4.0))
    assert target.tolist() == [[0, 1, 2, 3]] * 3
    with pytest.raises(RuntimeError, match="expanded size"):
        target.copy_(torch.zeros(5))


def a_copy_without_elements_does_nothing() -> None:
    with device.recorded_host_waits() as waits:
        torch.empty(0, device=DEVICE_TYPE).copy_(torch.empty(0))
        assert torch.empty(0, 3, device=DEVICE_TYPE).cpu().shape == (0, 3)
    assert waits == []
