"""Describe a training run on an EMULATED machine, and the small model that trains in the place of the run's model.

One rank of the run is emulated. Each parameter of the small model stands for ``scale`` parameters of the rank, so the
emulated machine has the rates of the preset divided by ``scale``: then an update of the small model takes as long as
one of the run. All seconds are multiplied by ``slowdown``, so that the Python code, which runs at the speed of this
machine, takes a small part of them. The memory of the GPU, the gigabytes of the default margin, and the unit sizes that
the planner chooses from are also divided by ``scale``: then the plugin measures and plans as users have it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any
from unittest import mock

import deepspeed

from benchmarks.emulated.host_passes import HostPasses
from benchmarks.harness.setting import TrainingSetting
from deep_opt_states.zero.start import devices, planning
from examples.common.byte_gpt import Shape
from perf_model.planner import UNIT_SIZES
from perf_model.prediction.cost import CostModel, Resource
from perf_model.prediction.hardware import HardwareProfile, Measurement
from perf_model.prediction.slowdown import Slowdown
from perf_model.presets.machines import MACHINES
from perf_model.presets.models import MODELS
from perf_model.schedule.action import ActionKind
from perf_model.schedule.host_layout import Widths
from perf_model.schedule.workload import Workload
from perf_model.training_run.job import Job
from perf_model.training_run.micro_batch import TRAINING_SHARE
from perf_model.training_run.training_memory import DEFAULT_SIZES
from perf_model.units import GB
from tests.software_gpu import device, plugged, settings
from tests.software_gpu.process_group import BACKEND, register_backend

SHARE_FOR_UPDATES = 0.1
"""The share of GPU memory for a planned update, which leaves the rest to training."""

SEQUENCE = 2048
"""Tokens per sequence of the run. The small model trains on fewer."""

STOCK_STEP_S = 1.5
"""Emulated seconds that stock's passes over host memory take in every run, which decides the slowdown."""

LARGEST_PERSISTENT = 1000
"""The norms of the small model have at most so many elements. They are persistent parameters, as in the run."""


LAG = "longest lag of this machine in an EMULATED iteration"
"""The quantity that shows how far the Python code kept this machine behind the emulated one."""

PRODUCTS_PER_LAYER = 4
"""The products of matrices in the forward of a layer of the small model."""

WAVE_FLOPS = 132 * 2 * 128 * 256 * 16384
"""The operations of a product after which the GPU starts kernels of streams with a higher priority.

They are one thread block for each of an H100's 132 multiprocessors, of 128 x 256 elements with an inner length of
16384. This follows from specifications and was not measured. The software GPU knows no priorities: it lets kernels of
all other streams in.
"""

MEASURED_SLOWDOWN = Slowdown(cpu=0.53)
"""A forward of 340 ms took 724 ms during updates on the CPU of an H100's host. Copies were not measured."""


def start_device() -> None:
    """Load the software GPU and start the collectives of this rank. Call this once per process."""
    device.register()
    register_backend()
    deepspeed.init_distributed(dist_backend=BACKEND)


@contextmanager
def software_gpu() -> Iterator[None]:
    """Train on the software GPU of the tests inside this context, without emulated time. Call this once per process."""
    start_device()
    with plugged.plugged():
        yield


@dataclass(frozen=True, kw_only=True)
class SmallModel(TrainingSetting):
    """The model that trains for real: without biases, as the models of the runs."""

    width: int = 256
    context: int = 32
    micro_batch: int = 1
    sub_group_size: int = 200_000

    @property
    def shape(self) -> Shape:
        return replace(super().shape, bias=False)

    @property
    def forward_flops(self) -> float:
        """Return the operations of the matrix products of forward; backward does twice as many."""
        products = 12 * self.layers * self.width**2 + 256 * self.width
        attention = 2 * self.layers * self.width * self.context
        return 2.0 * self.tokens * (products + attention)


