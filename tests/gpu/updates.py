"""Run the GPU kernel next to the CPU kernel, and train on the GPU through the executor next to serial updates.

The shapes are such that copies take most of the time. As a program, it is the one that compute-sanitizer runs.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch

from deep_opt_states.device.cuda import CudaDevice
from deep_opt_states.device.kernels.adam import AdamTensors
from deep_opt_states.device.kernels.arithmetic import Arithmetic
from deep_opt_states.device.kernels.triton_adam import TritonAdam
from perf_model.schedule.placement import Placement
from perf_model.schedule.plan import UpdatePlan
from perf_model.schedule.workload import Workload
from tests.kernels.adam_steps import BETAS, machine_arithmetic
from tests.kernels.compared import compared
from tests.runtime.moving import DTYPES, Model, MovingIteration, MovingTraining, train_serially
from tests.runtime.random_states import same


def on_gpu(tensors: AdamTensors) -> AdamTensors:
    return tensors.map(lambda tensor: tensor.to("cuda", copy=True))


def on_cpu(tensors: AdamTensors) -> AdamTensors:
    return tensors.map(torch.Tensor.cpu)


def triton_adam(*, adamw: bool = True, arithmetic: Arithmetic | None = None) -> TritonAdam:
    return TritonAdam(
        arithmetic or machine_arithmetic(), BETAS, adamw=adamw, device=torch.device("cuda", torch.cuda.current_device())
    )


def random_model(chance: random.Random) -> Model:
    """Return a random model with copies of a few bytes to a few MB, for which the kernels are very short."""
    numels = [chance.choice([1, 15, 4097, chance.randint(1, 900_000)]) for _ in range(chance.randint(1, 5))]
    borders = [sorted(chance.randint(0, numel) for _ in range(4)) for numel in numels]
    dtype = chance.choice(DTYPES)
    return Model(
        numels=tuple(numels),
        persistent=[list(zip(each[::2], each[1::2], strict=True)) for each in borders],
        dtype=dtype,
        grad_dtype=chance.choice((dtype, torch.float32)),
        params_on_host=chance.random() < 0.2,
    )


class TrainingOnGpu(MovingTraining):
    """The training on the current GPU, whose backward takes longer than the host needs to issue an update."""

    late_s = 0.01

    def __init__(self, model: Model, plan: UpdatePlan) -> None:
        super().__init__(model, plan, CudaDevice(torch.cuda.current_device()))
        assert isinstance(self.device_adam, TritonAdam)
        self.device_adam.compile([model.grad_dtype], [model.dtype])


def is_right(model: Model, iterations: Sequence[MovingIteration]) -> bool:
    found = TrainingOnGpu(model, iterations[0].plan).train(iterations)
    return same(found, train_serially(model, iterations))


def main() -> None:
    for numel in (1, 17, 4099):
        assert compared(machine_arithmetic(), torch.bfloat16, torch.bfloat16, True, numel=numel, device="cuda") == []
    model = Model(numels=(33, 5000, 4096, 17), persistent=[], grad_dtype=torch.bfloat16)
    workload = Workload.from_numels(list(model.numels))
    plan = UpdatePlan(workload=workload, placements=(*Placement, Placement.STREAMED), num_slots=1)
    assert is_right(model, [MovingIteration(plan=plan)] * 2)
    print("same bits")


if __name__ == "__main__":
    main()
