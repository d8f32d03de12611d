"""How much of the update would be seen, with and without overlap? ``python -m benchmarks.overlap``: a simulation.

For the paper's models, on machine presets (``perf_model/presets/machines.py``), none of which was measured. ``stock``
is DeepSpeed's offload, ``stride 2`` the paper's rule executed by us; both and ``planned`` show the whole update. The
columns after them plan for windows in backward, in the next forward, and in both; the bounds are what no plan can go
below, of the update's work and, with both windows, of what is seen of it.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.record import RESULTS, record
from perf_model.cli.inputs import OVERLAPS
from perf_model.forecast import Arm, Forecast, MemoryLimits, Unfit, forecast
from perf_model.job import Job
from perf_model.placement import Placement
from perf_model.presets.machines import MACHINES
from perf_model.presets.models import MODELS
from perf_model.sub_group_size import SUB_GROUP_SIZES

SEQUENCE = 2048

PAPER_MODELS = ("7B", "8.3B", "10B", "13B", "20B")

TABLE = RESULTS / "overlap.md"


@dataclass(frozen=True, kw_only=True)
class Setting:
    machine: str
    model: str
    gpus: int
    micro_batch: int
    optimizer_memory: str
    """Of the GPU: "all" that the model leaves, or the "tenth" that the runtime takes if the config does not say."""

    def forecast(self, overlap: str) -> Forecast:
        job = Job(
            shape=MODELS[self.model],
            world_size=self.gpus,
            ranks_per_node=self.gpus,
            micro_batch=self.micro_batch,
            sequence=SEQUENCE,
        )
        profile = MACHINES[self.machine].profile(self.gpus)
        gpu_bytes = profile.gpu_memory_bytes
        assert gpu_bytes is not None
        if self.optimizer_memory == "tenth":
            gpu_bytes = min(gpu_bytes, job.gpu_bytes + gpu_bytes // 10)
        limits = MemoryLimits(gpu=gpu_bytes, host=profile.host_memory_bytes)
        return forecast(job, profile, limits, OVERLAPS[overlap], SUB_GROUP_SIZES)


SETTINGS = tuple(
    Setting(machine=machine, model=model, gpus=gpus, micro_batch=micro_batch, optimizer_memory=memory)
    for memory in ("tenth", "all")
    for machine, model, gpus, micro_batch in (
        *(("h100-pcie5", model, 4, 1) for model in PAPER_MODELS),
        *(("h200-pcie5", "7B", 1, size) for size in (1, 2, 4, 8, 16)),
    )
)

COLUMNS = {
    "machine": "machine",
    "gpus": "GPUs",
    "model": "model",
    "micro_batch": "micro-batch",
    "optimizer_memory": "optimizer's part of GPU memory",
    "placement": "CPU, streamed, resident",
    "forward_s": "forward",
    "backward_s": "backward",
    "stock_s": "stock",
    "stride_2_s": "stride 2",
    "planned_s": "planned",
    "planned_backward_s": "+ backward",
    "planned_forward_s": "+ forward",
    "planned_both_s": "+ both",
    "work_bound_s": "bound of the work",
    "exposed_bound_s": "bound of what is seen",
}


def row_of(setting: Setting) -> dict[str, object]:
    """Seconds; an arm that does not fit has None and its ``why``."""
    by_overlap = {name: setting.forecast(name) for name in OVERLAPS}
    plain, both = by_overlap["none"], by_overlap["both"]
    row: dict[str, object] = {
        **vars(setting),
        "sequence": SEQUENCE,
        "simulated": True,
        "placement": ", ".join(str(plain.planned.plan.placements.count(placement)) for placement in Placement),
        "forward_s": plain.predicted.forward_s,
        "backward_s": plain.predicted.backward_s,
        "planned_s": plain.planned.exposed_s,
        **{f"planned_{name}_s": by_overlap[name].planned.exposed_s for name in ("backward", "forward", "both")},
        "work_bound_s": plain.planned.bound.seconds,
        "exposed_bound_s": both.planned.exposed_bound.seconds,
    }
    for name in ("stock", "stride_2"):
        row |= _exposed(name, plain.baselines[name])
    return row


def _exposed(name: str, arm: Arm) -> dict[str, object]:
    if isinstance(arm, Unfit):
        return {f"{name}_s": None, f"{name}_why": arm.why}
    return {f"{name}_s": arm.exposed_update_s}


def table(rows: list[dict[str, object]]) -> Iterator[str]:
    """Markdown."""
    yield "# Seconds of the update that are seen: simulated, nothing here was measured"
    yield ""
    yield "By `python -m benchmarks.overlap --record`, with its rows in `overlap.jsonl`."
    yield f"Sequences of {SEQUENCE} tokens, activation recomputation."
    yield "Communication between GPUs is taken to be hidden; presets are specifications, not machines."
    yield ""
    yield "| " + " | ".join(COLUMNS.values()) + " |"
    yield "|---" * len(COLUMNS) + "|"
    for row in rows:
        yield "| " + " | ".join(_cell(row[key]) for key in COLUMNS) + " |"


def _cell(value: object) -> str:
    if value is None:
        return "does not fit"
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def main() -> int:
    parser = argparse.ArgumentParser(description="Simulates how much of the update is seen, with and without overlap.")
    parser.add_argument("--record", action="store_true", help="keep the rows and the table under benchmarks/results")
    options = parser.parse_args()
    rows = [row_of(setting) for setting in SETTINGS]
    text = "\n".join(table(rows)) + "\n"
    print(text, end="")
    if options.record:
        for row in rows:
            record("overlap", ("numpy",), row)
        TABLE.write_text(text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
