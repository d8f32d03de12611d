"""Hold optimizer states in the GPU memory that training leaves free, and evict them when training needs it.

1. **Plan once.** In the first steps the CPU updates all units that no rule places. The memory that is free at their
   peak, less a margin, is for states. Rank 0 plans, with the least of all ranks and the measured windows. When the plan
   has shown how much its copies slow down forward, it is reconsidered once.
2. **When memory is short on a rank, evict, measure the windows in one step, and plan once with what is left**, on all
   ranks: when half of the margin is taken, PyTorch had to retry an allocation, or a plan's memory could not be
   reserved. The memory never grows again.
3. **Evict before training needs the memory**, on one rank alone: before a forward that may need more than any before,
   and between two layers of a forward that has taken half of the margin. The plan stays, and its memory is reserved
   again when the need is known.

Training runs out of memory where stock does not only if its need grows by more than the margin inside one layer or in
backward: gradients are being reduced then, and the memory of a plan must not change.
"""

from __future__ import annotations

import atexit
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial

from deepspeed import comm as dist

from deep_opt_states import log
from deep_opt_states.device.cuda import AllocatorWatch, free_bytes, reserved_bytes
from deep_opt_states.zero.internals.agreement import gather_values, raise_together, same_on_all_ranks
from deep_opt_states.zero.step.measured_windows import FIRST_UPDATES
from deep_opt_states.zero.step.running_plan import RunningPlan
from perf_model.plan_request import PlanRequest
from perf_model.prediction.memory import Budgets, memory_of
from perf_model.prediction.overlap_windows import slowest
from perf_model.schedule.plan import UpdatePlan
from perf_model.units import gigabytes, seconds

OBSERVED_STEPS = 3
"""The steps after which the free memory is known, because allocators and communication take theirs first."""

FIRST_STEPS = FIRST_UPDATES + 2
"""The steps before the first plan. In the last ones, the CPU's updates show how they slow down forward."""

LITTLE_GAIN = 0.01
"""The share of the time that an update adds to an iteration for which no units move."""

PLANNED_STEPS = 4
"""The steps with the first plan before it is reconsidered for the slowdown by its copies."""

REMEDY = (
    "If stock DeepSpeed has enough memory for this step, its need has jumped by more than the margin, without a "
    "larger input: a larger gpu_memory_margin_gb leaves more memory free"
)


