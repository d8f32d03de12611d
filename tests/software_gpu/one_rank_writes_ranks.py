"""Write to a parameter of split masters on one of two ranks, behind the interfaces, and go on in one of several ways.

Every rank prints one answer per way and block, with the error that ended its training.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from deepspeed import zero
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.utils import safe_get_full_fp32_param, safe_set_full_fp32_param

from deep_opt_states.runtime.failure import UpdateFailed
from tests.launch import answer
from tests.software_gpu.plugged import plugged
from tests.software_gpu.ranks import software_process_group
from tests.software_gpu.settings import PLAIN
from tests.zero.parity.case import SPLIT_MASTERS, STREAMED, WITHOUT_FORWARD_OVERLAP, Case
from tests.zero.parity.training import run_variant
from tests.zero.races.faults import RESIDENT

CASE = Case(name="one rank writes", blocks=(), world_size=2, steps=4)
WRITTEN_AFTER_STEP = 2
WRITING_RANK = 1

BLOCKS: dict[str, dict[str, Any]] = {
    "resident": RESIDENT,
    "resident, serial": {**RESIDENT, **WITHOUT_FORWARD_OVERLAP},
    "streamed, serial": {**STREAMED, **WITHOUT_FORWARD_OVERLAP},
}


def step_on(engine: Any, param: Any) -> None:
    """Do nothing: training goes on with the next step."""


def save(engine: Any, param: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        engine.save_checkpoint(folder)


def gather_to_write(engine: Any, param: Any) -> None:
    with zero.GatheredParameters([param], modifier_rank=0):
        pass


def read_master(engine: Any, param: Any) -> None:
    safe_get_full_fp32_param(param)


def write_master(engine: Any, param: Any) -> None:
    safe_set_full_fp32_param(param, torch.zeros(param.ds_shape, device=engine.device))


def read_on_the_writing_rank(engine: Any, param: Any) -> None:
    if dist.get_rank() == WRITING_RANK:
        _ = engine.optimizer.fp32_partitioned_groups_flat


WAYS: dict[str, Callable[[Any, Any], None]] = {
    "step": step_on,
    "save": save,
    "gather": gather_to_write,
    "read": read_master,
    "write": write_master,
    "read on one rank": read_on_the_writing_rank,
}


@contextmanager
def one_rank_writes(go_on: Callable[[Any, Any], None]) -> Iterator[None]:
    """Change the signs of the first partition on one rank after a step, and then call ``go_on`` on every rank."""
    step = DeepSpeedEngine.step

    def step_and_write(self: Any, *args: Any) -> None:
        step(self, *args)
        if self.global_steps == WRITTEN_AFTER_STEP:
            param = self.optimizer.fp16_groups[0][0]
            if dist.get_rank() == WRITING_RANK:
                # A resident unit is updated while step() returns. If the write came between the comparison of its sums
                # and its kernel, the update would overwrite the write, which then has no effect to be noticed.
                get_accelerator().synchronize()
                param.ds_tensor.data.neg_()
            go_on(self, param)

    with mock.patch.object(DeepSpeedEngine, "step", step_and_write):
        yield


def main() -> None:
    for block_name, block in BLOCKS.items():
        for way, go_on in WAYS.items():
            error = ""
            try:
                with plugged(PLAIN), one_rank_writes(go_on):
                    run_variant(CASE, {**block, **SPLIT_MASTERS})
            except UpdateFailed as failed:
                error = str(failed)
            answer({"label": f"{way}, {block_name}", "way": way, "error": error})


if __name__ == "__main__":
    with software_process_group():
        main()
