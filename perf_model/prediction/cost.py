"""Model the cost of an action: the time that it takes alone, and the amount of each shared resource that it uses.

``docs/dev/performance_model.md`` explains the model.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property
from typing import NamedTuple

from perf_model.prediction.hardware import DISK_QUANTITIES, HardwareProfile
from perf_model.schedule.action import ActionKind
from perf_model.schedule.happens_before import CHAINS, DISK_CHAIN, EAGER_CHAINS
from perf_model.schedule.host_layout import SIXTEEN_BIT, Widths
from perf_model.schedule.placement import Placement
from perf_model.schedule.workload import FP32_BYTES

COPIES_PER_ACTION = {ActionKind.PREFETCH: 3, ActionKind.FLUSH_STATES: 3, ActionKind.PUBLISH: 1, ActionKind.ADOPT: 1}
"""The number of copies of an action. Each copy starts with the latency of a copy."""

UPDATES_ON_CPU = (ActionKind.CPU_STEP, ActionKind.SPECULATE)
UPDATES_ON_GPU = (ActionKind.GPU_STEP, ActionKind.GPU_SPECULATE)
USES_OF_DISK = (ActionKind.READ, ActionKind.WRITE)

CPU_ADAM = {
    (4, 4): "cpu_adam_params_per_s",
    (2, 4): "cpu_adam_bf16_masters_params_per_s",
    (2, 2): "cpu_adam_bf16_states_params_per_s",
}
"""The quantity of a profile by the bytes of master weights and of moments."""

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
    DISK_READ = "disk reads"
    DISK_WRITE = "disk writes"
    DISK = "disk"

    __hash__ = object.__hash__  # as in ``action.py``


@dataclass(frozen=True, kw_only=True)
class BytesPerParam:
    """Bytes per parameter that an action moves, by resource."""

    h2d: float = 0.0
    d2h: float = 0.0
    pageable: float = 0.0
    dram: float = 0.0


def gpu_step_bytes(widths: Widths = SIXTEEN_BIT) -> int:
    """Return the bytes per parameter of Adam on the GPU: states are read and written, gradient and parameter once."""
    return 2 * widths.states + widths.grad + widths.param


def traffic_by_action(widths: Widths = SIXTEEN_BIT) -> dict[ActionKind, BytesPerParam]:
    """Return the bytes per parameter that our runtime moves in each kind of action.

    CPU_STEP is one pass. It reads and writes p, m and v, reads the gradient, and writes rounded parameters. SPECULATE
    is the same pass to the other version of the states. If nothing is published, CPU_STEP and COMMIT write the model's
    parameters, and GPU_STEP copies them down.
    """
    staged = widths.states
    published, copied_down = (widths.param, 0) if widths.publishes else (0, widths.param)
    written = widths.param if widths.rounds or not widths.publishes else 0
    cpu_step = BytesPerParam(dram=2 * staged + widths.grad + written)
    speculate = BytesPerParam(dram=2 * staged + widths.grad + (widths.param if widths.rounds else 0))
    return {
        ActionKind.PREFETCH: BytesPerParam(h2d=staged, dram=staged),
        ActionKind.GPU_STEP: BytesPerParam(d2h=copied_down, dram=copied_down),
        ActionKind.GPU_SPECULATE: BytesPerParam(),
        ActionKind.FLUSH_STATES: BytesPerParam(d2h=staged, dram=staged),
        ActionKind.CPU_STEP: cpu_step,
        ActionKind.SPECULATE: speculate,
        ActionKind.COMMIT: BytesPerParam(dram=2 * copied_down),
        ActionKind.PUBLISH: BytesPerParam(h2d=published, dram=published),
        ActionKind.ADOPT: BytesPerParam(h2d=widths.param, dram=widths.param),
    }


def stock_traffic_by_action(widths: Widths = SIXTEEN_BIT) -> dict[ActionKind, BytesPerParam]:
    """Return the bytes per parameter that stock DeepSpeed moves in each kind of action.

    Its CPU update takes three passes: the gradient, in the dtype of the masters, is scaled in place (8 if they are
    fp32), Adam reads and writes (28), and the parameter is rounded (4 read, 2 written). It publishes from pageable
    memory, which the driver first copies to pinned memory.
    """
    published = widths.param if widths.publishes else 0
    rounding = widths.master + widths.param if widths.rounds or not widths.publishes else 0
    return {
        **traffic_by_action(widths),
        ActionKind.CPU_STEP: BytesPerParam(dram=3 * widths.master + 2 * widths.states + rounding),
        ActionKind.PUBLISH: BytesPerParam(h2d=published, pageable=published, dram=3 * published),
    }


class DiskRates(NamedTuple):
    """The bytes per second that a rank reads and writes on its disks, alone and both together."""

    read: float
    write: float
    both: float

    @classmethod
    def from_profile(cls, profile: HardwareProfile) -> DiskRates | None:
        """Return the rates in ``profile`` of all ranks of a node together, None if it has none."""
        ranks = profile.provenance.ranks
        rates = [ranks * rate for name in DISK_QUANTITIES if (rate := profile.get(name)) is not None]
        return cls(*rates) if len(rates) == len(DISK_QUANTITIES) else None

    @classmethod
    def one_after_the_other(cls, read: float, write: float) -> DiskRates:
        """Return the rates of a disk that gains nothing if it reads and writes at the same time."""
        return cls(read, write, 2 / (1 / read + 1 / write))


@dataclass(frozen=True, eq=False)
class Load:
    """The ``amounts`` of an action. It takes ``alone_s`` if nothing else runs, after ``latency_s`` of its lane."""

    alone_s: float
    amounts: Mapping[Resource, float]
    latency_s: float = 0.0

    @property
    def total_s(self) -> float:
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
    eager_flush: float = 1.0
    """The bytes of an eager unit's flush, with rounded parameters, as a multiple of another unit's."""

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
        eager_flush: float = 1.0,
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
        for kind in UPDATES_ON_GPU:
            if gpu_adam_params_per_s is None:
                del per_param[kind]
            else:
                per_param[kind][Resource.GPU] = 1 / gpu_adam_params_per_s
        return cls(
            capacities={**capacities, Resource.CPU: 1.0, Resource.GPU: 1.0},
            per_param=per_param,
            copy_latency_s=copy_latency_s,
            eager_flush=eager_flush,
        )

    @classmethod
    def for_stock(cls, profile: HardwareProfile, widths: Widths = SIXTEEN_BIT) -> CostModel:
        """Return the cost model of stock DeepSpeed's update. Raise ``ProfileError`` if a rate is missing.

        Its rate was measured with fp32 states. With others, it is that rate times the bytes that it moves less.
        """
        if not profile.has_accelerator and not widths.rounds and widths.param < FP32_BYTES:
            # The masters are copied to the parameters of the model.
            widths = replace(widths, publishes=False)
        rate = stock_speed_up(widths) * profile.rate("stock_cpu_adam_params_per_s")
        return cls._from_traffic(profile, stock_traffic_by_action(widths), rate, widths)

    @classmethod
    def from_profile(cls, profile: HardwareProfile, widths: Widths = SIXTEEN_BIT) -> CostModel:
        """Return the cost model of our update. Raise ``ProfileError`` if a rate is missing."""
        # If the profile contains no rate of an accelerator, the CPU is the accelerator.
        widths = replace(widths, publishes=widths.publishes and profile.has_accelerator)
        return cls._from_traffic(profile, traffic_by_action(widths), cpu_adam_params_per_s(profile, widths), widths)

    @classmethod
    def _from_traffic(
        cls, profile: HardwareProfile, traffic: Mapping[ActionKind, BytesPerParam], cpu: float, widths: Widths
    ) -> CostModel:
        latency_s = profile.get("copy_latency_s") or 0.0
        eager_flush = 1.0 + (widths.param / widths.states if widths.rounds else 0.0)
        if not profile.has_accelerator:
            # Slots are host memory. Copies, which read and write each byte, and Adam share the cores.
            byte_s = 2 / (profile.get("dram_copy_bytes_per_s") or profile.rate("dram_update_bytes_per_s"))
            seconds = {kind: byte_s * (moved.h2d + moved.d2h) for kind, moved in traffic.items()}
            seconds |= dict.fromkeys((*UPDATES_ON_CPU, *UPDATES_ON_GPU), 1 / cpu)
            seconds[ActionKind.COMMIT] = byte_s / 2 * traffic[ActionKind.COMMIT].dram
            if traffic[ActionKind.PUBLISH].h2d < FP32_BYTES:
                seconds[ActionKind.PUBLISH] = 0.0
            per_param = {kind: {Resource.CPU: param_s} for kind, param_s in seconds.items()}
            return cls(
                capacities={Resource.CPU: 1.0}, per_param=per_param, copy_latency_s=latency_s, eager_flush=eager_flush
            )
        h2d, gpu = profile.rate("h2d_bytes_per_s"), profile.get("gpu_adam_params_per_s")
        if gpu is not None and widths.master < FP32_BYTES:
            # Adam on a GPU is limited by its memory.
            gpu *= gpu_step_bytes() / gpu_step_bytes(widths)
        return cls.from_rates(
            cpu_adam_params_per_s=cpu,
            gpu_adam_params_per_s=gpu,
            capacities={
                Resource.H2D: h2d,
                Resource.D2H: profile.rate("d2h_bytes_per_s"),
                Resource.BOTH: profile.both_directions,
                Resource.PAGEABLE: profile.get("pageable_h2d_bytes_per_s") or h2d,
                Resource.DRAM: max(_dram_capacity(profile), traffic[ActionKind.CPU_STEP].dram * cpu),
            },
            traffic=traffic,
            copy_latency_s=latency_s,
            eager_flush=eager_flush,
        )

    def with_disk(self, rates: DiskRates, widths: Widths) -> CostModel:
        capacities = {Resource.DISK_READ: rates.read, Resource.DISK_WRITE: rates.write, Resource.DISK: rates.both}
        shared = [Resource.DISK, Resource.DRAM] if Resource.DRAM in self.capacities else [Resource.DISK]
        by_kind = {
            kind: dict.fromkeys([own, *shared], float(widths.states))
            for kind, own in ((ActionKind.READ, Resource.DISK_READ), (ActionKind.WRITE, Resource.DISK_WRITE))
        }
        return replace(self, capacities={**self.capacities, **capacities}, per_param={**self.per_param, **by_kind})

    def load(self, kind: ActionKind, numel: int) -> Load:
        amounts = {resource: each * numel for resource, each in self.per_param[kind].items() if each > 0}
        busiest_s = max((amount / self.capacities[resource] for resource, amount in amounts.items()), default=0.0)
        copies = COPIES_PER_ACTION.get(kind, 0) if amounts else 0
        return Load(busiest_s, amounts, self.copy_latency_s * copies)

    def busy_s(self, kinds: Iterable[ActionKind], numel: int = 1) -> dict[Resource, float]:
        """Return the seconds for which actions of ``kinds`` on ``numel`` parameters keep each resource busy."""
        amounts = [self.per_param[kind] for kind in kinds if kind in self.per_param]
        return {
            resource: numel * sum(each.get(resource, 0.0) for each in amounts) / capacity
            for resource, capacity in self.capacities.items()
        }

    def without_accelerator(self) -> CostModel:
        kinds = {*CHAINS[Placement.CPU], *EAGER_CHAINS[Placement.CPU], *DISK_CHAIN} & self.per_param.keys()
        return replace(self, per_param={kind: each for kind, each in self.per_param.items() if kind in kinds})


def cpu_adam_params_per_s(profile: HardwareProfile, widths: Widths) -> float:
    """Return the rate of a CPU_STEP. For bf16 states, host memory is assumed to limit it if it was not measured."""
    measured, fp32 = profile.get(CPU_ADAM[widths.master, widths.moment]), profile.rate("cpu_adam_params_per_s")
    if measured is not None:
        return measured
    return fp32 * traffic_by_action()[ActionKind.CPU_STEP].dram / traffic_by_action(widths)[ActionKind.CPU_STEP].dram


def stock_speed_up(widths: Widths) -> float:
    """Return how many times as fast stock's CPU update is as with fp32 states, if host memory limits both."""
    if widths.master == FP32_BYTES:
        return 1.0
    fp32, other = (stock_traffic_by_action(each)[ActionKind.CPU_STEP].dram for each in (SIXTEEN_BIT, widths))
    return fp32 / other


def _dram_capacity(profile: HardwareProfile) -> float:
    """Return a lower bound: the bytes per second during a CPU update and transfers both ways, or during either."""
    cpu = profile.rate("cpu_adam_params_per_s")
    # If the rate of both directions is waived, its upper bound is known, but only one direction is a lower bound.
    both = profile.get("both_bytes_per_s") or max(map(profile.rate, ("h2d_bytes_per_s", "d2h_bytes_per_s")))
    step_bytes = traffic_by_action()[ActionKind.CPU_STEP].dram
    alone = max(profile.rate("dram_update_bytes_per_s"), step_bytes * cpu, both)
    concurrent_cpu = profile.get("cpu_adam_beside_transfers_params_per_s")
    concurrent_both = profile.get("both_beside_cpu_adam_bytes_per_s")
    if concurrent_cpu is None or concurrent_both is None:
        return alone
    return max(alone, step_bytes * min(concurrent_cpu, cpu) + min(concurrent_both, profile.both_directions))
