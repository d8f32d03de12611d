"""Keep master weights in two halves where that saves bytes, and join them before any other code uses them.

A bf16 parameter is the upper half of its fp32 master weight, rounded (``split_form.py``). The place of a range of
masters in host memory has both halves. Who owns the upper half decides where it is valid:

- Where the CPU updates a range, it is the one in host memory, the source of the publication. Nothing else writes to it.
- Where the accelerator updates a range, it is the model's own parameter. The states that are copied are the lower half
  and the moments: 10 bytes per parameter instead of 12.

A range is split before its first update. It is joined before any other code reads or writes optimizer states. The
masters are then ordinary fp32 tensors in the same memory, so that checkpoints need no other memory, and what is written
to them takes effect. The early ranges of CPU and streamed units are never split: they have buffers for rounded
parameters.

Stock forgets at its next update what a script has written to a parameter. Here such a write would change the master. So
the upper halves are copied to host memory before a known write to parameters, and the next update begins with these.
All other writes are noticed by sums over the bits (``checksum.py``), which an update leaves behind. They are compared
before the next update begins, and before the upper halves are copied to host memory. An update works on a copy of the
parameters, whose sums are compared, too: so also a write while the update is in flight is noticed, or overwritten. The
host reads the findings of these comparisons when the ranks agree how the update has ended.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from deep_opt_states.device.interface import Device, Stream
from deep_opt_states.device.kernels import split_form
from deep_opt_states.device.kernels.adam import ElementRange, RangeUpdate
from deep_opt_states.device.kernels.checksum import Checksum, num_sums
from deep_opt_states.runtime.param_sums import Names, ParamSums, Place, WrittenBlocks, no_names
from deep_opt_states.runtime.state import Split, UnitState
from perf_model.schedule.placement import Placement


@dataclass(eq=False)
class SplitRange:
    """A range whose masters are split as a whole.

    ``sums`` has, for each part that the accelerator updates at once, its elements and the sums over its parameters. It
    is empty where the CPU updates the range.
    """

    state: UnitState
    elements: ElementRange
    sums: dict[ElementRange, torch.Tensor] = field(default_factory=dict)
    is_split: bool = False
    upper_is_param: bool = False
    """Whether the model's parameters are the upper halves, and those in host memory are older."""

    @property
    def upper(self) -> torch.Tensor:
        """Return the place of the upper halves in host memory."""
        return split_form.halves(self._master)[1]

    @property
    def param(self) -> torch.Tensor:
        """Return the model's parameters."""
        return self.state.view(self.state.param, self.elements)

    def split(self) -> None:
        """Split the masters in host memory. Raise ``ValueError`` if a second moment is negative."""
        try:
            split_form.split(self._master, self._exp_avg_sq)
        except ValueError as error:
            raise ValueError(f"sub-group {self.state.sub_group}: {error}") from None
        self.is_split = True

    def join(self) -> None:
        """Make the masters in host memory fp32."""
        split_form.join(self._master, self._exp_avg_sq)
        self.is_split = self.upper_is_param = False

    @property
    def _master(self) -> torch.Tensor:
        return self.state.view(self.state.master, self.elements)

    @property
    def _exp_avg_sq(self) -> torch.Tensor:
        return self.state.view(self.state.exp_avg_sq, self.elements)


@dataclass(frozen=True)
class ReservedRanges:
    """Ranges to split, with all memory that they need. ``written`` is None if the accelerator updates none of them."""

    by_place: dict[Place, SplitRange]
    written: WrittenBlocks | None


