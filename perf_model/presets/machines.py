"""Read ``machines.csv``, the machines of specifications and published runs."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from perf_model.prediction.cost import CPU_ADAM, gpu_step_bytes, stock_traffic_by_action, traffic_by_action
from perf_model.prediction.hardware import HardwareProfile, Measurement, Provenance
from perf_model.schedule.action import ActionKind
from perf_model.schedule.host_layout import WIDTHS_OF_STATES
from perf_model.training_run.micro_batch import TRAINING_SHARE
from perf_model.units import GB

TABLE = Path(__file__).with_name("machines.csv")
"""One line per node, with the fields of ``MachinePreset``.

``gpu_memory_bytes`` is the memory that the driver reports. ``matmul_flops`` is the rate in training: fitted to
published runs (one sequence on H100 and on 4xA100, four on A100-40GB-nodes), or half of the peak. Links are as
specified, per GPU and direction, and ``joint`` is the rate of both directions as a multiple of one.
``peer_link_bytes_per_s`` is empty without links among GPUs. ``network_bytes_per_s`` is a GPU's share of the rate
between nodes.
"""

REACHED_SHARE = 0.8
"""The assumed share of a specified bandwidth that copies and Adam reach."""

SELENE = "selene"
"""The preset of the Megatron paper's machine: one rate of products explains all of table 1 (arXiv 2104.04473)."""

CORE_PARAMS_PER_S = 0.2e9
"""The assumed rate of Adam per core of every CPU."""

_ASSUMED = (
    "host memory and cores of a common server with this GPU, pageable copies, matrix products at 50% of the peak, "
    "network and the rate of both directions together are assumed"
)


class Figure(NamedTuple):
    """A figure of a machine that a user may give, its bounds, and the ``field`` of a preset that it replaces."""

    low: float
    high: float
    field: str
    meaning: str


FIGURES = {
    "cores": Figure(1, 10**5, "cores", "cores of a node"),
    "host_bandwidth_gb_per_s": Figure(1, 2500, "host_bytes_per_s", "bandwidth of a node's host memory that is reached"),
    "link_gb_per_s": Figure(0.3, 2000, "link_bytes_per_s", "rate of copies between host and one GPU, per direction"),
    "network_gb_per_s": Figure(1e-3, 1e4, "network_bytes_per_s", "rate at which one GPU receives from other nodes"),
}


@dataclass(frozen=True, kw_only=True)
class MachinePreset:
    """A line of ``TABLE``. All ranks of the node share ``host_bytes_per_s`` and ``cores``."""

    name: str
    gpu: str
    gpu_memory_bytes: int
    gpu_memory_bytes_per_s: float
    peak_flops: float
    matmul_flops: float
    link_bytes_per_s: float
    joint: float
    pageable_bytes_per_s: float
    cores: int
    host_bytes_per_s: float
    host_memory_bytes: int
    peer_link_bytes_per_s: float | None
    network_bytes_per_s: float
    source: str

    @classmethod
    def from_row(cls, row: Mapping[str, str]) -> MachinePreset:
        texts = {name: row[name] for name in ("name", "gpu", "specified_by", "other_sources")}
        figures: dict[str, Any] = {
            name: int(text) if text.isdigit() else float(text) if text else None
            for name, text in row.items()
            if name not in texts
        }
        reached = f"{texts['specified_by']}, {REACHED_SHARE:.0%} of which are assumed to be reached"
        source = f"{reached}; {texts['other_sources'] or _ASSUMED}"
        return cls(name=texts["name"], gpu=texts["gpu"], source=source, **figures)

    def changed(self, figures: Mapping[str, float]) -> MachinePreset:
        """Return the preset with ``figures`` that the user gave, by their names in ``FIGURES``."""
        named = ", ".join(f"{name} {value:g}" for name, value in figures.items())
        values: dict[str, Any] = {
            FIGURES[name].field: value if name == "cores" else value * GB for name, value in figures.items()
        }
        if "link_bytes_per_s" in values:
            # A preset contains the specified rate, and the user gives the rate that copies reach.
            values["link_bytes_per_s"] /= REACHED_SHARE
        return replace(self, source=f"{self.source}; given by the user: {named}", **values)

    @property
    def peer_bytes_per_s(self) -> float:
        """Return the rate at which a GPU receives from the other GPUs of the node."""
        # Without a link of their own, a byte goes up from one GPU and down to the other.
        specified = self.link_bytes_per_s / 2 if self.peer_link_bytes_per_s is None else self.peer_link_bytes_per_s
        return REACHED_SHARE * specified

    def profile(self, ranks: int) -> HardwareProfile:
        """Return the profile of one rank while ``ranks`` ranks, one per GPU, run on the node."""
        link_bytes_per_s = REACHED_SHARE * self.link_bytes_per_s
        host_bytes_per_s = self.host_bytes_per_s / ranks
        traffic = {CPU_ADAM[each.master, each.moment]: traffic_by_action(each) for each in WIDTHS_OF_STATES.values()}
        traffic["stock_cpu_adam_params_per_s"] = stock_traffic_by_action()
        rates = {
            "h2d_bytes_per_s": link_bytes_per_s,
            "d2h_bytes_per_s": link_bytes_per_s,
            "both_bytes_per_s": self.joint * link_bytes_per_s,
            "pageable_h2d_bytes_per_s": min(self.pageable_bytes_per_s, link_bytes_per_s),
            "copy_latency_s": 1e-5,
            **{
                name: min(host_bytes_per_s / moved[ActionKind.CPU_STEP].dram, CORE_PARAMS_PER_S * self.cores / ranks)
                for name, moved in traffic.items()
            },
            "dram_update_bytes_per_s": host_bytes_per_s,
            "dram_copy_bytes_per_s": host_bytes_per_s,
            "gpu_adam_params_per_s": REACHED_SHARE * self.gpu_memory_bytes_per_s / gpu_step_bytes(),
            # Training reaches ``matmul_flops`` with this rate of single products.
            "matmul_flops_per_s": self.matmul_flops / TRAINING_SHARE,
            "all_gather_bytes_per_s": self.peer_bytes_per_s,
            "reduce_scatter_bytes_per_s": self.peer_bytes_per_s,
            "inter_node_bytes_per_s": self.network_bytes_per_s,
        }
        return HardwareProfile(
            name=self.name,
            provenance=Provenance(
                source=f"PRESET, not a measurement of your machine: {self.source}",
                gpu=self.gpu,
                cores=self.cores // ranks,
                ranks=ranks,
            ),
            measurements={name: Measurement(samples=(rate,)) for name, rate in rates.items()},
            gpu_memory_bytes=self.gpu_memory_bytes,
            host_memory_bytes=self.host_memory_bytes,
            gpu_peak_flops=self.peak_flops,
        )


with TABLE.open(encoding="utf-8", newline="") as _file:
    MACHINES: dict[str, MachinePreset] = {row["name"]: MachinePreset.from_row(row) for row in csv.DictReader(_file)}

ALIASES = {"a100-80gb": "a100-pcie4", "h100": "h100-pcie5", "h200": "h200-pcie5"}
