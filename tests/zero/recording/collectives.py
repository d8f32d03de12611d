"""Collectives as NCCL runs them: on a stream of their own, which waits for the caller's and is waited for by it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

from deepspeed.comm import comm

from tests.zero.recording.clocks import Clock
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


class Handle:
    """Waiting holds back the stream that is current, not the host."""

    def __init__(self, recorder: Recorder, work: Any, done: Clock) -> None:
        self._recorder = recorder
        self._work = work
        self._done = done

    def wait(self, *_: Any) -> None:
        with self._recorder.paused():
            self._work.wait()
        self._recorder.learns(self._recorder.stream, self._done)


@contextmanager
def recorded_collectives(recorder: Recorder) -> Iterator[None]:
    with ExitStack() as patches:
        for name, parameters in PARAMETERS.items():
            method = _recorded(recorder, name, parameters, getattr(comm.cdb, name))
            patches.enter_context(mock.patch.object(comm.cdb, name, method))
        yield


def _recorded(recorder: Recorder, name: str, parameters: tuple[str, ...], original: Any) -> Callable[..., Any]:
    def collective(*args: Any, **kwargs: Any) -> Any:
        given = {**dict(zip(parameters, args, strict=False)), **kwargs}
        for tensor in tensors_in(given):
            if not recorder.on_accelerator(tensor):
                recorder.found(ILLEGAL, recorder.memory(tensor), name)
        recorder.learns(COMMUNICATION, recorder.now(recorder.stream))
        recorder.touch(COMMUNICATION, tensors_in(given), tensors_in(given[parameters[0]]), name)
        done = recorder.now(COMMUNICATION)
        # PyTorch keeps what an unfinished collective uses (ProcessGroupNCCL stashes it until the wait).
        for tensor in tensors_in(given):
            recorder.memory(tensor).recorded.add(COMMUNICATION)
        with recorder.paused():
            work = original(*args, **kwargs)
        if given.get("async_op"):
            return Handle(recorder, work, done)
        recorder.learns(recorder.stream, done)
        return work

    return collective
