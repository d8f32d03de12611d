"""Describe how the op that stock DeepSpeed built on this machine computes, which can only be found by trying.

Up to a cut, the op works on vectors, with the fused multiply-adds of its source. In the tail after the last whole
vector, the compiler decides which products are fused into sums (GCC 12 and Clang 15 differ).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum


class Tail(IntEnum):
    """The products that a compiler fuses in ``m = m * beta1; m = g * (1 - beta1) + m``, as in ``csrc/update.h``."""

    # The other sums are not fused either.
    UNFUSED = 0
    GRADIENT_FUSED = 1
    MOMENT_FUSED = 2


@dataclass(frozen=True)
class Arithmetic:
    """The arithmetic of an op: the elements per vector, the tail after the last whole vector, and the powers of beta.

    ``vector_width`` is 16 with AVX-512, 8 with AVX2, 4 with NEON, and 1 if every element is in the tail, as with SVE,
    where that is ``MOMENT_FUSED`` (``includes/sve.h``). NEON and SVE are untested. ``pow_when_repeated`` is true before
    DeepSpeed 0.19: a second call with the same step, as for other sub-groups, computes beta^t by ``pow``.
    """

    vector_width: int
    tail: Tail
    pow_when_repeated: bool = False

    def cut(self, numel: int) -> int:
        """Return the index of the first element of the tail of a sub-group of ``numel`` elements in any ranges."""
        return 0 if self.vector_width == 1 else numel // self.vector_width * self.vector_width


# If the tail computes as the vectors do, the width does not matter.
CANDIDATES = tuple(
    Arithmetic(width, tail, pow_when_repeated)
    for pow_when_repeated in (False, True)
    for tail in Tail
    for width in (16, 8, 4, 1)
)
