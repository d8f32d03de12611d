"""Write parameters, read and abandon gradients where users' scripts do, and compare with the CPU accelerator.

DeepSpeed's throughput timer is as it is by default. It synchronizes the device, unless the plugin lets updates go on.
Every rank prints one answer per placement and adversary.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from deepspeed import zero

from tests.launch import answer
from tests.software_gpu.faults.reads_between_steps import after_each_step
from tests.software_gpu.faults.writes_between_steps import write_gathered
from tests.software_gpu.plugged import plugged
from tests.software_gpu.ranks import software_process_group
from tests.software_gpu.settings import PLAIN, Settings
from tests.zero.parity.case import CPU, RESIDENT, STREAMED, STRIDE_2, Case
from tests.zero.parity.parity_model import batch
from tests.zero.parity.training import Block, Record, closing_engine, collect, differences, real_numel, run_variant

ADVERSARIES = {"plain": PLAIN, "lazy": Settings(lazy=True, lazy_s=20.0)}


def written(case: Case, block: Block) -> Record:
    """Train, and write all parameters in ``GatheredParameters(modifier_rank=0)`` after each step."""
    with after_each_step(write_gathered)():
        return run_variant(case, block)


def written_with_teacher(case: Case, block: Block) -> Record:
    """Train, and read and write all parameters after each step, together with those of a teacher.

    The teacher is older than the model. So DeepSpeed calls the methods of one of its parameters for all of them.
    """
    with zero.Init(dtype=torch.bfloat16):
        teacher = torch.nn.Linear(8, 8)

    def access(optimizer: Any) -> list[torch.Tensor]:
        params = [param for group in optimizer.fp16_groups for param in group]
        with zero.GatheredParameters([*params, *teacher.parameters()]):
            sums = [param.sum() for param in params]
        with zero.GatheredParameters([*params, *teacher.parameters()], modifier_rank=0):
            if dist.get_rank() == 0:
                for param in params:
                    param.data.mul_(0.5)
        return sums

    with after_each_step(access)() as results:
        record = run_variant(case, block)
    record.numbers["sum"] = [float(total) for sums in results for total in sums or ()]
    return record


def grad_partitions(case: Case, block: Block) -> tuple[Record, set[str]]:
    """Return the gradients of each backward from ``get_fp32_grad_partitions``, and their devices."""
    record, devices = Record(), set()
    with closing_engine(case, block) as engine:
        for step in range(case.steps):
            x, target = (tensor.to(engine.device) for tensor in batch(case, dist.get_rank(), step, torch.bfloat16))
            engine.backward(engine(x, target, None, 1.0))
            for sub_group, partitions in engine.optimizer.get_fp32_grad_partitions().items():
                for index, gradient in partitions.items():
                    param = engine.optimizer.fp16_groups[sub_group][index]
                    devices.add(gradient.device.type)
                    record.tensors[f"{step} {sub_group} {index}"] = (
                        gradient.flatten()[: real_numel(param)].cpu().clone()
                    )
            engine.step()
    return record, devices


def with_abandoned_backward(case: Case, block: Block) -> Record:
    """Train, and abandon the backward of every second step with ``zero_grad``, so that this step has no gradient.

    The gradients are copied to host memory at once, so that no staging buffer is used again soon, which would wait for
    the copies.
    """
    record = Record()
    at_once = replace(case, caller_accumulates=True, sub_group_size=10**6, zero={"reduce_bucket_size": 10**6})
    with closing_engine(at_once, block) as engine:
        for step in range(case.steps):
            tensors = batch(case, dist.get_rank(), step, torch.bfloat16)
            engine.backward(engine(*(tensor.to(engine.device) for tensor in tensors), None, 1.0))
            if step % 2 == 1:
                engine.optimizer.zero_grad()
            engine.step()
        collect(engine.optimizer, record)
    return record


def main() -> None:
    case = Case(name="access", blocks=(), world_size=dist.get_world_size(), steps=4, clip=0.3)
    stock, (stock_gradients, _) = written(case, None), grad_partitions(case, None)
    stock_with_teacher = written_with_teacher(case, None)
    # Stock uses the gradient of the step before where there is none.
    expected = with_abandoned_backward(case, CPU)
    for adversary, settings in ADVERSARIES.items():
        with plugged(settings):
            found = with_abandoned_backward(case, CPU)
        answer({"adversary": adversary, "after abandoned": differences(expected, found)})
    for placement, block in {"cpu": CPU, "stride": STRIDE_2, "streamed": STREAMED, "resident": RESIDENT}.items():
        for adversary, settings in ADVERSARIES.items():
            with plugged(settings):
                after_writes = written(case, block)
            with plugged(settings):
                with_teacher = written_with_teacher(case, block)
            with plugged(settings):
                gradients, devices = grad_partitions(case, block)
            answer(
                {
                    "placement": placement,
                    "adversary": adversary,
                    "written": differences(stock, after_writes),
                    "with teacher": differences(stock_with_teacher, with_teacher),
                    "gradients": differences(stock_gradients, gradients),
                    "devices of gradients": sorted(devices),
                }
            )


if __name__ == "__main__":
    with software_process_group():
        main()
