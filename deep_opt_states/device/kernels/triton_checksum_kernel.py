"""Implement the Triton kernel that ``triton_checksum.py`` launches and imports late, since Triton may not be installed.

All operations are on integers and modulo 2^64, so that the order of a sum does not matter.
"""

from __future__ import annotations

import triton
import triton.language as tl


# Triton must not specialize the kernel for lengths or for the places of sums: it would compile again inside a step.
@triton.jit(do_not_specialize=["numel"], do_not_specialize_on_alignment=["sums", "differs"])
def checksum(param, sums, differs, numel: tl.int64, COMPARES: tl.constexpr, BLOCK: tl.constexpr):
    """Sum the 16-bit integers ``param`` with one program per block of BLOCK elements.

    Store the sum in ``sums``. If COMPARES, compare it with ``sums``, and store 1 + the number of a block that differs
    in ``differs``: several programs may do so, and any of their numbers will do.
    """
    block = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    bits = tl.load(param + block * BLOCK + at, mask=at < numel - block * BLOCK, other=0)
    found = tl.sum(bits.to(tl.int64) * _odd_hash(at), axis=0)
    if COMPARES:
        if found != tl.load(sums + block):
            tl.store(differs, block + 1)
    else:
        tl.store(sums + block, found)


@triton.jit
def _odd_hash(at):
    """Return an odd number for each place: the finalizer of SplitMix64, with its last bit set."""
    mixed = (at.to(tl.uint64) + 1) * 0x9E3779B97F4A7C15
    mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9
    mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EB
    return ((mixed ^ (mixed >> 31)) | 1).to(tl.int64, bitcast=True)
