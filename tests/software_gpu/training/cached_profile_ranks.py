"""Request the quick profile of several machines twice, and print which machine's profile each request has found.

The machines are the CPU, and emulated ones that differ in one rate or in memory. The argument is the cache folder. The
measurement is replaced by a profile with the machine's name, since only the place where it is kept matters here.
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from unittest import mock

from deep_opt_states.device.cuda import CudaDevice
from deep_opt_states.profiler import cache
from deep_opt_states.profiler.ranks import Ranks
from tests.launch import answer
from tests.model.profiles import profile
from tests.software_gpu import device
from tests.software_gpu.plugged import plugged
from tests.software_gpu.settings import GIB, Settings
from tests.software_gpu.training.parity_on_device_ranks import MACHINE
from tests.zero.process_group import end_process

EMULATED = {
    "emulated": Settings(rates=MACHINE),
    "emulated, slower link": Settings(rates=replace(MACHINE, h2d=1e10)),
    "emulated, less memory": Settings(rates=MACHINE, memory_bytes=2 * GIB),
}


def request(machine: str, on_device: bool) -> None:
    """Request the quick profile, and answer with the machine that it is of, and whether it was measured now."""
    with mock.patch.object(cache, "measure", return_value=replace(profile(), name=machine)) as measure:
        found = cache.quick_profile(CudaDevice(0) if on_device else None, Ranks(), print, print, threads=1)
    answer({"machine": machine, "profile of": found.name, "measured": measure.called})


def main(cache_folder: str) -> None:
    os.environ["XDG_CACHE_HOME"] = cache_folder
    device.register()
    for _ in range(2):
        request("CPU", on_device=False)
        for machine, settings in EMULATED.items():
            with plugged(settings):
                request(machine, on_device=True)


if __name__ == "__main__":
    main(sys.argv[1])
    end_process()
