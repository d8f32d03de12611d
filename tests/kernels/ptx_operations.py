"""Map each PTX instruction that computes to a function of arrays, which have one element per thread.

The table has only the instructions that Triton emits for the Adam kernel, and similar ones. A floating-point
instruction must state how it rounds: without ``.rn``, such as in ``mul.f32``, the assembler may fuse it into another
one.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache

import numpy as np

from tests.kernels.fp32_operations import fused_multiply_add, with_one_nan
from tests.kernels.ptx_parser import PtxError

Compute = Callable[..., np.ndarray]

DTYPES: dict[str, type[np.generic]] = {
    "pred": np.bool_,
    "f16": np.float16,
    "f32": np.float32,
    "f16x2": np.uint32,
    "f32x2": np.uint64,
    **{f"{kind}{bits}": np.dtype(f"u{bits // 8}").type for kind in "bu" for bits in (16, 32, 64)},
    **{f"s{bits}": np.dtype(f"i{bits // 8}").type for bits in (16, 32, 64)},
}
"""The type of an array for each type of PTX. A packed pair is an unsigned number, the first value in the lower half."""

COMPARISONS = {
    "eq": operator.eq,
    "ne": operator.ne,
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
}


@dataclass(frozen=True)
class Operation:
    """A function with the PTX types of the result and of the operands."""

    result: str
    operands: tuple[str, ...]
    compute: Compute


@cache
def bits_of_type(name: str) -> int:
    """Return the bits of a PTX type, which a register must have."""
    return 1 if name == "pred" else 8 * np.dtype(DTYPES[name]).itemsize


def packed(compute: Compute) -> Compute:
    """Return ``compute``, a function of fp32 arrays, for packed pairs."""
    return lambda *operands: compute(*(operand.view(np.float32) for operand in operands)).view(np.uint64)


def two_halves(upper: np.ndarray, lower: np.ndarray) -> np.ndarray:
    """Round two fp32 arrays to fp16 and pack them."""
    halves = np.stack([round_to_half(lower), round_to_half(upper)], axis=-1)
    return halves.view(np.uint32).reshape(-1)


def shift_left(value: np.ndarray, count: np.ndarray) -> np.ndarray:
    """Return zero for counts that exceed the width; numpy leaves these undefined."""
    bits = 8 * value.itemsize
    shifted = value << np.minimum(count, bits - 1).astype(value.dtype)
    return np.where(count < bits, shifted, 0).astype(value.dtype)


def shift_right(value: np.ndarray, count: np.ndarray) -> np.ndarray:
    """Return zero, or the sign of a signed ``value``, for counts that exceed the width."""
    bits = 8 * value.itemsize
    shifted = value >> np.minimum(count, bits - 1).astype(value.dtype)
    if np.issubdtype(value.dtype, np.signedinteger):
        return shifted
    return np.where(count < bits, shifted, 0).astype(value.dtype)


def extract_bits(value: np.ndarray, position: np.ndarray, length: np.ndarray) -> np.ndarray:
    """Return ``length`` bits from ``position`` on; only the lowest 8 bits of both count."""
    mask = shift_left(np.ones_like(value), length & 0xFF) - np.uint32(1)
    return shift_right(value, position & 0xFF) & mask


def permute_bytes(lower: np.ndarray, upper: np.ndarray, selectors: np.ndarray) -> np.ndarray:
    """Return four bytes, each chosen among the eight by four bits; the highest of the four replicates the sign."""
    choices = np.stack([lower, upper], axis=-1).view(np.uint8)
    result = np.empty((len(lower), 4), np.uint8)
    for place in range(4):
        selector = (selectors >> np.uint32(4 * place)) & 0xF
        byte = np.take_along_axis(choices, (selector & 7).astype(np.int64)[:, None], axis=1)[:, 0]
        result[:, place] = np.where(selector & 8, np.where(byte & 0x80, 0xFF, 0), byte)
    return result.view(np.uint32).reshape(-1)


def multiply_wide(dtype: type[np.generic]) -> Compute:
    """Return the product in twice the bits."""
    return lambda a, b: a.astype(dtype) * b.astype(dtype)


def _select(value: np.ndarray, other: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    return np.where(chosen, value, other)


round_to_half = with_one_nan(lambda value: value.astype(np.float16))
widen_half = with_one_nan(lambda value: value.astype(np.float32))

FP32: dict[str, tuple[int, Compute]] = {
    "add.rn": (2, with_one_nan(np.add)),
    "mul.rn": (2, with_one_nan(np.multiply)),
    "fma.rn": (3, with_one_nan(fused_multiply_add)),
    "div.rn": (2, with_one_nan(np.divide)),
    "sqrt.rn": (1, with_one_nan(np.sqrt)),
}


def _floats() -> Iterator[tuple[str, Operation]]:
    for name, (count, compute) in FP32.items():
        yield f"{name}.f32", Operation("f32", ("f32",) * count, compute)
    for name in ("add.rn", "mul.rn", "fma.rn"):
        count, compute = FP32[name]
        yield f"{name}.f32x2", Operation("f32x2", ("f32x2",) * count, packed(compute))
    yield "cvt.f32.f16", Operation("f32", ("f16",), widen_half)
    yield "cvt.rn.f16.f32", Operation("f16", ("f32",), round_to_half)
    yield "cvt.rn.f16x2.f32", Operation("f16x2", ("f32", "f32"), two_halves)


def _integers() -> Iterator[tuple[str, Operation]]:
    signed_and_unsigned = [f"{kind}{bits}" for kind in "su" for bits in (16, 32, 64)]
    for kind in signed_and_unsigned:
        yield f"add.{kind}", Operation(kind, (kind, kind), np.add)
        yield f"sub.{kind}", Operation(kind, (kind, kind), np.subtract)
        yield f"shr.{kind}", Operation(kind, (kind, "u32"), shift_right)
        for source in signed_and_unsigned:
            dtype = DTYPES[kind]
            # The array is converted when the function is called, so each function needs a dtype of its own.
            yield f"cvt.{kind}.{source}", Operation(kind, (source,), lambda value, dtype=dtype: value.astype(dtype))
    for wide, kind in (("u64", "u32"), ("s64", "s32")):
        product = multiply_wide(DTYPES[wide])
        yield f"mul.wide.{kind}", Operation(wide, (kind, kind), product)
        yield (
            f"mad.wide.{kind}",
            Operation(wide, (kind, kind, wide), lambda a, b, c, product=product: product(a, b) + c),
        )
    yield "bfe.u32", Operation("u32", ("u32", "u32", "u32"), extract_bits)
    yield "prmt.b32", Operation("b32", ("b32", "b32", "b32"), permute_bytes)


def _bits() -> Iterator[tuple[str, Operation]]:
    for kind in ("b16", "b32", "b64", "pred"):
        for name, compute in (("and", operator.and_), ("or", operator.or_), ("xor", operator.xor)):
            yield f"{name}.{kind}", Operation(kind, (kind, kind), compute)
        yield f"not.{kind}", Operation(kind, (kind,), operator.invert)
    for kind in ("b16", "b32", "b64"):
        yield f"shl.{kind}", Operation(kind, (kind, "u32"), shift_left)


def _choices() -> Iterator[tuple[str, Operation]]:
    # In the order of the table, since the workers of pytest-xdist must collect the tests in one order.
    for kind in (kind for kind in DTYPES if kind not in ("pred", "f16", "f16x2", "f32x2")):
        yield f"selp.{kind}", Operation(kind, (kind, kind, "pred"), _select)
        for name, compare in COMPARISONS.items():
            # With a NaN, PTX's comparisons of fp32 numbers are false, and so are numpy's except for "ne".
            if name == "eq" or (kind[0] != "b" and (kind, name) != ("f32", "ne")):
                yield f"setp.{name}.{kind}", Operation("pred", (kind, kind), compare)
    yield "setp.num.f32", Operation("pred", ("f32", "f32"), lambda a, b: ~np.isnan(a) & ~np.isnan(b))
    yield "setp.nan.f32", Operation("pred", ("f32", "f32"), lambda a, b: np.isnan(a) | np.isnan(b))


OPERATIONS = dict([*_floats(), *_integers(), *_bits(), *_choices()])


def operation(name: str) -> Operation:
    """Return the operation of instruction ``name``. Raise ``PtxError`` if it is unknown."""
    if name not in OPERATIONS:
        raise PtxError(f"unknown instruction {name}")
    return OPERATIONS[name]
