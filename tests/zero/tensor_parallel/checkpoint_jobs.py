"""Save, convert and load checkpoints beside tensor parallelism, and answer with the problem of each job.

The arguments are a folder and "quick" or "all", the jobs. Each job runs on its own forked ranks.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

from tests.fork_server import import_all
from tests.launch import answer
from tests.zero.checkpoints.test_checkpoints import convert_to_universal
from tests.zero.parity.case import CPU, STRIDE_2
from tests.zero.parity.training import Block, Record, collect, differences
from tests.zero.rank_group import Group
from tests.zero.tensor_parallel.cases import TensorParallelCase
from tests.zero.tensor_parallel.layouts import SharedModel, layouts, one_rank_per_model
from tests.zero.tensor_parallel.tensor_parallel_ranks import closing_engine_of, train

STEPS = 2
TIMEOUT_S = 600
ANOTHER_PLACEMENT = {"placement": [{"match": "*", "states": "streamed"}], "unit_size": 700}
SAVED_BY: dict[str, Block] = {"stock": None, "plugin": STRIDE_2}


def case_of(name: str) -> TensorParallelCase:
    """Return the case that the jobs train with the layout ``name``."""
    return TensorParallelCase(name, "bf16", "clipping", zero_init=False)


def resumed(case: TensorParallelCase, layout: SharedModel, block: Block, folder: Path) -> Record:
    """Load the latest checkpoint in ``folder`` into a fresh engine, train, and return the record."""
    with closing_engine_of(case, layout, block) as engine:
        path, _ = engine.load_checkpoint(str(folder))
        assert path is not None
        loaded = Record()
        collect(engine.optimizer, loaded)
        assert set(loaded.numbers["step"]) == {STEPS}
        return train(engine, case, layout, STEPS)


def save_and_resume(folder: Path, name: str) -> None:
    """Save with stock and with the plugin, and resume each checkpoint with stock and with other placements."""
    case, layout = case_of(name), layouts()[name]
    for saved_by, block in SAVED_BY.items():
        with closing_engine_of(case, layout, block) as engine:
            train(engine, case, layout, STEPS)
            engine.save_checkpoint(str(folder / saved_by))
    expected = resumed(case, layout, None, folder / "stock")
    assert len(expected.tensors) >= 30
    ways: list[tuple[str, Block]] = [("plugin", None), ("stock", ANOTHER_PLACEMENT), ("plugin", CPU)]
    for saved_by, block in ways:
        assert differences(expected, resumed(case, layout, block, folder / saved_by)) == [], (saved_by, block)


def convert(folder: Path) -> None:
    """Convert the checkpoints of stock and of the plugin to universal checkpoints."""
    for saved_by in SAVED_BY:
        convert_to_universal(folder / saved_by, f"global_step{STEPS}")


def load_on_one_rank(folder: Path) -> None:
    """Load universal checkpoints of ranks that shared a model on one rank, which has the whole model."""
    case, layout = case_of("AutoTP"), one_rank_per_model({"checkpoint": {"load_universal": True}})
    expected = resumed(case, layout, None, folder / "stock")
    ways: list[tuple[str, Block]] = [("plugin", None), ("stock", ANOTHER_PLACEMENT), ("plugin", CPU)]
    for saved_by, block in ways:
        assert differences(expected, resumed(case, layout, block, folder / saved_by)) == [], (saved_by, block)


def job_stages(jobs: str) -> list[dict[str, tuple[Any, ...]]]:
    """Return the jobs by name, in stages: the function, its arguments, and the number of ranks."""
    saving = [(2, "mpu")] if jobs == "quick" else [(2, "AutoTP"), (2, "mpu"), (4, "AutoTP"), (4, "mpu")]
    of_autotp = [world_size for world_size, name in saving if name == "AutoTP"]
    return [
        {
            f"{name} on {world_size} ranks": (save_and_resume, f"{name} {world_size}", (name,), world_size)
            for world_size, name in saving
        },
        {f"convert, {world_size} ranks": (convert, f"AutoTP {world_size}", (), 1) for world_size in of_autotp},
        {
            f"universal, {world_size} ranks to one": (load_on_one_rank, f"AutoTP {world_size}", (), 1)
            for world_size in of_autotp
        },
    ]


def main(folder: Path, jobs: str) -> None:
    """Run the jobs one after the other, and answer with the problem of each."""
    import_all()
    for stage in job_stages(jobs):
        for name, (job, subfolder, arguments, world_size) in stage.items():
            work = partial(job, folder / subfolder, *arguments)
            answer({"job": name, "problem": Group(work, world_size, folder / "outputs" / name).problem(TIMEOUT_S)})


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
