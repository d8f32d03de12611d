"""Compute the sums of ``checksum.py`` with PyTorch on the CPU."""

from __future__ import annotations

from functools import cache

import numpy as np
import torch

from deep_opt_states.device.kernels.checksum import BLOCK_NUMEL


@cache
def odd_hashes() -> torch.Tensor:
    """Return the factors of the elements of a block, which are those of the Triton kernel."""
    mixed = np.arange(1, BLOCK_NUMEL + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return torch.from_numpy(((mixed ^ (mixed >> np.uint64(31))) | np.uint64(1)).view(np.int64).copy())


def sums_of(param: torch.Tensor) -> torch.Tensor:
    """Return the sum of each block of ``param``."""
    bits = param.contiguous().view(torch.int16).long()
    return torch.stack([(block * odd_hashes()[: block.numel()]).sum() for block in bits.split(BLOCK_NUMEL)])


def compare(param: torch.Tensor, sums: torch.Tensor, differs: torch.Tensor) -> None:
    """Do as ``Checksum.compare`` on the CPU."""
    for block in (sums_of(param) != sums).nonzero().flatten()[:1]:
        differs.copy_(block + 1)


class PlainChecksum:
    """The kernels of ``Checksum`` on the CPU."""

    def record(self, param: torch.Tensor, sums: torch.Tensor) -> None:
        sums.copy_(sums_of(param))

    def compare(self, param: torch.Tensor, sums: torch.Tensor, differs: torch.Tensor) -> None:
        compare(param, sums, differs)
