"""Check what the race check knows that no seeded fault shows: the waits of the host, and transfers to disk."""

from __future__ import annotations

import mmap
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

from deep_opt_states.device.state_file import StateFile
from tests.software_gpu import device
from tests.software_gpu.library import DEVICE_TYPE
from tests.software_gpu.racecheck import checked_threads, take_races
from tests.software_gpu.ranks import on_device
from tests.software_gpu.settings import changed


def _races(program: Callable[[], object]) -> list[str]:
    """Return the races of the program, without those of the tensors that it frees while streams use them."""
    with changed(racecheck=True), checked_threads():
        program()
        device.synchronize()
        return [race for race in take_races() if "memory that was freed" not in race]


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
                with device.stream(device.Stream()):
                    tensor.fill_(2)

            assert (len(_races(program)) > 0) == races, name


@on_device
def test_transfers_to_disk_are_known() -> None:
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
            assert _races(lambda name=name: program(getattr(file, name), waits=True)) == []
            (race,) = _races(lambda name=name: program(getattr(file, name), waits=False))
            assert access in race
