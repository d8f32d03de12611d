"""Train with each block of ``other_blocks.py``, with stock and with the plugin; started by ``test_other_blocks.py``.

The argument is the path of the results, to which the rank is appended.
"""

from __future__ import annotations

import gc
import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from deepspeed.comm import comm
from deepspeed.utils import logger
from deepspeed.utils.comms_logging import CommsLogger

from tests.fork_server import freeze_imported, import_all
from tests.zero.monitoring.test_monitoring import Wandb
from tests.zero.parity.case import STRIDE_2, Case
from tests.zero.parity.case_runs import Result, write_results
from tests.zero.parity.other_blocks import EXITS, REFUSED, TRAINED, Json
from tests.zero.parity.parity_model import batch
from tests.zero.parity.training import Block, Record, closing_engine, collect, differences, shared_folder, train
from tests.zero.process_group import process_group

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


def main(path: str) -> None:
    with shared_folder() as folder:
        work: dict[str, Callable[[], Result]] = {
            name: partial(same_as_stock, name, json, folder) for name, json in {**TRAINED, **EXITS}.items()
        }
        work |= {name: partial(refusals, name, json) for name, (json, _) in REFUSED.items()}
        write_results(work, path)


if __name__ == "__main__":
    # Before the process group, which keeps the garbage collections of DeepSpeed from all modules that are imported.
    import_all()
    with process_group():
        main(*sys.argv[1:])
