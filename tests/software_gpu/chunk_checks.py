"""Check that our CUDA device divides large copies into chunks: all elements arrive, and small copies overtake."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock

import torch

from deep_opt_states.device import cuda
from tests.software_gpu import device
from tests.software_gpu.library import DEVICE_TYPE
from tests.software_gpu.plugged import TORCH
from tests.software_gpu.settings import MachineRates, changed

CHUNK_NUMEL = 25_000
CHUNK_BYTES = 4 * CHUNK_NUMEL
NUM_CHUNKS = 4
WHOLE_BYTES = 2**62
"""Chunks of which no copy is divided."""


@contextmanager
def _our_device(chunk_bytes: int = CHUNK_BYTES) -> Iterator[cuda.CudaDevice]:
    with mock.patch.object(cuda, "torch", TORCH):
        yield cuda.CudaDevice(0, chunk_bytes)


def _names_of_work(copy: Callable[[], object]) -> list[str]:
    """Return the names of the tasks that the streams execute for ``copy``, without frees."""
    device.synchronize()
    with changed(trace=True):
        device.take_spans()
        copy()
        device.synchronize()
        return [span.name for span in device.take_spans() if span.name != "free"]


def chunks_have_all_elements_for_every_size() -> None:
    with _our_device() as ours:
        for dtype in (torch.float32, torch.bfloat16, torch.uint8):
            numel = CHUNK_BYTES // dtype.itemsize
            for size in (1, numel // 2, numel // 2 + 1, numel - 1, numel, numel + 1, 3 * numel, 3 * numel + 7):
                values = (torch.arange(size) % 251).to(dtype)
                # The copied range begins inside its memory, and the elements around it must stay.
                source, on_device = ours.empty_host(size + 8, dtype).fill_(1), ours.empty(size + 8, dtype).fill_(2)
                back = ours.empty_host(size + 8, dtype).fill_(3)
                source[3 : 3 + size] = values
                ours.copy(on_device[5 : 5 + size], source[3 : 3 + size])
                ours.copy(back[1 : 1 + size], on_device[5 : 5 + size])
                around = on_device.cpu()
                assert torch.equal(back[1 : 1 + size], values), (dtype, size)
                assert back[:1].tolist() + back[1 + size :].tolist() == [3] * 8
                assert around[:5].tolist() + around[5 + size :].tolist() == [2] * 8


def copies_that_are_not_divided_have_all_elements() -> None:
    """Check strided tensors, tensors whose dtypes differ, and one that is expanded, in both directions."""
    size = 3 * CHUNK_NUMEL + 7
    values = torch.arange(2.0 * size)
    layouts: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "strided": lambda whole: whole[::2],
        "transposed": lambda whole: whole.view(2, size).t(),
        "expanded": lambda whole: whole[:1].expand(size),
        "matrix": lambda whole: whole.view(2, size),
    }
    with _our_device() as ours:
        for name, layout in layouts.items():
            for dtype in (torch.float32, torch.bfloat16):
                for to, source in ((DEVICE_TYPE, "cpu"), ("cpu", DEVICE_TYPE), (DEVICE_TYPE, DEVICE_TYPE)):
                    read = layout(values.pin_memory().to(source))
                    whole = torch.zeros(2 * size, dtype=dtype, pin_memory=to == "cpu").to(to)
                    written = whole[:size] if name == "expanded" else layout(whole)
                    ours.copy(written, read)
                    device.synchronize()
                    assert torch.equal(written.cpu(), layout(values).to(dtype)), (name, dtype, to, source)


def large_copies_between_host_and_device_are_divided_and_no_others() -> None:
    numel = 2 * CHUNK_NUMEL + CHUNK_NUMEL // 2
    with _our_device() as ours:
        host, on_device = ours.empty_host(numel, torch.float32).zero_(), ours.empty(numel, torch.float32).zero_()
        other = torch.zeros_like(on_device)
        in_bf16 = ours.empty(numel, torch.bfloat16)
        few = CHUNK_NUMEL // 2
        assert _names_of_work(lambda: ours.copy(on_device, host)) == ["copy H2D", "sleep"] * 3
        assert _names_of_work(lambda: ours.copy(host, on_device)) == ["copy D2H", "sleep"] * 3
        # Several of these in a row on one stream would be longer than a chunk.
        assert _names_of_work(lambda: ours.copy(on_device[: few + 1], host[: few + 1])) == ["copy H2D", "sleep"]
        assert _names_of_work(lambda: ours.copy(on_device[:few], host[:few])) == ["copy H2D"]
        assert _names_of_work(lambda: ours.copy(other, on_device)) == ["copy"]
        assert _names_of_work(lambda: ours.copy(in_bf16, host)) == ["copy H2D", "copy"]


def _small_and_lane(
    direction: str, chunk_bytes: int, bytes_per_s: float
) -> tuple[device.TaskSpan, list[device.TaskSpan]]:
    """Return the span of a small copy, and those of the large copy of another stream that is issued before it."""
    with _our_device(chunk_bytes) as ours:
        numels = (NUM_CHUNKS * CHUNK_NUMEL, 256)
        hosts = [ours.empty_host(numel, torch.float32).zero_() for numel in numels]
        on_device = [torch.zeros(numel, device=DEVICE_TYPE) for numel in numels]
        device.synchronize()
        with changed(rates=MachineRates(h2d=bytes_per_s, d2h=bytes_per_s), trace=True):
            device.take_spans()
            lane, other = ours.stream(), ours.stream()
            large, few = (pair if direction == "H2D" else pair[::-1] for pair in zip(on_device, hosts, strict=True))
            with lane.issue():
                ours.copy(*large)
            with other.issue():
                # The small copy becomes ready in the middle of the first chunk.
                ours.occupy(CHUNK_BYTES / bytes_per_s / 2)
                ours.copy(*few)
            device.synchronize()
            copies = [span for span in device.take_spans() if span.name == f"copy {direction}"]
    first = min(copies, key=lambda span: span.start_s)
    (small,) = (span for span in copies if span.stream != first.stream)
    return small, [span for span in copies if span.stream == first.stream]


def a_small_copy_waits_for_one_chunk_and_not_for_the_whole_copy_before_it() -> None:
    for direction, chunk_bytes in itertools.product(("H2D", "D2H"), (CHUNK_BYTES, WHOLE_BYTES)):
        # On a busy machine the thread of a stream may be woken late. A slower link gives it more time.
        for bytes_per_s in (1e6, 2e5, 2e4):
            device.take_lag_s()
            small, lane = _small_and_lane(direction, chunk_bytes, bytes_per_s)
            if device.take_lag_s() < CHUNK_BYTES / bytes_per_s / 4:
                break
        assert len([span for span in lane if small.start_s < span.end_s <= small.end_s]) == 1
        behind = [span for span in lane if span.end_s > small.end_s]
        assert bool(behind) == (chunk_bytes == CHUNK_BYTES)
        assert len(lane) == (NUM_CHUNKS if chunk_bytes == CHUNK_BYTES else 1)
