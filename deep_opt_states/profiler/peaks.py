"""Look up the peak FLOP/s that a GPU's specification states; utilisation is reported relative to it."""

from __future__ import annotations

import re

_PEAK_FLOPS = {
    "B200": 2250e12,
    "GH200": 990e12,
    "H200 NVL": 835e12,
    "H200": 989e12,
    "H100 PCIE": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "A100": 312e12,
    "A40": 149.7e12,
    "A30": 165e12,
    "A10": 125e12,
    "L40S": 362e12,
    "L40": 181e12,
    "L4": 121e12,
    "RTX 6000 ADA": 364e12,
    "RTX A6000": 154.8e12,
    "RTX 4090": 165.2e12,
    "RTX 3090": 71e12,
    "V100S": 130e12,
    "V100 SXM2": 125e12,
    "V100": 112e12,
    "T4": 65e12,
}
"""Peak FLOP/s of dense 16-bit matrix products with fp32 accumulation, by the words of the name, most specific first.

The format is bf16, or fp16 on GPUs without bf16 (V100, T4). The figures are from NVIDIA's data sheets, and for GeForce
from the architecture white papers; figures that are given with sparsity are halved.
"""

_REDUCED = {"MIG", "LAPTOP", "MAX", "MOBILE", "D", "TI"}
"""Words in the names of slices of a GPU, and of other GPUs with almost the same name."""


def peak_flops(gpu: str) -> float | None:
    """Return the peak FLOP/s of ``gpu``, a name as the driver reports it, or None if it is unknown."""
    words = set(re.findall(r"[A-Z0-9]+", gpu.upper()))
    if words & _REDUCED:
        return None
    return next((flops for model, flops in _PEAK_FLOPS.items() if words.issuperset(model.split())), None)
