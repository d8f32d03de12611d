"""Scale a whole machine to the small model, so that the plugin measures and plans in emulated seconds as users have it.

The link, host memory, Adam on CPU and GPU, the memory of the GPU, the gigabytes of the default margin, and the unit
sizes that the planner chooses from are those of the run divided by ``scale``. Then no setting is needed: the first plan
is followed by one for the windows and the free memory that were measured.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from unittest import mock

from benchmarks.emulated.host_passes import HostPasses
from benchmarks.emulated.run import EmulatedRun
from deep_opt_states.zero.start import devices, planning
from perf_model.planner import UNIT_SIZES
from perf_model.prediction.hardware import HardwareProfile, Measurement
from perf_model.units import GB


@dataclass(frozen=True, kw_only=True)
class ScaledRun(EmulatedRun):
    """A training run whose small model trains on a machine that is scaled to it in everything."""

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
        """Return what a profile of the scaled machine measures. Its rates are below those that are plausible."""
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

        The quick profile is that of the emulated machine. It cannot be measured, because updates on the CPU take
        emulated time only inside the context of ``HostPasses``. The GPU's memory is not limited.
        """
        profile = self.scaled_profile
        with ExitStack() as patches:
            passes = patches.enter_context(self.emulated())
            patches.enter_context(mock.patch.object(planning, "quick_profile", return_value=profile))
            patches.enter_context(mock.patch.object(planning, "UNIT_SIZES", self.scaled_unit_sizes))
            patches.enter_context(mock.patch.object(devices, "GB", GB / self.scale))
            yield passes
