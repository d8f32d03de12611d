"""Check the default run of published configs: the bits of stock, the planned placements, and twice the speed. EMULATED.

The speeds are those of the shortest of a few iterations on the emulated clock, as the ones that this machine disturbed
least. Python and the arithmetic of this machine take a part of these seconds, which makes the ratio smaller. Our
iterations are those after the first change of the plan, since the planner uses only memory that has proved to be free.
"""

from __future__ import annotations

from functools import cache
from itertools import product
from typing import Any

import pytest

from perf_model.schedule.placement import Placement
from tests.launch import Finished, run_ranks
from tests.software_gpu.published_configs.published import EMPTY_BLOCK, PUBLISHED
from tests.zero.training_once import on_one_worker

PROGRAM = "tests.software_gpu.published_configs.published_config_ranks"
STOCK, OURS = "DeepSpeedZeroOptimizer_Stage3", "DeepOptimizerStates_Stage3"

LEAST_RATIO = 2.0
DOMINATED = ("axolotl", 1)
LEAST_RATIO_IF_DOMINATED = 1.6
"""The case in which DeepSpeed's own copies dominate, and the least ratio there.

Axolotl's config offloads the parameters and keeps none of them on the GPU. So DeepSpeed copies each of them to it three
times per iteration: in forward, in the recomputation and in backward. Without other ranks to share the copies, they and
the arithmetic, one after the other, take 47 % of stock's iteration. If the update took no time at all, the iteration
would be 2.1 times as fast.
"""

GPUS = (1, 4)

# The plan of an empty block is also followed, and adopted, in filled_gpu/, and the Trainer trains in training/.
pytestmark = pytest.mark.thorough


def case(config: str, gpus: int) -> Any:
    """Return the test parameter of a config and a number of GPUs; one worker runs all tests of it."""
    name = f"{config}, {gpus} H100"
    return pytest.param(config, gpus, id=name, marks=on_one_worker(f"{PROGRAM} {config}", gpus))


CASES = list(product(PUBLISHED, GPUS))
every_case = pytest.mark.parametrize(("config", "gpus"), [case(*found) for found in CASES])
every_other_case = pytest.mark.parametrize(("config", "gpus"), [case(*found) for found in CASES if found != DOMINATED])


@cache
def finished(config: str, gpus: int) -> Finished:
    """Return the program after it has ended; it is started once per process."""
    (ended,) = run_ranks(1, ["-m", PROGRAM, config, str(gpus)], timeout_s=600)
    return ended


def arms(config: str, gpus: int) -> dict[str, dict[str, Any]]:
    """Return what each arm has answered."""
    ended = finished(config, gpus)
    assert ended.returncode == 0, ended.output[-5000:]
    return {answered["arm"]: answered for answered in ended.answers()}


@pytest.mark.promise("P1", "P3")
@every_case
def test_a_published_config_with_an_empty_block_trains_on_an_emulated_h100_to_the_bits_of_stock(
    config: str, gpus: int
) -> None:
    found = arms(config, gpus)
    assert found["stock"]["class"] == STOCK
    assert found[EMPTY_BLOCK]["class"] == OURS
    assert found[EMPTY_BLOCK]["differences"] == []


@pytest.mark.promise("P5")
@every_case
def test_a_published_config_with_an_empty_block_streams_and_keeps_resident_what_the_planner_says(
    config: str, gpus: int
) -> None:
    ours = arms(config, gpus)[EMPTY_BLOCK]
    assert ours["adopted"], "the plan changes after the first steps"
    assert ours["fingerprint"] in ours["planned"]
    assert ours["updated"] == ours["placements"]
    assert set(ours["updated"]) - {Placement.CPU.value}


@every_other_case
def test_a_published_config_with_an_empty_block_is_at_least_twice_as_fast_as_stock(config: str, gpus: int) -> None:
    found = arms(config, gpus)
    assert found[EMPTY_BLOCK]["ratio"] >= LEAST_RATIO, found


@pytest.mark.parametrize(("config", "gpus"), [case(*DOMINATED)])
def test_a_published_config_is_faster_than_stock_even_if_copies_of_deepspeed_dominate(config: str, gpus: int) -> None:
    found = arms(config, gpus)
    assert found[EMPTY_BLOCK]["ratio"] >= LEAST_RATIO_IF_DOMINATED, found


@pytest.mark.parametrize(("config", "gpus"), [case("axolotl", 4)])
def test_a_published_config_that_keeps_the_adam_of_pytorch_is_refused_with_the_remedy(config: str, gpus: int) -> None:
    assert PUBLISHED[config]["zero_force_ds_cpu_optimizer"] is False
    error = arms(config, gpus)["optimizer of the Trainer"]["error"]
    assert "must be DeepSpeedCPUAdam" in error
    assert '"zero_force_ds_cpu_optimizer": false' in error
