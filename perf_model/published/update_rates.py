"""Predict the updates of published runs from the rates of a machine, and fit these rates.

The artifact's update is limited by host memory. While the CPU updates sub-groups, the one in the buffer is flushed, and
then the next one is prefetched. All three share the bandwidth of host memory, and the CPU alone exhausts it. So
whatever a transfer takes of it delays the CPU: the seconds of both add up, no matter which runs when, and the update is
a straight line in the share of the streamed parameters. Flush and prefetch run one after the other on the link, which
is the limit only where that takes longer than all the traffic of host memory.

The simulation of ``plan`` predicts these runs less well: ``rules_of_plan.py`` compares both.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cache

import numpy as np

from perf_model.prediction.cost import stock_traffic_by_action
from perf_model.presets.machines import MACHINES, REACHED_SHARE, MachinePreset
from perf_model.published.least_squares import FittedRates, Prior, Vector, fit_rates
from perf_model.published.placements import updated_parameters
from perf_model.published.runs import MeasuredRun, RunSetting
from perf_model.schedule.action import ActionKind
from perf_model.training_run.training_memory import PARAM_BYTES

STOCK_TRAFFIC = stock_traffic_by_action(PARAM_BYTES)
CPU_BYTES = STOCK_TRAFFIC[ActionKind.CPU_STEP].dram + PARAM_BYTES
"""Bytes of host memory per parameter that the CPU updates, and whose 16-bit value the device then reads."""

STREAMED_BYTES = 16 + 8 + 12
"""Bytes of host memory per streamed parameter: p, m, v and the fp32 gradient are copied up, after the host has scaled
the gradient in place (4 read, 4 written), and p, m and v are copied down."""

STREAMED_LINK_BYTES = 16 + 12
"""Bytes per streamed parameter that cross the link: up and down, one after the other."""

GPU_ADAM_BYTES = 80 + 8 + 6
"""Bytes of GPU memory per parameter that stays on the GPU. DeepSpeed updates it by ``torch.optim.AdamW``
(``stage3.py``, ``backup_optimizer``), whose eight kernels for lists of tensors read and write 80. Besides, it scales
the gradient in place and writes the 16-bit parameter."""

STOCK_NOISE, INTERLEAVED_NOISE = 0.02, 0.07
"""Standard deviations of log(measured time), as repeated settings in the published logs show."""

_SHARED_PRIORS = {
    # This prior is so wide that the runs alone determine the rate: every run depends on it.
    "dram_bytes_per_s": Prior(60e9, 3.0),
    "pageable_bytes_per_s": Prior(6e9, 0.5),
    # The count of bytes above; caches and write-allocate traffic change it.
    "streamed_bytes_per_param": Prior(STREAMED_BYTES, 0.3),
}


ASSUMED_MACHINE = MACHINES["a100-40gb"]
"""The preset of a machine whose name contains no GPU of a preset."""


def preset_of(machine: str) -> MachinePreset | None:
    """Return the first preset with the GPU in the name ``machine``, such as 8xH200-141GB, or None.

    A preset with the memory in that name is preferred.
    """
    name = machine.upper()
    known = [preset for preset in MACHINES.values() if _pattern(preset).search(name)]
    with_memory = [preset for preset in known if preset.gpu.rpartition("-")[2] in name]
    return next(iter(with_memory or known), None)


@cache
def _pattern(preset: MachinePreset) -> re.Pattern[str]:
    """Return the pattern of the GPU of ``preset`` without its memory, after the number of GPUs or as a word."""
    gpu = re.escape(preset.gpu.rpartition("-")[0].removeprefix("RTX-"))
    return re.compile(rf"(?:^|[^A-Z0-9]|[0-9]X)(?:RTX[- ]?)?{gpu}(?![A-Z0-9])")


def machine_of(name: str) -> MachinePreset:
    """Return the preset with the GPU of the machine ``name``, or ``ASSUMED_MACHINE``."""
    return preset_of(name) or ASSUMED_MACHINE


def link_bytes_per_s(machine: str) -> float:
    """Return the rate of copies on the link of ``machine``: that of its PCIe generation, which is not fitted."""
    return REACHED_SHARE * machine_of(machine).link_bytes_per_s


def priors_of(machine: str) -> dict[str, Prior]:
    """Return the priors of the rates of ``machine``."""
    gpu = REACHED_SHARE * machine_of(machine).gpu_memory_bytes_per_s / GPU_ADAM_BYTES
    return {**_SHARED_PRIORS, "gpu_adam_params_per_s": Prior(gpu, 0.5)}


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
    log_measured = np.log([run.measured_s for run in runs])
    noise = np.array([STOCK_NOISE if run.setting.update_stride is None else INTERLEAVED_NOISE for run in runs])

    def residuals(rates: Mapping[str, float]) -> Vector:
        predicted = {setting: update_s(setting, rates, link) for setting in {run.setting for run in runs}}
        found: Vector = (np.log([predicted[run.setting] for run in runs]) - log_measured) / noise
        return found

    return fit_rates(residuals, priors_of(runs[0].machine))
