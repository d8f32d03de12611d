"""Bound the shares of the parameters whose states fit on the accelerator, next to slots and gradients."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from perf_model.prediction.memory import DEFAULT_SETUP, TrainingSetup, block_bytes_of, resident_bytes_of
from perf_model.schedule.workload import Workload


@dataclass(frozen=True, kw_only=True)
class ResidentCapacity:
    """Upper bounds of the shares of the parameters whose states fit in GPU memory.

    ``alone`` is the share that can be resident if nothing is streamed, ``with_a_slot`` the share next to one staging
    slot. ``prefetched`` is the share whose states can be on the accelerator when the step is decided. The gradient of
    a streamed parameter takes memory, too: if the share x is streamed, at most ``next_to_gradients`` minus x times
    ``lost_to_gradients`` can be resident.
    """

    alone: float = 0.0
    with_a_slot: float = 0.0
    prefetched: float = 1.0
    next_to_gradients: float = 1.0
    lost_to_gradients: float = 0.0

    @classmethod
    def uniform(cls, share: float) -> ResidentCapacity:
        """Return the capacity of ``share``, with or without a slot, and no limit for prefetches."""
        return cls(alone=share, with_a_slot=share)

    @classmethod
    def from_gpu_bytes(
        cls, workload: Workload, gpu_bytes: int | None, setup: TrainingSetup = DEFAULT_SETUP
    ) -> ResidentCapacity:
        """Return the capacity of ``gpu_bytes`` of GPU memory (None: unlimited)."""
        if gpu_bytes is None:
            return cls.uniform(1.0)
        numels = np.sort([unit.numel for unit in workload.units])
        states_bytes = np.array([resident_bytes_of(numel, setup.widths) for numel in numels.tolist()])
        gradient_bytes = np.array([block_bytes_of(numel * setup.widths.grad) for numel in numels.tolist()])
        if setup.stages_params:
            gpu_bytes -= block_bytes_of(int(numels[0]) * setup.widths.param)
        if setup.accumulates:
            gpu_bytes -= int(gradient_bytes.sum())
            gradient_bytes = np.zeros_like(gradient_bytes)
        each_bytes = states_bytes + gradient_bytes
        next_to_a_slot_bytes = gpu_bytes - int(states_bytes.min())
        alone = _share_that_fits(gpu_bytes, numels, each_bytes)
        per_resident, per_streamed = (each_bytes / numels).min(), (gradient_bytes / numels).min()
        return cls(
            alone=alone,
            with_a_slot=_share_that_fits(gpu_bytes - int(each_bytes.min()), numels, each_bytes),
            prefetched=alone,
            next_to_gradients=max(0.0, float(next_to_a_slot_bytes / per_resident / workload.numel)),
            lost_to_gradients=float(per_streamed / per_resident),
        )

    def next_to_streamed(self, share: float) -> float:
        """Return the largest share that can be resident next to ``share`` of the parameters that are streamed."""
        fits = min(self.with_a_slot, self.next_to_gradients - share * self.lost_to_gradients, 1.0 - share)
        return max(0.0, fits)

    @property
    def most_streamed(self) -> float:
        """Return the largest share that can be streamed if nothing is resident."""
        lost = self.lost_to_gradients
        return 1.0 if self.next_to_gradients >= lost else self.next_to_gradients / lost


def _share_that_fits(gpu_bytes: int, numels: npt.NDArray[np.int64], each_bytes: npt.NDArray[np.int64]) -> float:
    """Return an upper bound of the share of units of lengths ``numels`` that fit; they take ``each_bytes``.

    The share is at most that of the units with the fewest bytes per parameter, filled up to ``gpu_bytes``. It is
    also at most that of the N largest units, where N is the number of the smallest units that would fit. ``numels``
    are in ascending order.
    """
    count = int(np.searchsorted(np.cumsum(np.sort(each_bytes)), max(0, gpu_bytes), side="right"))
    densest = np.argsort(each_bytes / numels)
    taken_bytes = np.concatenate([[0], np.cumsum(each_bytes[densest])])
    most = np.interp(max(0, gpu_bytes), taken_bytes, np.concatenate([[0], np.cumsum(numels[densest])]))
    return float(min(most, numels[len(numels) - count :].sum()) / numels.sum())
