"""``HardwareProfile``: what a machine was measured to do, with where each figure comes from. JSON in and out.

All rates are per rank, measured (or, in a preset, divided) with all ranks of the node at work at once: that is how
training uses them. A rate that could not be measured is *waived*, with the reason.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from perf_model.json_input import is_printable, parse_json, read_text, shown

VERSION = 2


class ProfileError(ValueError):
    """A profile that cannot be used: the rule, the value found, the remedy."""


class Quantity(NamedTuple):
    """``low`` and ``high`` bound what any machine does; a unit that is wrong by 1e3 falls outside."""

    meaning: str
    low: float
    high: float


QUANTITIES: dict[str, Quantity] = {
    "h2d_bytes_per_s": Quantity("host to accelerator, pinned, alone", 3e8, 2e12),
    "d2h_bytes_per_s": Quantity("accelerator to host, pinned, alone", 3e8, 2e12),
    "both_bytes_per_s": Quantity("both directions at once, pinned, their sum", 3e8, 4e12),
    "pageable_h2d_bytes_per_s": Quantity("host to accelerator, pageable", 1e8, 2e12),
    "pageable_d2h_bytes_per_s": Quantity("accelerator to host, pageable", 1e8, 2e12),
    "copy_latency_s": Quantity("of one small copy", 1e-7, 5e-3),
    "cpu_adam_params_per_s": Quantity("all that a CPU update does to a parameter, alone", 1e7, 1e11),
    "cpu_adam_beside_transfers_params_per_s": Quantity("the same while transfers run both ways", 1e7, 1e11),
    "both_beside_cpu_adam_bytes_per_s": Quantity("both directions at once while the CPU updates", 1e8, 4e12),
    "stock_cpu_adam_params_per_s": Quantity("what stock DeepSpeed does instead: three passes", 1e7, 1e11),
    "dram_update_bytes_per_s": Quantity("host memory, read and written in place", 1e9, 5e12),
    "dram_copy_bytes_per_s": Quantity("host memory, copied: bytes read and written", 1e9, 5e12),
    "rounding_params_per_s": Quantity("fp32 to 16 bit in host memory", 1e7, 1e12),
    "gpu_adam_params_per_s": Quantity("Adam on the accelerator", 2e9, 1e13),
    "matmul_flops_per_s": Quantity("bf16 matrix product on the accelerator, achieved", 1e9, 1e17),
}

WHOLE_NUMBERS = {"gpu_memory_bytes": (10**9, 10**13), "host_memory_bytes": (10**9, 10**14)}
PEAK_FLOPS = (1e12, 1e17)
PEAK_TOLERANCE = 1.2
"""Clocks may be above those of the specification."""

REQUIRED = ("cpu_adam_params_per_s", "stock_cpu_adam_params_per_s", "dram_update_bytes_per_s")
"""Without these nothing can be predicted; without the transfers' rates the accelerator is the CPU itself."""

LEAST_MATMUL_OF_A_GPU, MOST_MATMUL_OF_A_CPU = 1e12, 2e14
"""In FLOP/s; with a unit that is wrong by 1e3 one would look like the other. A CPU with AMX reaches 1e14."""

NOT_ABOVE = {
    "cpu_adam_beside_transfers_params_per_s": "cpu_adam_params_per_s",
    "both_beside_cpu_adam_bytes_per_s": "both_bytes_per_s",
}
BESIDE_TOLERANCE = 1.5
"""What runs beside something else is no faster than alone, but for noise."""

BOTH_TOLERANCE = 1.2
"""What both directions reach at once is no more than the sum of what they reach alone, but for noise."""

OF_AN_ACCELERATOR = ("h2d_bytes_per_s", "d2h_bytes_per_s", "both_bytes_per_s", "gpu_adam_params_per_s")
"""Any of these says that there is one."""


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """Samples of one quantity, or why there are none."""

    samples: tuple[float, ...] = ()
    waived: str | None = None

    @property
    def median(self) -> float:
        return median(self.samples)

    @property
    def spread(self) -> tuple[float, float]:
        """The 20th and the 80th percentile of the samples, by nearest rank."""
        ordered = sorted(self.samples)
        last = len(ordered) - 1
        return ordered[round(0.2 * last)], ordered[round(0.8 * last)]


