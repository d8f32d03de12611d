"""Check that callers see the same with the plugin as with stock, in the scenarios of the modules beside this one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from deepspeed.accelerator import get_accelerator

from perf_model.schedule.host_layout import KEYS_OF_STATES
from tests.ranks import on_ranks, once
from tests.zero.behaviour import assigned, backwards, experts, states, steps
from tests.zero.behaviour.behaviour_variant import BASE, run
from tests.zero.on_accelerator import GROUPS

SCENARIOS = {
    scenario.__name__: scenario
    for module in (backwards, steps, states, experts, assigned)
    for scenario in module.SCENARIOS
}
OF_STATES = (
    "fragments",
    "states_that_move",
    "moments_in_the_dtype_of_the_masters",
    "gradients_that_the_caller_clips",
    "gradients_that_the_caller_replaces",
    "states_assigned_before_a_skipped_step",
    "second_engines",
)
"""The scenarios that depend on the dtypes of the states."""

ON_DEVICE = (
    "nested_contexts",
    "partitions_that_the_caller_replaces",
    "learning_rates",
    "assigned_states",
    "second_engines",
)
"""The scenarios of ``make test`` on the GPU in software. In the first, the next forward must wait for the writes."""


@dataclass(frozen=True)
class BehaviourRun:
    """One start of ranks, in which the scenarios run one after the other.

    On the GPU in software, nothing is executed before it is waited for, so that a missing wait shows.
    """

    world_size: int
    names: tuple[str, ...] = tuple(SCENARIOS)
    on: str = "cpu"
    dtypes: str = "fp32"
    thorough: bool = False

    def parameters(self) -> Iterator[Any]:
        """Yield a test parameter for each scenario. One worker of pytest-xdist runs them all."""
        options = f"{self.world_size} ranks, {self.on}, {self.dtypes}, {len(self.names)} scenarios"
        marks = [pytest.mark.xdist_group(options), *([pytest.mark.thorough] if self.thorough else [])]
        for name in self.names:
            yield pytest.param(self, name, id=f"{name}, {options}", marks=marks)


RUNS = (
    BehaviourRun(1),
    BehaviourRun(2, thorough=True),
    *(BehaviourRun(1, OF_STATES, dtypes=dtypes) for dtypes in KEYS_OF_STATES if dtypes != "fp32"),
    *(BehaviourRun(2, OF_STATES, dtypes=dtypes, thorough=True) for dtypes in KEYS_OF_STATES if dtypes != "fp32"),
    BehaviourRun(2, ON_DEVICE, on="software_gpu"),
    *(BehaviourRun(world_size, on="software_gpu", thorough=True) for world_size in (1, 2)),
)


@once
def compared(ranks: BehaviourRun) -> list[dict[str, dict[str, Any]]]:
    """Return the findings of each rank in each scenario."""
    return on_ranks(ranks.world_size, compare, ranks.dtypes, ranks.names, group=GROUPS[ranks.on], timeout_s=900)


def compare(dtypes: str, names: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    # DeepSpeed requires instructions that this CPU may not have. PyTorch supports fp16 on every CPU.
    get_accelerator().is_fp16_supported = lambda: True
    BASE["bf16"].update(dict.fromkeys(KEYS_OF_STATES[dtypes], True))
    return {name: run(SCENARIOS[name]) for name in names}


@pytest.mark.promise("P1")
@pytest.mark.parametrize(("ranks", "name"), [parameter for ranks in RUNS for parameter in ranks.parameters()])
def test_callers_see_the_same_values_as_with_stock(ranks: BehaviourRun, name: str) -> None:
    for rank, by_name in enumerate(compared(ranks)):
        assert by_name[name]["differences"] == [], f"rank {rank}"
        assert by_name[name]["seen"] > 3
