"""Check the memory of the device: poison, the caching allocator by stream, its statistics and its capacity."""

from __future__ import annotations

import pytest
import torch

from tests.software_gpu import device
from tests.software_gpu.library import DEVICE_TYPE
from tests.software_gpu.settings import changed

MIB = 2**20
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
SIZES = (1, 1000, 3_000_001, 20_000_000)
"""Numbers of elements: small blocks, and blocks of 6 MB to 160 MB, which get their poison by other pages."""


def _new(size_bytes: int) -> torch.Tensor:
    return torch.empty(size_bytes, dtype=torch.uint8, device=DEVICE_TYPE)


def _is_nan(tensor: torch.Tensor) -> bool:
    """Return whether a sample of the elements, with both ends, is NaN."""
    step = max(1, tensor.numel() // 1000)
    return bool(torch.cat([tensor[::step], tensor[-1:]]).isnan().all().item())


def _statistic(name: str) -> int:
    return device.memory_stats()[name]


def memory_that_was_never_written_is_nan() -> None:
    for numel in SIZES:
        for dtype in FLOATS:
            fresh = torch.empty(numel, dtype=dtype, device=DEVICE_TYPE)
            assert _is_nan(fresh), (numel, dtype)
            del fresh
            device.empty_cache()
    assert torch.empty(7, dtype=torch.int64, device=DEVICE_TYPE).tolist() == [-1] * 7


def memory_that_is_reused_is_nan() -> None:
    for numel in SIZES:
        for dtype in FLOATS:
            first = torch.ones(numel, dtype=dtype, device=DEVICE_TYPE)
            address = first.data_ptr()
            del first
            second = torch.empty(numel, dtype=dtype, device=DEVICE_TYPE)
            assert second.data_ptr() == address
            assert _is_nan(second), (numel, dtype)
            del second


def poison_can_be_switched_off() -> None:
    with changed(poison=False):
        torch.ones(1000, device=DEVICE_TYPE)
        assert torch.empty(1000, device=DEVICE_TYPE).tolist() == [1] * 1000


def _read_by_a_late_stream(*, record: bool) -> list[float]:
    """Free a tensor while another stream has a read of the tensor in its queue, and return the numbers that it read."""
    with changed(lazy=True, lazy_s=100.0):
        side = device.Stream()
        read = torch.ones(1000, device=DEVICE_TYPE)
        device.synchronize()
        with device.stream(side):
            seen = read * 2
        if record:
            read.record_stream(side)
        del read
        device.current_stream().synchronize()
        side.synchronize()
        return seen.tolist()


def memory_freed_while_another_stream_reads_it_shows_nan() -> None:
    seen = torch.tensor(_read_by_a_late_stream(record=False))
    assert seen.isnan().all()


def record_stream_keeps_memory_until_the_stream_has_read_it() -> None:
    assert _read_by_a_late_stream(record=True) == [2] * 1000


def recorded_memory_is_active_until_the_stream_has_used_it() -> None:
    with changed(lazy=True, lazy_s=100.0):
        side = device.Stream()
        read = torch.ones(1000, device=DEVICE_TYPE)
        address = read.data_ptr()
        with device.stream(side):
            read.record_stream(side)
            device.launch(lambda: None, "read")
        active, allocated = _statistic("active_bytes.all.current"), device.memory_allocated()
        del read
        assert _statistic("active_bytes.all.current") == active
        assert device.memory_allocated() == allocated - 4096
        others = [torch.empty(1000, device=DEVICE_TYPE) for _ in range(3)]
        assert address not in [other.data_ptr() for other in others]
        side.synchronize()
        # The next allocation looks for blocks that have become free.
        others.append(torch.empty(1000, device=DEVICE_TYPE))
        assert others[-1].data_ptr() == address


def freed_memory_is_reused_by_the_same_stream_only() -> None:
    side = device.Stream()
    first = _new(5000)
    address = first.data_ptr()
    del first
    with device.stream(side):
        other = _new(5000)
    assert other.data_ptr() != address
    assert _new(5000).data_ptr() == address


def small_tensors_share_segments() -> None:
    device.empty_cache()
    side = device.Stream()
    reserved, segments = device.memory_reserved(), _statistic("segment.all.current")
    with device.stream(side):
        tensors = [_new(300_000) for _ in range(6)]
        assert device.memory_reserved() == reserved + 2 * MIB
        tensors.append(_new(300_000))
        assert device.memory_reserved() == reserved + 4 * MIB
    assert _statistic("segment.all.current") == segments + 2
    assert len({tensor.data_ptr() for tensor in tensors}) == 7


def large_tensors_split_a_segment_and_merge_again() -> None:
    device.empty_cache()
    reserved = device.memory_reserved()
    with device.stream(device.Stream()):
        tensors = [_new(5 * MIB) for _ in range(4)]
        addresses = [tensor.data_ptr() for tensor in tensors]
        assert device.memory_reserved() == reserved + 20 * MIB
        assert addresses == [addresses[0] + 5 * MIB * place for place in range(4)]
        for place in (1, 3, 0, 2):
            tensors[place] = _new(0)
        whole = _new(20 * MIB)
        assert whole.data_ptr() == addresses[0]
        assert device.memory_reserved() == reserved + 20 * MIB
        # A segment of its own, rounded to 2 MiB.
        other = _new(11 * MIB - 5)
        assert other.data_ptr() != 0
        assert device.memory_reserved() == reserved + 32 * MIB


def the_best_fit_is_chosen() -> None:
    with device.stream(device.Stream()):
        holes, between = [_new(size * 1024) for size in (64, 8, 16, 8)], []
        for place in (0, 2):
            between.append(holes[place].data_ptr())
            holes[place] = _new(0)
        # The order of the allocations was 64, 8, 16, 8: both holes are large enough, and the smaller one fits best.
        assert _new(10 * 1024).data_ptr() == between[1]


def statistics_have_the_names_and_values_of_cuda() -> None:
    device.empty_cache()
    device.reset_peak_memory_stats()
    allocated, reserved = device.memory_allocated(), device.memory_reserved()
    assert device.max_memory_allocated() == allocated
    with device.stream(device.Stream()):
        first = _new(3 * MIB + 1)
        second = _new(MIB + 1)
    assert device.memory_allocated() == allocated + 4 * MIB + 1024
    assert device.memory_reserved() == device.max_memory_reserved() == reserved + 20 * MIB
    del first
    assert device.memory_allocated() == allocated + MIB + 512
    assert device.max_memory_allocated() == allocated + 4 * MIB + 1024
    found = device.memory_stats()
    for name, value in {
        "allocated_bytes.all.current": device.memory_allocated(),
        "allocated_bytes.all.peak": device.max_memory_allocated(),
        "reserved_bytes.all.current": device.memory_reserved(),
        "reserved_bytes.all.peak": device.max_memory_reserved(),
    }.items():
        assert found[name] == value, name
    device.reset_peak_memory_stats()
    assert device.max_memory_allocated() == device.memory_allocated()
    del second
    assert device.memory_allocated() == allocated


def empty_cache_returns_whole_free_segments() -> None:
    device.empty_cache()
    reserved = device.memory_reserved()
    free, total = device.mem_get_info()
    assert free == total - reserved
    with device.stream(device.Stream()):
        kept, freed, alone = _new(5 * MIB), _new(5 * MIB), _new(30 * MIB)
        assert device.memory_reserved() == reserved + 50 * MIB
        del freed, alone
        device.empty_cache()
        assert device.memory_reserved() == reserved + 20 * MIB
        assert device.mem_get_info() == (free - 20 * MIB, total)
        del kept
        device.empty_cache()
    assert device.memory_reserved() == reserved


def an_allocation_beyond_the_capacity_empties_the_cache_and_raises_if_that_is_not_enough() -> None:
    device.empty_cache()
    reserved = device.memory_reserved()
    retries, errors = _statistic("num_alloc_retries"), _statistic("num_ooms")
    with changed(memory_bytes=reserved + 100 * MIB):
        cached = _new(60 * MIB)
        del cached
        with device.stream(device.Stream()):
            # The cached block is of another stream.
            kept = _new(50 * MIB)
        assert device.memory_reserved() == reserved + 50 * MIB
        assert (_statistic("num_alloc_retries"), _statistic("num_ooms")) == (retries + 1, errors)
        with pytest.raises(torch.OutOfMemoryError, match=r"out of memory\. Tried to allocate 60 MiB"):
            _new(60 * MIB)
        assert (_statistic("num_alloc_retries"), _statistic("num_ooms")) == (retries + 2, errors + 1)
        # The error leaves everything as it was.
        kept.fill_(3)
        assert kept[-1].item() == 3
        assert _new(50 * MIB).data_ptr() != 0


def a_stream_that_waits_for_python_cannot_block_an_allocation() -> None:
    """Free a tensor in a launched function while the host empties the cache, which waits for that function."""
    held = [torch.ones(1000, device=DEVICE_TYPE)]
    device.launch(held.clear, "clear")
    device.empty_cache()
    assert held == []


def tensors_without_elements_have_no_memory() -> None:
    allocated = device.memory_allocated()
    assert _new(0).data_ptr() == 0
    assert device.memory_allocated() == allocated
