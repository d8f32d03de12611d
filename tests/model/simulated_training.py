"""A training run whose updates are simulated with the true rates of a machine, which may change at any step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random

from perf_model.plan_request import PlanRequest
from perf_model.prediction.cost import CostModel, Resource
from perf_model.prediction.memory import Budgets
from perf_model.prediction.overlap_windows import Windows
from perf_model.prediction.simulate import simulate
from perf_model.prediction.timeline import Timeline
from perf_model.presets.machines import MACHINES
from perf_model.presets.models import MODELS
from perf_model.replanning.decision import Decision
from perf_model.replanning.measurements import StepMeasurement, TrailingWindow
from perf_model.replanning.policy import ReplanningPolicy
from perf_model.replanning.rates import RelativeRates
from perf_model.schedule.plan import UpdatePlan
from perf_model.training_run.job import Job
from perf_model.training_run.micro_batch import TRAINING_SHARE

NOISE = 0.05
"""The standard deviation of every measured duration from step to step, relative to the true one."""


@dataclass(frozen=True)
class Machine:
    """The true costs and windows."""

    cost: CostModel
    windows: Windows

    def scaled(self, scale: float, *resources: Resource) -> Machine:
        """Return the machine with that share of the capacity of ``resources``."""
        return replace(self, cost=RelativeRates(scales={resources: scale}).apply(self.cost))


def request_for(machine: str, model: str, ranks: int, unit_size: int, gpu_gb: float) -> PlanRequest:
    """Return the request of a run with micro-batch 1 on a preset machine, with ``gpu_gb`` for optimizer states."""
    job = Job(shape=MODELS[model], world_size=ranks, ranks_per_node=ranks, micro_batch=1, sequence=2048)
    profile = MACHINES[machine].profile(ranks)
    flops = TRAINING_SHARE * profile.rate("matmul_flops_per_s")
    return PlanRequest(
        sub_groups=job.sub_groups,
        unit_sizes=(unit_size,),
        cost=CostModel.from_profile(profile),
        budgets=Budgets(gpu_bytes=int(gpu_gb * 1e9)),
        windows=Windows(backward_s=job.backward_s(flops), forward_s=job.forward_s(flops)),
        setup=job.setup,
    )


class SimulatedTraining:
    """A training run that follows the policy, with the decisions by step.

    ``request`` has the rates of the profile and the windows at the start. ``machine_at`` returns the machine at a step;
    None for the one that was profiled.
    """

    def __init__(self, request: PlanRequest, machine_at: Callable[[int], Machine] | None = None, seed: int = 0) -> None:
        profiled = Machine(request.cost, request.windows)
        self.decisions: dict[int, Decision] = {}
        self.step = 0
        self._request = request
        self._machine_at = machine_at or (lambda step: profiled)
        self._random = Random(seed)
        self._window = TrailingWindow()
        # As in training, the CPU updates everything until the free GPU memory and the windows are known.
        start = replace(request, windows=Windows())
        on_cpu = replace(start, budgets=replace(request.budgets, gpu_bytes=0)).plan().plan
        self.policy = ReplanningPolicy(start, on_cpu)
        self._timelines: dict[tuple[str, int], Timeline] = {}

    def run(self, until: int) -> None:
        """Run steps up to and including the step ``until``."""
        while self.step < until:
            self.step += 1
            self._window.add(self._measure())
            measured = self._window.medians() if self._window.count_step() else None
            decision = None if measured is None else self.policy.observe(measured)
            if decision is not None:
                self.decisions[self.step] = decision
                self._window.restart()

    def exposed_s(self, plan: UpdatePlan | None = None) -> float:
        """Return the true exposed seconds of an update with ``plan``, by default the running one, at this step."""
        plan = plan or self.policy.running
        machine = self._machine_at(self.step)
        return machine.windows.exposed_s(self._timeline(plan), plan.workload, machine.cost)

    def best_exposed_s(self) -> float:
        """Return the exposed seconds of the plan that is found with the true rates and windows of this step."""
        machine = self._machine_at(self.step)
        return replace(self._request, cost=machine.cost, windows=machine.windows).plan().planned.exposed_s

    def _timeline(self, plan: UpdatePlan) -> Timeline:
        machine = self._machine_at(self.step)
        key = plan.fingerprint, id(machine)
        if key not in self._timelines:
            self._timelines[key] = simulate(plan.schedule, plan.workload, machine.cost, machine.windows)
        return self._timelines[key]

    def _measure(self) -> StepMeasurement:
        """Return the measurement of one step, in which each duration has an error of its own."""
        by_kind = self._timeline(self.policy.running).seconds_by_kind()
        windows = self._machine_at(self.step).windows
        return StepMeasurement(
            step=self.step,
            by_kind={kind: self._noisy(kind_s) for kind, kind_s in by_kind.items()},
            windows=Windows(backward_s=self._noisy(windows.backward_s), forward_s=self._noisy(windows.forward_s)),
            exposed_s=self._noisy(self.exposed_s()),
        )

    def _noisy(self, true_s: float) -> float:
        return true_s * max(0.0, self._random.gauss(1.0, NOISE))
