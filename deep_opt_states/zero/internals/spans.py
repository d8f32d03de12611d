"""Spans that profilers show: ``torch.profiler``, and NVTX in the domain of DeepSpeed's own."""

from __future__ import annotations

from typing import Any

from deepspeed.accelerator import get_accelerator
from deepspeed.utils import nvtx
from torch._C._profiler import _RecordFunctionFast


class ActionSpan:
    """Of what the current thread does inside. A schedule may have thousands of actions: where nobody profiles, one
    costs about 1 us, and ``record_function`` itself would cost 9."""

    __slots__ = ("_accelerator", "_name", "_record")

    def __init__(self, name: str) -> None:
        self._name = name
        self._record = _RecordFunctionFast(name)
        self._accelerator: Any = get_accelerator()

    def __enter__(self) -> None:
        # As ``instrument_w_nvtx`` does it for DeepSpeed's functions.
        if nvtx.enable_nvtx:
            nvtx._range_push(self._accelerator, self._name)
        self._record.__enter__()

    def __exit__(self, *exception: object) -> None:
        # It ends when it is dropped. Its own exit raises where a profiler of all threads was started in between, and
        # that would be the end of the update.
        del self._record
        if nvtx.enable_nvtx:
            nvtx._range_pop(self._accelerator)
