"""Installs it all: DeepSpeed, our hooks, our device, our worker and the CPU kernel run recorded."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from itertools import cycle
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from deepspeed.accelerator import get_accelerator, set_accelerator

from deep_opt_states.device import cuda
from deep_opt_states.device.kernels.adam import PartUpdate
from deep_opt_states.device.kernels.fused import FusedAdam
from deep_opt_states.device.slab import HostSlab
from deep_opt_states.runtime import executor
from deep_opt_states.runtime.worker import Task, Worker
from deep_opt_states.zero import plugin
from deep_opt_states.zero.start.devices import AcceleratorChoice
from tests.zero.recording.accelerator import RecordingAccelerator
from tests.zero.recording.clocks import Clock
from tests.zero.recording.collectives import recorded_collectives
from tests.zero.recording.memory import Place
from tests.zero.recording.operations import Accesses
from tests.zero.recording.places import Places
from tests.zero.recording.recorder import ILLEGAL, Recorder, who


@contextmanager
def recording(done: Iterable[bool] = (False, False, True)) -> Iterator[Recorder]:
    """Engines made and run inside are recorded; the process group must exist.

    ``done`` is what is answered, one after the other and again, to who asks whether the worker has done a task: what
    is issued when does not hang on how fast it was.
    """
    recorder = Recorder()
    places = Places(recorder)
    accelerator = RecordingAccelerator(recorder, places)
    plain = get_accelerator()
    set_accelerator(accelerator)
    try:
        with ExitStack() as patches:
            patches.enter_context(mock.patch.object(cuda, "torch", torch_for_our_device(accelerator, places)))
            choice = AcceleratorChoice(cuda.CudaDevice(0), steps_on_host=True)
            patches.enter_context(mock.patch.object(cuda.CudaDevice, "_page_lock", return_value=nothing))
            patches.enter_context(mock.patch.object(HostSlab, "tensor", _pinned_tensor(recorder)))
            patches.enter_context(mock.patch.object(plugin, "choose_device", return_value=choice))
            patches.enter_context(mock.patch.object(executor, "Worker", _recording_worker(recorder, cycle(done))))
            patches.enter_context(mock.patch.object(FusedAdam, "update_parts", _recording_update(recorder)))
            patches.enter_context(recorded_collectives(recorder))
            patches.enter_context(places.told_apart())
            patches.enter_context(Accesses(recorder))
            yield recorder
    finally:
        set_accelerator(plain)


def torch_for_our_device(accelerator: RecordingAccelerator, places: Places) -> Any:
    """``device/cuda.py`` as it is, with another ``torch.cuda``; memory that is not written yet is NaN."""

    def empty(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        tensor = torch.empty(*args, **kwargs).fill_(torch.nan)
        return places.pin(tensor) if pin_memory else tensor

    return SimpleNamespace(cuda=accelerator, device=lambda *_: Place.ACCELERATOR.value, empty=empty)


def _recording_worker(recorder: Recorder, answers: Iterator[bool]) -> type[Worker]:
    class RecordingWorker(Worker):
        """Real, with notes of what a task knows when it starts, and who waits for it knows then."""

        def submit(self, task: Task) -> Future[None]:
            given = recorder.now(recorder.host)
            done = Clock()

            def noted() -> None:
                recorder.learns(recorder.host, given)
                with Accesses(recorder):
                    task()
                done.join(recorder.now(recorder.host))

            return _noted_future(super().submit(noted), recorder, done, answers)

    return RecordingWorker


def _noted_future(future: Future[None], recorder: Recorder, done: Clock, answers: Iterator[bool]) -> Future[None]:
    result = future.result
    known = False

    def noted_result(timeout: float | None = None) -> None:
        nonlocal known
        if not known:
            recorder.waits.append(who())
        known = True
        result(timeout)
        recorder.learns(recorder.host, done)

    def answered() -> bool:
        nonlocal known
        known = known or next(answers)
        if known:
            future.exception()
        return known

    future.result = noted_result  # type: ignore[method-assign]
    future.done = answered  # type: ignore[method-assign]
    return future


def nothing() -> None:
    pass


def _pinned_tensor(recorder: Recorder) -> Callable[..., torch.Tensor]:
    tensor = HostSlab.tensor

    def pinned_tensor(self: HostSlab, *args: Any) -> torch.Tensor:
        found = tensor(self, *args)
        # Locked before the first copy that relies on it.
        recorder.memory(found).pinned = True
        return found

    return pinned_tensor


def _recording_update(recorder: Recorder) -> Callable[..., None]:
    update_parts = FusedAdam.update_parts

    def recording_update(self: FusedAdam, updates: Sequence[PartUpdate]) -> None:
        for each in updates:
            tensors = each.tensors
            # In a slot it stands for the GPU's kernel, and runs on the stream that it was launched on.
            on_accelerator = recorder.on_accelerator(tensors.master)
            lane = recorder.stream if on_accelerator else recorder.host
            for name, tensor in vars(tensors).items():
                if tensor is not None and recorder.on_accelerator(tensor) != on_accelerator:
                    place = Place.ACCELERATOR if on_accelerator else Place.HOST
                    recorder.found(ILLEGAL, recorder.memory(tensor), (f"{name} of an update in {place}", "fused Adam"))
            writes = [tensors.master, tensors.exp_avg, tensors.exp_avg_sq]
            if tensors.param is not None:
                writes.append(tensors.param)
            recorder.touch(lane, [tensors.grad], writes, "fused Adam")
        update_parts(self, updates)

    return recording_update
