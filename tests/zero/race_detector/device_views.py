"""Make the two kinds of CPU memory look like two devices to Python code that reads the device of a tensor.

``torch.Tensor`` is patched instead of using a ``TorchFunctionMode``, because PyTorch disables such modes in the hooks
of a backward.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from deepspeed.runtime.zero import partition_parameters

from tests.zero.race_detector.detector import Recorder
from tests.zero.race_detector.storages import Place

_to = torch.Tensor.to
_tolist = torch.Tensor.tolist
_tensor = torch.tensor


class DeviceViews:
    """The methods of ``torch.Tensor`` that depend on a device, for the places that the recorder stores."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    @contextmanager
    def patched_tensors(self) -> Iterator[None]:
        """Patch the methods of ``torch.Tensor`` inside this context, so that a tensor's device is its place."""
        memory = self._recorder.memory
        methods = {
            "device": property(lambda tensor: memory(tensor).place.value),
            "to": self.to,
            "cpu": lambda tensor: self.to(tensor, Place.HOST.value),
            "tolist": lambda tensor: _tolist(self.to(tensor, Place.HOST.value)),
            "is_pinned": lambda tensor, *_: memory(tensor).pinned,
            "pin_memory": lambda tensor, *_: self.pin(tensor),
            "record_stream": lambda tensor, stream: memory(tensor).recorded_streams.add(stream.name),
        }
        with ExitStack() as patches:
            for name, method in methods.items():
                patches.enter_context(mock.patch.object(torch.Tensor, name, _unbound(method)))
            patches.enter_context(mock.patch.object(torch, "tensor", self._tensor))
            # DeepSpeed assigns this one to torch.tensor when zero.Init ends.
            patches.enter_context(mock.patch.object(partition_parameters, "_orig_torch_tensor", self._tensor))
            yield

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy in pinned memory, or the tensor itself if it is pinned already."""
        if self._recorder.memory(tensor).pinned:
            return tensor
        pinned = tensor.clone()
        self._recorder.memory(pinned).pinned = True
        return pinned

    def to(self, tensor: torch.Tensor, *args: Any, copy: bool = False, **kwargs: Any) -> torch.Tensor:
        """Convert like ``torch.Tensor.to``: a change of place copies, and without one ``copy`` decides."""
        recorder = self._recorder
        if args and isinstance(args[0], torch.Tensor):
            args = (recorder.memory(args[0]).place.value, args[0].dtype, *args[1:])
        device, dtype, non_blocking, memory_format = torch._C._nn._parse_to(*args, **kwargs)
        source = recorder.memory(tensor).place
        destination = source if device is None else Place(device)
        options: dict[str, Any] = {"dtype": dtype or tensor.dtype, "non_blocking": non_blocking}
        if memory_format is not None:
            options["memory_format"] = memory_format
        if destination is source:
            return _to(tensor, copy=copy, **options)
        recorder.thread.to_host = destination is Place.HOST
        try:
            return _to(tensor, device=destination.value, copy=True, **options)
        finally:
            recorder.thread.to_host = False

    def _tensor(self, data: Any, *, device: Any = None, **kwargs: Any) -> torch.Tensor:
        tensor = _tensor(data, **kwargs)
        return tensor if device is None else self.to(tensor, device)


def _unbound(method: Any) -> Any:
    """Return ``method`` as a function, because Python would not bind a bound method to the tensor."""
    return method if isinstance(method, property) else lambda tensor, *args, **kwargs: method(tensor, *args, **kwargs)
