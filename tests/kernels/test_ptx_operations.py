"""Check the operations of the PTX interpreter against exact rational arithmetic and Python's integers."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest

from tests.kernels.adversarial_tensors import SPECIAL_BITS, adversarial_numbers
from tests.kernels.ptx_operations import DTYPES, OPERATIONS

COUNT = 4000

FP32_BITS, FP32_LOWEST = 24, -149
FP16_BITS, FP16_LOWEST = 11, -24
"""The bits of a significand, and the exponent of the smallest subnormal."""


def rounded(exact: Fraction, bits: int, lowest: int) -> float:
    """Return the nearest number of a binary format, ties to even, with integers only."""
    magnitude = abs(exact)
    exponent = magnitude.numerator.bit_length() - magnitude.denominator.bit_length()
    exponent -= magnitude < Fraction(2) ** exponent
    unit = max(exponent - bits + 1, lowest)
    # Python rounds a fraction to the nearest integer, ties to even.
    nearest = round(magnitude / Fraction(2) ** unit)
    limit = 128 if bits == FP32_BITS else 16
    result = math.inf if Fraction(nearest) * Fraction(2) ** unit >= Fraction(2) ** limit else math.ldexp(nearest, unit)
    return math.copysign(result, exact)


def exact_root(value: Fraction) -> Fraction:
    """Return a fraction that rounds to fp32 as the square root does."""
    # 200 bits after the point, and one more bit if the root is not exact.
    scaled = value * 4**200
    root = math.isqrt(scaled.numerator // scaled.denominator)
    return Fraction(2 * root + (root * root != scaled), 2**201)


EXACT: dict[str, Callable[..., Fraction]] = {
    "add": lambda a, b: a + b,
    "mul": lambda a, b: a * b,
    "fma": lambda a, b, c: a * b + c,
    "div": lambda a, b: a / b,
    "sqrt": exact_root,
    "cvt": lambda a: a,
}
IN_FP64: dict[str, Callable[..., np.ndarray]] = {
    "add": np.add,
    "mul": np.multiply,
    "fma": lambda a, b, c: a * b + c,
    "div": np.divide,
    "sqrt": np.sqrt,
    "cvt": np.positive,
}
"""The operations in fp64, which give the right infinities, NaNs and signs of zero."""


def operands_of(kind: str, seed: int) -> np.ndarray:
    """Return difficult operands."""
    generator = np.random.default_rng(seed)
    if kind == "f16":
        return np.resize(generator.permutation(2**16).astype(np.uint16).view(np.float16), COUNT)
    numbers = adversarial_numbers(COUNT, generator).numpy()
    numbers[: len(SPECIAL_BITS)] = np.array(SPECIAL_BITS, np.uint32).view(np.float32)
    return generator.permutation(numbers)


@pytest.mark.parametrize(
    "name",
    [
        name
        for name in OPERATIONS
        if name.split(".")[-1] in ("f32", "f16") and name.split(".")[0] in EXACT and "x2" not in name
    ],
)
def test_floating_point_operations_round_the_exact_result_once(name: str) -> None:
    operation = OPERATIONS[name]
    short = name.split(".")[0]
    operands = [operands_of(kind, seed) for seed, kind in enumerate(operation.operands)]
    if short == "fma":
        # A third of the sums nearly cancel, so that the bits that a rounded product lacks decide.
        with np.errstate(all="ignore"):
            operands[2][::3] = -(operands[0] * operands[1])[::3]
        # Most products of another third are ties. A term too small for fp64 decides in which direction they round.
        generator = np.random.default_rng(0)
        operands[0][1::3] = 2 * generator.integers(2**11, 2**12, COUNT)[1::3] + 1
        operands[1][1::3] = 2 * generator.integers(2**10, 2**11, COUNT)[1::3] + 1
        operands[2][1::3] = (generator.integers(1, 100, COUNT) * generator.choice([-1e-30, 1e-30], COUNT))[1::3]
    with np.errstate(all="ignore"):
        found = operation.compute(*operands)
        nearly = IN_FP64[short](*(operand.astype(np.float64) for operand in operands))
    width = (FP16_BITS, FP16_LOWEST) if operation.result == "f16" else (FP32_BITS, FP32_LOWEST)
    finite = np.all([np.isfinite(operand) for operand in operands], axis=0) & ~np.isnan(nearly)
    expected = nearly.copy()
    for place in np.flatnonzero(finite & np.isfinite(nearly)):
        exact = EXACT[short](*(Fraction(float(operand[place])) for operand in operands))
        # The sign of a result that is exactly zero is that of fp64.
        if exact:
            expected[place] = rounded(exact, *width)
    with np.errstate(all="ignore"):
        expected = expected.astype(found.dtype)
    integers = DTYPES[f"u{8 * found.itemsize}"]
    assert finite.sum() > COUNT / 2
    nan = np.isnan(expected)
    assert (np.isnan(found) == nan).all()
    assert (found.view(integers)[~nan] == expected.view(integers)[~nan]).all()
    assert set(found.view(integers)[nan].tolist()) <= {0x7FFFFFFF if integers is np.uint32 else 0x7FFF}


def test_packed_operations_compute_both_halves() -> None:
    pairs = [np.stack([operands_of("f32", 2 * seed), operands_of("f32", 2 * seed + 1)], axis=-1) for seed in range(3)]
    packed = [pair.view(np.uint64).reshape(-1) for pair in pairs]
    with np.errstate(all="ignore"):
        for name in ("add.rn", "mul.rn", "fma.rn"):
            count = len(OPERATIONS[f"{name}.f32x2"].operands)
            found = OPERATIONS[f"{name}.f32x2"].compute(*packed[:count]).view(np.uint32).reshape(-1, 2)
            for half in (0, 1):
                expected = OPERATIONS[f"{name}.f32"].compute(*(pair[:, half] for pair in pairs[:count]))
                assert (found[:, half] == expected.view(np.uint32)).all()
        upper, lower = pairs[0][:, 0].copy(), pairs[0][:, 1].copy()
        halves = OPERATIONS["cvt.rn.f16x2.f32"].compute(upper, lower)
        convert = OPERATIONS["cvt.rn.f16.f32"].compute
        wanted = [convert(half).view(np.uint16) for half in (upper, lower)]
    assert (halves >> 16 == wanted[0]).all()
    assert (halves & 0xFFFF == wanted[1]).all()


def expected_integer(name: str, a: int, b: int, c: int) -> int:
    """Return the result of an integer instruction, before it is cut to its width. ``c`` is small."""
    short, *rest = name.split(".")
    if short == "bfe":
        return (a >> c) & ((1 << (b & 0xFF)) - 1)
    if short == "prmt":
        joined = a | b << 32
        selectors = [(c * 0x1357 >> 4 * place) & 15 for place in range(4)]
        chosen = [(joined >> 8 * (selector & 7)) & 0xFF for selector in selectors]
        found = [
            0xFF * (byte >> 7) if selector >> 3 else byte for byte, selector in zip(chosen, selectors, strict=True)
        ]
        return int.from_bytes(bytes(found), "little")
    simple = {
        "add": lambda: a + b,
        "sub": lambda: a - b,
        "and": lambda: a & b,
        "or": lambda: a | b,
        "xor": lambda: a ^ b,
        "not": lambda: ~a,
        "mul": lambda: a * b,
        "mad": lambda: a * b + c,
        "shl": lambda: a << c,
        "shr": lambda: a >> c,
        "cvt": lambda: a,
        "selp": lambda: a if c % 2 else b,
    }
    compare = {"eq": a == b, "ne": a != b, "lt": a < b, "le": a <= b, "gt": a > b, "ge": a >= b}
    return compare[rest[0]] if short == "setp" else simple[short]()


@pytest.mark.parametrize(
    "name", [name for name, one in OPERATIONS.items() if not {"f16", "f32", "f32x2", "pred"} & {*one.operands[:2]}]
)
def test_integer_operations_equal_those_of_python(name: str) -> None:
    operation = OPERATIONS[name]
    generator = np.random.default_rng(len(name))
    small = generator.integers(0, 70, 500)
    operands = []
    for position, kind in enumerate(operation.operands):
        values = np.frombuffer(generator.bytes(500 * 8), np.uint64).astype(DTYPES[kind])
        values[:3] = np.array([0, 1, -1]).astype(DTYPES[kind])
        if position == 1:
            values[::3] = operands[0][::3].astype(DTYPES[kind])
        operands.append(values)
    if name.split(".")[0] in ("shl", "shr"):
        operands[1] = small.astype(np.uint32)
    elif name.startswith("bfe."):
        operands[1:] = small.astype(np.uint32), (small[::-1] % 40).astype(np.uint32)
    elif name == "prmt.b32":
        operands[2] = (small * 0x1357).astype(np.uint32)
    elif name.startswith("selp."):
        operands[2] = small % 2 == 1
    with np.errstate(all="ignore"):
        found = operation.compute(*operands)
    assert found.dtype == DTYPES[operation.result]
    a = operands[0].tolist()
    b = operands[1].tolist() if len(operands) > 1 else [0] * 500
    c = operands[2].tolist() if name.startswith("mad.") else small.tolist()
    if name.startswith("bfe."):
        b, c = operands[2].tolist(), operands[1].tolist()
    bits = 1 if operation.result == "pred" else 8 * found.itemsize
    expected = [expected_integer(name, *values) % 2**bits for values in zip(a, b, c, strict=True)]
    assert [int(value) % 2**bits for value in found.tolist()] == expected


@pytest.mark.parametrize(
    "name", [name for name, one in OPERATIONS.items() if one.operands[-2:] == ("f32", "f32") and one.result == "pred"]
)
def test_comparisons_with_a_nan_are_false_except_for_setp_nan(name: str) -> None:
    values = np.array([0.0, -0.0, 1.0, np.inf, -np.inf, np.nan, 1e-45], np.float32)
    a, b = (side.reshape(-1) for side in np.meshgrid(values, values))
    found = OPERATIONS[name].compute(a, b)
    either = [math.isnan(x) or math.isnan(y) for x, y in zip(a.tolist(), b.tolist(), strict=True)]
    python = {"eq": "__eq__", "lt": "__lt__", "le": "__le__", "gt": "__gt__", "ge": "__ge__"}
    comparison = name.split(".")[1]
    if comparison in ("num", "nan"):
        expected = [nan == (comparison == "nan") for nan in either]
    else:
        expected = [getattr(x, python[comparison])(y) for x, y in zip(a.tolist(), b.tolist(), strict=True)]
    assert found.tolist() == expected
