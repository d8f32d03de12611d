"""Turn the config block into a plan and a prediction of its update time."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import zip_longest
from operator import attrgetter
from pathlib import Path
from typing import Any

from deep_opt_states import log
from deep_opt_states.config import Config, Unsupported
from deep_opt_states.host.cores import CoreShare
from deep_opt_states.names import CONFIG_KEY
from deep_opt_states.profiler.cache import quick_profile
from deep_opt_states.profiler.ranks import Ranks, ranks_by_node
from deep_opt_states.report.record import PredictedUpdate
from deep_opt_states.zero.internals.agreement import gather_values, raise_together, same_on_all_ranks
from deep_opt_states.zero.start.devices import AcceleratorChoice
from deep_opt_states.zero.start.disk import with_disks
from deep_opt_states.zero.step.gpu_memory import GpuBudget
from perf_model.plan_request import PlanRequest
from perf_model.planner import UNIT_SIZES
from perf_model.prediction.cost import CostModel
from perf_model.prediction.hardware import HardwareProfile, ProfileError
from perf_model.prediction.memory import Budgets, TrainingSetup, summary_by_placement
from perf_model.prediction.overlap_windows import Windows
from perf_model.prediction.simulate import NO_WINDOWS, simulate
from perf_model.schedule.host_layout import Widths
from perf_model.schedule.plan import UpdatePlan
from perf_model.schedule.uses import with_uses
from perf_model.schedule.workload import Partition
from perf_model.units import counted


@dataclass(frozen=True)
class PlannedRun:
    """The plan of a training run, with the prediction of its updates."""

    plan: UpdatePlan
    predict: Callable[[UpdatePlan, Sequence[str] | None, Windows], PredictedUpdate] | None
    """Predicts an update from its plan, the uses of parameters in forward and the windows; None without a profile."""
    why_nothing_is_streamed: str = ""
    """The reason why the planner streams nothing; empty if it streams, or did not plan."""
    request: PlanRequest | None = None
    """The inputs of the planner; None if the config gives all placements."""
    notes: tuple[str, ...] = ()
    profile: HardwareProfile | None = None

    def at_start(self) -> str:
        """Return the line to log at start: the plan, the reason why nothing is streamed, and the notes."""
        return " ".join(filter(None, [f"{self.plan}.", self.why_nothing_is_streamed, *self.notes]))

    def at_end(self, plan: UpdatePlan, widths: Widths) -> list[str]:
        """Return the lines to log after training with ``plan``: the memory of one rank per placement, and why."""
        why = [self.why_nothing_is_streamed] if plan == self.plan and self.why_nothing_is_streamed else []
        return [*summary_by_placement(plan, widths), *why]


def make_plan(
    config: Config,
    sub_groups: Sequence[Sequence[Partition]],
    setup: TrainingSetup,
    accelerator: AcceleratorChoice,
    budget: GpuBudget | None,
    share: CoreShare,
) -> PlannedRun:
    """Return the plan that the block specifies, the same on every rank. This is a collective over all ranks.

    If the block gives no placements, rank 0 plans. Raise ``ConfigError`` or ``Unsupported`` for an impossible
    placement, ``ProfileError`` for an unusable profile.
    """
    workload = config.workload(sub_groups)
    notes: list[str] = []
    predict, request, why, profile = None, None, "", None
    if config.predicts(workload):
        profile = _load_profile(config, accelerator, share, notes.append)
        cost = with_disks(config, CostModel.from_profile(profile, setup.widths), workload, setup.widths, notes.append)
        predict = partial(_predict, cost, profile.has_accelerator, sub_groups)
    if config.plans(workload):
        unlimited = PlanRequest(
            sub_groups=sub_groups,
            unit_sizes=UNIT_SIZES if config.unit_size is None else (config.unit_size,),
            cost=cost,
            budgets=Budgets(),
            windows=Windows(),
            setup=setup,
            rules=config.rules,
            all_eager=config.all_eager,
            disk_unit_size=config.disk_unit_size,
        )
        if budget is not None:
            # Rules do not ask for sums of other units on the accelerator, which the plan below also counts.
            budget.require(replace(unlimited, setup=replace(setup, sums_on_accelerator=False)).fixed_bytes)
        gpu_bytes = max(0 if budget is None else budget.bytes, unlimited.fixed_bytes)
        request = replace(unlimited, budgets=Budgets(gpu_bytes=gpu_bytes))
        plan, why = plan_on_rank_0(request, accelerator)
        raise_together(lambda: accelerator.validate(plan))
    else:
        plan = same_on_all_ranks(lambda: accelerator.validate(config.plan(workload, setup)), attrgetter("fingerprint"))
    return PlannedRun(plan, predict, why, request, tuple(notes), profile)


def check_even_shards(sub_groups: Sequence[Sequence[Partition]]) -> None:
    """Raise ``Unsupported`` on every rank unless all partitions have the same sizes on all. This is a collective."""
    # Rank 0 plans for all ranks. DeepSpeed pads data-parallel partitions, but AutoTP or an ``mpu`` may shard unevenly.
    by_rank = gather_values([(partition.name, partition.numel) for group in sub_groups for partition in group])
    rank = next((rank for rank, other in enumerate(by_rank) if other != by_rank[0]), None)
    if rank is None:
        return
    pairs = zip_longest(by_rank[0], by_rank[rank], fillvalue=("parameters", 0))
    (name, numel), (other_name, other_numel) = next(pair for pair in pairs if pair[0] != pair[1])
    raise Unsupported(
        f"tensor_parallel.autotp_size, or the model-parallel size of the mpu: must divide the layers into shards of "
        f"the same sizes on all ranks, found {numel:,} elements of {name} on rank 0 and {other_numel:,} elements of "
        f"{other_name} on rank {rank}.\n"
        f"Choose a size that divides the attention heads, the key-value heads and the widths of the model: AutoTP "
        f"divides others unevenly. Without tensor parallelism, build the same model on every rank. "
        f'Or set "enabled": false in "{CONFIG_KEY}".'
    )


def plan_on_rank_0(request: PlanRequest, accelerator: AcceleratorChoice) -> tuple[UpdatePlan, str]:
    """Return rank 0's plan on every rank, and the reason if it streams nothing. This is a collective over all ranks."""
    ranks = Ranks()

    def decide() -> tuple[dict[str, Any], str]:
        if ranks.rank > 0:
            return {}, ""
        found = request.plan()
        unavailable = accelerator.why_only_the_cpu_updates()
        if not unavailable and not request.budgets.gpu_bytes:
            unavailable = "the planner uses no GPU memory until the first steps have shown how much is free."
        return found.to_json_dict(), request.why_nothing_is_streamed(found.plan, unavailable)

    decisions, why = ranks.gather(raise_together(decide))[0]
    return same_on_all_ranks(lambda: request.restore(decisions), lambda plan: plan.fingerprint), why


