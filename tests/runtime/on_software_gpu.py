"""Train on the software GPU under its race check, through the memory and the executor of a rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from deep_opt_states.device.cuda import CudaDevice, CudaStream
from deep_opt_states.device.interface import Device
from tests.runtime.moving import Model, MovingIteration, MovingTraining, train_serially
from tests.runtime.random_states import same
from tests.software_gpu import device as software_gpu
from tests.software_gpu.racecheck import checked_threads, take_races
from tests.software_gpu.settings import changed


class SoftwareDevice(CudaDevice):
    """The software GPU, with the same streams in each training run: the thread of a stream never ends."""

    _all_streams: ClassVar[list[CudaStream]] = []

    def __init__(self) -> None:
        super().__init__(0)
        self._used = 0

    def stream(self) -> CudaStream:
        if self._used == len(self._all_streams):
            self._all_streams.append(super().stream())
        self._used += 1
        return self._all_streams[self._used - 1]


def faults_of(numbers_are_right: Callable[[], bool]) -> list[str]:
    """Call a function that trains on the software GPU, and return the races, and a line if it returns False."""
    with changed(racecheck=True), checked_threads():
        lines = [] if numbers_are_right() else ["a number is wrong"]
        software_gpu.synchronize()
        return [*lines, *take_races()]


def is_right(model: Model, iterations: Sequence[MovingIteration], device: Device[Any] | None = None) -> bool:
    training = MovingTraining(model, iterations[0].plan, device or SoftwareDevice())
    return same(training.train(iterations), train_serially(model, iterations))
