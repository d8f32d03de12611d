"""What Python asks of tensors: there, the two kinds of CPU memory must look like two devices.

Patches of ``torch.Tensor``, not a ``TorchFunctionMode``: PyTorch switches those off in the hooks of a backward.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from deepspeed.runtime.zero import partition_parameters

from tests.zero.recording.memory import Place
from tests.zero.recording.recorder import Recorder

_to = torch.Tensor.to
_tolist = torch.Tensor.tolist
_tensor = torch.tensor


class Places:
    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    @contextmanager
    def told_apart(self) -> Iterator[None]:
        memory = self._recorder.memory
        answers = {
            "device": property(lambda tensor: memory(tensor).place.value),
            "to": self.to,
            "cpu": lambda tensor: self.to(tensor, Place.HOST.value),
            "tolist": lambda tensor: _tolist(self.to(tensor, Place.HOST.value)),
            "is_pinned": lambda tensor, *_: memory(tensor).pinned,
            "pin_memory": lambda tensor, *_: self.pin(tensor),
            "record_stream": lambda tensor, stream: memory(tensor).recorded.add(stream.name),
        }
        with ExitStack() as patches:
            for name, answer in answers.items():
                patches.enter_context(mock.patch.object(torch.Tensor, name, _method(answer)))
            patches.enter_context(mock.patch.object(torch, "tensor", self._tensor))
            # What DeepSpeed puts back when zero.Init ends.
            patches.enter_context(mock.patch.object(partition_parameters, "_orig_torch_tensor", self._tensor))
            yield

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy in pinned memory; pinned memory is returned as it is."""
        if self._recorder.memory(tensor).pinned:
            return tensor
        pinned = tensor.clone()
        self._recorder.memory(pinned).pinned = True
        return pinned

    def to(self, tensor: torch.Tensor, *args: Any, copy: bool = False, **kwargs: Any) -> torch.Tensor:
        """Copies between places, and only there if ``copy`` is not given, as between devices."""
        recorder = self._recorder
        if args and isinstance(args[0], torch.Tensor):
            args = (recorder.memory(args[0]).place.value, args[0].dtype, *args[1:])
        device, dtype, non_blocking, memory_format = torch._C._nn._parse_to(*args, **kwargs)
        here = recorder.memory(tensor).place
        there = here if device is None else Place(device)
        options: dict[str, Any] = {"dtype": dtype or tensor.dtype, "non_blocking": non_blocking}
        if memory_format is not None:
            options["memory_format"] = memory_format
        if there is here:
            return _to(tensor, copy=copy, **options)
        recorder.thread.to_host = there is Place.HOST
        try:
            return _to(tensor, device=there.value, copy=True, **options)
        finally:
            recorder.thread.to_host = False

    def _tensor(self, data: Any, *, device: Any = None, **kwargs: Any) -> torch.Tensor:
        tensor = _tensor(data, **kwargs)
        return tensor if device is None else self.to(tensor, device)


def _method(answer: Any) -> Any:
    """A bound method would not be bound to the tensor."""
    return answer if isinstance(answer, property) else lambda tensor, *args, **kwargs: answer(tensor, *args, **kwargs)
