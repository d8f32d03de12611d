"""Check that the other blocks of DeepSpeed's config have the same effects and the same bits as with stock."""

from __future__ import annotations

import gc
import json
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from deepspeed.comm import comm
from deepspeed.utils import logger
from deepspeed.utils.comms_logging import CommsLogger

from tests.fork_server import freeze_imported
from tests.launch import REPOSITORY
from tests.ranks import on_ranks, once
from tests.zero.monitoring.test_monitoring import Wandb
from tests.zero.parity.case import STRIDE_2, Case
from tests.zero.parity.case_runs import Result, results_in_turn
from tests.zero.parity.other_blocks import EXITS, REFUSED, TRAINED, Json
from tests.zero.parity.parity_model import batch
from tests.zero.parity.training import Block, Record, closing_engine, collect, differences, shared_folder, train

STEPS, SAMPLES = 4, 9


def case_of(name: str, json: Json) -> Case:
    """Return a case with the part ``json`` of a config. A part for fp16 has a step that overflows."""
    in_fp16 = "fp16" in json
    return Case(
        name=name,
        blocks=(),
        world_size=dist.get_world_size(),
        dtype="fp16" if in_fp16 else "bf16",
        steps=STEPS,
        clip=0.5,
        accumulation=2,
        poisoned={1: 1e6} if in_fp16 else {},
        reload=(2, 3) if "checkpoint" in json else None,
        extra=json,
    )


def reads_data(case: Case) -> bool:
    """Return whether the case is about the data loader of DeepSpeed."""
    return bool(case.extra.keys() & {"data_efficiency", "dataloader_drop_last"})


def train_from_loader(engine: Any, case: Case) -> Record:
    """Train two epochs on the data loader that DeepSpeed makes."""
    samples = []
    for number in range(SAMPLES * case.world_size):
        x, target = batch(case, 0, number, torch.bfloat16)
        samples.append((x[0], target[0]))
    loader = engine.deepspeed_io(samples, num_local_io_workers=0)
    record = Record(optimizer_class=type(engine.optimizer).__name__)
    losses = record.numbers["loss"] = []
    for _ in range(2):
        # A sampler of a curriculum never ends by itself.
        for _, (x, target) in zip(range(4), loader, strict=False):
            loss = engine(x, target, 1.0, 1.0)
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
    collect(engine.optimizer, record)
    return record


@contextmanager
def restored_process() -> Iterator[CommsLogger]:
    """Undo the changes of a block to the whole process. Yield the logger of collectives, which is new."""
    # ``memory_breakdown`` collects garbage many times per step. The objects of earlier engines need not be seen.
    freeze_imported()
    level = logger.level
    fresh = CommsLogger()
    with mock.patch.object(comm, "comms_logger", fresh), mock.patch.dict(sys.modules, wandb=Wandb()):
        try:
            yield fresh
        finally:
            logger.setLevel(level)
            gc.enable()


def run(case: Case, block: Block, folder: Path) -> tuple[Record, Result]:
    """Train the case in an empty folder, and return the record, and the contents of the files that it has written."""
    before = Path.cwd()
    folder.mkdir(parents=True, exist_ok=True)
    os.chdir(folder)
    found: Result = {}
    record = Record()
    try:
        with restored_process() as collectives:
            with closing_engine(case, block) as engine, shared_folder() as checkpoints:
                # The autotuner's runs end here.
                with suppress(SystemExit) if "autotuning" in case.extra else nullcontext():
                    found["exits"] = True
                    record = train_from_loader(engine, case) if reads_data(case) else train(engine, case, checkpoints)
                    found["exits"] = False
                found["flops"] = getattr(engine, "flops", None)
            found["collectives"] = {
                name: {size: logged[0] for size, logged in by_size.items()}
                for name, by_size in collectives.comms_dict.items()
            }
        dist.barrier()
        found |= written()
    finally:
        os.chdir(before)
    return record, found


def written() -> Result:
    """Return the contents of the files in the current folder, without times, which differ from run to run."""
    # The names of TensorBoard's files end with a time and the process.
    found: Result = {"files": sorted({re.sub(r"\d{6,}.*", "", str(path)) for path in Path().rglob("*.*")})}
    if Path("flops.txt").exists():
        found["operations"] = re.findall(r"[\d.]+ \w?MACs", Path("flops.txt").read_text())
    if Path("model.json").exists():
        found["model"] = json.loads(Path("model.json").read_text())
        # On the CPU this is the growth of the whole process.
        found["model"].pop("activation_mem_per_gpu")
    if Path("metric.json").exists():
        found["metrics"] = sorted(json.loads(Path("metric.json").read_text()))
    return found


