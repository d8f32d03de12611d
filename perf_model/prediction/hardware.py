"""Define ``HardwareProfile``, the measured rates of a machine with their origin.

All rates are per rank, while all ranks of the node work. A *waived* rate could not be measured, for a given reason.
"""

from __future__ import annotations

import json
import math
from collections import ChainMap
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import NamedTuple

from perf_model.json_input import parse_json, printable, read_text, shorten

VERSION = 2

_UNITS = "Units are bytes, seconds, parameters and FLOP."
_REMEDY = "Write a profile with: deep-opt-states profile --output profile.json"


class ProfileError(ValueError):
    """A profile that cannot be used. The message contains the rule, the value found and the remedy."""


class Quantity(NamedTuple):
    """A quantity of a profile. Its bounds are such that a unit wrong by 1e3 is detected on every machine."""

    meaning: str
    low: float
    high: float


QUANTITIES: dict[str, Quantity] = {
    "h2d_bytes_per_s": Quantity("host to accelerator, pinned, alone", 3e8, 2e12),
    "d2h_bytes_per_s": Quantity("accelerator to host, pinned, alone", 3e8, 2e12),
    "both_bytes_per_s": Quantity("both directions concurrently, pinned, their sum", 3e8, 4e12),
    "pageable_h2d_bytes_per_s": Quantity("host to accelerator, pageable", 1e8, 2e12),
    "copy_latency_s": Quantity("latency of one small copy", 1e-7, 5e-3),
    "cpu_adam_params_per_s": Quantity("the whole update on the CPU, alone", 1e7, 1e11),
    "cpu_adam_bf16_masters_params_per_s": Quantity("the same with bf16 master weights and fp32 moments", 1e7, 1e11),
    "cpu_adam_bf16_states_params_per_s": Quantity("the same with bf16 master weights and moments", 1e7, 1e11),
    "cpu_adam_beside_transfers_params_per_s": Quantity(
        "the whole update on the CPU, while transfers run both ways", 1e7, 1e11
    ),
    "both_beside_cpu_adam_bytes_per_s": Quantity("both directions concurrently, while the CPU updates", 1e8, 4e12),
    "cpu_adam_threads": Quantity("the fewest threads that update on the CPU at its full rate", 1, 1e4),
    "stock_cpu_adam_params_per_s": Quantity("the update of stock DeepSpeed on the CPU: three passes", 1e7, 1e11),
    "dram_update_bytes_per_s": Quantity("host memory, read and written in place", 1e9, 5e12),
    "dram_copy_bytes_per_s": Quantity("host memory, copied: bytes read and written", 1e9, 5e12),
    "gpu_adam_params_per_s": Quantity("Adam on the accelerator", 2e9, 1e13),
    "matmul_flops_per_s": Quantity("bf16 matrix product on the accelerator, alone", 1e8, 1e17),
    "all_gather_bytes_per_s": Quantity("all-gather among the ranks of a node: bytes that a rank receives", 1e6, 1e13),
    "reduce_scatter_bytes_per_s": Quantity("reduce-scatter in a node: bytes that a rank sends", 1e6, 1e13),
    "inter_node_bytes_per_s": Quantity(
        "all-gather among ranks on different nodes, all ranks of a node together: bytes that a rank receives", 1e6, 1e13
    ),
}
"""The quantities by name. Each of d ranks receives or sends (d - 1) / d of the whole in a collective."""

TRAINING_QUANTITIES: dict[str, Quantity] = {
    "training_flops_per_s": Quantity("matrix products of forward and backward, with many tokens", 1e8, 1e17),
    "module_forward_s": Quantity("ZeRO-3 on the host, per module and forward", 1e-5, 1e-2),
    "module_backward_s": Quantity("ZeRO-3 on the host, per module and backward without recomputation", 1e-5, 2e-2),
    "module_gradients_s": Quantity("stock's copies of gradients in backward, on the host, per module", 0.0, 1e-2),
    "module_step_s": Quantity("step() for any number of parameters, per module", 0.0, 1e-2),
    "stock_step_params_per_s": Quantity("stock's step(), with norm, unscaling and copies", 1e7, 1e11),
}
"""Quantities of a run of DeepSpeed, which a profile need not contain. A module is one with parameters."""

DISK_QUANTITIES: dict[str, Quantity] = {
    "disk_read_bytes_per_s": Quantity("states on disk, read alone", 1e6, 1e12),
    "disk_write_bytes_per_s": Quantity("states on disk, written alone", 1e6, 1e12),
    "disk_both_bytes_per_s": Quantity("states on disk, read and written together, their sum", 1e6, 2e12),
}
"""Quantities of the disks that ``profile --nvme`` names."""

