"""Orders in which the host turns to the sub-groups: to update a streamed or a resident one, to publish a CPU one.

All lanes are to finish together. The host blocks until a CPU sub-group is updated before it publishes it, so before
that it issues the share of the others that should be done by then, counted in parameters.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from perf_model.schedule.placement import Placement
from perf_model.schedule.workload import Workload


def as_forward_needs(
    workload: Workload, placements: Sequence[Placement], first_use: Sequence[int] | None = None
) -> tuple[int, ...]:
    """Those of each placement in the order of ``first_use``, which names every sub-group, or by index where it is not
    known; residents first, as they are ready at once."""
    in_order = range(len(placements)) if first_use is None else first_use
    by_placement = {its: [index for index in in_order if placements[index] is its] for its in Placement}
    residents = by_placement.pop(Placement.RESIDENT)
    return (*residents, *_merge_by_progress(workload, by_placement))


def rising_and_falling(workload: Workload, placements: Sequence[Placement]) -> tuple[int, ...]:
    """Of each placement, the longer the nearer to the middle; residents between the streamed, which need the GPU, too.

    When the first is prefetched nothing can be flushed yet, and when the last is flushed nothing is left to prefetch:
    there a long one, often the embedding, costs the most.
    """
    by_placement: dict[Placement, list[int]] = {}
    for placement in Placement:
        by_length = sorted(_placed(placements, placement), key=lambda index: workload.sub_groups[index].numel)
        by_placement[placement] = [*by_length[::2], *reversed(by_length[1::2])]
    return tuple(_merge_by_progress(workload, by_placement))


def _placed(placements: Sequence[Placement], placement: Placement) -> list[int]:
    return [index for index, its in enumerate(placements) if its is placement]


def _merge_by_progress(workload: Workload, by_placement: dict[Placement, list[int]]) -> Iterable[int]:
    """CPU sub-groups when they should be done, the others when they should be half done."""
    due: list[tuple[float, bool, int]] = []
    for placement, indices in by_placement.items():
        total = sum(workload.sub_groups[index].numel for index in indices)
        seen = 0
        for index in indices:
            numel = workload.sub_groups[index].numel
            done = seen + numel
            on_cpu = placement is Placement.CPU
            due.append(((done if on_cpu else seen + numel / 2) / total, on_cpu, index))
            seen = done
    return (index for _, _, index in sorted(due))
