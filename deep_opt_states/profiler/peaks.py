"""What GPUs reach by specification, which utilisation is told of: nothing that could be measured."""

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
"""Dense 16-bit matrix products that are summed in fp32, by the words of a name, most specific first.

bf16, fp16 on those without it (V100, T4). NVIDIA's data sheets; for GeForce its architecture white papers. Figures that
are given with sparsity are halved.
"""

_REDUCED = {"MIG", "LAPTOP", "MAX", "MOBILE", "D", "TI"}
"""A slice of a GPU, or another one with almost the same name."""


def peak_flops(gpu: str) -> float | None:
    """``gpu`` is the name as the driver reports it; None where that is not known."""
    words = set(re.findall(r"[A-Z0-9]+", gpu.upper()))
    if words & _REDUCED:
        return None
    return next((flops for model, flops in _PEAK_FLOPS.items() if words.issuperset(model.split())), None)
