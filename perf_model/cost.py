"""``CostModel``: what an action uses of each shared resource, and how long it takes alone.

Actions that overlap share resources (DESIGN 5): the two PCIe directions, their joint limit, and host memory bandwidth,
which CPU updates and every transfer use. Which of these slows whom follows from the amounts; there is no factor for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from perf_model.action import ActionKind
from perf_model.hardware import HardwareProfile
from perf_model.schedule import STAGED_BYTES_PER_PARAM


class Resource(Enum):
    H2D = "h2d"
    D2H = "d2h"
    BOTH = "both directions"
    DRAM = "host memory"
    CPU = "cpu cores"
    GPU = "gpu"


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Bytes a parameter, by resource."""

    h2d: float = 0.0
    d2h: float = 0.0
    dram: float = 0.0


def traffic_of(param_bytes: int) -> dict[ActionKind, Traffic]:
    """What the runtime moves. ``param_bytes``: 2 for 16-bit models; 4 for fp32, whose CPU update has nothing to round.

    CPU_STEP is stock's three passes: the gradient scaled in place (8), Adam (28), rounding (4 read, 2 written).
    """
    rounding = 4 + param_bytes if param_bytes < 4 else 0
    return {
        ActionKind.PREFETCH: Traffic(h2d=STAGED_BYTES_PER_PARAM, dram=STAGED_BYTES_PER_PARAM),
        ActionKind.GPU_STEP: Traffic(),
        ActionKind.FLUSH_STATES: Traffic(d2h=12, dram=12),
        ActionKind.CPU_STEP: Traffic(dram=8 + 28 + rounding),
        ActionKind.PUBLISH: Traffic(h2d=param_bytes, dram=param_bytes),
    }


COPIES = {ActionKind.PREFETCH: 4, ActionKind.FLUSH_STATES: 3, ActionKind.PUBLISH: 1}
"""Copies that an action consists of; each starts with the latency of a copy."""


@dataclass(frozen=True, eq=False)
class Load:
    """Of one action: seconds if nothing else runs, and what it takes of shared resources meanwhile, in their units."""

    alone_s: float
    amounts: Mapping[Resource, float]


@dataclass(frozen=True, kw_only=True)
class CostModel:
    """Rates of one rank. ``capacities`` are per second, of what ``Load.amounts`` counts.

    CPU and GPU are counted in seconds of the whole rank's share: a capacity of 1.
    """

    cpu_adam_params_per_s: float
    gpu_adam_params_per_s: float
    copy_latency_s: float
    capacities: Mapping[Resource, float]
    traffic: Mapping[ActionKind, Traffic]

    @classmethod
    def of(cls, profile: HardwareProfile, param_bytes: int = 2) -> CostModel:
        """Raises ``ProfileError`` where a rate that transfers need is waived; see ``HardwareProfile.transfers``."""
        traffic = traffic_of(param_bytes)
        cpu = profile.rate("cpu_adam_params_per_s")
        both = profile.rate("both_bytes_per_s")
        return cls(
            cpu_adam_params_per_s=cpu,
            gpu_adam_params_per_s=profile.rate("gpu_adam_params_per_s"),
            copy_latency_s=profile.get("copy_latency_s") or 0.0,
            capacities={
                Resource.H2D: profile.rate("h2d_bytes_per_s"),
                Resource.D2H: profile.rate("d2h_bytes_per_s"),
                Resource.BOTH: both,
                Resource.DRAM: _dram_capacity(profile, traffic[ActionKind.CPU_STEP].dram, cpu, both),
                Resource.CPU: 1.0,
                Resource.GPU: 1.0,
            },
            traffic=traffic,
        )

    def load(self, kind: ActionKind, numel: int) -> Load:
        traffic = self.traffic[kind]
        amounts = {
            Resource.H2D: traffic.h2d * numel,
            Resource.D2H: traffic.d2h * numel,
            Resource.BOTH: (traffic.h2d + traffic.d2h) * numel,
            Resource.DRAM: traffic.dram * numel,
            Resource.CPU: numel / self.cpu_adam_params_per_s if kind is ActionKind.CPU_STEP else 0.0,
            Resource.GPU: numel / self.gpu_adam_params_per_s if kind is ActionKind.GPU_STEP else 0.0,
        }
        amounts = {resource: amount for resource, amount in amounts.items() if amount > 0}
        busiest_s = max((amount / self.capacities[resource] for resource, amount in amounts.items()), default=0.0)
        return Load(busiest_s + self.copy_latency_s * COPIES.get(kind, 0), amounts)


def _dram_capacity(profile: HardwareProfile, cpu_step_bytes: float, cpu: float, both: float) -> float:
    """What host memory gave to a CPU update and to transfers both ways while they ran beside each other.

    If neither slowed the other, host memory did not bind: then at least that much. What either reaches alone is
    less than the capacity in any case; a CPU update that the caches help may beat the plain probe.
    """
    alone = max(profile.rate("dram_update_bytes_per_s"), cpu_step_bytes * cpu, both)
    beside_cpu = profile.get("cpu_adam_beside_transfers_params_per_s")
    beside_both = profile.get("both_beside_cpu_adam_bytes_per_s")
    if beside_cpu is None or beside_both is None:
        return alone
    return max(alone, cpu_step_bytes * min(beside_cpu, cpu) + min(beside_both, both))
