"""Start ranks that would run different plans, and report their errors. The argument is the kind of difference."""

from __future__ import annotations

import os
import sys

import torch.distributed as dist

from deep_opt_states.config import ConfigError
from deep_opt_states.zero import plugin
from deep_opt_states.zero.internals.agreement import RanksDisagree
from deep_opt_states.zero.start import planning
from deep_opt_states.zero.start.devices import AcceleratorChoice
from deep_opt_states.zero.start.unsupported import Unsupported
from perf_model.presets.machines import MACHINES
from tests.launch import answer
from tests.zero.parity.case import CPU, STRIDE_2, STRIDE_3, Case
from tests.zero.parity.training import make_engine
from tests.zero.process_group import process_group

CASE = Case(name="disagreeing", blocks=(), world_size=3)
BLOCKS = {
    "plans": (STRIDE_2, STRIDE_3, STRIDE_2),
    "one off": (CPU, CPU, CPU),
    "one impossible": (CPU, CPU, {"placement": [{"match": "nothing", "states": "cpu"}]}),
    "one disabled": (CPU, {"enabled": False}, CPU),
    "one refused": (CPU, CPU, CPU),
    "off for one, disabled for all": ({"enabled": False},) * 3,
    "one without a budget": ({"placement": "planned"},) * 3,
    "one without a kernel": ({"placement": "planned"},) * 3,
}


METHODS = {"one without a budget": "gpu_budget", "one without a kernel": "validate"}
"""The methods of the accelerator that fail on one rank, while the planner decides."""


def refuse(*_: object) -> None:
    raise Unsupported("this rank has another accelerator")


def main(difference: str) -> None:
    rank = dist.get_rank()
    if difference in ("one off", "off for one, disabled for all") and rank == 1:
        os.environ["DEEP_OPT_STATES"] = "0"
    if difference == "one refused" and rank == 2:
        plugin.choose_device = refuse
    if difference in METHODS:
        planning.quick_profile = lambda *_, **__: MACHINES["h100-pcie5"].profile(ranks=1)
        if rank == 2:
            setattr(AcceleratorChoice, METHODS[difference], refuse)
    try:
        engine = make_engine(CASE, BLOCKS[difference][rank])
    except (RanksDisagree, ConfigError, Unsupported) as error:
        answer(f"{type(error).__name__}: {' / '.join(str(error).splitlines())}")
    else:
        answer(f"trains with {type(engine.optimizer).__name__}")


if __name__ == "__main__":
    with process_group():
        main(sys.argv[1])
