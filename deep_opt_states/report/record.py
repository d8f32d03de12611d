"""One update that ran, as it is reported: its phases and its timeline, and the numbers that follow from them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from deep_opt_states.report.comparison import Measured
from perf_model.prediction.cost import traffic_of
from perf_model.prediction.timeline import Phase, PhaseSpan, Timeline, seconds_of
from perf_model.schedule.action import Lane


@dataclass(frozen=True)
class Progress:
    """Steps, and samples of all ranks, that training has done: DeepSpeed's ``global_steps`` and ``global_samples``."""

    step: int
    samples: int


@dataclass(frozen=True, kw_only=True)
class Work:
    """What each update does on this rank.

    ``numel`` parameters are updated, ``gpu_share`` of them on the accelerator. ``numels``, by sub-group, are what the
    schedule's actions work on: less than the sub-group where the step updates some of it at once. The model's
    parameters have ``param_bytes`` each.
    """

    numel: int
    gpu_share: float
    numels: Sequence[int]
    param_bytes: int

    def bytes_moved(self, lane: Lane, timeline: Timeline) -> float:
        """By the actions of ``lane``, which is of a direction of PCIe."""
        traffic = traffic_of(self.param_bytes)
        moved = 0.0
        for span in timeline.spans:
            if span.action.lane is lane:
                moved += getattr(traffic[span.action.kind], lane.value) * self.numels[span.action.sub_group]
        return moved


@dataclass(frozen=True, kw_only=True)
class Numbers:
    """Of one update. Rates are None where nothing was moved, or in no time that could be measured.

    ``exposed_s`` is how long the model stood still for it, ``hidden_s`` what nobody saw of it, and ``update_s`` the
    time from the decision to its end, over which ``params_per_s`` is taken; ``cpu_adam_s`` is what the CPU's updates
    took, and each direction's bytes are over the seconds in which it was busy.
    """

    update_s: float
    exposed_s: float
    hidden_s: float
    cpu_adam_s: float
    params_per_s: float | None
    h2d_bytes_per_s: float | None
    d2h_bytes_per_s: float | None
    gpu_share: float


@dataclass(frozen=True)
class UpdateRecord:
    """``progress`` is of the step that it belongs to; ``number`` counts from 1 since this process began to train."""

    number: int
    progress: Progress
    phases: Sequence[PhaseSpan]
    work: Work
    read_timeline: Callable[[], Timeline]
    """Of two device events an action: not free, and not asked before somebody needs it."""

    @cached_property
    def timeline(self) -> Timeline:
        return self.read_timeline()

    @cached_property
    def exposed_s(self) -> float:
        return seconds_of(Phase.EXPOSED, self.phases)

    @cached_property
    def measured(self) -> Measured:
        return Measured.of(self.timeline, self.phases)

    @cached_property
    def numbers(self) -> Numbers:
        timeline, work = self.timeline, self.work

        def bytes_per_s(lane: Lane) -> float | None:
            return _rate(work.bytes_moved(lane, timeline), timeline.busy_s(lane))

        return Numbers(
            update_s=self.measured.update_s,
            exposed_s=self.exposed_s,
            hidden_s=timeline.hidden_s(self.exposed_s),
            cpu_adam_s=timeline.busy_s(Lane.CPU),
            params_per_s=_rate(work.numel, self.measured.update_s),
            h2d_bytes_per_s=bytes_per_s(Lane.H2D),
            d2h_bytes_per_s=bytes_per_s(Lane.D2H),
            gpu_share=work.gpu_share,
        )

    def is_due(self, every_n_steps: float | None) -> bool:
        """Whether DeepSpeed prints at this step. Frameworks set infinity, to print never."""
        return every_n_steps is not None and self.progress.step % every_n_steps == 0


def _rate(amount: float, duration_s: float) -> float | None:
    return amount / duration_s if amount > 0 and duration_s > 0 else None
