"""List the cases of training beside tensor parallelism."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

PLACEMENTS = {
    "cpu": {"placement": "cpu"},
    "streamed": {"placement": "streamed", "unit_size": 700},
    "planned": {},
}
BY_NAME = "rules by name"
ARMS = (*PLACEMENTS, BY_NAME)
"""The names of the plugin's placements in a case. The rules by name depend on the layout."""
SETTINGS = {
    "plain": {},
    "clipping": {"gradient_clipping": 0.1},
    "accumulation 2": {"gradient_accumulation_steps": 2, "gradient_clipping": 0.1},
}
DTYPES = ("bf16", "fp32", "fp16")


@dataclass(frozen=True)
class TensorParallelCase:
    """A training run with stock, and with the plugin once for each of ``ARMS``.

    In fp16, gradients overflow in one step on one of the ranks that share a model only.
    """

    layout: str
    dtype: str
    setting: str
    zero_init: bool

    @property
    def name(self) -> str:
        """Return the case's name among the answers of the ranks."""
        return f"{self.layout}, {self.dtype}, {self.setting}{', zero.Init' if self.zero_init else ''}"


_QUICK = {("AutoTP", "fp16", "accumulation 2"), ("mpu", "bf16", "clipping"), ("mpu", "fp16", "plain")}

CASES = tuple(
    # Each dtype and each setting is combined with ``zero.Init`` in one of the layouts and without it in the other.
    TensorParallelCase(layout, dtype, setting, (index + position) % 2 == 0)
    for index, layout in enumerate(("AutoTP", "mpu"))
    for position, (dtype, setting) in enumerate(product(DTYPES, SETTINGS))
)
QUICK = tuple(case for case in CASES if (case.layout, case.dtype, case.setting) in _QUICK)
"""The cases of ``make test``."""
