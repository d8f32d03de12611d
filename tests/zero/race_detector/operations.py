"""Record PyTorch's operations as accesses, on the current stream for accelerator memory, on the host for host memory.

Copies follow the rules of CUDA and of ``aten/src/ATen/native/cuda/Copy.cpp``.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.zero.race_detector.detector import ILLEGAL, Recorder
from tests.zero.race_detector.storages import Place

SYNCHRONIZING = {"aten::_local_scalar_dense", "aten::equal", "aten::nonzero", "aten::is_nonzero", "aten::masked_select"}
"""Operations whose result is needed on the host, which waits for the stream."""

WITHOUT_CONTENTS = ("aten::empty", "aten::new_empty")
"""Operations that allocate their result and do not write it."""


def tensors_in(tree: Any) -> list[torch.Tensor]:
    """Return the tensors in ``tree``: a tensor, any other value, or lists, tuples and dictionaries of these."""
    if isinstance(tree, torch.Tensor):
        return [tree]
    if isinstance(tree, dict):
        tree = tree.values()
    elif not isinstance(tree, (list, tuple)):
        return []
    return [tensor for value in tree for tensor in tensors_in(value)]


class OperationRecorder(TorchDispatchMode):
    """The dispatch mode that records every operation that goes through PyTorch's dispatcher."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        recorder = self._recorder
        if recorder.thread.paused:
            return func(*args, **kwargs)
        reads, writes = _reads_and_writes(func, args, kwargs)
        inputs = [*reads, *writes]
        result = func(*args, **kwargs)
        known = {tensor.untyped_storage()._cdata for tensor in inputs}
        fresh = [tensor for tensor in tensors_in(result) if tensor.untyped_storage()._cdata not in known]
        place = self._place_of_result(inputs, kwargs.get("device"))
        for tensor in fresh:
            recorder.allocated(tensor, place)
        name = func._schema.name
        if name.startswith(WITHOUT_CONTENTS) or not (fresh or writes or name in SYNCHRONIZING):
            return result  # The operation makes a view or reads a shape: it touches no elements.
        if name == "aten::copy_":
            self._copy(args[0], args[1], bool(kwargs.get("non_blocking", args[2] if len(args) > 2 else False)))
        elif name == "aten::_to_copy":
            if recorder.memory(result).place is not recorder.memory(args[0]).place:
                non_blocking = bool(kwargs.get("non_blocking"))
                # PyTorch pins the destination of an asynchronous copy to the host.
                recorder.memory(result).pinned = non_blocking and place is Place.HOST
                self._copy(result, args[0], non_blocking)
            else:
                self._run(name, reads, [*writes, *fresh])
        else:
            self._run(name, reads, [*writes, *fresh])
        return result

    def _place_of_result(self, inputs: list[torch.Tensor], device: torch.device | None) -> Place:
        if device is not None and device.index is not None:
            return Place.ACCELERATOR
        if self._recorder.thread.to_host:
            return Place.HOST
        # PyTorch also passes a device where it means the device of its input, and passes "cpu" for both places.
        any_on_accelerator = any(self._recorder.on_accelerator(tensor) for tensor in inputs)
        return Place.ACCELERATOR if any_on_accelerator else Place.HOST

    def _run(self, name: str, reads: list[torch.Tensor], writes: list[torch.Tensor]) -> None:
        """Record an operation: a kernel on the current stream if it has a tensor on the accelerator."""
        recorder = self._recorder
        on_accelerator = [tensor for tensor in (*reads, *writes) if recorder.on_accelerator(tensor)]
        on_host = [tensor for tensor in (*reads, *writes) if not recorder.on_accelerator(tensor)]
        if not on_accelerator:
            recorder.record_accesses(recorder.host, reads, writes, name)
            return
        for tensor in on_host:
            if tensor.dim() > 0:
                recorder.add_finding(ILLEGAL, recorder.memory(tensor), (str(Place.HOST), name))
        # A kernel takes a scalar in host memory by value.
        recorder.record_accesses(recorder.host, on_host, [], name)
        recorder.record_accesses(
            recorder.stream, [tensor for tensor in reads if recorder.on_accelerator(tensor)], writes, name
        )
        if name in SYNCHRONIZING:
            recorder.wait_on_host(recorder.snapshot(recorder.stream))

    def _copy(self, destination: torch.Tensor, source: torch.Tensor, non_blocking: bool) -> None:
        recorder = self._recorder
        to_memory, from_memory = recorder.memory(destination), recorder.memory(source)
        if to_memory.place is from_memory.place:
            self._run("aten::copy_", [source], [destination])
            return
        stream, host = recorder.stream, recorder.host
        pageable_source = from_memory.place is Place.HOST and not from_memory.pinned
        # If the dtypes differ, an asynchronous copy converts on the accelerator, a blocking copy on the host.
        converts_on_host = source.dtype is not destination.dtype and not non_blocking
        if pageable_source or (converts_on_host and from_memory.place is Place.HOST):
            recorder.record_accesses(host, [source], [], "copy to a staging buffer")
            recorder.record_accesses(stream, [], [destination], "copy from a staging buffer")
        elif converts_on_host:
            recorder.record_accesses(stream, [source], [], "copy to a staging buffer")
            recorder.wait_on_host(recorder.snapshot(stream))
            recorder.record_accesses(host, [], [destination], "conversion")
            return
        else:
            recorder.record_accesses(stream, [source], [destination], "copy")
        # CUDA may also wait in an asynchronous copy of pageable memory, but callers must not rely on that.
        if not non_blocking:
            recorder.wait_on_host(recorder.snapshot(stream))


def _reads_and_writes(func: Any, args: Any, kwargs: Any) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the tensors that the operation reads and those that it writes, as its schema states."""
    reads: list[torch.Tensor] = []
    writes: list[torch.Tensor] = []
    for position, (name, is_written) in enumerate(_arguments(func)):
        value = args[position] if position < len(args) else kwargs.get(name)
        (writes if is_written else reads).extend(tensors_in(value))
    return reads, writes


@cache
def _arguments(func: Any) -> list[tuple[str, bool]]:
    """Return the name of each argument of the operation, and whether the operation writes to the argument."""
    return [
        (argument.name, argument.alias_info is not None and argument.alias_info.is_write)
        for argument in func._schema.arguments
    ]
