"""Multiply bf16 matrices at the speed of fp32 on CPUs for which PyTorch has no fast bf16 products.

Without AVX-512, PyTorch multiplies bf16 matrices in a plain loop, up to a hundred times slower than in fp32. An
iteration on the CPU accelerator would then consist of these products alone, and a benchmark would take hours. Inside a
benchmark, they are computed in fp32 and rounded to bf16, for stock and for the plugin alike, and the rows mention it.
The update of the optimizer has no matrix products.
"""

from __future__ import annotations

import functools

import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor

OPERATORS = ("mm", "bmm", "addmm")


def are_computed_in_fp32() -> bool:
    """Return whether the benchmarks on this accelerator compute bf16 products in fp32."""
    return get_accelerator().device_name() == "cpu" and not torch.ops.mkldnn._is_mkldnn_bf16_supported()


@functools.cache
def compute_in_fp32() -> torch.library.Library:
    """Compute the bf16 products of this process in fp32, as long as the returned object exists."""
    library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    for name in OPERATORS:
        # PyTorch does not dispatch the form with ``out`` to the functions that are registered here.
        product = functools.partial(_product, getattr(torch.ops.aten, name).out)
        library.impl(name, product, "CPU")  # type: ignore[no-untyped-call]
    return library


def _product(compute: torch._ops.OpOverload, *operands: Tensor, **scalars: float) -> Tensor:
    """Return the product of ``operands`` in their dtype."""
    dtype = operands[0].dtype
    if dtype == torch.bfloat16:
        operands = tuple(operand.float() for operand in operands)
    product: Tensor = compute(*operands, **scalars, out=operands[0].new_empty(0))
    return product.to(dtype)
