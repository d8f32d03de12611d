"""Split fp32 master weights into bf16 and the bits that bf16 lacks, in place, and join them again without any loss.

``upper`` is the master weight rounded to bf16, to nearest and ties to even: the parameter that the model computes with.
``lower`` has its 16 lower bits. The difference between the master weight and ``upper``, in units of
the last place of fp32, is between -32768 and 32768. So 16 bits are not enough: 32768, a tie that was rounded down, has
the lower bits of -32768. One more bit distinguishes the two. The sign bit of ``exp_avg_sq`` is free for it, because
second moments are never negative::

    master = (upper << 16) + signed(lower) + (sign of exp_avg_sq << 16)

A master weight that is NaN stays NaN, with other bits. ``csrc/element.h`` has the same in C++.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

CHUNK_NUMEL = 2**20
"""The elements that are converted at once, which bounds the temporary memory together with the rounded masters."""

_TIE_ROUNDED_DOWN = 0x8000
_LOWER_17_BITS = 0x1FFFF
_MAGNITUDE = 0x7FFFFFFF
_SIGN = -(2**31)


def halves(memory: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``lower``, int16, and ``upper``, bf16, of shape [numel] each, that ``split`` stores in ``memory``.

    ``memory`` has shape [numel] and 4 bytes per element. ``lower`` is in front.
    """
    numel = memory.numel()
    return memory.view(torch.int16)[:numel], memory.view(torch.bfloat16)[numel:]


def split(memory: torch.Tensor, exp_avg_sq: torch.Tensor) -> None:
    """Replace the fp32 masters in ``memory``, of shape [numel], by their ``halves``, and flag ties in ``exp_avg_sq``.

    Take 2 bytes per element of temporary memory. Raise ``ValueError`` if a second moment is negative; then nothing has
    changed. The sign of a second moment that is -0 or NaN is lost.
    """
    negative = exp_avg_sq[exp_avg_sq < 0]
    if negative.numel():
        raise ValueError(
            f"exp_avg_sq: the second moments of Adam must be at least 0; found {float(negative.min())}.\n"
            "Load the checkpoint of a training run that was not diverging."
        )
    lower, upper = halves(memory)
    rounded = memory.bfloat16()
    bits, moments = memory.view(torch.int32), exp_avg_sq.view(torch.int32)
    # From the front: the lower bits of an element are stored before the element, or where it was.
    for chunk in _chunks(memory.numel()):
        is_flagged = bits[chunk].bitwise_and(_LOWER_17_BITS).eq_(_TIE_ROUNDED_DOWN)
        moments[chunk] = moments[chunk].bitwise_and_(_MAGNITUDE) | is_flagged * _SIGN
        lower[chunk] = bits[chunk].to(torch.int16)
    upper.copy_(rounded)


def join(memory: torch.Tensor, exp_avg_sq: torch.Tensor) -> None:
    """Undo ``split``: make ``memory`` the fp32 masters, and ``exp_avg_sq`` the second moments without flags.

    Take 2 bytes per element of temporary memory.
    """
    lower, upper = halves(memory)
    rounded = upper.view(torch.int16).clone()
    bits, moments = memory.view(torch.int32), exp_avg_sq.view(torch.int32)
    # From the back: an element does not overwrite lower bits that are still needed.
    for chunk in reversed(list(_chunks(memory.numel()))):
        flags = moments[chunk].bitwise_right_shift(31).bitwise_and_(1)
        bits[chunk] = (rounded[chunk].int() + flags).bitwise_left_shift_(16) + lower[chunk]
        moments[chunk] = moments[chunk].bitwise_and_(_MAGNITUDE)


def _chunks(numel: int) -> Iterator[slice]:
    return (slice(begin, min(begin + CHUNK_NUMEL, numel)) for begin in range(0, numel, CHUNK_NUMEL))
