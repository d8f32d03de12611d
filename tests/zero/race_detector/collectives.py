"""Record collectives as PyTorch runs NCCL's: on the caller's stream, or if they are asynchronous, on their own stream.

The communication stream waits for the caller's stream. The stream that is current in ``handle.wait()`` waits for the
communication stream.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from deepspeed.comm import comm

from tests.zero.race_detector.clocks import Clock
from tests.zero.race_detector.detector import COMMUNICATION, ILLEGAL, Recorder
from tests.zero.race_detector.operations import tensors_in
from tests.zero.race_detector.storages import Place

PARAMETERS: dict[str, tuple[str, ...]] = {
    "all_gather_into_tensor": ("output_tensor", "input_tensor", "group", "async_op"),
    "all_gather": ("tensor_list", "tensor", "group", "async_op"),
    "all_reduce": ("tensor", "op", "group", "async_op"),
    "broadcast": ("tensor", "src", "group", "async_op"),
    "reduce_scatter_tensor": ("output_tensor", "input_tensor", "op", "group", "async_op"),
    "reduce_scatter": ("output", "input_list", "op", "group", "async_op"),
}
"""The parameters of the methods of DeepSpeed's backend (``deepspeed/comm/torch.py``).

The first parameter is written. All tensors are read.
"""


NOT_MODELLED = (
    "all_gather_coalesced",
    "all_reduce_coalesced",
    "all_to_all",
    "all_to_all_single",
    "gather",
    "inference_all_reduce",
    "irecv",
    "isend",
    "recv",
    "reduce",
    "scatter",
    "send",
)
"""Collectives that raise ``NotImplementedError``, because otherwise their accesses would go undetected."""


class Handle:
    """The handle of an asynchronous collective, which keeps the collective's tensors alive until ``wait``.

    ``wait`` blocks the current stream and not the host. PyTorch's ``WorkNCCL`` also keeps the tensors alive instead of
    recording them on its stream.
    """

    def __init__(self, recorder: Recorder, work: Any, done: Clock, tensors: list[torch.Tensor]) -> None:
        self._recorder = recorder
        self._work = work
        self._done = done
        self._kept: list[torch.Tensor] = tensors

    def wait(self, *_: Any) -> None:
        with self._recorder.paused():
            self._work.wait()
        self._recorder.order_after(self._recorder.stream, self._done)
        self._kept = []


@contextmanager
def recorded_collectives(recorder: Recorder) -> Iterator[None]:
    """Record every collective that is called through DeepSpeed inside this context."""
    with ExitStack() as patches:
        for name in PARAMETERS:
            method = recorded_collective(recorder, name, getattr(comm.cdb, name))
            patches.enter_context(mock.patch.object(comm.cdb, name, method))
        for name in NOT_MODELLED:
            unknown = mock.Mock(side_effect=NotImplementedError(f"{name} is not recorded yet"))
            patches.enter_context(mock.patch.object(comm.cdb, name, unknown))
        yield


def recorded_collective(recorder: Recorder, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    """Return the collective ``original``, called ``name`` in ``PARAMETERS``, with its accesses recorded."""
    parameters = PARAMETERS[name]

    def collective(*args: Any, **kwargs: Any) -> Any:
        given = {**dict(zip(parameters, args, strict=False)), **kwargs}
        tensors = tensors_in(given)
        for tensor in tensors:
            if not recorder.on_accelerator(tensor):
                recorder.add_finding(ILLEGAL, recorder.memory(tensor), (str(Place.HOST), name))
        asynchronous = bool(given.get("async_op"))
        lane = COMMUNICATION if asynchronous else recorder.stream
        recorder.order_after(lane, recorder.snapshot(recorder.stream))
        recorder.record_accesses(lane, tensors, tensors_in(given[parameters[0]]), name)
        with recorder.paused():
            work = original(*args, **kwargs)
        return Handle(recorder, work, recorder.snapshot(lane), tensors) if asynchronous else work

    return collective