KNOWN = ChainMap(QUANTITIES, TRAINING_QUANTITIES, DISK_QUANTITIES)

_SPECIFIED = {
    "gpu_memory_bytes": Quantity("memory of the GPU", 1e9, 1e13),
    "host_memory_bytes": Quantity("memory of the host", 1e9, 1e14),
    "gpu_peak_flops": Quantity("peak of the GPU in bf16, in FLOP/s", 1e12, 1e17),
}

MATMUL_SIZE = 4096
"""The rows of the square matrices of ``matmul_flops_per_s`` on a GPU."""

RETIRED_QUANTITIES = frozenset(
    {"matmul_small_flops_per_s", "pageable_d2h_bytes_per_s", "rounding_params_per_s", "split_cpu_adam_params_per_s"}
)
"""Quantities of earlier versions, which are ignored in saved profiles."""

REQUIRED = ("cpu_adam_params_per_s", "stock_cpu_adam_params_per_s", "dram_update_bytes_per_s")

ACCELERATOR_RATES = ("h2d_bytes_per_s", "d2h_bytes_per_s", "both_bytes_per_s", "gpu_adam_params_per_s")
"""The rates of an accelerator. Without all of them, the CPU is the accelerator."""

MIN_GPU_MATMUL_FLOPS_PER_S, MAX_CPU_MATMUL_FLOPS_PER_S = 1e12, 2e14
"""Bounds that detect a unit wrong by 1e3 on a GPU and on a CPU. A CPU with AMX reaches 1e14."""

PEAK_TOLERANCE = 1.2
"""The tolerance of ``gpu_peak_flops``: clocks may be above the specification."""

LIMITS: dict[str, tuple[tuple[str, ...], float]] = {
    "cpu_adam_beside_transfers_params_per_s": (("cpu_adam_params_per_s",), 1.5),
    "both_beside_cpu_adam_bytes_per_s": (("both_bytes_per_s",), 1.5),
    "both_bytes_per_s": (("h2d_bytes_per_s", "d2h_bytes_per_s"), 1.2),
}
"""Rates while other work runs. Their limits are a tolerance for noise times the sum of these rates alone."""


def rates_above_limits(median_of: Callable[[str], float | None]) -> Iterator[tuple[str, float, str, float, float]]:
    """Yield each rate above its limit: name, value, names and sum of the rates alone, tolerance."""
    for name, (names, tolerance) in LIMITS.items():
        rate, *alone = (median_of(each) or math.nan for each in (name, *names))
        # A missing rate, which is NaN, is above no limit and no limit itself.
        if rate > tolerance * sum(alone):
            yield name, rate, " plus ".join(names), sum(alone), tolerance


def matmul_bounds(gpu_memory_bytes: int | None, peak: float | None, *, has_accelerator: bool) -> tuple[float, float]:
    """Return the bounds of ``matmul_flops_per_s``. ``peak`` is in FLOP/s, or None if it is unknown."""
    low, high = QUANTITIES["matmul_flops_per_s"][1:]
    if gpu_memory_bytes is not None:
        low = MIN_GPU_MATMUL_FLOPS_PER_S
    elif not has_accelerator:
        high = MAX_CPU_MATMUL_FLOPS_PER_S
    return low, high if peak is None else min(high, PEAK_TOLERANCE * peak)


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """The samples of one quantity, or the reason why there are none."""

    samples: tuple[float, ...] = ()
    waived: str | None = None

    @property
    def median(self) -> float:
        return median(self.samples)

    @property
    def spread(self) -> tuple[float, float]:
        """Return the 20th and the 80th percentile of the samples, by nearest rank."""
        ordered = sorted(self.samples)
        last = len(ordered) - 1
        return ordered[round(0.2 * last)], ordered[round(0.8 * last)]


@dataclass(frozen=True, kw_only=True)
class Provenance:
    """The origin of a profile. ``source`` is "measured", or the origin of a preset's figures."""

    source: str
    date: str = ""
    host: str = ""
    cpu: str = ""
    cores: int = 0
    ranks: int = 1
    gpu: str = ""
    driver: str = ""
    torch: str = ""
    deepspeed: str = ""


