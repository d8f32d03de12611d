"""Derive the reported numbers of one update from its phases and its timeline."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from deep_opt_states.report.comparison import MeasuredUpdate
from perf_model.prediction.cost import traffic_by_action
from perf_model.prediction.timeline import Phase, PhaseSpan, Timeline, seconds_of
from perf_model.schedule.action import Lane
from perf_model.schedule.host_layout import Widths


@dataclass(frozen=True)
class StepCounts:
    """The steps and the samples of all ranks that training has done: ``global_steps``, ``global_samples``."""

    step: int
    samples: int


LANES_OF_DIRECTION = {"h2d": (Lane.H2D, Lane.PUBLISH), "d2h": (Lane.D2H,)}
"""The lanes that only copy, by their direction.

The compute lane copies parameters down if DeepSpeed offloads them, but the time of these copies is not measured apart
from that of Adam.
"""


@dataclass(frozen=True, kw_only=True)
class Work:
    """The work of each update on this rank.

    ``numel`` parameters are updated, ``gpu_share`` of them on the accelerator. ``numels`` holds the parameters of each
    unit. ``widths`` are the bytes per parameter of the tensors that are copied.
    """

    numel: int
    gpu_share: float
    numels: Sequence[int]
    widths: Widths

    def bytes_moved(self, direction: str, timeline: Timeline) -> float:
        """Return the bytes that the actions moved in ``direction`` of PCIe, a key of ``LANES_OF_DIRECTION``."""
        traffic = traffic_by_action(self.widths.param, params_on_host=not self.widths.publishes)
        moved = 0.0
        for span in timeline.spans:
            if span.action.lane in LANES_OF_DIRECTION[direction]:
                moved += getattr(traffic[span.action.kind], direction) * self.numels[span.action.unit]
        return moved


@dataclass(frozen=True, kw_only=True)
class Numbers:
    """The numbers of one update. Rates are None if nothing was moved or the time was too short to measure.

    ``exposed_s`` is the time that the model waited for the update, ``hidden_s`` the time of its work that overlapped
    with backward and forward, and ``update_s`` the time from the decision that the step is not skipped to the end of
    the update, which ``params_per_s`` is relative to. ``cpu_adam_s`` is the time of the CPU's updates. Each direction's
    bytes are divided by the seconds in which that direction was busy.
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
    """One update that ran.

    ``number`` counts the updates of this process from 1, and ``counts`` belongs to the step of the update. ``phases``
    gives the times when the model waited for the update and when it computed concurrently with it.
    """

    number: int
    counts: StepCounts
    phases: Sequence[PhaseSpan]
    work: Work
    read_timeline: Callable[[], Timeline]
    """The function that reads two device events per action; it is only called if a number needs the timeline."""

    @cached_property
    def timeline(self) -> Timeline:
        """Return the measured timeline, which is read once."""
        return self.read_timeline()

    @cached_property
    def exposed_s(self) -> float:
        """Return the seconds that the model waited for the update."""
        return seconds_of(Phase.EXPOSED, self.phases)

    @cached_property
    def measured(self) -> MeasuredUpdate:
        """Return the seconds that are compared with the prediction."""
        return MeasuredUpdate.from_timeline(self.timeline, self.phases)

    @cached_property
    def numbers(self) -> Numbers:
        """Return the reported numbers."""
        timeline, work = self.timeline, self.work

        def bytes_per_s(direction: str) -> float | None:
            return _rate(work.bytes_moved(direction, timeline), timeline.busy_s(*LANES_OF_DIRECTION[direction]))

        return Numbers(
            update_s=self.measured.update_s,
            exposed_s=self.exposed_s,
            hidden_s=timeline.hidden_s(self.exposed_s),
            cpu_adam_s=timeline.busy_s(Lane.CPU),
            params_per_s=_rate(work.numel, self.measured.update_s),
            h2d_bytes_per_s=bytes_per_s("h2d"),
            d2h_bytes_per_s=bytes_per_s("d2h"),
            gpu_share=work.gpu_share,
        )

    def is_due(self, every_n_steps: float | None) -> bool:
        """Return whether DeepSpeed prints at this step. Frameworks set ``every_n_steps`` to infinity to never print."""
        return every_n_steps is not None and self.counts.step % every_n_steps == 0


def _rate(amount: float, duration_s: float) -> float | None:
    return amount / duration_s if amount > 0 and duration_s > 0 else None
