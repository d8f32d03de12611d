"""Start ranks that would run different plans, and report their errors. The argument is the kind of difference."""

from __future__ import annotations

import os
import sys

import torch.distributed as dist

from deep_opt_states.config import ConfigError
from deep_opt_states.zero import plugin
from deep_opt_states.zero.internals.agreement import RanksDisagree
from deep_opt_states.zero.start.refusals import Unsupported
from tests.launch import answer
from tests.zero.parity.case import CPU, STRIDE_2, STRIDE_3, Case
from tests.zero.parity.training import make_engine
from tests.zero.process_group import process_group

CASE = Case(name="disagreeing", blocks=(), world_size=3)
BLOCKS = {
    "plans": (STRIDE_2, STRIDE_3, STRIDE_2),
    "one off": (CPU, CPU, CPU),
    "one impossible": (CPU, CPU, {"placement": ["cpu"]}),
    "one disabled": (CPU, {"enabled": False}, CPU),
    "one refused": (CPU, CPU, CPU),
    "off for one, disabled for all": ({"enabled": False},) * 3,
}


def refuse() -> None:
    raise Unsupported("this rank has another accelerator")


def main(difference: str) -> None:
    rank = dist.get_rank()
    if difference in ("one off", "off for one, disabled for all") and rank == 1:
        os.environ["DEEP_OPT_STATES"] = "0"
    if difference == "one refused" and rank == 2:
        plugin.choose_device = refuse
    try:
        engine = make_engine(CASE, BLOCKS[difference][rank])
    except (RanksDisagree, ConfigError, Unsupported) as error:
        answer(f"{type(error).__name__}: {' / '.join(str(error).splitlines())}")
    else:
        answer(f"trains with {type(engine.optimizer).__name__}")


if __name__ == "__main__":
    with process_group():
        main(sys.argv[1])
