"""From the block to a plan and to what it is predicted to take; each function is a collective over all ranks."""

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
from deep_opt_states.report.comparison import Predicted
from deep_opt_states.zero.internals.agreement import agree
from deep_opt_states.zero.internals.log import say
from deep_opt_states.zero.start.devices import AcceleratorChoice
from perf_model.prediction.cost import CostModel
from perf_model.prediction.hardware import HardwareProfile, ProfileError
from perf_model.prediction.memory_summary import inventory
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
class Intention:
    """``predict``, given what goes on beside the update, is None where nobody asks for it. ``why_nothing_is_streamed``
    is empty where something is, and where the config says itself what is to be placed where."""

    plan: UpdatePlan
    predict: Callable[[Windows], Predicted] | None
    why_nothing_is_streamed: str = ""

    def at_start(self) -> str:
        """Return the plan in a line, and the reason in another one."""
        return "\n".join(filter(None, [str(self.plan), self.why_nothing_is_streamed]))

    def at_end(self, widths: Widths) -> str:
        """Return a line for each placement, with what it takes of one rank's memory, and the reason."""
        lines = filter(None, [*inventory(self.plan, widths), self.why_nothing_is_streamed])
        return "\n  ".join(["planned for rank 0:", *lines])


def intend(
    config: Config,
    workload: Workload,
    accelerator: AcceleratorChoice,
    widths: Widths,
    share: CoreShare,
    *,
    params_on_host: bool = False,
) -> Intention:
    """The plan that the block asks for: by its rule, or rank 0's, for the profile that all ranks were measured for.

    ``share`` has the threads that update on the CPU; ``widths`` are of the model and its gradients.
    ``params_on_host``: the model's partitions are in page-locked host memory.

    Raises ``ConfigError`` or ``Unsupported`` for a placement that cannot be had, ``ProfileError`` for a profile.
    """
    profile = _profile(config, accelerator, share) if config.predicts else None
    cost = None if profile is None else CostModel.of(profile, widths.param, params_on_host=params_on_host)
    if config.placement == "planned":
        assert cost is not None
        # The memory model has gradients in the model's dtype, and parameters on the accelerator.
        beside_bytes = max(0, widths.grad - widths.param) * workload.numel
        if params_on_host:
            beside_bytes += widths.param * max((sub_group.numel for sub_group in workload.sub_groups), default=0)
        plan, why = _of_rank_0(config, workload, cost, accelerator, widths, beside_bytes)
    else:
        plan, why = agree(lambda: accelerator.accept(config.plan(workload)), lambda plan: plan.fingerprint), ""
    if profile is None or cost is None:
        return Intention(plan, None)
    return Intention(plan, partial(_predict, plan, cost, profile.has_accelerator), why)


def _predict(plan: UpdatePlan, cost: CostModel, has_accelerator: bool, windows: Windows) -> Predicted:
    # Where the CPU trains, the same cores do both: nothing is taken to be hidden.
    beside = windows if has_accelerator else NO_WINDOWS
    timeline = simulate(plan.schedule, plan.workload, cost, beside)
    phases = beside.phases(timeline, plan.workload)
    return Predicted(timeline, beside.exposed_s(timeline, plan.workload), phases)


def _profile(config: Config, accelerator: AcceleratorChoice, share: CoreShare) -> HardwareProfile:
    """Rank 0's file, or a quick profile of all ranks."""
    ranks = training_ranks()
    if config.profile is None:
        device = None if accelerator.steps_on_host else accelerator.device
        return quick_profile(device, ranks, say, threads=share.threads, cores=share.cores)
    path = Path(config.profile)
    # Other nodes need not have the file.
    text = agree(lambda: HardwareProfile.read(path).to_json() if ranks.rank == 0 else "", lambda _: "read")
    profile = HardwareProfile.from_json(ranks.gather(text)[0])
    _refuse_other_machine(profile, path, accelerator)
    profiled, train = profile.provenance.ranks, smallest_node(ranks, os.environ).ranks
    if profiled != train:
        say(
            f"{path}: measured with {profiled} rank{'' if profiled == 1 else 's'} on a node at once, while {train} "
            f"train; what they share is predicted for {profiled}"
        )
    return profile


def _refuse_other_machine(profile: HardwareProfile, path: Path, accelerator: AcceleratorChoice) -> None:
    if profile.has_accelerator != accelerator.steps_on_host:
        return
    trains, has = ("the CPU", "with a GPU") if accelerator.steps_on_host else ("a GPU", "without one")
    raise ProfileError(
        f"{CONFIG_KEY}.profile: must be of a machine like the one that trains, here on {trains}, found {path} of one "
        f"{has}.\nWrite one here with: deep-opt-states profile --output profile.json"
    )


def _of_rank_0(
    config: Config,
    workload: Workload,
    cost: CostModel,
    accelerator: AcceleratorChoice,
    widths: Widths,
    beside_bytes: int,
) -> tuple[UpdatePlan, str]:
    """Return the plan, and why it streams nothing if it does not.

    Every rank's workload is as long: DeepSpeed pads the partitions.
    """
    ranks = training_ranks()

    def decide() -> tuple[list[str], int, list[int] | None, str]:
        if ranks.rank > 0:
            return [], 0, None, ""
        gpu_bytes = accelerator.memory_for_states_bytes(config.gpu_memory_gb)
        budgets = Budgets(gpu_bytes=max(0, gpu_bytes - beside_bytes))
        plan = plan_updates(workload, cost, budgets, param_bytes=widths.param).plan
        # Forward waits for all that is issued before what it needs: an order of its own would make it wait for more.
        order = None if plan.order is None or config.overlap_forward else list(plan.order)
        why = why_nothing_is_streamed(
            plan,
            cost,
            Budgets(gpu_bytes=gpu_bytes),
            widths.param,
            extra_gradient_bytes=beside_bytes,
            unavailable=accelerator.why_only_the_cpu_updates(),
        )
        return [placement.value for placement in plan.placements], plan.num_slots, order, why or ""

    placements, num_slots, order, why = ranks.gather(agree(decide, lambda _: "planned"))[0]
    plan = agree(
        lambda: UpdatePlan(
            workload=workload,
            placements=tuple(map(Placement, placements)),
            num_slots=num_slots,
            order=None if order is None else tuple(order),
        ),
        lambda plan: plan.fingerprint,
    )
    return plan, why
