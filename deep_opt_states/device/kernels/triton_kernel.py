"""Implement the Triton kernel. ``triton_adam.py`` imports it late, since Triton may not be installed.

Every operation is one correctly rounded IEEE operation, in the order of ``csrc/vector_loop.h`` before the cut and of
``csrc/element.h`` after it. ``OPTIONS`` keep the compiler from fusing more, and from flushing denormals. Only the
places of NaN are the same (``adam.py``).
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import libdevice

from deep_opt_states.device.kernels.arithmetic import Tail
from deep_opt_states.device.kernels.scalars import Decay

OPTIONS = {"enable_fp_fusion": False, "enable_reflect_ftz": False}
"""No contraction of products into sums, and no flush to zero in square roots."""

_UNFUSED = tl.constexpr(int(Tail.UNFUSED))
_GRADIENT_FUSED = tl.constexpr(int(Tail.GRADIENT_FUSED))
_MOMENT_FUSED = tl.constexpr(int(Tail.MOMENT_FUSED))
_DECOUPLED = tl.constexpr(int(Decay.DECOUPLED))
_L2 = tl.constexpr(int(Decay.L2))


# Specialized for lengths or the kind of decay, Triton would compile again inside a training step.
@triton.jit(do_not_specialize=["numel", "cut", "skip", "decay_kind"])
def update(
    master,
    exp_avg,
    exp_avg_sq,
    grad,
    param,
    numel: tl.int64,
    cut: tl.int64,
    skip: tl.int64,
    grad_scale,
    beta1,
    one_minus_beta1,
    beta2,
    one_minus_beta2,
    bias_correction2,
    eps,
    step_size,
    decay,
    decay_kind,
    TAIL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Update one block of BLOCK elements per program. The parameters are as in ``csrc/update.h``.

    ``param`` may be None, and ``cut`` negative. The first ``skip`` of ``numel`` elements are unchanged.
    """
    begin = tl.program_id(0).to(tl.int64) * BLOCK
    state = (master, exp_avg, exp_avg_sq, grad, param)
    scalars = (
        grad_scale,
        beta1,
        one_minus_beta1,
        beta2,
        one_minus_beta2,
        bias_correction2,
        eps,
        step_size,
        decay,
        decay_kind,
    )
    # A mask whose length is unknown at compile time would prevent wide loads and stores.
    if (begin >= skip) & (begin + BLOCK <= cut):
        _update_block(state, scalars, begin, numel, cut, skip, TAIL=_GRADIENT_FUSED, BLOCK=BLOCK, WHOLE=True)
    else:
        _update_block(state, scalars, begin, numel, cut, skip, TAIL=TAIL, BLOCK=BLOCK, WHOLE=False)


@triton.jit
def _update_block(
    state, scalars, begin, numel, cut, skip, TAIL: tl.constexpr, BLOCK: tl.constexpr, WHOLE: tl.constexpr
):
    master, exp_avg, exp_avg_sq, grad, param = state
    (
        grad_scale,
        beta1,
        one_minus_beta1,
        beta2,
        one_minus_beta2,
        bias_correction2,
        eps,
        step_size,
        decay,
        decay_kind,
    ) = scalars
    at = tl.arange(0, BLOCK)
    inside = None
    if not WHOLE:
        inside = (at >= skip - begin) & (at < numel - begin)
    before_cut = at < cut - begin

    g = _in_dtype_of(_widened(tl.load(grad + begin + at, mask=inside)), master)
    g = _in_dtype_of(g * grad_scale, master)
    p = _widened(tl.load(master + begin + at, mask=inside))
    m = _widened(tl.load(exp_avg + begin + at, mask=inside))
    v = _widened(tl.load(exp_avg_sq + begin + at, mask=inside))

    g = tl.where(decay_kind == _L2, _multiply_add(p, decay, g, before_cut, TAIL), g)
    if TAIL == _MOMENT_FUSED:
        m = tl.where(before_cut, tl.fma(g, one_minus_beta1, m * beta1), tl.fma(m, beta1, g * one_minus_beta1))
        v = tl.where(before_cut, tl.fma(g * g, one_minus_beta2, v * beta2), tl.fma(v, beta2, g * g * one_minus_beta2))
    else:
        m = _multiply_add(g, one_minus_beta1, m * beta1, before_cut, TAIL)
        v = _multiply_add(g * g, one_minus_beta2, v * beta2, before_cut, TAIL)
    denominator = _multiply_add(tl.sqrt_rn(v), bias_correction2, eps, before_cut, TAIL)
    p = tl.where(decay_kind == _DECOUPLED, _multiply_add(p, decay, p, before_cut, TAIL), p)
    p = _multiply_add(tl.div_rn(m, denominator), step_size, p, before_cut, TAIL)

    tl.store(exp_avg + begin + at, _rounded(m, exp_avg.dtype.element_ty), mask=inside)
    if param is not None:
        tl.store(param + begin + at, _rounded(p, param.dtype.element_ty), mask=inside)
    tl.store(master + begin + at, _rounded(p, master.dtype.element_ty), mask=inside)
    tl.store(exp_avg_sq + begin + at, _rounded(v, exp_avg_sq.dtype.element_ty), mask=inside)


@triton.jit
def _multiply_add(a, b, c, before_cut, TAIL: tl.constexpr):
    """Compute a * b + c, rounded once; after the cut rounded twice if the tail is UNFUSED."""
    result = tl.fma(a, b, c)
    if TAIL == _UNFUSED:
        # On Blackwell, LLVM packs sums with "+" into pairs. The ptxas 12.9 of Triton 3.6 fuses packed products into
        # them, despite the rounding in the PTX and despite OPTIONS.
        result = tl.where(before_cut, result, libdevice.add_rn(a * b, c))
    return result


@triton.jit
def _in_dtype_of(value, states):
    """Round an fp32 ``value`` to the dtype of ``states``, as stock's gradient, and convert it back."""
    return _widened(_rounded(value, states.dtype.element_ty))


@triton.jit
def _widened(value):
    """Convert to fp32 exactly, denormals included; bf16 as in ``csrc/element.h``."""
    if value.dtype == tl.bfloat16:
        result = (value.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    else:
        result = value.to(tl.float32)
    return result


@triton.jit
def _rounded(value, DTYPE: tl.constexpr):
    """Round to nearest, ties to even, and keep denormals; bf16 as in ``csrc/element.h``, with the bits of its NaN."""
    if tl.bfloat16 == DTYPE:
        bits = value.to(tl.uint32, bitcast=True)
        halves = tl.where(value == value, (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16, 0x7FC0)
        result = halves.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    elif tl.float16 == DTYPE:
        result = value.to(DTYPE, fp_downcast_rounding="rtne")
    else:
        result = value
    return result
