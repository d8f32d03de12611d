"""Turn the config block into a plan and a prediction of its update time."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from deep_opt_states.config import Config
from deep_opt_states.host.cores import CoreShare
from deep_opt_states.names import CONFIG_KEY
from deep_opt_states.profiler.cache import quick_profile
from deep_opt_states.profiler.provenance import smallest_node
from deep_opt_states.profiler.ranks import training_ranks
from deep_opt_states.report.comparison import PredictedUpdate
from deep_opt_states.zero.internals.agreement import raise_together, same_on_all_ranks
from deep_opt_states.zero.internals.log import log_rank_0
from deep_opt_states.zero.start.devices import AcceleratorChoice
from perf_model.prediction.cost import CostModel
from perf_model.prediction.hardware import HardwareProfile, ProfileError
from perf_model.prediction.memory_summary import summary_by_placement
from perf_model.prediction.overlap_windows import Windows
from perf_model.prediction.simulate import NO_WINDOWS, simulate
from perf_model.schedule.host_layout import Widths
from perf_model.schedule.placement import Placement
from perf_model.schedule.plan import UpdatePlan
from perf_model.schedule.workload import Workload
from perf_model.search.budgets import Budgets
from perf_model.search.planner import plan_updates
from perf_model.search.reasons import why_nothing_is_streamed


@dataclass(frozen=True)
class PlannedRun:
    """The plan of a training run, with the prediction of its updates."""

    plan: UpdatePlan
    predict: Callable[[Windows], PredictedUpdate] | None
    """Predicts an update, given how long backward and forward can overlap it; None if no prediction is requested."""
    why_nothing_is_streamed: str = ""
    """The reason why the planner streams nothing; empty if it streams, or if the config itself gives the placement."""

    def at_start(self) -> str:
        """Return the lines to log before the first step: the plan, and the reason why nothing is streamed."""
        return "\n".join(filter(None, [str(self.plan), self.why_nothing_is_streamed]))

    def at_end(self, widths: Widths) -> str:
        """Return the lines to log after training: per placement the memory of one rank, and the reason."""
        lines = filter(None, [*summary_by_placement(self.plan, widths), self.why_nothing_is_streamed])
        return "\n  ".join(["planned for rank 0:", *lines])


def make_plan(
    config: Config,
    workload: Workload,
    accelerator: AcceleratorChoice,
    widths: Widths,
    share: CoreShare,
    *,
    params_on_host: bool = False,
) -> PlannedRun:
    """Return the plan that the block specifies, the same on every rank. A collective over all ranks.

    The block gives the placements, or a rule for them; otherwise rank 0 plans them, with a profile that was measured
    with all ranks. ``share`` has the threads that update on the CPU; ``widths`` are the bytes per parameter of the
    model and of its gradients. ``params_on_host``: the model's partitions are in page-locked host memory.

    Raise ``ConfigError`` or ``Unsupported`` for a placement that is impossible here, ``ProfileError`` for a profile
    that cannot be used.
    """
    profile = _load_profile(config, accelerator, share) if config.predicts else None
    cost = None if profile is None else CostModel.from_profile(profile, widths.param, params_on_host=params_on_host)
    if config.placement == "planned":
        assert cost is not None
        # The memory model assumes gradients in the model's dtype and parameters on the accelerator. Wider gradients
        # take more memory there, and offloaded parameters need a buffer for the largest sub-group.
        extra_bytes = max(0, widths.grad - widths.param) * workload.numel
        if params_on_host:
            extra_bytes += widths.param * max((sub_group.numel for sub_group in workload.sub_groups), default=0)
        plan, why = _plan_on_rank_0(config, workload, cost, accelerator, widths, extra_bytes)
    else:
        plan = same_on_all_ranks(lambda: accelerator.validate(config.plan(workload)), lambda plan: plan.fingerprint)
        why = ""
    if profile is None or cost is None:
        return PlannedRun(plan, None)
    return PlannedRun(plan, partial(_predict, plan, cost, profile.has_accelerator), why)


def _predict(plan: UpdatePlan, cost: CostModel, has_accelerator: bool, windows: Windows) -> PredictedUpdate:
    # Without an accelerator, the same cores compute the model and the update: nothing can be hidden.
    usable = windows if has_accelerator else NO_WINDOWS
    timeline = simulate(plan.schedule, plan.workload, cost, usable)
    phases = usable.phases(timeline, plan.workload)
    return PredictedUpdate(timeline, usable.exposed_s(timeline, plan.workload), phases)


def _load_profile(config: Config, accelerator: AcceleratorChoice, share: CoreShare) -> HardwareProfile:
    """Return the profile that the config names, read by rank 0, or measure a quick one with all ranks."""
    ranks = training_ranks()
    if config.profile is None:
        device = None if accelerator.slots_on_host else accelerator.device
        return quick_profile(device, ranks, log_rank_0, threads=share.threads, cores=share.cores)
    path = Path(config.profile)
    # Only rank 0 reads the file: other nodes need not have it.
    text = raise_together(lambda: HardwareProfile.read(path).to_json() if ranks.rank == 0 else "")
    profile = HardwareProfile.from_json(ranks.gather(text)[0])
    _refuse_other_machine(profile, path, accelerator)
    measured, training = profile.provenance.ranks, smallest_node(ranks, os.environ).ranks
    if measured != training:
        log_rank_0(
            f"{path}: measured with {measured} rank{'' if measured == 1 else 's'} per node at once, while {training} "
            f"train; shared resources are predicted for {measured}"
        )
    return profile


def _refuse_other_machine(profile: HardwareProfile, path: Path, accelerator: AcceleratorChoice) -> None:
    if profile.has_accelerator != accelerator.slots_on_host:
        return
    trains, has = ("the CPU", "with a GPU") if accelerator.slots_on_host else ("a GPU", "without one")
    raise ProfileError(
        f"{CONFIG_KEY}.profile: must be of a machine like the one that trains, here on {trains}, found {path} of one "
        f"{has}.\nWrite one here with: deep-opt-states profile --output profile.json"
    )


def _plan_on_rank_0(
    config: Config,
    workload: Workload,
    cost: CostModel,
    accelerator: AcceleratorChoice,
    widths: Widths,
    extra_bytes: int,
) -> tuple[UpdatePlan, str]:
    """Return rank 0's plan on every rank, and the reason if it streams nothing.

    The plan fits every rank, because DeepSpeed pads the partitions to equal lengths. ``extra_bytes`` is GPU memory that
    the memory model does not count.
    """
    ranks = training_ranks()

    def decide() -> tuple[list[str], int, list[int] | None, str]:
        if ranks.rank > 0:
            return [], 0, None, ""
        gpu_bytes = accelerator.memory_for_states_bytes(config.gpu_memory_gb)
        budgets = Budgets(gpu_bytes=max(0, gpu_bytes - extra_bytes))
        plan = plan_updates(workload, cost, budgets, param_bytes=widths.param).plan
        # Forward waits for every action that is issued before the ones that it needs. In the planner's order it would
        # wait for more of them; ``AdaptiveSchedule`` uses forward's own order as soon as that is known.
        order = None if plan.order is None or config.overlap_forward else list(plan.order)
        why = why_nothing_is_streamed(
            plan,
            cost,
            Budgets(gpu_bytes=gpu_bytes),
            widths.param,
            extra_gradient_bytes=extra_bytes,
            unavailable=accelerator.why_only_the_cpu_updates(),
        )
        return [placement.value for placement in plan.placements], plan.num_slots, order, why or ""

    placements, num_slots, order, why = ranks.gather(raise_together(decide))[0]
    plan = same_on_all_ranks(
        lambda: UpdatePlan(
            workload=workload,
            placements=tuple(map(Placement, placements)),
            num_slots=num_slots,
            order=None if order is None else tuple(order),
        ),
        lambda plan: plan.fingerprint,
    )
    return plan, why