class GpuBudget:
    """The ``bytes`` of this rank's accelerator that a plan may hold: at first ``start_bytes``, then all that is free.

    Memory is free if neither a process nor PyTorch's cache held it at the peak. ``margin_bytes`` of it stay free. The
    budget grows once, after ``OBSERVED_STEPS``, and not if ``fills`` is false.
    """

    def __init__(self, *, start_bytes: int, margin_bytes: int, fills: bool) -> None:
        self.bytes = start_bytes
        self.margin_bytes = margin_bytes
        self._fills = fills
        self._required_bytes = 0
        self._least_free_bytes = 2**63
        """The least memory that was free at a peak, if the optimizer had held nothing."""
        self._steps = self._alloc_retries = 0

    def require(self, required_bytes: int) -> None:
        """Allow ``required_bytes``, for units that rules place on the accelerator, until memory is short."""
        self._required_bytes = required_bytes
        self.bytes = max(self.bytes, required_bytes)

    def observe(self, free_bytes: int, alloc_retries: int, held_bytes: int, *, is_evicted: bool = False) -> None:
        """Update the budget from the free memory at the peak of a step, while the optimizer held ``held_bytes``."""
        self._steps += 1
        free_bytes += 0 if is_evicted else held_bytes
        self._least_free_bytes = min(free_bytes, self._least_free_bytes)
        for_states = self._least_free_bytes - self.margin_bytes
        if self._steps == OBSERVED_STEPS and self._fills:
            self.bytes = max(self._required_bytes, for_states)
        self.count_retries(alloc_retries, 0 if is_evicted else held_bytes)
        if self._steps >= OBSERVED_STEPS:
            is_short = self._least_free_bytes - self.margin_bytes // 2 < held_bytes
            self.limit(for_states if is_short else max(self._required_bytes, held_bytes, for_states))

    def count_retries(self, alloc_retries: int, held_bytes: int) -> None:
        """Limit the budget if an allocation was retried since the last call, while ``held_bytes`` were held."""
        was_retried, self._alloc_retries = alloc_retries > self._alloc_retries, alloc_retries
        if was_retried and self._steps >= OBSERVED_STEPS:
            self.limit(held_bytes // 2)

    def is_short_with(self, free_bytes: int) -> bool:
        """Return whether memory will be short after this step, given that ``free_bytes`` are free now."""
        return self._steps >= OBSERVED_STEPS - 1 and free_bytes < self.margin_bytes // 2

    def limit(self, limit_bytes: int) -> None:
        self.bytes = min(self.bytes, max(0, limit_bytes))


class GpuMemory:
    """The accelerator memory of the plan that ``running`` runs, under the rules at the top of this file."""

    def __init__(
        self,
        running: RunningPlan,
        request: PlanRequest,
        budget: GpuBudget,
        before_move: Callable[[], None],
        free_host_bytes: Callable[[], int] = lambda: 0,
    ) -> None:
        self._free_host_bytes = free_host_bytes
        self.budget, self._running, self._request, self._before_move = budget, running, request, before_move
        self.of_training = AllocatorWatch()
        self.bytes = self._bytes_of_running()
        self._steps = 0
        self._next_plan: int | None = FIRST_STEPS
        """The number of steps before the next plan; the same on every rank."""
        self._plans_for_less, self._planned_for = False, -1
        """Whether the next plan is made because memory is short, and this rank's budget at the last plan."""
        self._plans_left = 2
        """The first plan, and the one that knows the slowdown by copies, unless they were made."""
        self._may_restore = True
        """False after memory could not be reserved, until the next plan."""
        self._need_is_known = False
        """Whether a forward and its backward since the last eviction have shown the need of training."""
        self._available_bytes: int | None = None
        """The bytes that PyTorch held or could take before a forward; None if the plan held no memory."""

    def adapt(self, *, is_short_anywhere: bool) -> bool:
        """Plan if that is due, reserve the memory of an evicted plan if it fits, and return whether the plan is new."""
        # No window is open. This is a collective when a plan is due.
        self._steps += 1
        if is_short_anywhere and not self._plans_for_less:
            self._plans_for_less, self._may_restore, self._next_plan = True, False, self._steps + 1
            self._before_move()
            log.info("GPU memory is short: the states are evicted, and a plan for less memory follows in the next step")
            with self.of_training.changing_plan():
                self._running.evict()
        if self._next_plan == self._steps + 1 and self._steps >= FIRST_STEPS:
            self._measure_again()
        changed = self._next_plan is not None and self._steps >= self._next_plan and self._plan()
        self._restore()
        return changed

    def _measure_again(self) -> None:
        # The forward during the last update shows the slowdown by it.
        self._before_move()
        # Flushes in flight would slow down the backward that is measured.
        self._running.executor.end()
        self._running.windows.measure_again()

    def observe(self) -> None:
        """Update the budget from the peak of memory use, between backward and the update."""
        free, retries = self.of_training.free_and_retries()
        self.budget.observe(free, retries, self.bytes, is_evicted=self._running.is_evicted)
        self._need_is_known = True

    @property
    def is_short(self) -> bool:
        """Return whether this rank must free memory, and another plan may do so."""
        return self.budget.bytes < self.bytes and self.budget.bytes != self._planned_for

    def _plan(self) -> bool:
        """Plan for the least memory and the slowest of all ranks, and return whether the plan is a new one."""
        # The last update may not be reported yet, and ``windows`` needs it.
        self._before_move()
        held_bytes = memory_of(self._running.plan, self._request.setup).eager_bytes
        eager_bytes = (self._free_host_bytes() + held_bytes) // 2
        here = self.budget.bytes, self._need_is_known, self._running.windows.windows(), eager_bytes
        gpu_bytes_by_rank, needs_are_known, windows, eager_bytes_by_rank = zip(*gather_values(here), strict=True)
        are_measured = None not in windows
        if not self._plans_for_less and not (are_measured and all(needs_are_known)):
            # The need of this forward's backward is unknown, or an interrupt has prevented a measurement.
            if not are_measured:
                self._measure_again()
            return False
        before, must_move = self._request, self._plans_for_less
        if are_measured:
            self._request = replace(before, windows=slowest(windows))
        gpu_bytes = max(before.fixed_bytes, min(gpu_bytes_by_rank))
        budgets = Budgets(gpu_bytes=gpu_bytes, eager_bytes=min(eager_bytes_by_rank))
        self._request = replace(self._request, budgets=budgets, uses=self._running.uses)
        self._planned_for, self._plans_for_less = self.budget.bytes, False
        self._next_plan = self._after_plan(is_for_less=must_move)
        memory = f"{gigabytes(before.budgets.gpu_bytes or 0)} -> {gigabytes(gpu_bytes)}"
        plan = self._plan_on_rank_0(f"GPU memory for states {memory}", must_move=must_move)
        if plan.fingerprint == self._running.plan.fingerprint and not must_move:
            return False
        # Page-locked memory may be short: an error that every rank must raise.
        raise_together(lambda: self._move(plan))
        return True

    def _after_plan(self, *, is_for_less: bool) -> int | None:
        """Return the number of steps before the plan after this one, None if only short memory leads to another."""
        if self._steps < FIRST_STEPS:
            return FIRST_STEPS
        self._plans_left -= 0 if is_for_less else 1
        return self._steps + PLANNED_STEPS if self._plans_left > 0 else None

    def _move(self, plan: UpdatePlan) -> None:
        with self.of_training.changing_plan():
            self._running.adopt(plan)
        self._may_restore = True
        self.bytes = self._bytes_of_running()
        self._restore()

    def _plan_on_rank_0(self, reason: str, *, must_move: bool) -> UpdatePlan:
        """Return the plan that rank 0 finds, or the running one if it finds none; the same on every rank."""
        decisions = None
        if dist.get_rank() == 0:
            try:
                found = self._request.plan()
                windows, before = self._request.windows, self._request.evaluate(self._running.plan).added
                added = found.added
                if must_move or added.total_s < (1 - LITTLE_GAIN) * before.total_s:
                    log.info(
                        f"{reason}, {windows}, predicted to add to an iteration {seconds(before.total_s)} -> "
                        f"{seconds(added.total_s)}, {seconds(added.exposed_s)} of it exposed: {found.plan}"
                    )
                    decisions = found.to_json_dict()
            except Exception as error:  # noqa: BLE001 (the running plan is valid, and training goes on with it)
                log.error(error)
        decisions = gather_values(decisions)[0]
        if decisions is None:
            return self._running.plan
        return same_on_all_ranks(lambda: self._request.restore(decisions), lambda plan: plan.fingerprint)

    def _restore(self) -> None:
        if not (self._running.is_evicted and self._need_is_known and self._may_restore) or self.is_short:
            return
        with self.of_training.changing_plan():
            fits = self._running.restore()
        self.bytes = self._bytes_of_running()
        if not fits:
            self._may_restore = False
            self.budget.limit(self.bytes // 2)
            held = f"{gigabytes(self.bytes)} of GPU memory"
            log.warn_this_rank(f"{held} could not be reserved: a larger gpu_memory_margin_gb leaves more free at start")

    def _bytes_of_running(self) -> int:
        keeps_sums = None if self._running.is_evicted else self._running.gradients.have_device_accumulators
        return memory_of(self._running.plan, replace(self._request.setup, sums_on_accelerator=keeps_sums)).gpu_bytes

    # Evict on this rank alone, around and inside a forward

    def evict(self, reason: str) -> None:
        """Free all accelerator memory of the plan until the need of training is known. No update is in flight."""
        # Without memory to free, training keeps PyTorch's cache, as in stock.
        if self._running.holds_memory:
            self.budget.count_retries(self.of_training.free_and_retries()[1], self.bytes)
            with self.of_training.changing_plan():
                self._running.evict()
            evicted = f"{gigabytes(self.bytes)} of GPU memory are evicted {reason}"
            log.warn_this_rank(f"{evicted}. The CPU updates these states until a step has shown what training needs")
        self._available_bytes = None
        self._need_is_known = False

    def begin_forward(self) -> None:
        """Remember the free memory before a forward, so that ``is_short_now`` is fast."""
        self.of_training.forget_failures()
        self._available_bytes = free_bytes() + reserved_bytes() if self._running.holds_memory else None

    def is_short_now(self) -> bool:
        """Return whether this forward has taken so much that memory will be short after it."""
        # A plan that exceeds the budget is kept for rules by name.
        if self._available_bytes is None or self.budget.bytes < self.bytes:
            return False
        return self.budget.is_short_with(self._available_bytes - reserved_bytes())

    @property
    def has_failed(self) -> bool:
        """Return whether an allocation has failed since the last forward while the plan holds memory."""
        return self._running.holds_memory and self.of_training.has_failed()

    def log_failure_at_exit(self, resources: ExitStack) -> None:
        """Log the remedy if a failed allocation ends training. Keep no engine alive for it."""
        # One object per engine: ``unregister`` removes all registrations of a function.
        at_exit = partial(_call_if_alive, weakref.WeakMethod(self._log_failure))
        resources.callback(atexit.unregister, atexit.register(at_exit))
        resources.callback(self._log_failure)

    def _log_failure(self) -> None:
        if self.has_failed:
            held = gigabytes(self.bytes)
            log.warn_this_rank(f"an allocation has failed while optimizer states hold {held} of GPU memory. {REMEDY}")


def _call_if_alive(reference: weakref.WeakMethod[Callable[[], None]]) -> None:
    if (method := reference()) is not None:
        method()
