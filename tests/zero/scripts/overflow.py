"""Trains in fp16 with a Megatron-style ``mpu``, of which one rank only has gradients that overflow.

Prints where what the plugin's caller sees is not what stock's does. Two ranks, each of which has a part of the model.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch.distributed as dist
from deepspeed import comm
from deepspeed.accelerator import get_accelerator

from deep_opt_states.zero.start import refusals
from tests.launch import answer
from tests.zero.behaviour.arm import FP16, Arm, Net, Seen, counters, everything, inputs, loss_of
from tests.zero.behaviour.states import Alone
from tests.zero.process_group import process_group
from tests.zero.scripts.behaviour import run

STEPS = 7
OVERFLOWS = {1: (1,), 3: (0, 1), 4: (1,)}
"""By step: the ranks whose gradients overflow."""


class Parts(Alone):
    """An ``mpu`` whose model-parallel group is all ranks, and whose data-parallel groups have one rank each."""

    def __init__(self, data_parallel: Any, model_parallel: Any) -> None:
        super().__init__(data_parallel)
        self._model_parallel = model_parallel

    def get_model_parallel_world_size(self) -> int:
        return dist.get_world_size()

    def get_model_parallel_rank(self) -> int:
        return dist.get_rank()

    def get_model_parallel_group(self) -> Any:
        return self._model_parallel


@contextmanager
def noted_reductions() -> Iterator[list[str]]:
    """The all-reduces inside, in order."""
    notes: list[str] = []
    all_reduce = comm.all_reduce

    def noted(tensor: Any, op: Any = comm.ReduceOp.SUM, group: Any = None, **options: Any) -> Any:
        notes.append(f"{op} of {tensor.numel()} among {dist.get_world_size(group)}")
        return all_reduce(tensor, op=op, group=group, **options)

    with mock.patch.object(comm, "all_reduce", noted):
        yield notes


def train(arm: Arm, mpu: Any, overflows: dict[int, tuple[int, ...]]) -> Seen:
    model = Net()
    for param in model.parameters():
        # As of Megatron's layers: the norm is the sum over the ranks of the model-parallel group.
        param.model_parallel = True  # type: ignore[attr-defined]
    engine = arm.engine(
        model,
        {"mpu": mpu, "dist_init_required": False},
        **{**FP16, "fp16": {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 100, "hysteresis": 1}},
        gradient_clipping=0.1,
    )
    for step in range(STEPS):
        loss = loss_of(engine(inputs(step, model.layers[0].weight.dtype)))
        if dist.get_rank() in overflows.get(step, ()):
            loss = loss * 1e30
        engine.backward(loss)
        with noted_reductions() as reductions:
            engine.step()
        yield "loss", loss.detach()
        yield "reductions", " ".join(of_flags_and_norms(reductions))
        yield from counters(engine)
    yield from everything(engine)


def of_flags_and_norms(reductions: list[str]) -> list[str]:
    """Without those of the plugin's own, by which all ranks learn that an update has failed."""
    return [note for note in reductions if " of 1 " in note]


def overflow_on_one_model_parallel_rank(arm: Arm) -> Seen:
    mpu = Parts(*groups())
    yield from train(arm, mpu, OVERFLOWS)


def no_model_parallel_group(arm: Arm) -> Seen:
    data_parallel, _ = groups()
    yield from train(arm, Alone(data_parallel), {})


def groups() -> tuple[Any, Any]:
    """This rank's data-parallel group, and the model-parallel group."""
    ranks = range(dist.get_world_size())
    return [dist.new_group([rank]) for rank in ranks][dist.get_rank()], dist.new_group(list(ranks))


def main() -> None:
    # DeepSpeed asks for instructions that this CPU may lack; PyTorch has fp16 on every one.
    get_accelerator().is_fp16_supported = lambda: True
    # Model parallelism is refused at start, whatever the ranks would compute.
    with mock.patch.object(refusals, "_model_parallel_size", return_value=1):
        answer(run(overflow_on_one_model_parallel_rank))
        answer(run(no_model_parallel_group))


if __name__ == "__main__":
    with process_group():
        main()