@dataclass(frozen=True, kw_only=True)
class EmulatedRun:
    """A training run on one node: ``ranks`` GPUs of the preset ``machine`` train the preset ``model`` with ZeRO-3.

    A planned update may use ``gpu_memory_share`` of each GPU's memory, by default a tenth.
    """

    machine: str
    ranks: int
    model: str = "7B"
    micro_batch: int = 1
    gpu_memory_share: float = SHARE_FOR_UPDATES
    small: SmallModel = field(default_factory=lambda: SmallModel(layers=4))
    forward_slowdown: Slowdown = MEASURED_SLOWDOWN
    states: str = "fp32"

    @cached_property
    def job(self) -> Job:
        """Return the run as ``perf_model`` describes it."""
        return Job(
            shape=MODELS[self.model],
            world_size=self.ranks,
            ranks_per_node=self.ranks,
            micro_batch=self.micro_batch,
            sequence=SEQUENCE,
            recompute=False,
            states=self.states,
        )

    @property
    def widths(self) -> Widths:
        """Return the bytes of the run's states."""
        return self.job.setup.widths

    @cached_property
    def profile(self) -> HardwareProfile:
        """Return the profile of the machine that is emulated."""
        return MACHINES[self.machine].profile(self.ranks)

    @cached_property
    def scale(self) -> float:
        """Return how many parameters of a rank one parameter of the small model stands for."""
        return self.job.shape.numel / self.ranks / self.small.parameters

    @cached_property
    def slowdown(self) -> float:
        """Return how many emulated seconds one second of the machine takes."""
        numel = self.job.shape.numel / self.ranks
        return STOCK_STEP_S * self.profile.rate("stock_cpu_adam_params_per_s") / numel

    @property
    def labels(self) -> dict[str, object]:
        """Return the setting of the rows."""
        return {
            "machine": f"EMULATED {self.machine}, {self.ranks} GPU{'s' if self.ranks > 1 else ''}",
            "model": self.model,
            "micro_batch": self.micro_batch,
            "gpu_memory_share": self.gpu_memory_share,
            "slowdown": round(self.slowdown, 2),
            "parameters": self.small.parameters,
            "parameters_each_stands_for": round(self.scale),
            **({} if self.states == "fp32" else {"states": self.states}),
        }

    def workload(self, numels: list[int]) -> Workload:
        """Return the workload of a rank of the run, for units of ``numels`` parameters of the small model."""
        return Workload.from_numels([round(self.scale * numel) for numel in numels])

    @property
    def zero(self) -> dict[str, Any]:
        """Return DeepSpeed's default sizes, which count parameters of all ranks, for the small model on one rank.

        One weight of the small model stands for more parameters than DeepSpeed gathers ahead, so it gathers none ahead.
        """
        return {
            "reduce_bucket_size": round(DEFAULT_SIZES.reduce_bucket / (self.scale * self.ranks)),
            "stage3_prefetch_bucket_size": 0,
            "stage3_param_persistence_threshold": LARGEST_PERSISTENT,
        }

    @property
    def share_of_bucket(self) -> float:
        """Return the share of the gradients that are in one bucket."""
        return min(1.0, DEFAULT_SIZES.reduce_bucket / self.job.shape.numel)

    @property
    def free_gb(self) -> float:
        """Return the gigabytes of each GPU that training leaves for the states."""
        assert self.profile.gpu_memory_bytes is not None
        return self.gpu_memory_share * self.profile.gpu_memory_bytes / GB

    @property
    def memory_bytes(self) -> int:
        """Return the memory of the scaled GPU."""
        assert self.profile.gpu_memory_bytes is not None
        return round(self.profile.gpu_memory_bytes / self.scale)

    @property
    def scaled_profile(self) -> HardwareProfile:
        """Return the profile that the scaled machine would measure. Its rates are below those that are plausible."""
        per_s = 1 / (self.scale * self.slowdown)
        factors = dict.fromkeys(self.profile.measurements, per_s)
        factors["copy_latency_s"] = self.slowdown
        # Planning does not read it: the windows of forward and backward are measured.
        del factors["matmul_flops_per_s"]
        rates = {name: Measurement(samples=(factor * self.profile.rate(name),)) for name, factor in factors.items()}
        with mock.patch.object(HardwareProfile, "__post_init__", return_value=None):
            return replace(self.profile, measurements=rates, gpu_memory_bytes=self.memory_bytes, host_memory_bytes=None)

    @property
    def scaled_unit_sizes(self) -> tuple[int, ...]:
        """Return the sizes of units that the planner chooses from, in parameters of the small model."""
        return tuple(round(size / self.scale) for size in UNIT_SIZES)

    @contextmanager
    def planned_by_plugin(self) -> Iterator[HostPasses]:
        """Emulate the machine inside this context, in which the plugin itself plans and adapts.

        Yield the passes of CPU updates, which also take emulated time. The quick profile describes the emulated
        machine. It cannot be measured, because updates on the CPU take emulated time only inside the context of
        ``HostPasses``. The GPU's memory is not limited.
        """
        cost, stock = (make(self.profile, self.widths) for make in (CostModel.from_profile, CostModel.for_stock))
        per_s = 1 / (self.scale * self.slowdown)
        products = self.small.layers * PRODUCTS_PER_LAYER
        rates = settings.MachineRates(
            h2d=cost.capacities[Resource.H2D] * per_s,
            d2h=cost.capacities[Resource.D2H] * per_s,
            both_directions=cost.capacities[Resource.BOTH] * per_s,
            pageable=cost.capacities[Resource.PAGEABLE] * per_s,
            host_memory=cost.capacities[Resource.DRAM] * per_s,
            flops_per_s=self.small.forward_flops / (self.slowdown * self.forward_s),
            adam_params_per_s=per_s / cost.per_param[ActionKind.GPU_STEP][Resource.GPU],
            copy_latency_s=cost.copy_latency_s * self.slowdown,
            slowed_by_host_work=self.forward_slowdown.cpu,
            slowed_by_copies=self.forward_slowdown.copies,
            kernels_per_product=max(1, round(self.job.work.forward_flops / products / WAVE_FLOPS)),
        )
        passes = HostPasses(cost, stock, per_s, self.widths)
        with ExitStack() as patches:
            patches.enter_context(plugged.plugged(settings.Settings(rates=rates, execute_first=True, trace=True)))
            patches.enter_context(passes.applied())
            patches.enter_context(mock.patch.object(planning, "quick_profile", return_value=self.scaled_profile))
            patches.enter_context(mock.patch.object(planning, "UNIT_SIZES", self.scaled_unit_sizes))
            patches.enter_context(mock.patch.object(devices, "GB", GB / self.scale))
            yield passes

    @property
    def forward_s(self) -> float:
        """Return the seconds of forward on the machine."""
        return self.job.work.forward_flops / self._flops_per_s

    @property
    def backward_s(self) -> float:
        """Return the seconds of backward on the machine."""
        return self.job.work.backward_flops / self._flops_per_s

    @property
    def _flops_per_s(self) -> float:
        return TRAINING_SHARE * self.profile.rate("matmul_flops_per_s")
