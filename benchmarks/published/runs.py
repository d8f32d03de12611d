"""Read the measured runs in ``benchmarks/data/published_runs.csv``."""

from __future__ import annotations

import csv
from dataclasses import dataclass

from benchmarks.harness.rows import REPOSITORY

PUBLISHED_RUNS = REPOSITORY / "benchmarks" / "data" / "published_runs.csv"

GPUS_PER_NODE = 4
"""The GPUs of a node of each machine in the file."""

QUANTITIES = ("forward", "backward", "update", "iteration")
"""The measured times of a run that are compared with predictions."""


@dataclass(frozen=True, kw_only=True)
class RunSetting:
    """The inputs of the prediction of an update: two runs on one machine with equal settings should take equally long.

    ``real_params`` are the whole model's, divided among ``ranks`` ranks, and ``sub_group_size`` is in parameters
    of one rank. ``cpu_ratio`` is the share of the sub-groups that is offloaded. ``update_stride`` is None if updates
    are not interleaved.
    """

    real_params: int
    layers: int
    hidden: int
    heads: int
    ranks: int
    cpu_ratio: float
    sub_group_size: int
    update_stride: int | None


@dataclass(frozen=True, kw_only=True)
class MeasuredRun:
    """One measured run. ``measured_s`` contains the seconds of each of ``QUANTITIES``.

    ``blocking``: the last copy of the gradients to host memory blocks backward, None if that is unknown.
    """

    machine: str
    sweep: str
    model_name: str
    setting: RunSetting
    micro_batch: int
    accumulation: int
    blocking: bool | None
    measured_s: dict[str, float]

    @property
    def trained(self) -> tuple[str, RunSetting, int, int]:
        """Return the machine and the setting: all runs of one setting are fitted, or none of them."""
        return self.machine, self.setting, self.micro_batch, self.accumulation

    @property
    def ranks_on_node(self) -> int:
        """Return the number of ranks on each node."""
        return min(GPUS_PER_NODE, self.setting.ranks)

    @property
    def nodes(self) -> int:
        """Return the number of nodes."""
        return -(-self.setting.ranks // GPUS_PER_NODE)


def read_runs() -> list[MeasuredRun]:
    """Return the runs in the order of the file, all of them without tensor parallelism."""
    with PUBLISHED_RUNS.open(newline="") as file:
        return [_run(row) for row in csv.DictReader(file)]


def _run(row: dict[str, str]) -> MeasuredRun:
    assert row["tp"] == "1"
    ranks, micro_batch = int(row["dp"]), int(row["micro_batch"])
    return MeasuredRun(
        machine=row["machine"],
        sweep=row["sweep"],
        model_name=row["model_name"],
        setting=RunSetting(
            **{name: int(row[name]) for name in ("real_params", "layers", "hidden", "heads", "sub_group_size")},
            ranks=ranks,
            cpu_ratio=float(row["cpu_ratio"]),
            # The column has a stride also where nothing was interleaved.
            update_stride=int(row["update_stride"]) if row["interleaved"] == "1" else None,
        ),
        micro_batch=micro_batch,
        accumulation=int(row["global_batch"]) // (micro_batch * ranks),
        blocking={"0": True, "1": False}.get(row["async_grad_flush"]),
        measured_s={quantity: float(row[f"{quantity}_s"]) for quantity in QUANTITIES},
    )
