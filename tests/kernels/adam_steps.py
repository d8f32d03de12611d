"""Run steps of Adam on one sub-group, with one of our kernels or as stock's ``step()`` does in three passes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam

from deep_opt_states.device.kernels.adam import FP32_STATES, AdamStep, AdamTensors, StateDtypes
from deep_opt_states.device.kernels.arithmetic import Arithmetic
from deep_opt_states.device.kernels.fused import FusedAdam
from deep_opt_states.device.kernels.library import InstructionSet
from deep_opt_states.device.kernels.probe_arithmetic import find_arithmetic

BETAS = (0.9, 0.95)
STEP = AdamStep(
    step=1, lr=1e-2, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, bias_correction=True, grad_scale=0.37
)


GRADS = (torch.float32, torch.bfloat16, torch.float16)
PARAMS = (None, torch.float32, torch.bfloat16, torch.float16)


def machine_arithmetic(dtypes: StateDtypes = FP32_STATES) -> Arithmetic:
    """Return the arithmetic of stock's op on this machine, which must be known."""
    found = find_arithmetic(dtypes)
    assert found is not None
    return found


def steps_of(count: int, **changes: object) -> list[AdamStep]:
    """Return ``count`` steps with different learning rates and gradient scales."""
    plain = replace(STEP, **changes)
    return [
        replace(plain, step=1 + index, lr=plain.lr / (1 + index), grad_scale=0.37 + index) for index in range(count)
    ]


def fused(
    *,
    adamw: bool = True,
    num_threads: int = 1,
    cores: Sequence[int] = (),
    instruction_set: InstructionSet | None = None,
    dtypes: StateDtypes = FP32_STATES,
) -> FusedAdam:
    """Return the C++ kernel with this machine's arithmetic."""
    return FusedAdam(
        machine_arithmetic(dtypes),
        BETAS,
        adamw=adamw,
        num_threads=num_threads,
        cores=cores,
        instruction_set=instruction_set,
    )


class Stock:
    """The update of stock: ``unscale_and_clip_grads``, DeepSpeedCPUAdam's ``step()`` and ``copy_``, as in
    ``stage3.py``."""

    def __init__(self, tensors: AdamTensors, *, adamw: bool) -> None:
        self._master = torch.nn.Parameter(tensors.master)
        self._optimizer = DeepSpeedCPUAdam([self._master], betas=BETAS, adamw_mode=adamw)
        self._optimizer.state[self._master] = {
            "step": 0,
            "exp_avg": tensors.exp_avg,
            "exp_avg_sq": tensors.exp_avg_sq,
        }
        self._param = tensors.param

    def update(self, step: AdamStep, grad: torch.Tensor) -> None:
        group = self._optimizer.param_groups[0]
        group.update(
            lr=step.lr,
            betas=(step.beta1, step.beta2),
            eps=step.eps,
            weight_decay=step.weight_decay,
            bias_correction=step.bias_correction,
        )
        self._optimizer.state[self._master]["step"] = step.step - 1
        self._master.grad = grad.to(self._master.dtype, copy=True)
        self._master.grad.mul_(step.grad_scale)
        self._optimizer.step()
        if self._param is not None:
            self._param.copy_(self._master.data)


def random_tensors(
    numel: int, grad_dtype: torch.dtype, param_dtype: torch.dtype | None, seed: int
) -> tuple[AdamTensors, Callable[[], torch.Tensor]]:
    """Return a sub-group, and a function that returns its next gradient.

    Both have numbers of every kind, over the whole range of fp32.
    """
    generator = torch.Generator().manual_seed(seed)

    def wild(dtype: torch.dtype = torch.float32) -> torch.Tensor:
        plain = torch.randn(numel, generator=generator)
        exponents = torch.randint(-149, 127, (numel,), generator=generator).double()
        spread = (plain.double() * 2.0**exponents).float()
        special = torch.tensor([0.0, -0.0, 1e-45, -1e-40, 3e38, -3e38, 1.0, 65504.0, 65520.0, 6e-8, 3e-8])
        chosen = special[torch.randint(len(special), (numel,), generator=generator)]
        kind = torch.randint(8, (numel,), generator=generator)
        return torch.where(kind == 0, chosen, torch.where(kind < 3, spread, plain)).to(dtype)

    tensors = AdamTensors(
        master=wild(),
        exp_avg=wild(),
        exp_avg_sq=wild().abs(),
        grad=torch.empty(numel, dtype=grad_dtype),
        param=None if param_dtype is None else torch.full((numel,), 7.0, dtype=param_dtype),
    )
    return tensors, lambda: wild(grad_dtype)


def with_infinities(tensor: torch.Tensor, seed: int) -> torch.Tensor:
    """Return ``tensor`` with a tenth of its elements replaced by infinities and NaN."""
    generator = torch.Generator().manual_seed(seed)
    kinds = torch.tensor([float("inf"), float("-inf"), float("nan")], dtype=tensor.dtype)
    chosen = kinds[torch.randint(3, tensor.shape, generator=generator)]
    return torch.where(torch.rand(tensor.shape, generator=generator) < 0.1, chosen, tensor)


def in_dtypes(tensors: AdamTensors, dtypes: StateDtypes) -> AdamTensors:
    """Return copies of the tensors, with the states in ``dtypes``."""
    copies = copied(tensors)
    return replace(
        copies,
        master=copies.master.to(dtypes.master),
        exp_avg=copies.exp_avg.to(dtypes.moment),
        exp_avg_sq=copies.exp_avg_sq.to(dtypes.moment),
    )


def copied(tensors: AdamTensors) -> AdamTensors:
    """Return copies of all tensors."""
    return tensors.map(torch.Tensor.clone)


def differences(found: AdamTensors, expected: AdamTensors) -> list[str]:
    """Return the names of tensors that differ in a bit, or in the places of NaN.

    The bits of a NaN are not compared, since IEEE 754 leaves them open.
    """
    differ = []
    for name, theirs in vars(expected).items():
        if name == "grad" or theirs is None:
            continue
        ours = getattr(found, name)
        bits = {4: torch.int32, 2: torch.int16}[ours.element_size()]
        if torch.equal(ours.view(bits), theirs.view(bits)):
            continue
        number = ~theirs.isnan()
        if not torch.equal(ours.isnan(), theirs.isnan()) or not torch.equal(
            ours.view(bits)[number], theirs.view(bits)[number]
        ):
            differ.append(name)
    return differ
