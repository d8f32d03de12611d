"""Torch's operations as accesses: on the issuing stream for accelerator memory, on the host thread for host memory.

The rules for copies are those of CUDA and of ``aten/src/ATen/native/cuda/Copy.cpp``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.zero.recording.memory import Place
from tests.zero.recording.recorder import ILLEGAL, Recorder

SYNCHRONIZING = {"aten::_local_scalar_dense", "aten::equal", "aten::nonzero", "aten::is_nonzero", "aten::masked_select"}
"""Their result is on the host: it waits for the stream."""

WITHOUT_CONTENTS = ("aten::empty", "aten::new_empty")
"""What they return has not been written."""


def tensors_in(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


class Accesses(TorchDispatchMode):
    """Sees every operation that PyTorch's dispatcher sees."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        recorder = self._recorder
        if recorder.thread.paused:
            return func(*args, **kwargs)
        reads, writes = _reads_and_writes(func, args, kwargs)
        inputs = tensors_in((args, kwargs))
        result = func(*args, **kwargs)
        known = {tensor.untyped_storage()._cdata for tensor in inputs}
        fresh = [tensor for tensor in tensors_in(result) if tensor.untyped_storage()._cdata not in known]
        place = self._place_of_result(inputs, kwargs.get("device"))
        for tensor in fresh:
            recorder.allocated(tensor, place)
        name = func._schema.name
        if name.startswith(WITHOUT_CONTENTS) or not (fresh or writes or name in SYNCHRONIZING):
            return result  # a view, or a question about shapes
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
        # PyTorch itself names a device, too, where it means its input's: as far as it knows, that is just "cpu".
        there = any(self._recorder.on_accelerator(tensor) for tensor in inputs)
        return Place.ACCELERATOR if there else Place.HOST

    def _run(self, name: str, reads: list[torch.Tensor], writes: list[torch.Tensor]) -> None:
        recorder = self._recorder
        there = [tensor for tensor in (*reads, *writes) if recorder.on_accelerator(tensor)]
        here = [tensor for tensor in (*reads, *writes) if not recorder.on_accelerator(tensor)]
        if not there:
            recorder.touch(recorder.host, reads, writes, name)
            return
        for tensor in here:
            if tensor.dim() > 0:
                recorder.found(ILLEGAL, recorder.memory(tensor), (str(Place.HOST), name))
        # A kernel takes a scalar of the host by value.
        recorder.touch(recorder.host, here, [], name)
        recorder.touch(recorder.stream, [it for it in reads if recorder.on_accelerator(it)], writes, name)
        if name in SYNCHRONIZING:
            recorder.host_waits(recorder.now(recorder.stream))

    def _copy(self, destination: torch.Tensor, source: torch.Tensor, non_blocking: bool) -> None:
        recorder = self._recorder
        to, of = recorder.memory(destination), recorder.memory(source)
        if to.place is of.place:
            self._run("aten::copy_", [source], [destination])
            return
        stream, host = recorder.stream, recorder.host
        pageable_source = of.place is Place.HOST and not of.pinned
        # An asynchronous copy converts another dtype on the accelerator, a blocking one on the host.
        converts_here = source.dtype is not destination.dtype and not non_blocking
        if pageable_source or (converts_here and of.place is Place.HOST):
            recorder.touch(host, [source], [], "copy to a staging buffer")
            recorder.touch(stream, [], [destination], "copy from a staging buffer")
        elif converts_here:
            recorder.touch(stream, [source], [], "copy to a staging buffer")
            recorder.host_waits(recorder.now(stream))
            recorder.touch(host, [], [destination], "conversion")
            return
        else:
            recorder.touch(stream, [source], [destination], "copy")
        # With pageable memory CUDA might wait all the same; nobody may rely on it.
        if not non_blocking:
            recorder.host_waits(recorder.now(stream))


def _reads_and_writes(func: Any, args: Any, kwargs: Any) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    reads: list[torch.Tensor] = []
    writes: list[torch.Tensor] = []
    for position, argument in enumerate(func._schema.arguments):
        value = args[position] if position < len(args) else kwargs.get(argument.name)
        written = argument.alias_info is not None and argument.alias_info.is_write
        (writes if written else reads).extend(tensors_in(value))
    return reads, writes
