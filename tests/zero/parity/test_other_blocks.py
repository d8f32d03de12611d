"""Check that the other blocks of DeepSpeed's config have the same effects and the same bits as with stock."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest

from tests.launch import REPOSITORY
from tests.zero.parity.other_blocks import EXITS, REFUSED, TRAINED
from tests.zero.training_once import ProgramRanks, TrainingOnce, on_one_worker

RANKS = ProgramRanks(
    "tests.zero.parity.other_blocks_ranks", timeout_s=300, arguments=lambda folder: [str(folder / "results")]
)
STOCK, OURS = "DeepSpeedZeroOptimizer_Stage3", "DeepOptimizerStates_Stage3"
WORLD_SIZES = (1, 2)

GATHERS = "all_gather_into_tensor"


def results_of(name: str, world_size: int, trained: TrainingOnce) -> list[dict[str, Any]]:
    trained.finished(world_size)
    results = []
    for rank in range(world_size):
        by_name = json.loads((trained.folder(world_size) / f"results.{rank}").read_text())
        assert name in by_name, "an earlier case failed"
        assert "error" not in by_name[name], by_name[name]["error"]
        results.append(by_name[name])
    return results


def grouped(*names: str) -> list[Any]:
    """Return test parameters such that one worker of pytest-xdist trains all blocks of a world size."""
    return [
        pytest.param(name, world_size, id=f"{name}, {world_size}", marks=on_one_worker(RANKS.program, world_size))
        for world_size in WORLD_SIZES
        for name in names
    ]


@pytest.mark.promise("P1")
@pytest.mark.parametrize(("name", "world_size"), grouped(*TRAINED))
def test_training_with_a_block_that_watches_has_the_bits_of_stock(
    name: str, world_size: int, trained: TrainingOnce
) -> None:
    is_timed = TRAINED[name].keys() & {"wall_clock_breakdown", "flops_profiler"}
    for rank, result in enumerate(results_of(name, world_size, trained)):
        assert result["classes"] == [STOCK, OURS]
        assert len(result["steps"]) >= 4
        assert max(result["steps"]) >= 2
        assert result["differences"] == [], f"rank {rank}"
        # DeepSpeed's data loader is read outside of the function that counts forwards with an update in flight.
        assert (result["deferred"] > 0) == (not is_timed and not name.startswith("data")), name


@pytest.mark.parametrize(("name", "world_size"), grouped(*TRAINED, *EXITS))
def test_a_block_writes_what_it_writes_with_stock(name: str, world_size: int, trained: TrainingOnce) -> None:
    json = {**TRAINED, **EXITS}[name]
    for rank, result in enumerate(results_of(name, world_size, trained)):
        stock, plugin = result["written"]
        # The monitors also get the plugin's own values.
        assert set(stock["files"]) <= set(plugin["files"])
        writers = {"flops_profiler", "csv_monitor", "autotuning"}
        assert bool(stock["files"]) == (bool(json.keys() & writers) or name == "data_efficiency, curriculum")
        assert stock["exits"] == plugin["exits"] == (name in EXITS)
        for key in ("operations", "flops", "model", "metrics"):
            assert stock.get(key) == plugin.get(key), key
        assert ("operations" in stock) == ("flops_profiler" in json)
        assert (stock["flops"] is not None) == (name == "autotuning, metrics" and rank == 0)


@pytest.mark.parametrize(
    ("name", "world_size"), grouped(*(name for name in TRAINED if "comms_logger" in TRAINED[name]))
)
def test_the_log_of_collectives_is_that_of_stock(name: str, world_size: int, trained: TrainingOnce) -> None:
    """Check how often each collective ran with each size, with two exceptions.

    Forward waits between its gathers, so that they are grouped otherwise. In a step that is skipped because of an
    overflow, the plugin reduces the norms of the sub-groups together with the overflow, and stock reduces none.
    """
    skipped = 1 if "fp16" in TRAINED[name] else 0
    for result in results_of(name, world_size, trained):
        stock, plugin = (by_operation(written["collectives"]) for written in result["written"])
        assert {"barrier", "all_reduce"} <= stock.keys() == plugin.keys()
        assert bytes_of(stock.pop(GATHERS, {})) == bytes_of(plugin.pop(GATHERS, {}))
        stock["all_reduce"]["4"] += skipped * len(result["steps"])
        assert stock == plugin


def by_operation(logged: dict[str, dict[str, int]]) -> dict[str, Counter[str]]:
    """Return how often each collective ran, by size. With ``debug`` the log also has the functions that called it."""
    collectives: dict[str, Counter[str]] = {}
    for operation, by_size in logged.items():
        collectives.setdefault(operation.partition(" ")[0], Counter()).update(by_size)
    return collectives


def bytes_of(by_size: Mapping[str, int]) -> int:
    return sum(int(size) * count for size, count in by_size.items())


@pytest.mark.parametrize(("name", "world_size"), grouped(*REFUSED))
def test_what_stock_refuses_has_the_same_error_with_the_plugin(
    name: str, world_size: int, trained: TrainingOnce
) -> None:
    for result in results_of(name, world_size, trained):
        stock, plugin = result["errors"]
        assert REFUSED[name][1] in stock
        assert plugin == stock


def test_only_reductions_that_replace_stocks_pass_the_logger_of_collectives() -> None:
    """Check the source: DeepSpeed's ``comms_logger`` ends the process at collectives that it does not know."""
    called: dict[str, set[str]] = {}
    for path in (REPOSITORY / "deep_opt_states").rglob("*.py"):
        source = path.read_text()
        if "from deepspeed import comm as dist" in source:
            called[path.name] = set(re.findall(r"\bdist\.(\w+)", source))
    assert called.pop("norms.py") == {"all_reduce", "ReduceOp"}
    assert set.union(*called.values()) == {"get_rank", "get_world_size"}
