"""``Run``: what a training run leaves in a folder of its updates, in files that people and programs read.

``run.json`` has the plan, the memory and the software, and what was predicted against what was measured;
``steps.jsonl`` a line for each update; ``timeline.json`` and ``predicted.json`` are traces, of the last update and of
its prediction.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deep_opt_states.report.comparison import Compared
from perf_model.json_input import parse_json, read_text, shown
from perf_model.prediction.timeline import PhaseSpan, Timeline
from perf_model.schedule.placement import Placement
from perf_model.schedule.plan import UpdatePlan
from perf_model.schedule.workload import Workload

FORMAT = 1

ABOUT, STEPS, MEASURED, PREDICTED = "run.json", "steps.jsonl", "timeline.json", "predicted.json"
PAGE = "report.html"


class RunError(ValueError):
    """The folder has no run that can be read; the message has the rule, what was found, and the remedy."""


@dataclass(frozen=True, kw_only=True)
class About:
    """``began`` is local time, ISO 8601; ``memory_bytes`` is what rank 0 has reserved at start, by where."""

    began: str
    world_size: int
    accelerator: str
    software: Mapping[str, str]
    plan: UpdatePlan
    memory_bytes: Mapping[str, int]

    def to_json_dict(self) -> dict[str, Any]:
        plan = self.plan
        return {
            "format": FORMAT,
            "began": self.began,
            "world_size": self.world_size,
            "accelerator": self.accelerator,
            "software": dict(self.software),
            "plan": {
                "numels": [sub_group.numel for sub_group in plan.workload.sub_groups],
                "placements": [placement.value for placement in plan.placements],
                "num_slots": plan.num_slots,
                "order": None if plan.order is None else list(plan.order),
            },
            "memory_bytes": dict(self.memory_bytes),
        }

    @classmethod
    def from_json_dict(cls, found: Mapping[str, Any]) -> About:
        plan = found["plan"]
        return cls(
            began=str(found["began"]),
            world_size=int(found["world_size"]),
            accelerator=str(found["accelerator"]),
            software={str(name): str(version) for name, version in found["software"].items()},
            plan=UpdatePlan(
                workload=Workload.of([int(numel) for numel in plan["numels"]]),
                placements=tuple(map(Placement, plan["placements"])),
                num_slots=int(plan["num_slots"]),
                order=None if plan["order"] is None else tuple(map(int, plan["order"])),
            ),
            memory_bytes={str(where): int(size) for where, size in found["memory_bytes"].items()},
        )


Pictured = tuple[Timeline, Sequence[PhaseSpan]]


@dataclass(frozen=True, kw_only=True)
class Run:
    """``steps``: the lines of ``steps.jsonl``. ``compared`` is empty, and ``predicted`` None, where nothing was
    predicted; ``measured`` is None before the first update was written."""

    about: About
    steps: Sequence[Mapping[str, float | None]]
    compared_updates: int
    compared: Sequence[Compared]
    measured: Pictured | None
    predicted: Pictured | None

    @classmethod
    def read(cls, folder: Path) -> Run:
        """Raises ``RunError``."""
        try:
            about = _parsed(folder / ABOUT)
            if about["format"] != FORMAT:
                raise ValueError(f"format {shown(about['format'])}")
            return cls(
                about=About.from_json_dict(about),
                steps=_steps(folder / STEPS),
                compared_updates=int(about.get("compared_updates", 0)),
                compared=[
                    Compared(str(row["what"]), float(row["predicted_s"]), float(row["measured_s"]))
                    for row in about.get("compared", [])
                ],
                measured=_pictured(folder / MEASURED),
                predicted=_pictured(folder / PREDICTED),
            )
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            found = f"{type(error).__name__}: {error}"
            raise RunError(
                f"A run must be a folder that training has written, of format {FORMAT}; found {folder}: {found}.\n"
                f'Train with "deep_optimizer_states": {{"report": "FOLDER"}}, and name that folder.'
            ) from None


def _parsed(path: Path) -> Any:
    return parse_json(read_text(path))


def _steps(path: Path) -> list[Mapping[str, float | None]]:
    lines = read_text(path).splitlines()
    # A process that was killed may have left a part of the last.
    complete = [line for line in lines if line.endswith("}")]
    return [_step(parse_json(line)) for line in complete]


def _step(found: Any) -> dict[str, float | None]:
    return {str(name): None if value is None else float(value) for name, value in found.items()}


def _pictured(path: Path) -> Pictured | None:
    return Timeline.from_chrome_trace(_parsed(path)) if path.exists() else None


def to_json(value: Any) -> str:
    return json.dumps(value, indent=2) + "\n"
