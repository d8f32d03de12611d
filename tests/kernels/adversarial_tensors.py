"""Choose tensors for which rounding, overflow, underflow and NaN are difficult, at any alignment and between guards."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from deep_opt_states.device.kernels.adam import FP32_STATES, AdamTensors, StateDtypes

GUARD = 8
"""The elements before and after a tensor that no kernel may change. Eight fp32 elements keep the alignment."""

GUARD_VALUE = 12345.0

SPECIAL_BITS = [
    *(0x00000000,) * 6,
    *(0x00000001, 0x00000002, 0x007FFFFF, 0x00800000, 0x00800001, 0x7F7FFFFF, 0x7F7FFFFE, 0x7F800000),
    *(0x7FC00000, 0x7F800001, 0x3F800000, 0x3F800001, 0x3F7FFFFF, 0x7F000000, 0x7E7FFFFF, 0x5F000000, 0x1F800000),
    # Ties and neighbours of ties of bf16, the largest finite number and the subnormals included.
    *(0x3F808000, 0x3F818000, 0x3F807FFF, 0x3F808001, 0x7F7F8000, 0x7F7F7FFF, 0x00008000, 0x00018000, 0x00007FFF),
    # The same of fp16: between its numbers, at its largest finite number (65504) and at its subnormals.
    *(0x3F801000, 0x3F803000, 0x3F800FFF, 0x3F801001, 0x477FE000, 0x477FEFFF, 0x477FF000, 0x477FF001, 0x47800000),
    *(0x33000000, 0x33000001, 0x32FFFFFF, 0x33800000, 0x33C00000, 0x387FE000, 0x387FF000, 0x38800000),
]
"""The bits of positive fp32 numbers that are difficult to round, to add or to convert."""


@dataclass(frozen=True)
class Offsets:
    """The elements by which the gradient and the parameters are after a multiple of 16 bytes."""

    grad: int = 0
    param: int = 0


def adversarial_numbers(numel: int, generator: np.random.Generator) -> torch.Tensor:
    """Return fp32 numbers, half of them plain, and the others with difficult bits of both signs."""
    signs = generator.integers(0, 2, numel, dtype=np.uint32) << np.uint32(31)
    plain = generator.standard_normal(numel, dtype=np.float32).view(np.uint32)
    exponents = generator.integers(0x38, 0x47, numel, dtype=np.uint32) << np.uint32(24)
    mantissas = generator.integers(0, 2**23, numel, dtype=np.uint32)
    near = generator.integers(-1, 2, numel).astype(np.uint32)
    kinds = np.stack(
        [
            *(plain,) * 6,
            generator.integers(0, 2**32, numel, dtype=np.uint32),
            mantissas | signs,  # subnormal
            (mantissas & np.uint32(0x7F0000) | exponents | np.uint32(0x8000)) + near | signs,  # at ties of bf16
            (mantissas & np.uint32(0x7FE000) | exponents | np.uint32(0x1000)) + near | signs,  # at ties of fp16
            np.uint32(0x7F7FFFFF) - (mantissas >> np.uint32(3)) | signs,  # close to overflow
            generator.choice(np.array(SPECIAL_BITS, np.uint32), numel) | signs,
        ]
    )
    bits = np.take_along_axis(kinds, generator.integers(0, len(kinds), (1, numel)), axis=0)[0]
    return torch.from_numpy(bits.view(np.float32).copy())


def adversarial_grad(
    numel: int, dtype: torch.dtype, generator: np.random.Generator, still: torch.Tensor
) -> torch.Tensor:
    """Return a gradient that is zero at the elements ``still``."""
    grad = adversarial_numbers(numel, generator).to(dtype)
    if dtype != torch.float32:
        # A conversion never gives some NaNs, and seldom gives subnormals of fp16.
        patterns = torch.from_numpy(generator.integers(-(2**15), 2**15, numel, dtype=np.int16)).view(dtype)
        grad = torch.where(torch.from_numpy(generator.random(numel) < 0.2), patterns, grad)
    return grad.masked_fill(still, 0)


def adversarial_tensors(
    numel: int,
    grad_dtype: torch.dtype,
    param_dtype: torch.dtype | None,
    offsets: Offsets,
    seed: int,
    states: StateDtypes = FP32_STATES,
) -> tuple[AdamTensors, torch.Tensor]:
    """Return a sub-group between guards, and the elements whose moment is zero.

    If their gradient is zero, too, then the master weights of these elements stay as they are, so that those which are
    ties reach the conversion to 16 bits.
    """
    generator = np.random.default_rng(seed)
    still = torch.from_numpy(generator.random(numel) < 0.2)
    exp_avg_sq = adversarial_numbers(numel, generator)
    negative = torch.from_numpy(generator.random(numel) < 0.05)
    # An element whose second moment is negative becomes NaN.
    exp_avg_sq = torch.where(negative, exp_avg_sq, exp_avg_sq.abs())
    tensors = AdamTensors(
        master=_guarded(adversarial_numbers(numel, generator).to(states.master)),
        exp_avg=_guarded(adversarial_numbers(numel, generator).masked_fill(still, 0).to(states.moment)),
        exp_avg_sq=_guarded(exp_avg_sq.where(~still, exp_avg_sq.abs().nan_to_num(1.0)).to(states.moment)),
        grad=_guarded(torch.zeros(numel, dtype=grad_dtype), offsets.grad),
        param=None if param_dtype is None else _guarded(torch.zeros(numel, dtype=param_dtype), offsets.param),
    )
    return tensors, still


def copied_between_guards(tensors: AdamTensors) -> AdamTensors:
    """Return copies of all tensors with new guards, at the same alignment."""
    return tensors.map(lambda tensor: _guarded(tensor, tensor.storage_offset() - GUARD))


def changed_guards(tensors: AdamTensors) -> list[str]:
    """Return the names of tensors outside of whose range something was written."""
    changed = []
    for name, tensor in vars(tensors).items():
        if tensor is not None:
            begin, whole = tensor.storage_offset(), _whole(tensor)
            outside = torch.cat([whole[:begin], whole[begin + tensor.numel() :]])
            if not torch.equal(outside, torch.full_like(outside, GUARD_VALUE)):
                changed.append(f"memory around {name}")
    return changed


def _guarded(tensor: torch.Tensor, offset: int = 0) -> torch.Tensor:
    """Return a copy of ``tensor`` that begins ``offset`` elements after a multiple of 16 bytes."""
    begin = GUARD + offset
    whole = torch.full((begin + tensor.numel() + GUARD,), GUARD_VALUE, dtype=tensor.dtype)
    whole[begin : begin + tensor.numel()] = tensor
    assert whole.data_ptr() % 16 == 0
    return whole[begin : begin + tensor.numel()]


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    numel = tensor.untyped_storage().nbytes() // tensor.element_size()
    return tensor.as_strided((numel,), (1,), 0)
