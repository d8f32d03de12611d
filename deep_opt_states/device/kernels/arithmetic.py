"""How the op that stock DeepSpeed built on this machine computes, found by trying.

Up to a cut it works on vectors, with the fused multiply-adds that its source spells out. The elements after the last
whole vector are left to the compiler, which may fuse products into sums as it likes (GCC 12 and Clang 15 differ).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum


class Tail(IntEnum):
    """What became of ``m = m * beta1; m = g * (1 - beta1) + m``; the other sums are fused unless ``UNFUSED``.

    The values are those of ``csrc/update.h``.
    """

    UNFUSED = 0
    GRADIENT_FUSED = 1
    MOMENT_FUSED = 2


@dataclass(frozen=True)
class Arithmetic:
    """``vector_width`` elements to a vector: 16 with AVX-512, 8 with AVX2, 4 with NEON, 1 where all is the tail's.

    With SVE that is ``MOMENT_FUSED`` (``includes/sve.h``). Neither NEON nor SVE has been tried.
    """

    vector_width: int
    tail: Tail

    def cut(self, numel: int) -> int:
        """The elements of a sub-group from here on are its tail, whatever range of it is updated at a time."""
        return 0 if self.vector_width == 1 else numel // self.vector_width * self.vector_width

    def __str__(self) -> str:
        return f"vectors of {self.vector_width}, tail {self.tail.name.lower().replace('_', ' ')}"


# A tail like the vectors makes the width irrelevant; the widest first.
CANDIDATES = tuple(Arithmetic(width, tail) for tail in Tail for width in (16, 8, 4, 1))