@dataclass(frozen=True, kw_only=True)
class Provenance:
    """Where and when; ``source`` is "measured", or where the figures of a preset are from."""

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
    """``measurements`` by the names in ``QUANTITIES``; ``cpu_adam_by_threads`` are params/s by thread count."""

    name: str
    provenance: Provenance
    measurements: Mapping[str, Measurement]
    cpu_adam_by_threads: Mapping[int, Measurement] = field(default_factory=dict)
    gpu_memory_bytes: int | None = None
    host_memory_bytes: int | None = None
    gpu_peak_flops: float | None = None

    def __post_init__(self) -> None:
        for name in self.measurements:
            _require(name in QUANTITIES, "measurements", f"are of {', '.join(QUANTITIES)}", name, "Measure anew.")
        for name in REQUIRED:
            known = name in self.measurements and self.measurements[name].samples
            _require(bool(known), name, "is needed for every prediction", "nothing", "Measure it: profile.")
        for name, measurement in self.measurements.items():
            _check(name, measurement, QUANTITIES[name])
        for threads, measurement in self.cpu_adam_by_threads.items():
            _check(f"cpu_adam_by_threads.{threads}", measurement, QUANTITIES["cpu_adam_params_per_s"])
        for key, (low, high) in WHOLE_NUMBERS.items():
            _check_whole(key, getattr(self, key), low, high)
        _check_whole("provenance.ranks", self.provenance.ranks, 1, 10**5)
        _check_whole("provenance.cores", self.provenance.cores, 0, 10**5)
        self._check_matmul()
        self._check_together()

    def _check_matmul(self) -> None:
        peak, achieved = self.gpu_peak_flops, self.get("matmul_flops_per_s")
        fits = peak is None or (_is_number(peak) and PEAK_FLOPS[0] <= peak <= PEAK_FLOPS[1])
        rule = "must be a number from {:g} to {:g}".format(*PEAK_FLOPS)
        _require(fits, "gpu_peak_flops", rule, peak, "Its unit is FLOP/s.")
        if achieved is None:
            return
        low, high = QUANTITIES["matmul_flops_per_s"][1:]
        if self.gpu_memory_bytes is not None:
            low = LEAST_MATMUL_OF_A_GPU
        elif not self.has_accelerator:
            high = MOST_MATMUL_OF_A_CPU
        rule = f"must be from {low:g} to {high:g} on {'this CPU' if high == MOST_MATMUL_OF_A_CPU else 'this GPU'}"
        _require(low <= achieved <= high, "matmul_flops_per_s", rule, achieved, "Its unit is FLOP/s.")
        most = math.inf if peak is None else PEAK_TOLERANCE * peak
        rule = f"cannot exceed gpu_peak_flops, {most:.3g} with a tolerance"
        _require(achieved <= most, "matmul_flops_per_s", rule, achieved, "Correct one of them.")

    def _check_together(self) -> None:
        for beside, of in NOT_ABOVE.items():
            slowed, free = self.get(beside), self.get(of)
            if slowed is not None and free is not None:
                most = BESIDE_TOLERANCE * free
                rule = f"cannot exceed {of}, {most:.3g} with a tolerance"
                _require(slowed <= most, beside, rule, slowed, "Measure anew, with nothing else at work.")
        both, alone = self.get("both_bytes_per_s"), (self.get("h2d_bytes_per_s"), self.get("d2h_bytes_per_s"))
        if both is not None and None not in alone:
            most = BOTH_TOLERANCE * sum(rate for rate in alone if rate is not None)
            rule = f"cannot exceed what the directions reach alone, {most:.3g} with a tolerance"
            _require(both <= most, "both_bytes_per_s", rule, both, "It is the sum of both directions; measure anew.")

    def get(self, name: str) -> float | None:
        """The median, or None where it is waived or not there."""
        assert name in QUANTITIES, name
        measurement = self.measurements.get(name)
        return None if measurement is None or not measurement.samples else measurement.median

    def rate(self, name: str) -> float:
        """The median. Raises ``ProfileError`` where it is waived."""
        value = self.get(name)
        if value is None:
            reason = self.measurements[name].waived if name in self.measurements else "not in the profile"
            raise ProfileError(f"{name}: is needed here, found nothing ({reason}).\nProfile the machine that trains.")
        return value

    @property
    def has_accelerator(self) -> bool:
        """Whether there is one beside the CPU itself."""
        return any(self.get(name) is not None for name in OF_AN_ACCELERATOR)

    def to_json(self) -> str:
        return json.dumps({"version": VERSION, **asdict(self)}, indent=2)

    @classmethod
    def from_json(cls, text: str) -> HardwareProfile:
        """Raises ``ProfileError`` for whatever is not a profile of this version."""
        try:
            raw = parse_json(text)
        except ValueError as error:
            raise ProfileError(f"A profile is JSON, found a text that is not: {error}.\n{_ANEW}") from None
        return _from_mapping(cls, raw)

    @classmethod
    def read(cls, path: Path) -> HardwareProfile:
        try:
            text = read_text(path)
        except (OSError, ValueError) as error:
            raise ProfileError(f"A profile must be a readable file, found {path}: {error}.\n{_ANEW}") from None
        return cls.from_json(text)


