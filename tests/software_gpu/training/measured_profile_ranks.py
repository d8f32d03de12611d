"""Measure a quick profile on an emulated machine, and print what was measured and what was waived."""

from __future__ import annotations

from dataclasses import replace

from deep_opt_states.device.cuda import CudaDevice
from deep_opt_states.profiler.profile import QUICK, measure
from deep_opt_states.profiler.ranks import Ranks
from tests.launch import answer
from tests.software_gpu import device
from tests.software_gpu.plugged import plugged
from tests.software_gpu.settings import Settings
from tests.software_gpu.training.parity_on_device_ranks import MACHINE
from tests.zero.process_group import end_process

EFFORT = replace(QUICK, max_samples=3, update_numel=1_000_000, launch_numel=1_000_000, matrix_size=1024)
"""The quick profile is measured with smaller sizes, since this machine executes the work of the GPU."""


def main() -> None:
    device.register()
    with plugged(Settings(rates=MACHINE)):
        found = measure(CudaDevice(0), Ranks(), EFFORT, threads=1)
    answer(
        {
            "gpu_memory_bytes": found.gpu_memory_bytes,
            "waived": {name: measurement.waived for name, measurement in found.measurements.items()},
            "numbers of samples": [len(measurement.samples) for measurement in found.measurements.values()],
        }
    )


if __name__ == "__main__":
    main()
    end_process()