@dataclass(frozen=True, kw_only=True)
class HardwareProfile:
    """The rates of one rank on one machine. Raise ``ProfileError`` if a value is missing or implausible."""

    name: str
    provenance: Provenance
    measurements: Mapping[str, Measurement]
    gpu_memory_bytes: int | None = None
    host_memory_bytes: int | None = None
    gpu_peak_flops: float | None = None

    def __post_init__(self) -> None:
        if unknown := [name for name in self.measurements if name not in KNOWN]:
            raise _error("measurements", f"must only have the keys {', '.join(KNOWN)}", unknown[0])
        if missing := [name for name in REQUIRED if self.get(name) is None]:
            raise _error(missing[0], "is needed for every prediction", f"nothing ({self.why_missing(missing[0])})")
        for name, measurement in self.measurements.items():
            _check(name, KNOWN[name], measurement.samples)
        for name, quantity in _SPECIFIED.items():
            value = getattr(self, name)
            _check(name, quantity, () if value is None else (value,))
        achieved, peak = self.get("matmul_flops_per_s"), self.gpu_peak_flops
        low, high = matmul_bounds(self.gpu_memory_bytes, peak, has_accelerator=self.has_accelerator)
        if achieved is not None and not low <= achieved <= high:
            on_gpu = self.has_accelerator or self.gpu_memory_bytes is not None
            rule = f"must be from {low:.3g} to {high:.3g} on {'this GPU' if on_gpu else 'this CPU'}"
            by_peak = "" if peak is None else f", {PEAK_TOLERANCE} times gpu_peak_flops at most"
            raise _error("matmul_flops_per_s", f"{rule}{by_peak}", achieved)
        for name, rate, names, alone, tolerance in rates_above_limits(self.get):
            rule = f"cannot exceed {names}, {tolerance * alone:.3g} with a tolerance ({QUANTITIES[name].meaning})"
            raise _error(name, rule, rate)

    def get(self, name: str) -> float | None:
        """Return the median of the quantity, or None if it is waived or missing."""
        assert name in KNOWN, name
        measurement = self.measurements.get(name)
        return None if measurement is None or not measurement.samples else measurement.median

    def rate(self, name: str, purpose: str = "the update") -> float:
        """Return the median of the quantity. Raise ``ProfileError`` with the ``purpose`` if it is missing."""
        value = self.get(name)
        if value is None:
            raise ProfileError(
                f"{name}: is needed to predict {purpose}, found nothing ({self.why_missing(name)}).\n"
                "Measure again with nothing else running: deep-opt-states profile --output profile.json. "
                "Or plan for a preset."
            )
        return value

    def why_missing(self, name: str) -> str:
        measurement = self.measurements.get(name)
        return (None if measurement is None else measurement.waived) or "not in the profile"

    @property
    def both_directions(self) -> float:
        """Return the rate of concurrent transfers, or its upper bound if it is waived. Raise ``ProfileError``."""
        measurement = self.measurements.get("both_bytes_per_s")
        if measurement is None or measurement.waived is None:
            return self.rate("both_bytes_per_s")
        return self.rate("h2d_bytes_per_s") + self.rate("d2h_bytes_per_s")

    @property
    def has_accelerator(self) -> bool:
        return any(self.get(name) is not None for name in ACCELERATOR_RATES)

    def to_json(self) -> str:
        return json.dumps({"version": VERSION, **asdict(self)}, indent=2)

    @classmethod
    def from_json(cls, text: str) -> HardwareProfile:
        """Return the profile in ``text``. Raise ``ProfileError`` if it is not a profile of this version."""
        raw = parse_json(text, "A profile must be JSON", _REMEDY, ProfileError)
        if not isinstance(raw, dict) or (version := raw.pop("version", "nothing")) != VERSION:
            raise _error("version", f"must be the integer {VERSION}", version if isinstance(raw, dict) else raw)
        try:
            raw["provenance"] = Provenance(**raw["provenance"])
            raw["measurements"] = {
                name: Measurement(**{**each, "samples": tuple(map(float, each.get("samples", ())))})
                for name, each in raw["measurements"].items()
                if name not in RETIRED_QUANTITIES
            }
            # Earlier versions wrote this key, which nothing reads.
            raw.pop("cpu_adam_by_threads", None)
            return cls(**raw)
        except ProfileError:
            raise
        except (ArithmeticError, AttributeError, KeyError, TypeError, ValueError) as error:
            raise _error("profile", "must be as the program writes it", f"{type(error).__name__}: {error}") from None

    @classmethod
    def read(cls, path: Path) -> HardwareProfile:
        """Return the profile in the file ``path``. Raise ``ProfileError`` if it cannot be read."""
        return cls.from_json(read_text(path, "A profile must be a readable file", _REMEDY, ProfileError))


def _check(name: str, quantity: Quantity, values: Iterable[float]) -> None:
    for value in values:
        if not quantity.low <= value <= quantity.high:
            raise _error(name, f"must be from {quantity.low:g} to {quantity.high:g} ({quantity.meaning})", value)


def _error(key: str, rule: str, found: object) -> ProfileError:
    shown = printable(found, 300) if isinstance(found, str) else shorten(found)
    return ProfileError(f"{printable(key, 100)}: {rule}, found {shown}.\n{_UNITS} {_REMEDY}")
