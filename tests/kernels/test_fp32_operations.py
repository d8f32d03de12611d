"""Check the fused multiply-add that Triton's interpreter uses here against exact rational arithmetic."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np

from tests.kernels.adversarial_tensors import SPECIAL_BITS, adversarial_numbers
from tests.kernels.fp32_operations import fused_multiply_add

COUNT = 4000


def rounded(exact: Fraction) -> float:
    """Return the nearest fp32 number, ties to even, with integers only."""
    magnitude = abs(exact)
    exponent = magnitude.numerator.bit_length() - magnitude.denominator.bit_length()
    exponent -= magnitude < Fraction(2) ** exponent
    # 24 bits of significand, and 2**-149 is the smallest subnormal.
    unit = max(exponent - 23, -149)
    # Python rounds a fraction to the nearest integer, ties to even.
    nearest = Fraction(round(magnitude / Fraction(2) ** unit)) * Fraction(2) ** unit
    return math.copysign(math.inf if nearest >= 2**128 else float(nearest), exact)


def difficult_operands() -> list[np.ndarray]:
    """Return three arrays: a third of the sums nearly cancel, and most products of another third are ties."""
    operands = []
    for seed in range(3):
        generator = np.random.default_rng(seed)
        numbers = adversarial_numbers(COUNT, generator).numpy()
        numbers[: len(SPECIAL_BITS)] = np.array(SPECIAL_BITS, np.uint32).view(np.float32)
        operands.append(generator.permutation(numbers))
    operands[2][::3] = -(operands[0] * operands[1])[::3]
    # A term that is too small for fp64 decides in which direction the ties round.
    generator = np.random.default_rng(0)
    operands[0][1::3] = 2 * generator.integers(2**11, 2**12, COUNT)[1::3] + 1
    operands[1][1::3] = 2 * generator.integers(2**10, 2**11, COUNT)[1::3] + 1
    operands[2][1::3] = (generator.integers(1, 100, COUNT) * generator.choice([-1e-30, 1e-30], COUNT))[1::3]
    return operands


def test_a_fused_multiply_add_rounds_the_exact_result_once() -> None:
    with np.errstate(all="ignore"):
        operands = difficult_operands()
        found = fused_multiply_add(*operands)
        # In fp64, infinities, NaNs and signs of zero are right.
        expected = operands[0].astype(np.float64) * operands[1] + operands[2]
        finite = np.isfinite(operands).all(axis=0)
        for place in np.flatnonzero(finite):
            a, b, c = (Fraction(float(operand[place])) for operand in operands)
            if exact := a * b + c:
                expected[place] = rounded(exact)
        expected = expected.astype(np.float32)
    nan = np.isnan(expected)
    assert finite.sum() > COUNT / 2
    assert (np.isnan(found) == nan).all()
    assert (found.view(np.uint32)[~nan] == expected.view(np.uint32)[~nan]).all()
