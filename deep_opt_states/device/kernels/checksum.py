"""Define the sums by which a write to parameters is noticed that the plugin was not called before.

The upper halves of split masters are the model's own parameters, where the accelerator updates them. A script that
writes to them would change the masters. So the update leaves behind a sum over each block of ``BLOCK_NUMEL``
parameters: that of their bits, each multiplied by an odd hash of its place in the block, modulo 2^64. A write to one
element always changes it, because an odd factor has an inverse. Other writes do so but for one in about 2^64.
"""

from __future__ import annotations

from typing import Protocol

import torch

BLOCK_NUMEL = 4096
"""The parameters of one sum. They take 8 KiB, and the sum 8 bytes."""


class Checksum(Protocol):
    """The kernels that compute the sums on the accelerator, on the stream that is current.

    ``param`` has 16 bits per element, and shape [numel]. ``sums`` is int64, of shape [``num_sums(numel)``]. Both are in
    the accelerator's memory. A call neither allocates nor synchronises.
    """

    def record(self, param: torch.Tensor, sums: torch.Tensor) -> None:
        """Store the sums of ``param`` in ``sums``."""

    def compare(self, param: torch.Tensor, sums: torch.Tensor, differs: torch.Tensor) -> None:
        """Store 1 + the index of a block whose sum is not that in ``sums`` in ``differs``, int64 of shape [1].

        If there is no such block, ``differs`` stays as it is.
        """


def num_sums(numel: int) -> int:
    """Return the number of sums of ``numel`` parameters."""
    return -(-numel // BLOCK_NUMEL)