def same_as_stock(name: str, json: Json, folder: Path) -> Result:
    case = case_of(name, json)
    stock, written_by_stock = run(case, None, folder / name / "stock")
    plugin, written_by_plugin = run(case, STRIDE_2, folder / name / "plugin")
    return {
        "classes": [stock.optimizer_class, plugin.optimizer_class],
        "steps": stock.numbers.get("step"),
        "differences": differences(stock, plugin),
        "deferred": plugin.deferred,
        "written": [written_by_stock, written_by_plugin],
    }


def refusals(name: str, json: Json) -> Result:
    """Return the errors of stock and of the plugin."""
    errors = []
    for block in (None, STRIDE_2):
        with restored_process():
            try:
                with closing_engine(case_of(name, json), block):
                    errors.append("")
            except Exception as error:  # noqa: BLE001 (the test compares it)
                errors.append(f"{type(error).__name__}: {error}")
    return {"errors": errors}


STOCK, OURS = "DeepSpeedZeroOptimizer_Stage3", "DeepOptimizerStates_Stage3"
WORLD_SIZES = (1, 2)
GATHERS = "all_gather_into_tensor"


@once
def trained(world_size: int) -> list[dict[str, Result]]:
    """Return the results by name of each rank; one process trains with all blocks."""
    return on_ranks(world_size, train_with_all)


def train_with_all() -> dict[str, Result]:
    with shared_folder() as folder:
        work: dict[str, Callable[[], Result]] = {
            name: partial(same_as_stock, name, json, folder) for name, json in {**TRAINED, **EXITS}.items()
        }
        work |= {name: partial(refusals, name, json) for name, (json, _) in REFUSED.items()}
        return dict(results_in_turn(work.items()))


def results_of(name: str, world_size: int) -> list[Result]:
    results = [by_name[name] for by_name in trained(world_size) if name in by_name]
    assert len(results) == world_size, "an earlier case failed"
    for found in results:
        assert "error" not in found, found["error"]
    return results


def grouped(*names: str) -> list[Any]:
    """Return test parameters such that one worker of pytest-xdist trains all blocks of a world size."""
    return [
        pytest.param(
            name, world_size, id=f"{name}, {world_size}", marks=pytest.mark.xdist_group(f"other blocks {world_size}")
        )
        for world_size in WORLD_SIZES
        for name in names
    ]


@pytest.mark.promise("P1")
@pytest.mark.parametrize(("name", "world_size"), grouped(*TRAINED))
def test_training_with_a_block_that_watches_has_the_bits_of_stock(name: str, world_size: int) -> None:
    is_timed = TRAINED[name].keys() & {"wall_clock_breakdown", "flops_profiler"}
    for rank, result in enumerate(results_of(name, world_size)):
        assert result["classes"] == [STOCK, OURS]
        assert len(result["steps"]) >= 4
        assert max(result["steps"]) >= 2
        assert result["differences"] == [], f"rank {rank}"
        # DeepSpeed's data loader is read outside of the function that counts forwards with an update in flight.
        assert (result["deferred"] > 0) == (not is_timed and not name.startswith("data")), name


@pytest.mark.parametrize(("name", "world_size"), grouped(*TRAINED, *EXITS))
def test_a_block_writes_what_it_writes_with_stock(name: str, world_size: int) -> None:
    json = {**TRAINED, **EXITS}[name]
    for rank, result in enumerate(results_of(name, world_size)):
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
def test_the_log_of_collectives_is_that_of_stock(name: str, world_size: int) -> None:
    """Check how often each collective ran with each size, with two exceptions.

    Forward waits between its gathers, so that they are grouped otherwise. In a step that is skipped because of an
    overflow, the plugin reduces the norms of the sub-groups together with the overflow, and stock reduces none.
    """
    skipped = 1 if "fp16" in TRAINED[name] else 0
    for result in results_of(name, world_size):
        stock, plugin = (by_operation(written["collectives"]) for written in result["written"])
        assert {"barrier", "all_reduce"} <= stock.keys() == plugin.keys()
        assert bytes_of(stock.pop(GATHERS, {})) == bytes_of(plugin.pop(GATHERS, {}))
        stock["all_reduce"][4] += skipped * len(result["steps"])
        assert stock == plugin


def by_operation(logged: dict[str, dict[int, int]]) -> dict[str, Counter[int]]:
    """Return how often each collective ran, by size. With ``debug`` the log also has the functions that called it."""
    collectives: dict[str, Counter[int]] = {}
    for operation, by_size in logged.items():
        collectives.setdefault(operation.partition(" ")[0], Counter()).update(by_size)
    return collectives


def bytes_of(by_size: Mapping[int, int]) -> int:
    return sum(size * count for size, count in by_size.items())


@pytest.mark.parametrize(("name", "world_size"), grouped(*REFUSED))
def test_what_stock_refuses_has_the_same_error_with_the_plugin(name: str, world_size: int) -> None:
    for result in results_of(name, world_size):
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
