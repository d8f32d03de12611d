"""Check that all ranks run the same plan or none runs any, and that no rank waits for another forever."""

from __future__ import annotations

import os
import re

import pytest
import torch.distributed as dist

from deep_opt_states.config import ConfigError
from deep_opt_states.zero import plugin
from deep_opt_states.zero.internals.agreement import RanksDisagree
from deep_opt_states.zero.start import planning
from deep_opt_states.zero.start.devices import AcceleratorChoice
from deep_opt_states.zero.start.unsupported import Unsupported
from perf_model.presets.machines import MACHINES
from tests.ranks import on_ranks
from tests.tiers import thorough
from tests.zero.parity.case import CPU, STRIDE_2, STRIDE_3, Case
from tests.zero.parity.training import make_engine

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


def start(difference: str) -> str:
    """Return the class of the optimizer, or the error, of this rank."""
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
        return f"{type(error).__name__}: {' / '.join(str(error).splitlines())}"
    return f"trains with {type(engine.optimizer).__name__}"


@pytest.mark.promise("P6")
def test_different_plans_are_an_error_that_names_the_ranks() -> None:
    for found in on_ranks(3, start, "plans"):
        assert found.startswith("RanksDisagree: All ranks must run the same plan")
        assert re.search(r"rank 0, 2: [0-9a-f]{16}", found)
        assert re.search(r"rank 1: [0-9a-f]{16}", found)


@pytest.mark.parametrize("difference", ["one off", thorough("one disabled")])
def test_every_rank_names_the_rank_on_which_the_plugin_is_off(difference: str) -> None:
    for found in on_ranks(3, start, difference):
        assert re.search(r"RanksDisagree.* rank 0, 2: on / .* rank 1: off", found)


@pytest.mark.thorough
def test_ranks_on_which_it_is_off_for_different_reasons_agree() -> None:
    assert on_ranks(3, start, "off for one, disabled for all") == ["trains with DeepSpeedZeroOptimizer_Stage3"] * 3


@pytest.mark.thorough
def test_the_refusal_of_one_rank_is_reported_by_the_others() -> None:
    first, second, third = on_ranks(3, start, "one refused")
    assert third == "Unsupported: this rank has another accelerator"
    for found in (first, second):
        assert "another one has failed / " in found
        assert "rank 2: Unsupported: this rank has another accelerator" in found


@pytest.mark.promise("P6")
@pytest.mark.parametrize("difference", ["one without a kernel", thorough("one without a budget")])
def test_a_rank_that_cannot_run_the_plan_stops_all_ranks(difference: str) -> None:
    first, second, third = on_ranks(3, start, difference)
    assert third == "Unsupported: this rank has another accelerator"
    for found in (first, second):
        assert "rank 2: Unsupported: this rank has another accelerator" in found


@pytest.mark.thorough
def test_the_invalid_placement_of_one_rank_is_reported_by_the_others() -> None:
    first, second, third = on_ranks(3, start, "one impossible")
    assert third.startswith("ConfigError: deep_optimizer_states.placement")
    for found in (first, second):
        assert "rank 2: ConfigError: deep_optimizer_states.placement" in found