def _predict(
    cost: CostModel,
    has_accelerator: bool,
    sub_groups: Sequence[Sequence[Partition]],
    plan: UpdatePlan,
    uses: Sequence[str] | None,
    windows: Windows,
) -> PredictedUpdate:
    if uses is not None:
        plan = replace(plan, workload=with_uses(plan.workload, sub_groups, uses))
    # Without an accelerator, model and update use the same cores: nothing can be hidden.
    usable = windows if has_accelerator else NO_WINDOWS
    timeline = simulate(plan.schedule, plan.workload, cost, usable)
    phases = usable.phases(timeline, plan.workload, cost)
    return PredictedUpdate(timeline, usable.added_time(timeline, plan.workload, cost).exposed_s, phases)


def _load_profile(
    config: Config, accelerator: AcceleratorChoice, share: CoreShare, note: Callable[[str], None]
) -> HardwareProfile:
    """Return the profile that the config names, read by rank 0, or measure a quick one with all ranks."""
    ranks = Ranks()
    if config.profile is None:
        device = None if accelerator.slots_on_host else accelerator.device
        return quick_profile(device, ranks, log.warn, note, threads=share.threads, cores=share.cores)
    path = Path(config.profile)
    text = raise_together(lambda: HardwareProfile.read(path).to_json() if ranks.rank == 0 else "")
    profile = HardwareProfile.from_json(ranks.gather(text)[0])
    if profile.has_accelerator == accelerator.slots_on_host:
        trains, has = ("the CPU", "with a GPU") if accelerator.slots_on_host else ("a GPU", "without one")
        raise ProfileError(
            f"{CONFIG_KEY}.profile: must be of a machine like the one that trains, here on {trains}, found {path} of "
            f"one {has}.\nWrite one here with: deep-opt-states profile --output profile.json"
        )
    measured, training = profile.provenance.ranks, max(map(len, ranks_by_node(ranks, os.environ)))
    if measured != training:
        log.warn(
            f"{path}: measured with {counted(measured, 'rank')} per node at the same time, while {training} "
            f"train; shared resources are predicted for {measured}"
        )
    return profile
