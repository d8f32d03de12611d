"""What the measured programs did in an update, as schedules of ours.

Twin-Flow (DeepSpeed's ``ratio``; ``stage3.py``, ``subgroup_to_device``) offloads the first sub-groups; the others stay
on the accelerator, and are updated there after them.
"""

from __future__ import annotations

from functools import cache

from perf_model.published.runs import Setting
from perf_model.schedule.action import Action, ActionKind
from perf_model.schedule.lowering import needed_slots, serial_schedule
from perf_model.schedule.placement import Placement
from perf_model.schedule.schedule import Schedule
from perf_model.schedule.workload import Workload
from perf_model.training_run.model import gpt

VOCAB = 51200
POSITIONS = 2048
MOST_LAYERS = 256
"""More than any model has; keeps a mistake in a file from becoming millions of sub-groups."""


@cache
def workload_of(setting: Setting) -> Workload:
    """The sub-groups of one rank.

    Of a GPT that has the run's width and as many layers as bring it near ``real_params``, its tensors scaled to meet
    them: their sizes only matter for where sub-groups are cut. What the logs print as layers fits the parameters less.
    """
    one, two = (gpt("published", layers, setting.hidden, 1, VOCAB, POSITIONS).numel for layers in (1, 2))
    layers = min(MOST_LAYERS, max(1, 1 + round((setting.real_params - one) / (two - one))))
    tensors = gpt("published", layers, setting.hidden, 1, VOCAB, POSITIONS).parameters()
    scale = setting.real_params / sum(tensors)
    scaled = [max(1, round(scale * numel)) for numel in tensors]
    return Workload.of_parameters(scaled, setting.ranks, setting.sub_group_size)


@cache
def placements_of(setting: Setting) -> tuple[Placement, ...]:
    count = len(workload_of(setting).sub_groups)
    offloaded = int(setting.cpu_ratio * count)
    placements = [Placement.CPU] * offloaded + [Placement.RESIDENT] * (count - offloaded)
    if setting.update_stride is not None:
        for index in range(setting.update_stride - 1, offloaded, setting.update_stride):
            placements[index] = Placement.STREAMED
    return tuple(placements)


@cache
def schedule_of(setting: Setting) -> Schedule:
    placements = placements_of(setting)
    if setting.update_stride is None:
        return serial_schedule(placements)
    return artifact_schedule(workload_of(setting), placements)


def artifact_schedule(workload: Workload, placements: tuple[Placement, ...]) -> Schedule:
    """The original's interleaving: all streamed sub-groups pass through a single buffer.

    While the CPU updates those in between, and their publishing does not hold it up, the buffer's occupant is flushed
    and then the next one prefetched, in series. The accelerator's turn comes when the CPU has updated those before.
    """
    waiting = [index for index, placement in enumerate(placements) if placement is Placement.STREAMED]
    actions: list[Action] = []

    def prefetch_next(*after: str) -> None:
        if waiting:
            actions.append(Action(ActionKind.PREFETCH, waiting.pop(0), 0, after))

    prefetch_next()
    for index, placement in enumerate(placements):
        if placement is Placement.CPU:
            # The host stands still at PUBLISH until the CPU is done, and only then issues what follows.
            step = Action(ActionKind.CPU_STEP, index)
            actions += [step, Action(ActionKind.PUBLISH, index, None, (step.name,))]
        elif placement is Placement.STREAMED:
            step = Action(ActionKind.GPU_STEP, index, 0, (f"{ActionKind.PREFETCH.value} {index}",))
            flush = Action(ActionKind.FLUSH_STATES, index, 0, (step.name,))
            actions += [step, flush]
            prefetch_next(flush.name)
        else:
            actions.append(Action(ActionKind.GPU_STEP, index))
    num_slots, slot_numel = needed_slots(workload, placements, 1)
    return Schedule(
        num_slots=num_slots,
        slot_numel=slot_numel,
        # p, m, v and the gradient, all fp32.
        staging_bytes=num_slots * slot_numel * 16,
        actions=tuple(actions),
    )
