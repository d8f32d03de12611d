"""Read and write the folder in which a training run records its updates, in files for people and programs.

``run.json`` has the plan, the memory, the software, and the prediction next to the measurement. ``steps.jsonl`` has one
line per update. ``timeline.json`` and ``predicted.json`` are traces of the last update and of its prediction.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deep_opt_states.report.comparison import ComparisonRow
from perf_model.json_input import parse_json, read_text, shorten
from perf_model.prediction.timeline import PhaseSpan, Timeline
from perf_model.schedule.placement import Placement
from perf_model.schedule.plan import UpdatePlan
from perf_model.schedule.workload import Range, Unit, Workload

FORMAT = 3

INFO, STEPS, MEASURED, PREDICTED = "run.json", "steps.jsonl", "timeline.json", "predicted.json"
PAGE = "report.html"

MAX_RUN_BYTES = 10**10
"""The size of the largest file of a run that is read. A long training writes more than a user's file may have."""


class RunError(ValueError):
    """An error for a folder that has no readable run: the rule, the value found, and the remedy."""


@dataclass(frozen=True, kw_only=True)
class RunInfo:
    """The facts about a run with its present plan.

    ``began`` is local time in ISO 8601; ``memory_bytes`` has the bytes that rank 0 has reserved, by kind of memory.
    """

    began: str
    world_size: int
    accelerator: str
    software: Mapping[str, str]
    plan: UpdatePlan
    memory_bytes: Mapping[str, int]

    def to_json_dict(self) -> dict[str, Any]:
        """Return the content of ``run.json``."""
        plan = self.plan
        return {
            "format": FORMAT,
            "began": self.began,
            "world_size": self.world_size,
            "accelerator": self.accelerator,
            "software": dict(self.software),
            "plan": {
                "units": [
                    [[[run.sub_group, run.begin, run.numel] for run in unit.ranges], unit.label]
                    for unit in plan.workload.units
                ],
                "placements": [placement.value for placement in plan.placements],
                "num_slots": plan.num_slots,
                "order": None if plan.order is None else list(plan.order),
            },
            "memory_bytes": dict(self.memory_bytes),
        }

    @classmethod
    def from_json_dict(cls, found: Mapping[str, Any]) -> RunInfo:
        """Return the facts from the content of ``run.json``.

        Raise ``KeyError``, ``TypeError``, ``ValueError`` or ``AttributeError`` if it has another shape.
        """
        plan = found["plan"]
        return cls(
            began=str(found["began"]),
            world_size=int(found["world_size"]),
            accelerator=str(found["accelerator"]),
            software={str(name): str(version) for name, version in found["software"].items()},
            plan=UpdatePlan(
                workload=Workload(
                    tuple(
                        Unit(index, tuple(Range(*map(int, run)) for run in ranges), str(label))
                        for index, (ranges, label) in enumerate(plan["units"])
                    )
                ),
                placements=tuple(map(Placement, plan["placements"])),
                num_slots=int(plan["num_slots"]),
                order=None if plan["order"] is None else tuple(map(int, plan["order"])),
            ),
            memory_bytes={str(kind): int(size) for kind, size in found["memory_bytes"].items()},
        )


TimelineAndPhases = tuple[Timeline, Sequence[PhaseSpan]]


@dataclass(frozen=True, kw_only=True)
class RecordedRun:
    """A run as its folder describes it.

    ``steps`` has the lines of ``steps.jsonl``. ``compared`` is empty and ``predicted`` is None if nothing was
    predicted; ``measured`` is None until the first update is written.
    """

    info: RunInfo
    steps: Sequence[Mapping[str, float | None]]
    compared_updates: int
    compared: Sequence[ComparisonRow]
    measured: TimelineAndPhases | None
    predicted: TimelineAndPhases | None

    @classmethod
    def read(cls, folder: Path) -> RecordedRun:
        """Return the run in ``folder``, as far as it is written. Raise ``RunError`` if there is none."""
        try:
            info = _parsed(folder / INFO)
            if info["format"] != FORMAT:
                raise ValueError(f"format {shorten(info['format'])}")
            return cls(
                info=RunInfo.from_json_dict(info),
                steps=_steps(folder / STEPS),
                compared_updates=int(info.get("compared_updates", 0)),
                compared=[
                    ComparisonRow(str(row["what"]), float(row["predicted_s"]), float(row["measured_s"]))
                    for row in info.get("compared", [])
                ],
                measured=_trace(folder / MEASURED),
                predicted=_trace(folder / PREDICTED),
            )
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            found = f"{type(error).__name__}: {error}"
            raise RunError(
                f"A run must be a folder that training has written, of format {FORMAT}; found {folder}: {found}.\n"
                f'Train with "deep_optimizer_states": {{"report": "FOLDER"}}, and name that folder.'
            ) from None


def _parsed(path: Path) -> Any:
    return parse_json(read_text(path, MAX_RUN_BYTES))


def _steps(path: Path) -> list[Mapping[str, float | None]]:
    lines = read_text(path, MAX_RUN_BYTES).splitlines()
    # A process that was killed may have written only a part of the last line.
    complete = [line for line in lines if line.endswith("}")]
    return [_step(parse_json(line)) for line in complete]


def _step(found: Any) -> dict[str, float | None]:
    return {str(name): None if value is None else float(value) for name, value in found.items()}


def _trace(path: Path) -> TimelineAndPhases | None:
    return Timeline.from_chrome_trace(_parsed(path)) if path.exists() else None


def to_json(value: Any) -> str:
    """Return ``value`` as indented JSON that ends with a newline."""
    return json.dumps(value, indent=2) + "\n"
