"""Mark actions in profilers: in ``torch.profiler``, and as NVTX ranges in DeepSpeed's own domain."""

from __future__ import annotations

from typing import Any

from deepspeed.accelerator import get_accelerator
from deepspeed.utils import nvtx
from torch._C._profiler import _RecordFunctionFast

# Before 0.19.0, ranges are in no domain.
_push = getattr(nvtx, "_range_push", lambda accelerator, name: accelerator.range_push(name))
_pop = getattr(nvtx, "_range_pop", lambda accelerator: accelerator.range_pop())


class ActionSpan:
    """A context that profilers show. Without a profiler, it costs about 1 us, ``record_function`` 9 us."""

    __slots__ = ("_accelerator", "_name", "_record")

    def __init__(self, name: str) -> None:
        self._name = name
        self._record = _RecordFunctionFast(name)
        self._accelerator: Any = get_accelerator()

    def __enter__(self) -> None:
        # As in ``instrument_w_nvtx``, with which DeepSpeed marks its functions.
        if nvtx.enable_nvtx:
            _push(self._accelerator, self._name)
        self._record.__enter__()

    def __exit__(self, *exception: object) -> None:
        # Deleting the record ends it. Its ``__exit__`` would raise after a profiler of all threads has started inside.
        del self._record
        if nvtx.enable_nvtx:
            _pop(self._accelerator)