_ANEW = "Write one with: deep-opt-states profile --output profile.json"


def _require(holds: bool, key: str, rule: str, found: object, remedy: str) -> None:
    if not holds:
        raise ProfileError(f"{key}: {rule}, found {found if found == 'nothing' else shown(found)}.\n{remedy}")


def _check(key: str, measurement: Measurement, quantity: Quantity) -> None:
    one_of_both = bool(measurement.samples) != (measurement.waived is not None)
    _require(one_of_both, key, "has samples or a reason why not", asdict(measurement), _ANEW)
    for sample in measurement.samples:
        rule = f"must be from {quantity.low:g} to {quantity.high:g} ({quantity.meaning})"
        _require(quantity.low <= sample <= quantity.high, key, rule, sample, "Units are bytes, seconds and parameters.")


def _from_mapping(cls: type[HardwareProfile], raw: Any) -> HardwareProfile:
    _require(isinstance(raw, dict), "profile", "must be an object", raw, _ANEW)
    is_ours = raw.get("version") == VERSION and type(raw["version"]) is int
    _require(is_ours, "version", f"must be the integer {VERSION}", raw.get("version", "nothing"), _ANEW)
    known = {"version", "name", "provenance", "measurements", "cpu_adam_by_threads", *WHOLE_NUMBERS, "gpu_peak_flops"}
    unknown = sorted(set(raw) - known)
    _require(not unknown, "profile", f"has the keys {', '.join(sorted(known))}", unknown, _ANEW)
    name = raw.get("name")
    _require(_is_text(name), "name", "must be a text", name, _ANEW)
    for key in ("provenance", "measurements"):
        _require(isinstance(raw.get(key), dict), key, "must be an object", raw.get(key, "nothing"), _ANEW)
    by_threads = raw.get("cpu_adam_by_threads", {})
    _require(isinstance(by_threads, dict), "cpu_adam_by_threads", "must be an object", by_threads, _ANEW)
    counts = [threads for threads in by_threads if not _THREADS.fullmatch(threads)]
    _require(not counts, "cpu_adam_by_threads", "has thread counts for keys", counts, _ANEW)
    return cls(
        name=name,
        provenance=_provenance(raw["provenance"]),
        measurements={key: _measurement(key, value) for key, value in raw["measurements"].items()},
        cpu_adam_by_threads={
            int(key): _measurement(f"cpu_adam_by_threads.{key}", value) for key, value in by_threads.items()
        },
        gpu_peak_flops=raw.get("gpu_peak_flops"),
        **{key: raw.get(key) for key in WHOLE_NUMBERS},
    )


_THREADS = re.compile("[1-9][0-9]{0,4}")


def _provenance(raw: dict[str, Any]) -> Provenance:
    types = {name: int if name in ("cores", "ranks") else str for name in Provenance.__dataclass_fields__}
    for key, value in raw.items():
        _require(key in types, "provenance", f"has the keys {', '.join(types)}", key, _ANEW)
        fits = _is_text(value) if types[key] is str else type(value) is int
        _require(fits, f"provenance.{key}", f"must be {types[key].__name__}", value, _ANEW)
    _require("source" in raw, "provenance.source", "says where the figures are from", "nothing", _ANEW)
    return Provenance(**raw)


def _measurement(key: str, raw: Any) -> Measurement:
    shape = isinstance(raw, dict) and set(raw) <= {"samples", "waived"}
    _require(shape, key, 'must be {"samples": [...]} or {"waived": "why"}', raw, _ANEW)
    samples, waived = raw.get("samples", ()), raw.get("waived")
    numbers = isinstance(samples, (list, tuple)) and all(map(_is_number, samples))
    _require(numbers, key, "has numbers for samples", samples, _ANEW)
    _require(waived is None or _is_text(waived), key, "is waived with a reason", waived, _ANEW)
    return Measurement(samples=tuple(map(float, samples)), waived=waived)


def _check_whole(key: str, value: Any, low: int, high: int) -> None:
    fits = value is None or (type(value) is int and low <= value <= high)
    _require(fits, key, f"must be an integer from {low:g} to {high:g}", value, _ANEW)


def _is_number(value: Any) -> bool:
    """That a float can hold; JSON also has whole numbers that none can."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and is_printable(value)
