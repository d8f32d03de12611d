"""``CostModel``: what an action uses of each shared resource, and how long it takes alone.

Actions that overlap share resources (DESIGN 5): the two PCIe directions, their joint limit, the driver's staging of
pageable copies, CPU cores, the GPU, and host memory bandwidth, which CPU updates and every transfer use. Which of these
slows whom follows from the amounts; there is no factor for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from perf_model.prediction.hardware import HardwareProfile
from perf_model.schedule.action import ActionKind
from perf_model.schedule.happens_before import CHAINS
from perf_model.schedule.placement import Placement
from perf_model.schedule.schedule import STAGED_BYTES_PER_PARAM

FP32_BYTES = 4
PROBED_PARAM_BYTES = 2
"""Of the model whose update is probed: bf16."""


class Resource(Enum):
    H2D = "h2d"
    D2H = "d2h"
    BOTH = "both directions"
    PAGEABLE = "pageable copies"
    DRAM = "host memory"
    CPU = "cpu cores"
    GPU = "gpu"


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Bytes a parameter, by resource."""

    h2d: float = 0.0
    d2h: float = 0.0
    pageable: float = 0.0
    dram: float = 0.0


def traffic_of(param_bytes: int, *, params_on_host: bool = False) -> dict[ActionKind, Traffic]:
    """What the runtime moves. ``param_bytes``: 2 for 16-bit models; 4 for fp32, whose CPU update has nothing to round.

    CPU_STEP is one pass: p, m and v read and written (24), the gradient read in the model's dtype, in which DeepSpeed
    accumulates it by default, and the 16-bit parameter written. ``params_on_host``: DeepSpeed offloads parameters: the
    CPU update writes them where they are, in fp32 too, and an update on the accelerator is copied down to them.
    """
    writes_param = params_on_host or param_bytes < FP32_BYTES
    published, copied_down = (0, param_bytes) if params_on_host else (param_bytes, 0)
    return {
        ActionKind.PREFETCH: Traffic(h2d=STAGED_BYTES_PER_PARAM, dram=STAGED_BYTES_PER_PARAM),
        ActionKind.GPU_STEP: Traffic(d2h=copied_down, dram=copied_down),
        ActionKind.FLUSH_STATES: Traffic(d2h=12, dram=12),
        ActionKind.CPU_STEP: Traffic(dram=24 + param_bytes + (param_bytes if writes_param else 0)),
        ActionKind.PUBLISH: Traffic(h2d=published, dram=published),
    }


def stock_traffic_of(param_bytes: int) -> dict[ActionKind, Traffic]:
    """What stock DeepSpeed moves: its CPU update takes three passes, and publishes from pageable memory.

    The gradient is scaled in place (8), Adam reads and writes (28), the parameter is rounded (4 read, 2 written). The
    driver copies what is published to memory that it has pinned (read, written) before the device reads that.
    """
    rounding = 4 + param_bytes if param_bytes < FP32_BYTES else 0
    return {
        **traffic_of(param_bytes),
        ActionKind.CPU_STEP: Traffic(dram=8 + 28 + rounding),
        ActionKind.PUBLISH: Traffic(h2d=param_bytes, pageable=param_bytes, dram=3 * param_bytes),
    }


COPIES = {ActionKind.PREFETCH: 3, ActionKind.FLUSH_STATES: 3, ActionKind.PUBLISH: 1}
"""Copies that an action consists of; each starts with the latency of a copy."""


@dataclass(frozen=True, eq=False)
class Load:
    """Of one action: what it takes of shared resources, in their units, and the seconds for that if nothing else runs.

    ``latency_s`` comes before that, and uses nothing but the lane.
    """

    alone_s: float
    amounts: Mapping[Resource, float]
    latency_s: float = 0.0

    @property
    def total_s(self) -> float:
        return self.latency_s + self.alone_s


