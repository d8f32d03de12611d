"""What of a sub-group is updated before ``step()`` returns, and what may be updated later."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from deep_opt_states.device.kernels.adam import Part


@dataclass(frozen=True)
class Split:
    """Parts of one sub-group, in order; together all of it. Neither has empty parts."""

    first: tuple[Part, ...]
    rest: tuple[Part, ...]

    @classmethod
    def of(cls, numel: int, first: Iterable[tuple[int, int]] = ()) -> Split:
        """``first``: ranges [begin, end) of the sub-group's ``numel`` elements that do not overlap."""
        merged: list[tuple[int, int]] = []
        for begin, end in sorted(first):
            if merged and merged[-1][1] == begin:
                begin, _ = merged.pop()
            if begin < end:
                merged.append((begin, end))
        borders = [0, *(border for its in merged for border in its), numel]
        between = zip(borders[::2], borders[1::2], strict=True)
        return cls(
            first=tuple(Part(begin=begin, end=end, of=numel) for begin, end in merged),
            rest=tuple(Part(begin=begin, end=end, of=numel) for begin, end in between if begin < end),
        )
