"""Measure steps of tiny engines on each rank, and print the quantities, or train with the software GPU."""

from __future__ import annotations

import sys
from dataclasses import replace

import deepspeed

from deep_opt_states.profiler import training_step
from tests.launch import answer
from tests.software_gpu import device
from tests.software_gpu.plugged import plugged
from tests.software_gpu.process_group import BACKEND, register_backend
from tests.software_gpu.settings import Settings
from tests.zero.process_group import end_process

TINY = training_step.Layers(width=64, tokens=16, layers=2)


def main() -> None:
    training_step.STEPS = 2
    for sizes in (training_step.SMALL, training_step.LARGE, training_step.MANY_TOKENS):
        sizes.update(dict.fromkeys(sizes, TINY))
    training_step.LARGE.update(dict.fromkeys(training_step.LARGE, replace(TINY, width=256)))
    if sys.argv[1] == "cpu":
        deepspeed.init_distributed()
        answer(training_step.measure_here())
        return
    device.register()
    register_backend()
    with plugged(Settings()):
        deepspeed.init_distributed(dist_backend=BACKEND)
        answer(training_step.measure_here())


if __name__ == "__main__":
    main()
    end_process()
