"""Check the race check itself, on programs whose order is known: it reports unordered accesses and no others."""

from __future__ import annotations

import mmap
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from deep_opt_states.device.state_file import StateFile
from tests.software_gpu import device
from tests.software_gpu.library import DEVICE_TYPE
from tests.software_gpu.racecheck import BETWEEN, checked_threads, take_races
from tests.software_gpu.ranks import on_device
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


@on_device
def test_streams_are_ordered_by_waits_only() -> None:
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
            assert "aten::fill_ in test_racecheck.py" in one, race
            assert "read on stream" in other, race
            assert "aten::add in test_racecheck.py" in other, race


@on_device
def test_waits_of_the_host_order_later_work_and_other_calls_do_not() -> None:
    waits: dict[str, Callable[[torch.Tensor], object]] = {
        "item": lambda tensor: tensor[0].item(),
        "nonzero": lambda tensor: tensor.nonzero(),
        "cpu": lambda tensor: tensor.cpu(),
        "copy from the host": lambda tensor: tensor.copy_(torch.zeros(4)),
        "stream": lambda _: device.current_stream().synchronize(),
        "event": lambda _: device.current_stream().record_event().synchronize(),
    }
    others: dict[str, Callable[[torch.Tensor], object]] = {
        "asynchronous copy": lambda tensor: tensor.to("cpu", non_blocking=True),
        "operator": lambda tensor: tensor + 1,
        "event": lambda _: device.current_stream().record_event().query(),
    }
    for calls, races in ((waits, False), (others, True)):
        for name, call in calls.items():

            def program(call: Callable[[torch.Tensor], object] = call) -> None:
                tensor = torch.ones(4, device=DEVICE_TYPE)
                call(tensor)
                _on_stream(lambda: tensor.fill_(2))

            assert (len(_races(program)) > 0) == races, name


@on_device
def test_transfers_to_disk_are_known() -> None:
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


@on_device
def test_memory_must_not_be_freed_while_another_stream_uses_it() -> None:
    ends: dict[str, Callable[[torch.Tensor, Any], object]] = {
        "nothing": lambda tensor, side: None,
        "recorded on a stream that does not wait": lambda tensor, side: tensor.record_stream(device.Stream()),
        "recorded": lambda tensor, side: tensor.record_stream(side),
        "waited": lambda tensor, side: device.current_stream().wait_stream(side),
        "host waited": lambda tensor, side: side.synchronize(),
    }
    for name, end in ends.items():

        def program(end: Callable[[torch.Tensor, Any], object] = end) -> None:
            side, tensor = device.Stream(), torch.ones(4, device=DEVICE_TYPE)
            side.wait_stream(device.current_stream())
            _on_stream(lambda: tensor[1:].sum(), side)
            end(tensor, side)

        races = _races(program, of_freed_memory=True)
        assert len(races) == (name in ("nothing", "recorded on a stream that does not wait")), name
