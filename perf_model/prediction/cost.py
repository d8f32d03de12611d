"""Model the cost of an action: the time that it takes alone, and the amount of each shared resource that it uses.

Actions that overlap share resources. ``relative_speeds`` computes their slowdown from the amounts. ``docs/design.md``
explains the model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property

from perf_model.prediction.hardware import HardwareProfile
from perf_model.schedule.action import ActionKind
from perf_model.schedule.happens_before import CHAINS, EAGER_CHAIN
from perf_model.schedule.placement import Placement
from perf_model.schedule.schedule import STAGED_BYTES_PER_PARAM
from perf_model.schedule.workload import FP32_BYTES

PROBED_PARAM_BYTES = 2

COPIES_PER_ACTION = {ActionKind.PREFETCH: 3, ActionKind.FLUSH_STATES: 3, ActionKind.PUBLISH: 1}
"""The number of copies of an action. Each copy starts with the latency of a copy."""

UPDATES_ON_CPU = (ActionKind.CPU_STEP, ActionKind.SPECULATE)

GPU_STEP_BYTES = 28
"""Bytes per parameter: p, m and v are read and written (24), and the 16-bit gradient and parameter take 2 each."""

_FULL = 1e-12


class Resource(Enum):
    """A resource that concurrent actions share."""

    H2D = "h2d"
    D2H = "d2h"
    BOTH = "both directions"
    PAGEABLE = "pageable copies"
    DRAM = "host memory"
    CPU = "cpu cores"
    GPU = "gpu"

    __hash__ = object.__hash__  # as in ``action.py``


@dataclass(frozen=True, kw_only=True)
class BytesPerParam:
    """Bytes per parameter that an action moves, by resource."""

    h2d: float = 0.0
    d2h: float = 0.0
    pageable: float = 0.0
    dram: float = 0.0


def traffic_by_action(param_bytes: int, *, params_on_host: bool = False) -> dict[ActionKind, BytesPerParam]:
    """Return the bytes per parameter that our runtime moves in each kind of action.

    CPU_STEP is one pass. It reads and writes p, m and v (24), reads the gradient, and writes 16-bit parameters. With
    ``params_on_host``, it also writes fp32 ones, and GPU_STEP copies the parameters down. SPECULATE is the same pass to
    the other version of the states, and COMMIT moves nothing. With ``params_on_host``, COMMIT also stands for the copy
    of an eager unit's parameters to the model, since PUBLISH has no cost there.
    """
    staged = STAGED_BYTES_PER_PARAM
    writes_param = params_on_host or param_bytes < FP32_BYTES
    published, copied_down = (0, param_bytes) if params_on_host else (param_bytes, 0)
    cpu_step = BytesPerParam(dram=24 + param_bytes + (param_bytes if writes_param else 0))
    return {
        ActionKind.PREFETCH: BytesPerParam(h2d=staged, dram=staged),
        ActionKind.GPU_STEP: BytesPerParam(d2h=copied_down, dram=copied_down),
        ActionKind.FLUSH_STATES: BytesPerParam(d2h=staged, dram=staged),
        ActionKind.CPU_STEP: cpu_step,
        ActionKind.SPECULATE: cpu_step,
        ActionKind.COMMIT: BytesPerParam(dram=2 * copied_down),
        ActionKind.PUBLISH: BytesPerParam(h2d=published, dram=published),
    }


def stock_traffic_by_action(param_bytes: int, *, params_on_host: bool = False) -> dict[ActionKind, BytesPerParam]:
    """Return the bytes per parameter that stock DeepSpeed moves in each kind of action.

    Its CPU update takes three passes: the gradient is scaled in place (8), Adam reads and writes (28), and the
    parameter is rounded (4 read, 2 written). It publishes from pageable memory, which the driver first copies to pinned
    memory. With ``params_on_host``, the rounded parameters stay in host memory.
    """
    published = 0 if params_on_host else param_bytes
    rounding = 4 + param_bytes if param_bytes < FP32_BYTES else 0
    return {
        **traffic_by_action(param_bytes, params_on_host=params_on_host),
        ActionKind.CPU_STEP: BytesPerParam(dram=8 + 28 + rounding),
        ActionKind.PUBLISH: BytesPerParam(h2d=published, pageable=published, dram=3 * published),
    }


@dataclass(frozen=True, eq=False)
class Load:
    """The ``amounts`` of an action. It takes ``alone_s`` if nothing else runs, after ``latency_s`` of its lane."""

    alone_s: float
    amounts: Mapping[Resource, float]
    latency_s: float = 0.0

    @property
    def total_s(self) -> float:
        """Return the time of the action if nothing else runs."""
        return self.latency_s + self.alone_s


def relative_speeds(loads: Sequence[Load], capacities: Mapping[Resource, float]) -> list[float]:
    """Return each running action's speed relative to running alone, by max-min fair sharing.

    All speeds rise together until a resource is full. The actions that use it keep their speed, and the others rise
    further. For example, two actions that each use two thirds of a resource's capacity alone both run at 0.75.
    """
    result = [1.0] * len(loads)
    rising = {index for index, load in enumerate(loads) if load.alone_s > 0}
    left = dict(capacities)
    share = 0.0
    while rising:
        step, full = 1.0 - share, None
        for resource, capacity in left.items():
            use = sum(loads[index].amounts.get(resource, 0.0) / loads[index].alone_s for index in rising)
            if use > 0 and capacity / use < step - _FULL:
                step, full = max(0.0, capacity / use), resource
        for resource in left:
            left[resource] -= step * sum(loads[i].amounts.get(resource, 0.0) / loads[i].alone_s for i in rising)
        share += step
        stay = {index for index in rising if full is None or loads[index].amounts.get(full, 0.0) > 0}
        for index in stay:
            result[index] = share
        rising -= stay
    return result


@dataclass(frozen=True, kw_only=True)
class CostModel:
    """The ``capacities`` of one rank per second, and the amounts ``per_param`` that each kind of action uses.

    The unit is bytes. CPU and GPU are counted in seconds of the rank's whole share, with capacity 1.
    """

    capacities: Mapping[Resource, float]
    per_param: Mapping[ActionKind, Mapping[Resource, float]]
    copy_latency_s: float = 0.0

    @cached_property
    def speeds_of_copies(self) -> tuple[float, float]:
        """Return the speeds of a prefetch and of a flush that overlap, relative to running alone."""
        if ActionKind.PREFETCH not in self.per_param:
            return 1.0, 1.0
        loads = [self.load(kind, 1) for kind in (ActionKind.PREFETCH, ActionKind.FLUSH_STATES)]
        prefetch, flush = relative_speeds(loads, self.capacities)
        return prefetch, flush

    @property
    def placements(self) -> tuple[Placement, ...]:
        """Return the placements whose actions all have a cost: only the CPU if the GPU's Adam has no rate."""
        return tuple(placement for placement, chain in CHAINS.items() if all(kind in self.per_param for kind in chain))

    @classmethod
    def from_rates(
        cls,
        *,
        cpu_adam_params_per_s: float,
        gpu_adam_params_per_s: float | None,
        capacities: Mapping[Resource, float],
        traffic: Mapping[ActionKind, BytesPerParam],
        copy_latency_s: float = 0.0,
    ) -> CostModel:
        """Return the cost model. Without ``gpu_adam_params_per_s``, nothing can be updated on the accelerator."""
        per_param = {
            kind: {
                Resource.H2D: moved.h2d,
                Resource.D2H: moved.d2h,
                Resource.BOTH: moved.h2d + moved.d2h,
                Resource.PAGEABLE: moved.pageable,
                Resource.DRAM: moved.dram,
            }
            for kind, moved in traffic.items()
        }
        for kind in UPDATES_ON_CPU:
            per_param[kind][Resource.CPU] = 1 / cpu_adam_params_per_s
        if gpu_adam_params_per_s is None:
            del per_param[ActionKind.GPU_STEP]
        else:
            per_param[ActionKind.GPU_STEP][Resource.GPU] = 1 / gpu_adam_params_per_s
        return cls(
            capacities={**capacities, Resource.CPU: 1.0, Resource.GPU: 1.0},
            per_param=per_param,
            copy_latency_s=copy_latency_s,
        )

    @classmethod
    def for_stock(cls, profile: HardwareProfile, param_bytes: int = 2, *, params_on_host: bool = False) -> CostModel:
        """Return the cost model of stock DeepSpeed's update. Raise ``ProfileError`` if a rate is missing."""
        traffic = stock_traffic_by_action(param_bytes, params_on_host=params_on_host)
        return cls._from_traffic(profile, traffic, profile.rate("stock_cpu_adam_params_per_s"))

    @classmethod
    def from_profile(cls, profile: HardwareProfile, param_bytes: int = 2, *, params_on_host: bool = False) -> CostModel:
        """Return the cost model of our update.

        Raise ``ProfileError`` if a rate is missing. If the profile contains no rate of an accelerator, the CPU is the
        accelerator.
        """
        on_host = params_on_host or not profile.has_accelerator
        traffic = traffic_by_action(param_bytes, params_on_host=on_host)
        return cls._from_traffic(profile, traffic, profile.rate("cpu_adam_params_per_s"))

    @classmethod
    def _from_traffic(
        cls, profile: HardwareProfile, traffic: Mapping[ActionKind, BytesPerParam], cpu: float
    ) -> CostModel:
        latency_s = profile.get("copy_latency_s") or 0.0
        if not profile.has_accelerator:
            # Slots are host memory. Copies, which read and write each byte, and Adam share the cores.
            byte_s = 2 / (profile.get("dram_copy_bytes_per_s") or profile.rate("dram_update_bytes_per_s"))
            seconds = {kind: byte_s * (moved.h2d + moved.d2h) for kind, moved in traffic.items()}
            seconds |= dict.fromkeys((*UPDATES_ON_CPU, ActionKind.GPU_STEP), 1 / cpu)
            seconds[ActionKind.COMMIT] = byte_s / 2 * traffic[ActionKind.COMMIT].dram
            if traffic[ActionKind.PUBLISH].h2d < FP32_BYTES:
                seconds[ActionKind.PUBLISH] = 0.0
            per_param = {kind: {Resource.CPU: param_s} for kind, param_s in seconds.items()}
            return cls(capacities={Resource.CPU: 1.0}, per_param=per_param, copy_latency_s=latency_s)
        h2d = profile.rate("h2d_bytes_per_s")
        return cls.from_rates(
            cpu_adam_params_per_s=cpu,
            gpu_adam_params_per_s=profile.get("gpu_adam_params_per_s"),
            capacities={
                Resource.H2D: h2d,
                Resource.D2H: profile.rate("d2h_bytes_per_s"),
                Resource.BOTH: profile.both_directions,
                Resource.PAGEABLE: profile.get("pageable_h2d_bytes_per_s") or h2d,
                Resource.DRAM: max(_dram_capacity(profile), traffic[ActionKind.CPU_STEP].dram * cpu),
            },
            traffic=traffic,
            copy_latency_s=latency_s,
        )

    def load(self, kind: ActionKind, numel: int) -> Load:
        """Return the cost of an action of this kind on ``numel`` parameters."""
        amounts = {resource: each * numel for resource, each in self.per_param[kind].items() if each > 0}
        busiest_s = max((amount / self.capacities[resource] for resource, amount in amounts.items()), default=0.0)
        copies = COPIES_PER_ACTION.get(kind, 0) if amounts else 0
        return Load(busiest_s, amounts, self.copy_latency_s * copies)

    def busy_s_per_param(self, placement: Placement) -> dict[Resource, float]:
        """Return the seconds that a parameter with ``placement`` keeps each resource busy."""
        amounts = [self.per_param[kind] for kind in CHAINS[placement]]
        return {
            resource: sum(each.get(resource, 0.0) for each in amounts) / capacity
            for resource, capacity in self.capacities.items()
        }

    def without_accelerator(self) -> CostModel:
        """Return the costs if nothing can be updated on an accelerator."""
        return replace(self, per_param={kind: self.per_param[kind] for kind in (*CHAINS[Placement.CPU], *EAGER_CHAIN)})


def _dram_capacity(profile: HardwareProfile) -> float:
    """Return the bytes per second that host memory reached during a CPU update and transfers both ways.

    This is a lower bound of the capacity, as is the rate of either alone.
    """
    cpu = profile.rate("cpu_adam_params_per_s")
    # If the rate of both directions is waived, its upper bound is known, but only one direction is a lower bound.
    both = profile.get("both_bytes_per_s") or max(map(profile.rate, ("h2d_bytes_per_s", "d2h_bytes_per_s")))
    step_bytes = traffic_by_action(PROBED_PARAM_BYTES)[ActionKind.CPU_STEP].dram
    alone = max(profile.rate("dram_update_bytes_per_s"), step_bytes * cpu, both)
    concurrent_cpu = profile.get("cpu_adam_beside_transfers_params_per_s")
    concurrent_both = profile.get("both_beside_cpu_adam_bytes_per_s")
    if concurrent_cpu is None or concurrent_both is None:
        return alone
    return max(alone, step_bytes * min(concurrent_cpu, cpu) + min(concurrent_both, profile.both_directions))
