"""Collectives as PyTorch runs NCCL's: on the caller's stream; asynchronous ones on a stream of their own.

That one waits for the caller's stream, and whichever stream is current waits for it with the handle.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from deepspeed.comm import comm

from tests.zero.recording.clocks import Clock
from tests.zero.recording.memory import Place
from tests.zero.recording.operations import tensors_in
from tests.zero.recording.recorder import COMMUNICATION, ILLEGAL, Recorder

PARAMETERS: dict[str, tuple[str, ...]] = {
    "all_gather_into_tensor": ("output_tensor", "input_tensor", "group", "async_op"),
    "all_gather": ("tensor_list", "tensor", "group", "async_op"),
    "all_reduce": ("tensor", "op", "group", "async_op"),
    "broadcast": ("tensor", "src", "group", "async_op"),
    "reduce_scatter_tensor": ("output_tensor", "input_tensor", "op", "group", "async_op"),
    "reduce_scatter": ("output", "input_list", "op", "group", "async_op"),
}
"""Of the methods of DeepSpeed's backend (``deepspeed/comm/torch.py``). The first is written, all tensors are read."""


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
"""Better refused than unseen."""


class Handle:
    """Waiting holds back the stream that is current, not the host. Until then it keeps what the collective uses.

    So does PyTorch's ``WorkNCCL``, instead of recording the tensors on its stream.
    """

    def __init__(self, recorder: Recorder, work: Any, done: Clock, tensors: list[torch.Tensor]) -> None:
        self._recorder = recorder
        self._work = work
        self._done = done
        self._kept: list[torch.Tensor] = tensors

    def wait(self, *_: Any) -> None:
        with self._recorder.paused():
            self._work.wait()
        self._recorder.learns(self._recorder.stream, self._done)
        self._kept = []


@contextmanager
def recorded_collectives(recorder: Recorder) -> Iterator[None]:
    with ExitStack() as patches:
        for name in PARAMETERS:
            method = recorded_collective(recorder, name, getattr(comm.cdb, name))
            patches.enter_context(mock.patch.object(comm.cdb, name, method))
        for name in NOT_MODELLED:
            unknown = mock.Mock(side_effect=NotImplementedError(f"{name} is not recorded yet"))
            patches.enter_context(mock.patch.object(comm.cdb, name, unknown))
        yield


def recorded_collective(recorder: Recorder, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    parameters = PARAMETERS[name]

    def collective(*args: Any, **kwargs: Any) -> Any:
        given = {**dict(zip(parameters, args, strict=False)), **kwargs}
        tensors = tensors_in(given)
        for tensor in tensors:
            if not recorder.on_accelerator(tensor):
                recorder.found(ILLEGAL, recorder.memory(tensor), (str(Place.HOST), name))
        asynchronous = bool(given.get("async_op"))
        lane = COMMUNICATION if asynchronous else recorder.stream
        recorder.learns(lane, recorder.now(recorder.stream))
        recorder.touch(lane, tensors, tensors_in(given[parameters[0]]), name)
        with recorder.paused():
            work = original(*args, **kwargs)
        return Handle(recorder, work, recorder.now(lane), tensors) if asynchronous else work

    return collective