class SplitMasters:
    """The ranges of one executor whose masters are split while they are updated, and where their upper halves are.

    ``compute`` is the stream of updates on the accelerator, and ``d2h`` that of copies to host memory. ``checksum`` may
    be None if no unit is ever updated on the accelerator. ``names`` is used in errors.

    In each update the caller calls ``compare``, ``raise_if_written`` when the host has waited for the current stream,
    ``split``, and ``begin``, in this order, and then ``before`` and ``after`` for each range that the
    accelerator updates. It may call ``split`` before, and it calls ``raise_if_found`` when all updates are issued. It
    calls all other methods only while nothing is in flight.
    """

    def __init__(
        self,
        device: Device[Any],
        compute: Stream[Any],
        d2h: Stream[Any],
        checksum: Checksum | None,
        names: Names = no_names,
    ) -> None:
        self._device = device
        self._compute, self._d2h = compute, d2h
        self._sums = ParamSums(device, checksum, names)
        self._ranges: dict[Place, SplitRange] = {}
        self._updated: dict[Place, SplitRange] = {}
        """The range of each part that the accelerator updates at once."""
        self._from_host: set[Place] = set()
        """The parts whose next update reads the upper halves in host memory."""
        self._compared, self._copied, self._found = (device.event() for _ in range(3))
        """The current stream -> d2h stream, that stream -> host, and compute stream -> host."""

    @property
    def watches_params(self) -> bool:
        """Return whether the accelerator updates any range."""
        return len(self._sums) > 0

    def reserve_ranges(self, states: Sequence[UnitState], splits: Sequence[Split]) -> ReservedRanges:
        """Return the ranges of ``states`` to split, with memory for their sums. ``splits`` has their early ranges.

        Raise the device's out-of-memory error if memory is short. Nothing changes before ``set_ranges``.
        """
        ranges: dict[Place, SplitRange] = {}
        for state, split in zip(states, splits, strict=True):
            for elements, parts in _ranges_with_parts(state, split) if state.rounded is None else ():
                known = self._ranges.get((state.sub_group, elements))
                sums = (
                    known.sums
                    if known is not None and known.sums.keys() == set(parts)
                    else {part: self._device.empty(num_sums(part.numel), torch.int64) for part in parts}
                )
                ranges[state.sub_group, elements] = SplitRange(state, elements, sums)
        num_parts = sum(len(split_range.sums) for split_range in ranges.values())
        return ReservedRanges(ranges, WrittenBlocks.reserve(self._device, num_parts) if num_parts else None)

    def set_ranges(self, reserved: ReservedRanges, *, are_valid: bool) -> None:
        """Split the ``reserved`` ranges from the next update on, and join those that are not among them.

        If not ``are_valid``, because an update has failed, nothing is read from parameters. Raise ``ParameterWritten``
        if a parameter was written to that is the upper half of a master.
        """
        kept = {place for place, split_range in reserved.by_place.items() if self._has_sums_of(place, split_range)}
        try:
            if are_valid:
                moved = [known for place, known in self._ranges.items() if place not in kept]
                self._copy_to_host(moved, "when units moved")
        finally:
            self._adopt(reserved)

    def _has_sums_of(self, place: Place, split_range: SplitRange) -> bool:
        """Return whether ``split_range`` is updated as the known range at the same place is, and has its sums."""
        return place in self._ranges and self._ranges[place].sums is split_range.sums

    def _adopt(self, reserved: ReservedRanges) -> None:
        ranges = reserved.by_place
        for place, known in self._ranges.items():
            if place in ranges:
                ranges[place].is_split = known.is_split
                ranges[place].upper_is_param = known.upper_is_param and self._has_sums_of(place, ranges[place])
            elif known.is_split:
                known.join()
        self._ranges = ranges
        sums = {
            (sub_group, part): sums
            for (sub_group, _), split_range in ranges.items()
            for part, sums in split_range.sums.items()
        }
        self._sums.replace(sums, reserved.written)
        self._updated = {
            (sub_group, part): split_range
            for (sub_group, _), split_range in ranges.items()
            for part in split_range.sums
        }

    def compare(self) -> None:
        """Issue the comparison of all sums on the current stream, for ``raise_if_written``."""
        for split_range in self._ranges.values():
            if split_range.upper_is_param:
                for part in split_range.sums:
                    param = split_range.state.view(split_range.state.param, part)
                    self._sums.compare((split_range.state.sub_group, part), param)
        self._sums.copy_to_host()

    def raise_if_written(self, when: str = "when an update began") -> None:
        """Raise ``ParameterWritten`` if a sum differs. The host has waited for the stream of ``compare``.

        The error names ``when`` that was noticed.
        """
        self._sums.raise_if_written(when)

    def raise_if_found(self) -> None:
        """Raise ``ParameterWritten`` if ``before`` has found a write to a parameter in the last update.

        The host waits for the compute stream. Without this call, the next ``raise_if_written`` would raise.
        """
        if not self._sums.are_compared:
            return
        with self._compute.issue():
            self._sums.copy_to_host()
        self._compute.record(self._found)
        self._found.synchronize()
        self._sums.raise_if_written("in the last update")

    def split(self) -> None:
        """Split what is not split. Raise ``ValueError`` if a second moment is negative."""
        for split_range in self._ranges.values():
            if not split_range.is_split:
                split_range.split()

    def begin(self) -> None:
        """Update from the upper halves in host memory where only these are valid.

        This forgets what was written to these parameters, as stock does.
        """
        for split_range in self._ranges.values():
            if split_range.sums and not split_range.upper_is_param:
                self._from_host.update((split_range.state.sub_group, part) for part in split_range.sums)
                split_range.upper_is_param = True

    def before(self, update: RangeUpdate) -> None:
        """Issue the copy of upper halves to the buffer that ``update`` reads and writes, and the comparison there.

        Both are on the current stream, which updates. No other code writes to the buffer. So a write to the parameters
        before the copy is noticed by this comparison, for ``raise_if_found``. The update overwrites a later one, or the
        next comparison notices it.
        """
        place = update.sub_group, update.element_range
        split_range, buffer = self._updated[place], update.tensors.param
        assert buffer is not None
        if place in self._from_host:
            self._from_host.remove(place)
            self._device.copy(buffer, update.element_range.view(split_range.upper, split_range.elements.begin))
        else:
            self._device.copy(buffer, split_range.state.view(split_range.state.param, update.element_range))
            self._sums.compare(place, buffer)

    def after(self, update: RangeUpdate) -> None:
        """Issue the sums of the buffer after ``update``, on the current stream. It is then copied to the parameters."""
        assert update.tensors.param is not None
        self._sums.record((update.sub_group, update.element_range), update.tensors.param)

    def copy_to_host(self, when: str) -> None:
        """Make the upper halves in host memory valid, so that parameters may be written, and block the host until then.

        Raise ``ParameterWritten``, which names ``when`` that was noticed, if they were written already.
        """
        self._copy_to_host(self._ranges.values(), when)

    def join(self) -> None:
        """Make all masters fp32. The caller has called ``copy_to_host``, unless an update has failed."""
        self._from_host.clear()
        for split_range in self._ranges.values():
            if split_range.is_split:
                split_range.join()
        # An update that has failed may have found a write that no comparison has reported. A checkpoint replaces it.
        # This is last: if the accelerator has failed and raises here, all masters are fp32 already.
        self._sums.forget_written()

    def close(self) -> None:
        """Drop the references to the states."""
        self._ranges.clear()
        self._updated.clear()
        self._sums.close()

    def _copy_to_host(self, ranges: Iterable[SplitRange], when: str) -> None:
        if not any(split_range.upper_is_param for split_range in self._ranges.values()):
            return
        copied = [split_range for split_range in ranges if split_range.upper_is_param]
        self.compare()
        self._device.current_stream().record(self._compared)
        self._d2h.wait(self._compared)
        with self._d2h.issue():
            for split_range in copied:
                self._device.copy(split_range.upper, split_range.param)
        self._d2h.record(self._copied)
        self._copied.synchronize()
        self.raise_if_written(when)
        for split_range in copied:
            split_range.upper_is_param = False


def _ranges_with_parts(state: UnitState, split: Split) -> Iterable[tuple[ElementRange, tuple[ElementRange, ...]]]:
    """Yield the ranges to split, each with the parts of it that the accelerator updates at once."""
    if state.is_evicted or state.placement is Placement.CPU:
        # Units that the CPU updates, and publishes from memory of its own.
        for elements in split.early if state.is_evicted else split.rest:
            yield elements, ()
    elif state.placement is Placement.RESIDENT:
        yield state.elements, (*split.early, *split.rest)
    else:
        for elements in split.rest:
            yield elements, (elements,)
