"""Define the gradient buffers of units' ranges, and find the segments of one parameter's gradient in them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from deep_opt_states.device.kernels.adam import ElementRange
from deep_opt_states.zero.internals.compat import Parameter, place_of_gradient


@dataclass(frozen=True, kw_only=True)
class GradientBuffer:
    """The memory of the gradients of one range of a unit: tensors of shape [numel] in the accumulation dtype."""

    sub_group: int
    elements: ElementRange
    grad: torch.Tensor
    device_accumulator: torch.Tensor | None = None
    """Memory on the accelerator for sums over micro-batches, if there is room while ``grad`` is in host memory."""

    @property
    def accumulator(self) -> torch.Tensor:
        return self.grad if self.device_accumulator is None else self.device_accumulator


@dataclass(frozen=True)
class Segment:
    """The elements of one parameter's partition, from ``begin`` on, that are in one buffer, from ``offset`` on."""

    index: int
    buffer: GradientBuffer
    begin: int
    offset: int
    numel: int

    def view(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the elements in ``tensor``, one of the buffer's."""
        return tensor.narrow(0, self.offset, self.numel)

    def part(self, partition: torch.Tensor) -> torch.Tensor:
        """Return the elements in ``partition``, the parameter's."""
        return partition.narrow(0, self.begin, self.numel)


class Segments:
    """The segments of all parameters of ``optimizer`` in ``buffers``, found when they are first used."""

    def __init__(self, optimizer: Any, buffers: Sequence[GradientBuffer]) -> None:
        self._optimizer = optimizer
        self._buffers = buffers
        self._in_sub_group: dict[int, list[int]] = {}
        for index in sorted(range(len(buffers)), key=lambda index: buffers[index].elements.begin):
            self._in_sub_group.setdefault(buffers[index].sub_group, []).append(index)
        self._found: dict[int, tuple[Segment, ...]] = {}

    def of_param(self, param: Parameter, numel: int | None = None) -> tuple[Segment, ...]:
        """Return the segments of the parameter's partition, or of its first ``numel`` elements, in order."""
        segments = self._found.get(param.ds_id)
        if segments is None:
            segments = self._found[param.ds_id] = tuple(self._find(param))
        if numel is None or numel == segments[-1].begin + segments[-1].numel:
            return segments
        return tuple(
            replace(segment, numel=min(segment.numel, numel - segment.begin))
            for segment in segments
            if segment.begin < numel
        )

    def _find(self, param: Parameter) -> Iterator[Segment]:
        sub_group, begin, numel = place_of_gradient(self._optimizer, param)
        for index in self._in_sub_group[sub_group]:
            elements = self._buffers[index].elements
            first, end = max(begin, elements.begin), min(begin + numel, elements.end)
            if first < end:
                yield Segment(index, self._buffers[index], first - begin, first - elements.begin, end - first)
