"""Check the device's memory: poison, protection, which copies are divided, and that transfers to disk are known."""

from __future__ import annotations

import ctypes
import mmap
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from unittest import mock

import torch

from deep_opt_states.device import cuda
from deep_opt_states.device.state_file import StateFile
from tests.forked_child import protection_of
from tests.software_gpu import device
from tests.software_gpu.library import DEVICE_TYPE
from tests.software_gpu.plugged import TORCH
from tests.software_gpu.racecheck import checked_threads, take_races
from tests.software_gpu.ranks import on_device
from tests.software_gpu.settings import changed

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
SIZES = (1, 1000, 3_000_001)
"""Numbers of elements: small blocks, and blocks of 6 MB to 24 MB, which get their poison by other pages."""


def _is_nan(tensor: torch.Tensor) -> bool:
    step = max(1, tensor.numel() // 1000)
    return bool(torch.cat([tensor[::step], tensor[-1:]]).isnan().all().item())


@on_device
def test_memory_that_was_never_written_and_memory_that_is_reused_is_nan() -> None:
    for numel in SIZES:
        for dtype in FLOATS:
            fresh = torch.empty(numel, dtype=dtype, device=DEVICE_TYPE)
            assert _is_nan(fresh), (numel, dtype)
            address = fresh.fill_(1).data_ptr()
            del fresh
            reused = torch.empty(numel, dtype=dtype, device=DEVICE_TYPE)
            assert reused.data_ptr() == address
            assert _is_nan(reused), (numel, dtype)
            del reused
            device.empty_cache()
    assert torch.empty(7, dtype=torch.int64, device=DEVICE_TYPE).tolist() == [-1] * 7
    torch.ones(1000).pin_memory()
    assert torch.empty(1000, pin_memory=True).isnan().all()


@on_device
def test_the_pages_of_memory_of_the_device_allow_no_access() -> None:
    tensor = torch.ones(10, device=DEVICE_TYPE)
    address = tensor.data_ptr()
    assert protection_of(address).startswith("---")
    device.synchronize()
    # Other threads find the bytes elsewhere.
    assert ctypes.c_float.from_address(device.real_address(address)).value == 1


CHUNK_NUMEL = 25_000


def _names_of_work(copy: Callable[[], object]) -> list[str]:
    device.synchronize()
    with changed(trace=True):
        device.take_spans()
        copy()
        device.synchronize()
        return [span.name for span in device.take_spans() if span.name != "free"]


@on_device
def test_large_copies_between_host_and_device_are_divided_and_no_others() -> None:
    numel = 2 * CHUNK_NUMEL + CHUNK_NUMEL // 2
    with mock.patch.object(cuda, "torch", TORCH):
        ours = cuda.CudaDevice(0, 4 * CHUNK_NUMEL)
        host, on_gpu = ours.empty_host(numel, torch.float32).zero_(), ours.empty(numel, torch.float32).zero_()
        other = torch.zeros_like(on_gpu)
        in_bf16 = ours.empty(numel, torch.bfloat16)
        few = CHUNK_NUMEL // 2
        assert _names_of_work(lambda: ours.copy(on_gpu, host)) == ["copy H2D", "sleep"] * 3
        assert _names_of_work(lambda: ours.copy(host, on_gpu)) == ["copy D2H", "sleep"] * 3
        # Several of these in a row on one stream would be longer than a chunk.
        assert _names_of_work(lambda: ours.copy(on_gpu[: few + 1], host[: few + 1])) == ["copy H2D", "sleep"]
        assert _names_of_work(lambda: ours.copy(on_gpu[:few], host[:few])) == ["copy H2D"]
        assert _names_of_work(lambda: ours.copy(other, on_gpu)) == ["copy"]
        assert _names_of_work(lambda: ours.copy(in_bf16, host)) == ["copy H2D", "copy"]


def races_of(program: Callable[[], object]) -> list[str]:
    """Return the races of the program, except on tensors that it frees while streams use them."""
    with changed(racecheck=True), checked_threads():
        program()
        device.synchronize()
        return [race for race in take_races() if "memory that was freed" not in race]


@on_device
def test_waits_of_the_host_order_later_work_and_other_calls_do_not() -> None:
    waits: tuple[Callable[[torch.Tensor], object], ...] = (
        lambda tensor: tensor[0].item(),
        lambda tensor: tensor.nonzero(),
        lambda tensor: tensor.cpu(),
        lambda tensor: tensor.copy_(torch.zeros(4)),
        lambda _: device.current_stream().synchronize(),
        lambda _: device.current_stream().record_event().synchronize(),
    )
    others: tuple[Callable[[torch.Tensor], object], ...] = (
        lambda tensor: tensor.to("cpu", non_blocking=True),
        lambda tensor: tensor + 1,
        lambda _: device.current_stream().record_event().query(),
    )

    def program(call: Callable[[torch.Tensor], object]) -> None:
        tensor = torch.ones(4, device=DEVICE_TYPE)
        call(tensor)
        with device.stream(device.Stream()):
            tensor.fill_(2)

    found = [len(races_of(partial(program, call))) > 0 for call in (*waits, *others)]
    assert found == [False] * len(waits) + [True] * len(others)


@on_device
def test_the_race_check_knows_transfers_to_disk() -> None:
    def program(transfer: Callable[..., None], *, waits: bool) -> None:
        pinned = torch.zeros(mmap.PAGESIZE // 4).pin_memory()
        pinned.copy_(torch.ones(mmap.PAGESIZE // 4, device=DEVICE_TYPE), non_blocking=True)
        if waits:
            device.synchronize()
        transfer(memoryview(pinned.numpy()).cast("B"), 0)

    with tempfile.TemporaryDirectory() as folder:
        file = StateFile(Path(folder), mmap.PAGESIZE)
        file.reserve(0, mmap.PAGESIZE)
        for name, access in (("write", "read on thread MainThread by a write"), ("read", "write on thread MainThread")):
            assert races_of(lambda name=name: program(getattr(file, name), waits=True)) == []
            (race,) = races_of(lambda name=name: program(getattr(file, name), waits=False))
            assert access in race
