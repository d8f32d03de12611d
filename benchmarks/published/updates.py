"""Predict the updates of published runs from the rates of a machine, and fit these rates.

The artifact's update is limited by host memory. While the CPU updates sub-groups, the one in the buffer is flushed, and
then the next one is prefetched. All three share the bandwidth of host memory, and the CPU alone exhausts it. So
whatever a transfer takes of it delays the CPU: the seconds of both add up, no matter which runs when, and the update is
a straight line in the share of the streamed parameters. Flush and prefetch run one after the other on the link, which
is the limit only where that takes longer than all the traffic of host memory.

``plan`` simulates an update instead, in which a copy and a CPU update that exceed the bandwidth of host memory together
both slow down. ``simulated_update_s`` does so at the same rates, as a comparison.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import NamedTuple

import numpy as np

from benchmarks.published.least_squares import FittedRates, Prior, Vector, fit_rates
from benchmarks.published.runs import MeasuredRun, RunSetting
from perf_model.prediction.cost import BytesPerParam, CostModel, Resource, stock_traffic_by_action, traffic_by_action
from perf_model.prediction.simulate import simulate
from perf_model.presets.machines import MACHINES, REACHED_SHARE
from perf_model.schedule.action import ActionKind
from perf_model.schedule.lowering import serial_schedule
from perf_model.schedule.placement import Placement
from perf_model.schedule.plan import UpdatePlan
from perf_model.schedule.schedule import Schedule
from perf_model.schedule.workload import Partition, Workload, form_sub_groups
from perf_model.training_run.micro_batch import PARAM_BYTES

PRESETS = {
    "4xH100-80GB": MACHINES["h100-pcie5"],
    "4xA100-40GB": MACHINES["a100-40gb"],
    # Its link and its memory; the preset a100-40gb-nodes was fitted to the rates of these runs.
    "A100-40GB-nodes": MACHINES["a100-40gb"],
}
"""The preset with the specifications of each machine. Its measured rates are not used."""

VOCAB = 51200
"""The vocabulary of GPT-2, padded as Megatron-LM does."""

KV_HEADS = 4
"""The heads of keys and values. The parameters and layers that the logs print match these and feed-forward widths of
11008, 12400, 13824, 20480 and 17920 within 0.7 %."""

STOCK_TRAFFIC = stock_traffic_by_action()
CPU_BYTES = STOCK_TRAFFIC[ActionKind.CPU_STEP].dram + PARAM_BYTES
"""Bytes of host memory per parameter that the CPU updates, and whose 16-bit value the device then reads."""

STREAMED_BYTES = 16 + 8 + 12
"""Bytes of host memory per streamed parameter: p, m, v and the fp32 gradient are copied up, after the host has scaled
the gradient in place (4 read, 4 written), and p, m and v are copied down."""

STREAMED_LINK_BYTES = 16 + 12
"""Bytes per streamed parameter that cross the link: up and down, one after the other."""

GPU_ADAM_BYTES = 80 + 8 + 6
"""Bytes of GPU memory per parameter that stays on the GPU. DeepSpeed updates it by ``torch.optim.AdamW``
(``stage3.py``, ``backup_optimizer``), whose eight kernels for lists of tensors read and write 80. It also scales the
gradient in place and writes the 16-bit parameter."""

STOCK_NOISE, INTERLEAVED_NOISE = 0.02, 0.07
"""Standard deviations of log(measured time), as repeated settings in the published logs show."""


@cache
def workload_of(setting: RunSetting) -> Workload:
    """Return the sub-groups of one rank.

    The launch script of the artifact trains Llama-like models with Megatron-DeepSpeed: rotary positions, no biases,
    untied embeddings, and a gated feed-forward, as wide as ``real_params`` require, whose first matrices are one
    parameter, same as queries, keys and values. ZeRO-3 leaves parameters without a shape when Megatron looks for
    vectors, which have no weight decay, so all parameters are in one param group.
    """
    hidden, layers, table = setting.hidden, setting.layers, VOCAB * setting.hidden
    projections = round(hidden * hidden * (1 + 2 * KV_HEADS / setting.heads))
    in_feed_forward = (setting.real_params - 2 * table) / layers - projections - hidden * hidden
    width = round(in_feed_forward / (3 * hidden))
    layer = [hidden, projections, hidden * hidden, hidden, 2 * hidden * width, hidden * width]
    tensors = [table, *(layers * layer), hidden, table]
    scale = setting.real_params / sum(tensors)
    partitions = (Partition("", -(-round(scale * numel) // setting.ranks)) for numel in tensors)
    groups = form_sub_groups(partitions, setting.sub_group_size)
    return Workload.from_numels([sum(partition.numel for partition in group) for group in groups])


@cache
def placements_of(setting: RunSetting) -> tuple[Placement, ...]:
    """Return the placement of each sub-group of one rank.

    Twin-Flow (DeepSpeed's ``ratio``; ``stage3.py``, ``subgroup_to_device``) offloads the first sub-groups. The others
    stay on the accelerator, which updates them after the first ones.
    """
    count = len(workload_of(setting).units)
    offloaded = int(setting.cpu_ratio * count)
    placements = [Placement.CPU] * offloaded + [Placement.RESIDENT] * (count - offloaded)
    if setting.update_stride is not None:
        for index in range(setting.update_stride - 1, offloaded, setting.update_stride):
            placements[index] = Placement.STREAMED
    return tuple(placements)


class UpdatedParameters(NamedTuple):
    """The parameters of one rank, by the way in which they are updated."""

    on_cpu: int
    streamed: int
    resident: int


@cache
def updated_parameters(setting: RunSetting) -> UpdatedParameters:
    """Return how many parameters of one rank are updated in which way."""
    counts = dict.fromkeys(Placement, 0)
    for unit, placement in zip(workload_of(setting).units, placements_of(setting), strict=True):
        counts[placement] += unit.numel
    return UpdatedParameters(counts[Placement.CPU], counts[Placement.STREAMED], counts[Placement.RESIDENT])


def link_bytes_per_s(machine: str) -> float:
    """Return the rate of copies on the link of ``machine``, by its PCIe generation. It is not fitted."""
    return REACHED_SHARE * PRESETS[machine].link_bytes_per_s


def priors_of(machine: str) -> dict[str, Prior]:
    """Return the priors of the rates of ``machine``."""
    gpu = REACHED_SHARE * PRESETS[machine].gpu_memory_bytes_per_s / GPU_ADAM_BYTES
    return {
        # This prior is so wide that the runs alone determine the rate: every run depends on it.
        "dram_bytes_per_s": Prior(60e9, 3.0),
        "pageable_bytes_per_s": Prior(6e9, 0.5),
        # The count of bytes above; caches and write-allocate traffic change it.
        "streamed_bytes_per_param": Prior(STREAMED_BYTES, 0.3),
        "gpu_adam_params_per_s": Prior(gpu, 0.5),
    }


def update_s(setting: RunSetting, rates: Mapping[str, float], link: float) -> float:
    """Return the predicted seconds of the update of a run with ``setting``.

    Without interleaving, DeepSpeed publishes each sub-group from pageable memory and waits for it.
    """
    numel = updated_parameters(setting)
    host_bytes = CPU_BYTES * numel.on_cpu + rates["streamed_bytes_per_param"] * numel.streamed
    host_s = max(host_bytes / rates["dram_bytes_per_s"], STREAMED_LINK_BYTES * numel.streamed / link)
    waits = setting.update_stride is None
    published_s = PARAM_BYTES * numel.on_cpu / rates["pageable_bytes_per_s"] if waits else 0.0
    return host_s + published_s + numel.resident / rates["gpu_adam_params_per_s"]


def fit_updates(runs: Sequence[MeasuredRun]) -> FittedRates:
    """Return the rates that fit the updates of ``runs`` best. There must be at least one run, all of one machine."""
    link = link_bytes_per_s(runs[0].machine)
    log_measured = np.log([run.measured_s["update"] for run in runs])
    noise = np.array([STOCK_NOISE if run.setting.update_stride is None else INTERLEAVED_NOISE for run in runs])

    def residuals(rates: Mapping[str, float]) -> Vector:
        found: Vector = (np.log([update_s(run.setting, rates, link) for run in runs]) - log_measured) / noise
        return found

    return fit_rates(residuals, priors_of(runs[0].machine))


def simulated_update_s(setting: RunSetting, rates: Mapping[str, float], machine: str) -> float:
    """Return the seconds of the update of a run with ``setting`` on ``machine``, simulated as ``plan`` does.

    The rates are the same as for ``update_s``, which counts the same bytes.
    """
    link = link_bytes_per_s(machine)
    # The fitted rate of host memory counts the reading of the 16-bit parameter with the CPU's update.
    traffic = dict(STOCK_TRAFFIC) | {
        ActionKind.CPU_STEP: BytesPerParam(dram=CPU_BYTES),
        ActionKind.PUBLISH: BytesPerParam(h2d=PARAM_BYTES, pageable=PARAM_BYTES),
    }
    if setting.update_stride is not None:
        streamed = rates["streamed_bytes_per_param"] / STREAMED_BYTES
        flush = traffic_by_action()[ActionKind.FLUSH_STATES]
        prefetch = BytesPerParam(h2d=STREAMED_LINK_BYTES - flush.d2h, dram=streamed * (STREAMED_BYTES - flush.dram))
        traffic |= {
            ActionKind.PREFETCH: prefetch,
            ActionKind.FLUSH_STATES: BytesPerParam(d2h=flush.d2h, dram=streamed * flush.dram),
            ActionKind.PUBLISH: BytesPerParam(h2d=PARAM_BYTES),
        }
    cost = CostModel.from_rates(
        cpu_adam_params_per_s=rates["dram_bytes_per_s"] / CPU_BYTES,
        gpu_adam_params_per_s=rates["gpu_adam_params_per_s"],
        capacities={
            Resource.H2D: link,
            Resource.D2H: link,
            Resource.BOTH: PRESETS[machine].joint * link,
            Resource.PAGEABLE: rates["pageable_bytes_per_s"],
            Resource.DRAM: rates["dram_bytes_per_s"],
        },
        traffic=traffic,
    )
    return simulate(_schedule_of(setting), workload_of(setting), cost).end_s


@cache
def _schedule_of(setting: RunSetting) -> Schedule:
    """Return the schedule of a run, in which one buffer holds one streamed sub-group after another.

    The GPU's own sub-groups come last: their steps wait for the last step of the CPU.
    """
    workload, placements = workload_of(setting), placements_of(setting)
    if setting.update_stride is None:
        return serial_schedule(placements)
    schedule = UpdatePlan(workload=workload, placements=placements, num_slots=1).schedule
    on_cpu = [action.name for action in schedule.actions if action.kind is ActionKind.CPU_STEP]
    offloaded = [action for action in schedule.actions if placements[action.unit] is not Placement.RESIDENT]
    resident = [action for action in schedule.actions if placements[action.unit] is Placement.RESIDENT]
    return replace(schedule, actions=(*offloaded, *(replace(action, waits=tuple(on_cpu[-1:])) for action in resident)))
