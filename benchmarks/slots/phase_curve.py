"""Simulate an update with slots that exist only while the activations' memory is free.

Such slots come in the tail of backward, layer by layer, and go in the next forward. Forward waits where it needs memory
that a slot still holds. The allocator is assumed to place a slot in any free memory, and flushes may take all of the
next backward, so the simulated gain is an upper bound of what a runtime can reach with the same placements.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from perf_model.prediction.memory import MIB
from perf_model.prediction.simulate import Simulator, _Simulation
from perf_model.schedule.action import ActionKind
from perf_model.schedule.placement import Placement
from perf_model.schedule.plan import UpdatePlan
from perf_model.schedule.workload import FP32_BYTES, STATES
from perf_model.training_run.job import Job
from perf_model.training_run.training_memory import TrainingMemory

_NEVER_S = float("inf")
_LAST_LAYER = 1.0 - 1e-12


def resident_bytes_of(numel: int) -> int:
    """Return the least bytes that p, m and v of that length take, in a slot or resident."""
    each_bytes = numel * FP32_BYTES
    block_bytes = 2 * MIB if each_bytes > 10 * MIB - 512 else 512
    return len(STATES) * -(-each_bytes // block_bytes) * block_bytes


@dataclass(frozen=True, kw_only=True)
class ActivationMemory:
    """Bytes of activations that are free outside the peak.

    ``logits_bytes`` are free except at the end of forward and the begin of backward. ``layers_bytes`` are taken layer
    by layer in forward, and become free layer by layer in backward. The activations of a layer that is recomputed are
    left out, because every layer of backward needs their memory.
    """

    logits_bytes: int = 0
    layers_bytes: int = 0

    @classmethod
    def from_job(cls, job: Job) -> ActivationMemory:
        """Return the activations with which the memory of the GPU is predicted."""
        activations = TrainingMemory(job)
        return cls(logits_bytes=activations.logits_bytes, layers_bytes=activations.kept_bytes(job.shape.layers))

    @property
    def free_bytes(self) -> int:
        """Return what is free when the step is decided."""
        return self.logits_bytes + self.layers_bytes

    def share(self, share: float) -> ActivationMemory:
        """Return a share of the memory."""
        return ActivationMemory(
            logits_bytes=int(share * self.logits_bytes), layers_bytes=int(share * self.layers_bytes)
        )

    def free_in_phase(self, layers: float) -> float:
        """Return the free bytes while the activations of a share ``layers`` of the layers exist."""
        return self.logits_bytes + (1.0 - layers) * self.layers_bytes

    def most_layers(self, taken_bytes: float) -> float:
        """Return for which share of the layers there is memory while slots take ``taken_bytes`` of it."""
        if taken_bytes <= 0:
            return 1.0
        if taken_bytes <= self.logits_bytes or self.layers_bytes == 0:
            return _LAST_LAYER if taken_bytes <= self.logits_bytes else 0.0
        return max(0.0, 1.0 - (taken_bytes - self.logits_bytes) / self.layers_bytes)


def exposed_with_activation_memory_s(plan: UpdatePlan, simulator: Simulator, memory: ActivationMemory) -> float:
    """Return the exposed seconds of ``plan`` with further slots in ``memory``, in windows of backward and forward."""
    return _SlotsInPhases(plan, simulator, memory).exposed_s()


class _SlotsInPhases(_Simulation):
    """A simulation in which a prefetch waits until any slot exists and is free, instead of for one flush."""

    def __init__(self, plan: UpdatePlan, simulator: Simulator, memory: ActivationMemory) -> None:
        streamed = max(1, plan.placements.count(Placement.STREAMED))
        super().__init__(replace(plan, num_slots=streamed).schedule, plan.workload, simulator)
        self._windows = simulator.windows
        self._memory = memory
        self._permanent = plan.num_slots
        self._slot_bytes = max(1, resident_bytes_of(plan.schedule.slot_numel))
        prefetches = [action.unit for action in self._actions if action.kind is ActionKind.PREFETCH]
        filling = prefetches[: plan.num_slots + memory.free_bytes // self._slot_bytes]
        fill_s = sum(simulator.load(ActionKind.PREFETCH, self._numels[unit]).total_s for unit in filling)
        self._now_s = 0.0 - min(self._windows.backward_s, fill_s)
        self._flushes = [at for at, action in enumerate(self._actions) if action.kind is ActionKind.FLUSH_STATES]
        self._taken = 0
        """The number of slots that hold states."""
        self._begun = 0
        self._layers = 0.0
        """The share of forward that is done."""
        self._forward_end_s = _NEVER_S
        ready = {
            action.unit: at
            for at, action in enumerate(self._actions)
            if action.kind in (ActionKind.GPU_STEP, ActionKind.PUBLISH)
        }
        self._needs: list[tuple[float, int]] = []
        before = 0
        for unit in self._windows.in_order_of_use(plan.workload):
            self._needs.append((before / plan.workload.numel, ready[unit.index]))
            before += unit.numel
        self._needs.reverse()

    def exposed_s(self) -> float:
        """Return the seconds by which the iteration grows."""
        while True:
            self._start()
            if self._running:
                self._advance_with_forward()
            elif self._now_s < 0.0:
                self._now_s = self._next_slot_s()
            else:
                break
        self._proceed(_NEVER_S)
        assert self._forward_end_s < _NEVER_S, "forward gets the memory of all slots at the end of the update"
        late_flushes_s = self._now_s - self._windows.forward_s - self._windows.backward_s
        return max(self._forward_end_s - self._windows.forward_s, late_flushes_s)

    def _may_start(self, position: int) -> bool:
        prefetches = self._actions[position].kind is ActionKind.PREFETCH
        if prefetches and self._taken >= self._existing():
            return False
        starts = (self._now_s >= 0.0 or prefetches) and all(
            self._ended_s[producer] < _NEVER_S for producer in self._waits[position]
        )
        if starts and prefetches:
            self._taken += 1
            self._begun += 1
        return starts

    def _existing(self) -> int:
        layers = -self._now_s / self._windows.backward_s if self._now_s < 0.0 else self._layers
        free_bytes = self._memory.free_in_phase(layers) if layers < 1.0 else 0.0
        return max(1, self._permanent + int(free_bytes / self._slot_bytes + 1e-6))

    def _next_slot_s(self) -> float:
        """Return when the next slot exists in backward, at most 0."""
        layers = self._memory.most_layers((self._taken + 1 - self._permanent) * self._slot_bytes)
        then_s = -layers * self._windows.backward_s
        return then_s if self._now_s < then_s < 0.0 and self._begun < len(self._flushes) else 0.0

    def _advance_with_forward(self) -> None:
        before_s, ended_s = self._now_s, list(self._ended_s)
        self._advance()
        # What ends now was running until now.
        self._ended_s, ended_s = ended_s, self._ended_s
        if before_s >= 0.0:
            now_s, self._now_s = self._now_s, before_s
            self._proceed(now_s)
            self._now_s = now_s
        self._ended_s = ended_s
        self._taken = self._begun - sum(ended_s[flush] < _NEVER_S for flush in self._flushes)

    def _proceed(self, until_s: float) -> None:
        """Let forward proceed from now until ``until_s``, as far as parameters are updated and memory is free."""
        while self._needs and self._ended_s[self._needs[-1][1]] < _NEVER_S:
            self._needs.pop()
        updated = self._needs[-1][0] if self._needs else 1.0
        most = min(updated, self._memory.most_layers((self._taken - self._permanent) * self._slot_bytes))
        left_s = (most - self._layers) * self._windows.forward_s
        if left_s <= 0.0:
            return
        if most == 1.0 and self._now_s + left_s <= until_s:
            self._forward_end_s = min(self._forward_end_s, self._now_s + left_s)
        self._layers = min(most, self._layers + (until_s - self._now_s) / self._windows.forward_s)
