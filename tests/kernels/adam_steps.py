"""Run steps of Adam on one sub-group, with one of our kernels or as stock's ``step()`` does in three passes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import numpy as np
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
    found = find_arithmetic(dtypes)
    assert found is not None
    return found


def steps_of(count: int, **changes: object) -> list[AdamStep]:
    plain = replace(STEP, **changes)
    return [
        replace(plain, step=1 + index, lr=plain.lr / (1 + index), grad_scale=0.37 + index) for index in range(count)
    ]


def changing(steps: Iterable[AdamStep]) -> list[AdamStep]:
    """Return the steps with other betas from the third to the fifth, and a jump of 40 after the eighth."""
    changed = [replace(step, beta1=0.8) if 3 <= step.step < 6 else step for step in steps]
    return [replace(step, step=step.step + 40 if step.step > 8 else step.step) for step in changed]


def fused(
    *,
    adamw: bool = True,
    num_threads: int = 1,
    cores: Sequence[int] = (),
    instruction_set: InstructionSet | None = None,
    dtypes: StateDtypes = FP32_STATES,
) -> FusedAdam:
    options = {"adamw": adamw, "num_threads": num_threads, "cores": cores, "instruction_set": instruction_set}
    return FusedAdam(machine_arithmetic(dtypes), BETAS, **options)


class Stock:
    """The update of stock: ``unscale_and_clip_grads``, DeepSpeedCPUAdam's ``step()`` and ``copy_``."""

    def __init__(self, tensors: AdamTensors, *, adamw: bool) -> None:
        self._master = torch.nn.Parameter(tensors.master)
        self._optimizer = DeepSpeedCPUAdam([self._master], betas=BETAS, adamw_mode=adamw)
        moments = {"exp_avg": tensors.exp_avg, "exp_avg_sq": tensors.exp_avg_sq}
        self._optimizer.state[self._master] = {"step": 0, **moments}
        self._param = tensors.param

    def update(self, step: AdamStep, grad: torch.Tensor) -> None:
        names = ("lr", "eps", "weight_decay", "bias_correction")
        changes = {name: getattr(step, name) for name in names}
        self._optimizer.param_groups[0].update(betas=(step.beta1, step.beta2), **changes)
        self._optimizer.state[self._master]["step"] = step.step - 1
        self._master.grad = grad.to(self._master.dtype, copy=True)
        self._master.grad.mul_(step.grad_scale)
        self._optimizer.step()
        if self._param is not None:
            self._param.copy_(self._master.data)


def random_tensors(
    numel: int, grad_dtype: torch.dtype, param_dtype: torch.dtype | None, seed: int
) -> tuple[AdamTensors, Callable[[], torch.Tensor]]:
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
    generator = torch.Generator().manual_seed(seed)
    kinds = torch.tensor([float("inf"), float("-inf"), float("nan")], dtype=tensor.dtype)
    chosen = kinds[torch.randint(3, tensor.shape, generator=generator)]
    return torch.where(torch.rand(tensor.shape, generator=generator) < 0.1, chosen, tensor)


def in_dtypes(tensors: AdamTensors, dtypes: StateDtypes) -> AdamTensors:
    copies = copied(tensors)
    return replace(copies, **{name: getattr(copies, name).to(dtype) for name, dtype in dtypes.by_name.items()})


def copied(tensors: AdamTensors) -> AdamTensors:
    return tensors.map(torch.Tensor.clone)


def differences(found: AdamTensors, expected: AdamTensors) -> list[str]:
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


def difficult_tensors(
    numel: int, grad_dtype: torch.dtype, param_dtype: torch.dtype | None, states: StateDtypes, seed: int
) -> tuple[AdamTensors, Callable[[], torch.Tensor]]:
    """Return a sub-group whose rounding is difficult, and a function that returns its next gradient.

    A fifth of the elements stays as it is without weight decay: ties of bf16 and fp16, and their neighbours, which so
    reach the conversion to 16 bits. A few moments are negative, infinite or NaN. The gradient and the parameters begin
    at a multiple of 16 bytes or behind it, by ``seed``.
    """
    generator = torch.Generator().manual_seed(seed)
    plain, gradient = random_tensors(numel, grad_dtype, param_dtype, seed)
    still = torch.rand(numel, generator=generator) < 0.2
    bits = torch.randint(0x38000000, 0x47800000, (numel,), generator=generator, dtype=torch.int32)
    ties = torch.where(bits % 2 == 0, bits & -0x10000 | 0x8000, bits & -0x2000 | 0x1000)
    ties = (ties + torch.randint(-1, 2, (numel,), generator=generator, dtype=torch.int32)).view(torch.float32)
    moments = with_infinities(plain.exp_avg, seed).masked_fill(still, 0)
    negative = torch.rand(numel, generator=generator) < 0.05
    squares = torch.where(negative & ~still, -plain.exp_avg_sq, plain.exp_avg_sq)
    tensors = in_dtypes(
        replace(plain, master=ties.where(still, plain.master), exp_avg=moments, exp_avg_sq=squares), states
    )

    def shifted(tensor: torch.Tensor, offset: int) -> torch.Tensor:
        return torch.cat([tensor[:1], tensor])[offset:][:numel]

    grad = shifted(tensors.grad, seed % 2)
    param = None if tensors.param is None else shifted(tensors.param, seed // 2 % 2)
    return replace(tensors, grad=grad, param=param), lambda: gradient().masked_fill(still, 0)


def rounded_upper_halves(param_dtype: torch.dtype) -> tuple[AdamTensors, AdamTensors]:
    """Return masters with all upper halves and lower ones around ties, before and after an update without decay."""
    upper = torch.arange(-(2**15), 2**15, dtype=torch.int32) * 2**16
    lower = torch.tensor([0, 1, 0x0FFF, 0x1000, 0x1001, 0x2FFF, 0x3000, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
    master = (upper[:, None] + lower[None, :].int()).flatten().view(torch.float32).contiguous()
    zeros = torch.zeros_like(master)
    states = {"master": master, "exp_avg": zeros, "exp_avg_sq": zeros, "grad": zeros.bfloat16()}
    tensors = AdamTensors(**states, param=torch.empty(len(master), dtype=param_dtype))
    return copied(tensors), replace(tensors, param=master.to(param_dtype))


def fused_multiply_add(x: np.ndarray, y: np.ndarray, z: np.ndarray) -> np.ndarray:
    """Return x * y + z, rounded once to float32."""
    x, y, z = (np.asarray(operand, dtype=np.float32).astype(np.float64) for operand in (x, y, z))
    product_ = x * y  # exact: 48 bits
    total = product_ + z
    rounded_z = total - product_
    error = (product_ - (total - rounded_z)) + (z - rounded_z)
    even = np.asarray(total).view(np.int64) % 2 == 0
    inexact = np.isfinite(total) & np.isfinite(error) & (error != 0)
    odd = np.nextafter(total, np.where(error > 0, np.inf, -np.inf))
    return np.where(inexact & even, odd, total).astype(np.float32)
