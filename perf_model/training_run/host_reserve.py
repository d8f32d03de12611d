"""Define the host memory that is kept for everything but the optimizer: the system and the processes of the ranks."""

from __future__ import annotations

SYSTEM_BYTES = 7_300_000_000
RANK_BYTES = 6_650_000_000
"""Host memory of the operating system, and of each process that trains on a GPU: Python, CUDA, page-locked pools and
data loader. The published logs have 13.0 GiB in use with one rank (``act-output-13B-scale-gaps-scale-DP``) and 31.6 GiB
with four (``act-output-20B-scale-twinflow``) before the optimizer takes any."""

CPU_RANK_BYTES = 500_000_000
"""Host memory of a process that trains on the CPU: measured after the import of DeepSpeed and Transformers."""


def reserved_host_bytes(ranks: int, *, has_gpu: bool) -> int:
    """Return the bytes per node that a plan leaves to the system and to ``ranks`` processes.

    Weights that are loaded at start are not counted: they are on the GPU before the optimizer takes host memory.
    """
    return SYSTEM_BYTES + RANK_BYTES * ranks if has_gpu else CPU_RANK_BYTES * ranks
