"""Express the updates of the measured programs as schedules of ours.

Twin-Flow (DeepSpeed's ``ratio``; ``stage3.py``, ``subgroup_to_device``) offloads the first sub-groups. The others stay
on the accelerator, which updates them after the first ones.
"""

from __future__ import annotations

from functools import cache

from perf_model.published.runs import RunSetting
from perf_model.schedule.action import Action, ActionKind, Lane
from perf_model.schedule.lowering import needed_slots, serial_schedule
from perf_model.schedule.placement import Placement
from perf_model.schedule.schedule import Schedule
from perf_model.schedule.workload import Workload
from perf_model.training_run.families.decoder import gpt

VOCAB = 51200
POSITIONS = 2048
MAX_LAYERS = 256
"""More than any model has, so that a mistake in a file does not make millions of sub-groups."""


@cache
def workload_of(setting: RunSetting) -> Workload:
    """Return the sub-groups of one rank.

    They are those of a GPT with the width of the run and as many layers as bring it near ``real_params``. Its tensors
    are scaled to match ``real_params``; their sizes only matter for the cuts between sub-groups. The number of layers
    in the logs matches the parameters less well.
    """
    one, two = (gpt("published", layers, setting.hidden, 1, VOCAB, POSITIONS).numel for layers in (1, 2))
    layers = min(MAX_LAYERS, max(1, 1 + round((setting.real_params - one) / (two - one))))
    shape = gpt("published", layers, setting.hidden, 1, VOCAB, POSITIONS)
    tensors = [numel for _, numel in shape.parameters()]
    scale = setting.real_params / sum(tensors)
    scaled = [max(1, round(scale * numel)) for numel in tensors]
    return Workload.from_parameters(scaled, setting.ranks, setting.sub_group_size)


@cache
def placements_of(setting: RunSetting) -> tuple[Placement, ...]:
    """Return the placement of each sub-group of one rank."""
    count = len(workload_of(setting).units)
    offloaded = int(setting.cpu_ratio * count)
    placements = [Placement.CPU] * offloaded + [Placement.RESIDENT] * (count - offloaded)
    if setting.update_stride is not None:
        for index in range(setting.update_stride - 1, offloaded, setting.update_stride):
            placements[index] = Placement.STREAMED
    return tuple(placements)


@cache
def schedule_of(setting: RunSetting) -> Schedule:
    """Return the schedule of the update, interleaved if the setting has a stride."""
    placements = placements_of(setting)
    if setting.update_stride is None:
        return serial_schedule(placements)
    return artifact_schedule(workload_of(setting), placements)


_WAITS_OF_ARTIFACT = {
    Lane.CPU: (),
    Lane.PUBLISH: (Lane.CPU, Lane.H2D),
    Lane.H2D: (Lane.CPU, Lane.PUBLISH),
    Lane.COMPUTE: (Lane.CPU,),
    Lane.D2H: (Lane.CPU,),
}
"""The lanes whose latest actions the artifact's actions wait for, by the lane of the action."""


def artifact_schedule(workload: Workload, placements: tuple[Placement, ...]) -> Schedule:
    """Return the interleaved schedule of the original artifact: all streamed sub-groups share one buffer.

    While the CPU updates the sub-groups in between, the sub-group in the buffer is flushed, and then the next one is
    prefetched; both wait while the host publishes. The accelerator updates a sub-group after the CPU has updated those
    before it.
    """
    waiting = [index for index, placement in enumerate(placements) if placement is Placement.STREAMED]
    actions: list[Action] = []
    last: dict[Lane, str] = {}

    def issue(kind: ActionKind, unit: int, *after: str) -> str:
        """Append an action that waits for ``after`` and for what the artifact's host or its streams make it wait for.

        The host blocks until a CPU step has finished, and only then issues the actions that follow. One stream copies
        prefetched states and published parameters.
        """
        before = [*after, *(last[lane] for lane in _WAITS_OF_ARTIFACT[kind.lane] if lane in last)]
        action = Action(kind, unit, 0 if placements[unit] is Placement.STREAMED else None, tuple(dict.fromkeys(before)))
        actions.append(action)
        last[kind.lane] = action.name
        return action.name

    def prefetch_next(*after: str) -> None:
        if waiting:
            issue(ActionKind.PREFETCH, waiting.pop(0), *after)

    prefetch_next()
    for index, placement in enumerate(placements):
        if placement is Placement.CPU:
            issue(ActionKind.CPU_STEP, index)
            issue(ActionKind.PUBLISH, index)
        elif placement is Placement.STREAMED:
            updated = issue(ActionKind.GPU_STEP, index, f"{ActionKind.PREFETCH.value} {index}")
            prefetch_next(issue(ActionKind.FLUSH_STATES, index, updated))
        else:
            issue(ActionKind.GPU_STEP, index)
    num_slots, slot_numel = needed_slots(workload, placements, 1)
    return Schedule(
        num_slots=num_slots,
        slot_numel=slot_numel,
        # 4 bytes each for p, m, v and the gradient.
        staging_bytes=num_slots * slot_numel * 16,
        actions=tuple(actions),
    )
