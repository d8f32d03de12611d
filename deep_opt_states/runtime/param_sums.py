"""Notice writes to parameters that are a half of masters, by sums over their bits (``checksum.py``).

An update on the accelerator leaves behind the sums of each part of the parameters that it updates at once. Each
comparison adds its finding to a record on the accelerator, which the host reads later.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from deep_opt_states.device.interface import Device
from deep_opt_states.device.kernels.adam import ElementRange
from deep_opt_states.device.kernels.checksum import BLOCK_NUMEL, Checksum
from deep_opt_states.runtime.failure import ParameterWritten

Place: TypeAlias = tuple[int, ElementRange]
"""The sub-group and the elements of a range."""

Names: TypeAlias = Callable[[ElementRange, int], Iterable[str]]
"""Return the names of the parameters in a range of a sub-group, wholly or in part."""


def no_names(elements: ElementRange, sub_group: int) -> Iterable[str]:
    """Return a description for parameters whose names are not known."""
    return [f"elements {elements.begin} to {elements.end} of sub-group {sub_group}"]


@dataclass(frozen=True)
class WrittenBlocks:
    """The number of a block of each part that was written to, or zero; int64, of shape [parts].

    ``found`` is on the accelerator, where comparisons add to it. ``on_host`` is its page-locked copy, and ``none`` has
    zeros there.
    """

    found: torch.Tensor
    on_host: torch.Tensor
    none: torch.Tensor

    @classmethod
    def reserve(cls, device: Device[Any], numel: int) -> WrittenBlocks:
        """Allocate the tensors. Raise the device's out-of-memory error if memory is short."""
        none = device.empty_host(numel, torch.int64).zero_()
        written = cls(device.empty(numel, torch.int64), device.empty_host(numel, torch.int64), none)
        device.copy(written.found, none)
        return written


class ParamSums:
    """The sums of the parts of parameters that the accelerator updates, and the findings of comparisons with them.

    ``checksum`` may be None if there is never such a part. ``names`` is used in errors.
    """

    def __init__(self, device: Device[Any], checksum: Checksum | None, names: Names) -> None:
        self._device = device
        self._checksum = checksum
        self._names = names
        self._sums: Mapping[Place, torch.Tensor] = {}
        self._positions: dict[Place, int] = {}
        """The position of each part in ``_written``."""
        self._written: WrittenBlocks | None = None
        self.are_compared = False
        """Whether a comparison may have a finding that ``raise_if_written`` has not read."""

    def __len__(self) -> int:
        return len(self._sums)

    def replace(self, sums: Mapping[Place, torch.Tensor], written: WrittenBlocks | None) -> None:
        """Keep ``sums`` from now on. ``written`` has a number for each of them, and is None if there are none."""
        self._sums, self._written = sums, written
        self._positions = {place: position for position, place in enumerate(sums)}
        self.are_compared = False

    def record(self, place: Place, param: torch.Tensor) -> None:
        """Issue the sums of ``param``, the part at ``place``, on the current stream."""
        assert self._checksum is not None
        self._checksum.record(param, self._sums[place])

    def compare(self, place: Place, param: torch.Tensor) -> None:
        """Issue the comparison of ``param``, the part at ``place``, with its sums on the current stream."""
        assert self._checksum is not None
        assert self._written is not None
        self._checksum.compare(param, self._sums[place], self._written.found.narrow(0, self._positions[place], 1))
        self.are_compared = True

    def copy_to_host(self) -> None:
        """Issue the copy of all findings on the current stream, which has waited for all comparisons."""
        if self.are_compared:
            assert self._written is not None
            self._device.copy(self._written.on_host, self._written.found)

    def raise_if_written(self, when: str) -> None:
        """Raise ``ParameterWritten``, which names ``when``, if a sum differs.

        The host has waited for the stream of ``copy_to_host``.
        """
        if not self.are_compared:
            return
        self.are_compared = False
        assert self._written is not None
        for (sub_group, part), number in zip(self._sums, self._written.on_host.tolist(), strict=True):
            if number:
                self.forget_written()
                begin = part.begin + (number - 1) * BLOCK_NUMEL
                block = part.part(begin, min(begin + BLOCK_NUMEL, part.end))
                raise ParameterWritten(
                    f"split_masters: no code but the update may write to the 16-bit parameters, which are a half of "
                    f"the master weights; found other bits in {' or '.join(self._names(block, sub_group))} {when}.\n"
                    f"Write inside deepspeed.zero.GatheredParameters(..., modifier_rank=0), which is allowed, or set "
                    f'"split_masters": false, and resume from the last checkpoint.'
                )

    def forget_written(self) -> None:
        """Forget the findings of all comparisons."""
        self.are_compared = False
        if self._written is not None:
            self._device.copy(self._written.found, self._written.none)

    def close(self) -> None:
        """Free the sums."""
        self.replace({}, None)
