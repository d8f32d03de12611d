"""Adapt the plan between steps: to forward's order, to measured windows and rates, and to free GPU memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial

import torch
from deepspeed import comm as dist

from deep_opt_states.runtime.gpu_budget import GpuBudget
from deep_opt_states.zero.internals.agreement import gather_values, raise_together, same_on_all_ranks
from deep_opt_states.zero.internals.log import log_error, log_rank_0, log_this_rank
from deep_opt_states.zero.step.fixed_placements import FirstUses, OrderAdaptation, SlotAdaptation, learn_uses
from deep_opt_states.zero.step.growing_forwards import GrowingForwards
from deep_opt_states.zero.step.held_memory import REMEDY, HeldMemory
from deep_opt_states.zero.step.larger_forwards import LargerForwards
from deep_opt_states.zero.step.running_plan import RunningPlan
from perf_model.plan_request import PlanRequest, SizedPlan
from perf_model.prediction.memory import Budgets, DoesNotFit, memory_of
from perf_model.prediction.timeline import PhaseSpan, Timeline
from perf_model.replanning.measurements import StepMeasurement, TrailingWindow, WindowMeasurement, slowest_rank
from perf_model.replanning.policy import ReplanningPolicy
from perf_model.schedule.plan import UpdatePlan
from perf_model.units import gigabytes

UNREPORTED = 4
"""An upper bound of the updates that have run and are not reported yet."""


class Replanning:
    """The adaptation of a plan that the planner has made: another plan replaces it when that is better.

    The ranks decide together. ``measure`` and ``observe_memory`` collect what this rank sees. ``adapt`` exchanges the
    measurements when they are due, which is after the same steps on every rank, or if memory is short on any rank. Rank
    0 then plans for the slowest rank and for the least memory. ``before_move`` is called before the plan changes.

    A rank calls ``give_memory_back`` before a forward that may need more memory than any before, or in one that takes
    more. As in stock, nothing on the accelerator belongs to the optimizer then. The CPU updates, until the peak of that
    forward and its backward is known. Before the next backward, the memory is reserved again, for a plan that fits into
    what is free.
    """

    def __init__(
        self,
        running: RunningPlan,
        request: PlanRequest,
        budget: GpuBudget,
        first_uses: FirstUses | None,
        before_move: Callable[[], None],
    ) -> None:
        self._running = running
        self._request = request
        self._first_uses = first_uses
        self._before_move = before_move
        self._step = 0
        self._window = TrailingWindow()
        self._policy = ReplanningPolicy(request, running.plan)
        self.memory = HeldMemory(
            budget, self._bytes_of_running(), lambda: running.is_evicted, lambda: running.holds_memory
        )
        self._agreed_bytes = request.budgets.gpu_bytes or 0
        """The budget that the ranks have planned with last."""
        self._may_restore = True
        """False after the memory that was given back could not be reserved again, until the plan changes."""
        self._no_plan_for: int | None = None
        """The budget for which no smaller plan was found: rules by name keep the plan. It is not planned for again."""
        self._evicted_updates: deque[int] = deque(maxlen=UNREPORTED)
        """The numbers of the last updates that ran while the memory was given back."""

    @property
    def memory_is_short(self) -> bool:
        """Return whether this rank must give accelerator memory back, and a plan may do so."""
        return self.memory.exceeds_budget and self.memory.budget.bytes != self._no_plan_for

    def measure(self, step: int, phases: Sequence[PhaseSpan], timeline: Callable[[], Timeline]) -> None:
        """Add the measurements of update number ``step``, unless the CPU updated everything, because of an eviction."""
        if step not in self._evicted_updates:
            self._window.add(StepMeasurement.from_update(step, timeline(), phases))

    def observe_memory(self, update: int) -> None:
        """Update the budget from the peak of memory use so far. Call this after backward, before update ``update``."""
        self.memory.observe()
        if self._running.is_evicted:
            self._evicted_updates.append(update)

    def give_memory_back(self, reason: str) -> None:
        """Give all accelerator memory of the plan to training. No update is in flight on this rank."""
        # A plan without memory has nothing to give. Training then keeps PyTorch's cache, as it does in stock.
        if self._running.holds_memory:
            # Retries from now on happen while nothing is held.
            self.memory.count_retries()
            with self.memory.changing():
                self._running.evict()
            log_this_rank(
                f"the CPU updates units until their memory need is known: "
                f"{gigabytes(self.memory.bytes)} of GPU memory are given back {reason}"
            )
        self.memory.gave_back()

    def adapt(self, *, memory_is_short_anywhere: bool) -> bool:
        """Change to a better plan if there is one; return whether the plan or its uses have changed.

        Every rank calls this once per step while no update is in flight. It is a collective when it is due.
        ``memory_is_short_anywhere`` is the same on every rank: whether memory is short on any of them.
        """
        has_learned = learn_uses(self._running, self._first_uses)
        changed = self._replan(memory_is_short_anywhere) or has_learned
        if self._running.is_evicted:
            if self.memory.need_is_known and self._may_restore and not self.memory_is_short:
                self._restore()
        elif self.memory.exceeds_budget and self._running.gradients.have_device_accumulators:
            self._move_sums_to_host()
        return changed

    def _restore(self) -> None:
        """Reserve the memory that was given back, if there is enough."""
        with self.memory.changing():
            fits = self._running.restore()
        if fits:
            self.memory.bytes = self._bytes_of_running()
            log_this_rank(f"{gigabytes(self.memory.bytes)} of GPU memory hold optimizer states again")
        else:
            self.memory.budget.limit(self.memory.bytes // 2)
            self._may_restore = False

    def _move_sums_to_host(self) -> None:
        """Free the sums of units that the CPU updates, which are no part of the plan. No window is open."""
        with self.memory.changing():
            self._running.gradients.free_device_accumulators()
        before_bytes, self.memory.bytes = self.memory.bytes, self._bytes_of_running()
        log_this_rank(
            f"GPU memory is short: gradients of units that the CPU updates are summed in host memory from now on, "
            f"which frees {gigabytes(before_bytes - self.memory.bytes)}"
        )

    def _replan(self, memory_is_short_anywhere: bool) -> bool:
        self._step += 1
        is_due = self._window.count_step()
        if not is_due and not memory_is_short_anywhere:
            return False
        measured = self._window.medians() if is_due else None
        medians = None if measured is None else measured.to_json_dict()
        seen = gather_values((self.memory.budget.bytes, self.memory.need_is_known, medians))
        if not memory_is_short_anywhere and not all(is_known for _, is_known, _ in seen):
            # This forward may need more memory than any before. A plan could take memory that its backward needs.
            self._window.postpone()
            return False
        least_bytes = max(self._request.fixed_bytes, min(budget_bytes for budget_bytes, _, _ in seen))
        measurements = [WindowMeasurement.from_json_dict(values) for _, _, values in seen if values is not None]
        changed = least_bytes != self._agreed_bytes
        self._agreed_bytes = least_bytes
        plan = self._decide(
            measurements if len(measurements) == len(seen) else [],
            Budgets(gpu_bytes=least_bytes) if changed else None,
        )
        if plan is None:
            self._no_plan_for = self.memory.budget.bytes if self.memory.exceeds_budget else None
            return False
        return self._adopt(plan)

    def _decide(self, measurements: Sequence[WindowMeasurement], budgets: Budgets | None) -> UpdatePlan | None:
        """Return the plan that rank 0 wants all ranks to adopt, the same on every rank; None to keep the present one.

        ``measurements`` are those of all ranks, or none. ``budgets`` are new ones, None if they have not changed.
        """
        uses = self._running.uses
        if uses is not None:
            # The plan that is restored below then has the uses of its units, from which its updates are predicted.
            self._request = replace(self._request, uses=uses)

        def decide() -> SizedPlan | None:
            if dist.get_rank() > 0:
                return None
            decision = None
            try:
                if measurements:
                    decision = self._policy.observe(slowest_rank(measurements), budgets, uses)
                elif budgets is not None:
                    decision = self._policy.change_budgets(self._step, budgets)
            except DoesNotFit as error:
                # The rules of the config need more memory than is free now. Stock would not stop for that either.
                log_rank_0(
                    f"the plan does not change, because rules by name take more GPU memory than is free: {error}"
                )
            except Exception as error:  # noqa: BLE001 (the running plan is valid, and training goes on with it)
                log_error(error)
            if decision is None:
                return None
            log_rank_0(str(decision))
            return decision.chosen

        chosen = raise_together(decide)
        decisions = gather_values(None if chosen is None else chosen.to_json_dict())[0]
        if decisions is None:
            return None
        return same_on_all_ranks(lambda: self._request.restore(decisions), lambda plan: plan.fingerprint)

    def _adopt(self, plan: UpdatePlan) -> bool:
        self._before_move()
        with self.memory.changing():
            fits = self._running.adopt(plan)
        self._may_restore = True
        if not fits:
            needed_bytes = memory_of(plan, self._request.setup).gpu_bytes
            self.memory.budget.limit(needed_bytes // 2)
            self._policy.running = self._running.plan
            log_rank_0(
                f"GPU memory is short: a plan that takes {gigabytes(needed_bytes)} could not be reserved on every "
                f"rank. The CPU updates what does not fit. A larger gpu_memory_margin_gb leaves more memory free from "
                f"the start: {self._running.plan}"
            )
        self.memory.bytes = self._bytes_of_running()
        self._window.restart()
        return True

    def _bytes_of_running(self) -> int:
        """Return what the running plan holds; if it is evicted, what the planner assumes for it."""
        keeps_sums = None if self._running.is_evicted else self._running.gradients.have_device_accumulators
        return memory_of(self._running.plan, replace(self._request.setup, sums_on_accelerator=keeps_sums)).gpu_bytes


def make_adaptation(
    *,
    running: RunningPlan,
    first_uses: FirstUses | None,
    request: PlanRequest | None,
    budget: GpuBudget | None,
    slot_budget: GpuBudget | None,
    before_move: Callable[[], None],
    give_memory_back: Callable[[str], None],
    module: torch.nn.Module,
    resources: ExitStack,
) -> OrderAdaptation | Replanning:
    """Return the adaptation of the plan of one engine, which trains ``module``.

    ``request`` and ``budget`` are those of the planner; None if it has nothing to decide. ``slot_budget`` is for more
    slots of placements that the config gives; None if it gives their number as well. ``before_move`` is the one of
    ``Replanning``. ``give_memory_back`` waits until nothing uses the memory, and calls the method of the adaptation
    with the same reason. ``resources`` receives the callback that removes the hooks on ``module``.
    """
    if request is not None and budget is not None:
        replanning = Replanning(running, request, budget, first_uses, before_move)
        _watch_forwards(replanning.memory, give_memory_back, module, resources)
        return replanning
    if slot_budget is not None:
        slots = SlotAdaptation(running, first_uses, slot_budget)
        _watch_forwards(slots.memory, give_memory_back, module, resources)
        return slots
    return OrderAdaptation(running, first_uses)


def _watch_forwards(
    memory: HeldMemory,
    give_memory_back: Callable[[str], None],
    module: torch.nn.Module,
    resources: ExitStack,
) -> None:
    """Give ``memory`` back before and in forwards of ``module`` that may need it."""
    larger_forwards = LargerForwards(
        partial(give_memory_back, "before a forward that may need more than any before"),
        memory.bytes_in_use,
        memory.budget.margin_bytes // 4,
    )
    hook = module.register_forward_pre_hook(larger_forwards, prepend=True, with_kwargs=True)
    resources.callback(hook.remove)

    def begin_forward() -> None:
        if memory.has_failed:
            give_memory_back(f"after an allocation has failed. {REMEDY}")
        memory.begin_forward()

    # These hooks run before the one above. What has failed, has failed while the memory was held.
    GrowingForwards(
        module,
        begin_forward,
        memory.is_short_now,
        partial(give_memory_back, "in a forward that has taken half of gpu_memory_margin_gb"),
        resources,
    )
    memory.log_failure_at_exit(resources)
