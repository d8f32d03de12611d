"""Record DeepSpeed, our hooks, our device, our worker and the CPU kernel, inside one context."""

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
from deep_opt_states.device.kernels.adam import RangeUpdate
from deep_opt_states.device.kernels.fused import FusedAdam
from deep_opt_states.device.slab import HostSlab
from deep_opt_states.runtime import executor
from deep_opt_states.runtime.uninterrupted import Section
from deep_opt_states.runtime.worker import Task, Worker
from deep_opt_states.zero import plugin
from deep_opt_states.zero.start.devices import AcceleratorChoice
from tests.zero.race_detector.accelerator import RecordingAccelerator
from tests.zero.race_detector.clocks import Clock
from tests.zero.race_detector.collectives import recorded_collectives
from tests.zero.race_detector.detector import ILLEGAL, Recorder, callers
from tests.zero.race_detector.device_views import DeviceViews
from tests.zero.race_detector.operations import OperationRecorder
from tests.zero.race_detector.storages import Place


@contextmanager
def recording(worker_is_done: Iterable[bool] = (False, False, True)) -> Iterator[Recorder]:
    """Record the engines that are created and run inside this context. The process group must exist.

    ``worker_is_done`` are the results, used in a cycle, of asking whether the worker has finished a task. So the order
    in which actions are issued does not depend on the speed of the worker.
    """
    recorder = Recorder()
    views = DeviceViews(recorder)
    accelerator = RecordingAccelerator(recorder, views)
    original = get_accelerator()
    set_accelerator(accelerator)
    try:
        with ExitStack() as patches:
            patches.enter_context(mock.patch.object(cuda, "torch", torch_for_our_device(accelerator, views)))
            choice = AcceleratorChoice(cuda.CudaDevice(0), slots_on_host=True)
            patches.enter_context(mock.patch.object(cuda.CudaDevice, "_page_lock", return_value=do_nothing))
            patches.enter_context(mock.patch.object(HostSlab, "tensor", _pinned_tensor(recorder)))
            patches.enter_context(mock.patch.object(plugin, "choose_device", return_value=choice))
            patches.enter_context(
                mock.patch.object(executor, "Worker", _recording_worker(recorder, cycle(worker_is_done)))
            )
            for name, method in _recording_section(recorder).items():
                patches.enter_context(mock.patch.object(Section, name, method))
            patches.enter_context(mock.patch.object(FusedAdam, "update_ranges", _recording_update(recorder)))
            patches.enter_context(recorded_collectives(recorder))
            patches.enter_context(views.patched_tensors())
            patches.enter_context(OperationRecorder(recorder))
            yield recorder
    finally:
        set_accelerator(original)


def torch_for_our_device(accelerator: RecordingAccelerator, views: DeviceViews) -> Any:
    """Return a replacement of ``torch`` for ``device/cuda.py``, which is otherwise unchanged.

    ``torch.cuda`` is the recording accelerator, and memory holds NaN until it is written.
    """

    def empty(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        tensor = torch.empty(*args, **kwargs)
        # NaN, or -1 if these are integers.
        tensor.view(torch.uint8).fill_(0xFF)
        return views.pin(tensor) if pin_memory else tensor

    return SimpleNamespace(
        cuda=accelerator,
        device=lambda *_: Place.ACCELERATOR.value,
        empty=empty,
        _foreach_copy_=torch._foreach_copy_,
    )


def _recording_worker(recorder: Recorder, done_results: Iterator[bool]) -> type[Worker]:
    class RecordingWorker(Worker):
        """The real worker. A task is ordered after its submission, and its end before the return of ``result()``."""

        def submit(self, task: Task) -> Future[None]:
            submitted = recorder.snapshot(recorder.host)
            done = Clock()

            def recorded_task() -> None:
                recorder.order_after(recorder.host, submitted)
                with OperationRecorder(recorder):
                    task()
                done.join(recorder.snapshot(recorder.host))

            return _recorded_future(super().submit(recorded_task), recorder, done, done_results)

    return RecordingWorker


def _recorded_future(
    future: Future[None], recorder: Recorder, done: Clock, done_results: Iterator[bool]
) -> Future[None]:
    """Return ``future`` with recorded waits for its result or its exception.

    ``future.done()`` returns the next of ``done_results``. A result that the caller has already found done is not
    recorded as a wait.
    """
    exception = future.exception
    known = False

    def recorded(wait: Callable[..., Any]) -> Callable[..., Any]:
        def recorded_wait(timeout: float | None = None) -> Any:
            nonlocal known
            if not known:
                recorder.waits.append(callers())
            known = True
            found = wait(timeout)
            recorder.order_after(recorder.host, done)
            return found

        return recorded_wait

    def recorded_done() -> bool:
        nonlocal known
        known = known or next(done_results)
        if known:
            exception()
        return known

    future.result = recorded(future.result)  # type: ignore[method-assign]
    future.exception = recorded(exception)  # type: ignore[method-assign]
    future.done = recorded_done  # type: ignore[method-assign]
    return future


def _recording_section(recorder: Recorder) -> dict[str, Callable[..., Any]]:
    """Return methods of ``Section``: it is ordered after its creation, and its end before the return of the wait."""
    initialize, wait_for_end = Section.__init__, Section.wait_for_end

    def recorded_initialize(self: Any, run: Callable[[], Any], stream: Any) -> None:
        created, self.done = recorder.snapshot(recorder.host), Clock()

        def recorded_run() -> Any:
            recorder.order_after(recorder.host, created)
            try:
                with OperationRecorder(recorder):
                    return run()
            finally:
                self.done.join(recorder.snapshot(recorder.host))

        initialize(self, recorded_run, stream)

    def recorded_wait(self: Any, timeout_s: float | None = None) -> bool:
        ended = wait_for_end(self, timeout_s)
        recorder.order_after(recorder.host, self.done)
        return ended

    return {"__init__": recorded_initialize, "wait_for_end": recorded_wait}


def do_nothing() -> None:
    pass


def _pinned_tensor(recorder: Recorder) -> Callable[..., torch.Tensor]:
    tensor = HostSlab.tensor

    def pinned_tensor(self: HostSlab, *args: Any) -> torch.Tensor:
        pinned = tensor(self, *args)
        # The slab is page-locked before the first copy that relies on it.
        recorder.memory(pinned).pinned = True
        return pinned

    return pinned_tensor


def _recording_update(recorder: Recorder) -> Callable[..., None]:
    update_ranges = FusedAdam.update_ranges

    def recording_update(self: FusedAdam, updates: Sequence[RangeUpdate]) -> None:
        for update in updates:
            tensors = update.tensors
            # For states in a slot the CPU kernel replaces the GPU kernel, which runs on the current stream.
            on_accelerator = recorder.on_accelerator(tensors.master)
            lane = recorder.stream if on_accelerator else recorder.host
            for name, tensor in vars(tensors).items():
                if tensor is not None and recorder.on_accelerator(tensor) != on_accelerator:
                    place = Place.ACCELERATOR if on_accelerator else Place.HOST
                    recorder.add_finding(
                        ILLEGAL, recorder.memory(tensor), (f"{name} of an update in {place}", "fused Adam")
                    )
            states = [tensors.master, tensors.exp_avg, tensors.exp_avg_sq]
            reads, writes = [tensors.grad], states
            if update.updated is not None:
                reads, writes = [tensors.grad, *states], list(update.updated)
            if tensors.param is not None:
                writes.append(tensors.param)
            recorder.record_accesses(lane, reads, writes, "fused Adam")
        update_ranges(self, updates)

    return recording_update