@dataclass(frozen=True, kw_only=True)
class CostModel:
    """``capacities`` of one rank a second, ``per_param`` what an action takes of them for each parameter.

    CPU and GPU are counted in seconds of the rank's whole share, a capacity of 1; the others in bytes. ``blocks``: the
    host itself does what it issues on a stream, and issues nothing meanwhile.
    """

    capacities: Mapping[Resource, float]
    per_param: Mapping[ActionKind, Mapping[Resource, float]]
    copy_latency_s: float = 0.0
    blocks: bool = False

    @property
    def placements(self) -> tuple[Placement, ...]:
        """Those whose actions have a cost: without a GPU's Adam, all is updated on the CPU."""
        return tuple(placement for placement, chain in CHAINS.items() if all(kind in self.per_param for kind in chain))

    @classmethod
    def of_rates(
        cls,
        *,
        cpu_adam_params_per_s: float,
        gpu_adam_params_per_s: float | None,
        capacities: Mapping[Resource, float],
        traffic: Mapping[ActionKind, Traffic],
        copy_latency_s: float = 0.0,
    ) -> CostModel:
        """``capacities`` are of what ``traffic`` counts, in bytes a second. Without ``gpu_adam_params_per_s`` nothing
        can be updated on the accelerator."""
        per_param = {kind: _amounts(its) for kind, its in traffic.items()}
        per_param[ActionKind.CPU_STEP][Resource.CPU] = 1 / cpu_adam_params_per_s
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
    def of_stock(cls, profile: HardwareProfile, param_bytes: int = 2) -> CostModel:
        """Of stock DeepSpeed's update. Raises ``ProfileError`` as ``of`` does."""
        return cls._of(profile, stock_traffic_of(param_bytes), profile.rate("stock_cpu_adam_params_per_s"))

    @classmethod
    def of(cls, profile: HardwareProfile, param_bytes: int = 2, *, params_on_host: bool = False) -> CostModel:
        """Of our update.

        Without any rate of transfers the accelerator is the CPU itself. Raises ``ProfileError`` where some of them
        are there and others are not.
        """
        # Where the accelerator is the CPU, all parameters are in host memory.
        traffic = traffic_of(param_bytes, params_on_host=params_on_host or not profile.has_accelerator)
        return cls._of(profile, traffic, profile.rate("cpu_adam_params_per_s"))

    @classmethod
    def _of(cls, profile: HardwareProfile, traffic: Mapping[ActionKind, Traffic], cpu: float) -> CostModel:
        if not profile.has_accelerator:
            return cls._of_cpu_accelerator(profile, traffic, cpu)
        h2d, both = profile.rate("h2d_bytes_per_s"), profile.rate("both_bytes_per_s")
        return cls.of_rates(
            cpu_adam_params_per_s=cpu,
            gpu_adam_params_per_s=profile.get("gpu_adam_params_per_s"),
            capacities={
                Resource.H2D: h2d,
                Resource.D2H: profile.rate("d2h_bytes_per_s"),
                Resource.BOTH: both,
                Resource.PAGEABLE: profile.get("pageable_h2d_bytes_per_s") or h2d,
                Resource.DRAM: max(_dram_capacity(profile), traffic[ActionKind.CPU_STEP].dram * cpu),
            },
            traffic=traffic,
            copy_latency_s=profile.get("copy_latency_s") or 0.0,
        )

    @classmethod
    def _of_cpu_accelerator(
        cls, profile: HardwareProfile, traffic: Mapping[ActionKind, Traffic], cpu: float
    ) -> CostModel:
        """Slots are host memory and every action is the host's: copies and Adam take turns at its cores.

        A copied byte is one read and one written; GPU_STEP does in a slot what CPU_STEP does in place. The CPU writes
        parameters where the model has them, as it updates: there is nothing to publish.
        """
        adam_s = 1 / cpu
        copied_byte_s = 2 / (profile.get("dram_copy_bytes_per_s") or profile.rate("dram_update_bytes_per_s"))
        seconds = {
            kind: adam_s if kind in (ActionKind.CPU_STEP, ActionKind.GPU_STEP) else copied_byte_s * (its.h2d + its.d2h)
            for kind, its in traffic.items()
        }
        if traffic[ActionKind.PUBLISH].h2d < FP32_BYTES:
            seconds[ActionKind.PUBLISH] = 0.0
        per_param = {kind: {Resource.CPU: param_s} for kind, param_s in seconds.items()}
        return cls(
            capacities={Resource.CPU: 1.0},
            per_param=per_param,
            copy_latency_s=profile.get("copy_latency_s") or 0.0,
            blocks=True,
        )

    def load(self, kind: ActionKind, numel: int) -> Load:
        amounts = {resource: each * numel for resource, each in self.per_param[kind].items() if each > 0}
        busiest_s = max((amount / self.capacities[resource] for resource, amount in amounts.items()), default=0.0)
        copies = COPIES.get(kind, 0) if amounts else 0
        return Load(busiest_s, amounts, self.copy_latency_s * copies)

    def busiest(self, kind: ActionKind) -> Resource:
        """What binds it alone."""
        each = self.per_param[kind]
        return max(each, key=lambda resource: each[resource] / self.capacities[resource])


def _amounts(traffic: Traffic) -> dict[Resource, float]:
    return {
        Resource.H2D: traffic.h2d,
        Resource.D2H: traffic.d2h,
        Resource.BOTH: traffic.h2d + traffic.d2h,
        Resource.PAGEABLE: traffic.pageable,
        Resource.DRAM: traffic.dram,
    }


def _dram_capacity(profile: HardwareProfile) -> float:
    """What host memory gave to a CPU update and to transfers both ways while they ran beside each other.

    If neither slowed the other, host memory did not bind: then at least that much. What either reaches alone is
    less than the capacity in any case; a CPU update that the caches help may beat the plain probe.
    """
    cpu, both = profile.rate("cpu_adam_params_per_s"), profile.rate("both_bytes_per_s")
    step_bytes = traffic_of(PROBED_PARAM_BYTES)[ActionKind.CPU_STEP].dram
    alone = max(profile.rate("dram_update_bytes_per_s"), step_bytes * cpu, both)
    beside_cpu = profile.get("cpu_adam_beside_transfers_params_per_s")
    beside_both = profile.get("both_beside_cpu_adam_bytes_per_s")
    if beside_cpu is None or beside_both is None:
        return alone
    return max(alone, step_bytes * min(beside_cpu, cpu) + min(beside_both, both))


_FULL = 1e-12


def shares(loads: Sequence[Load], capacities: Mapping[Resource, float]) -> list[float]:
    """Of each running action, its speed as a share of its speed alone. Max-min fair: progressive filling.

    All shares rise together until a resource is full; whoever uses that stays where it is, and the others rise on.
    They follow from what the actions are, not from how large: amounts and seconds alone grow alike.
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
