"""Write and read the folder in which a training run records its updates, in files for people and programs.

``run.json`` contains the plan, the memory, the software, and the prediction next to the measurement. ``steps.jsonl``
contains one line per update. ``timeline.json`` and ``predicted.json`` are traces of the last update and of its
prediction.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

from deep_opt_states.files import replace_file
from deep_opt_states.report.line import ReportSink, UpdateReporter
from deep_opt_states.report.record import ComparisonRow, UpdateRecord
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
    """An error for a folder that contains no readable run: the rule, the value found, and the remedy."""


@dataclass(frozen=True, kw_only=True)
class RunInfo:
    """The facts about a run with its present plan.

    ``began`` is local time in ISO 8601; ``memory_bytes`` are the bytes that rank 0 has reserved, by kind of memory.
    """

    began: str
    world_size: int
    accelerator: str
    software: Mapping[str, str]
    plan: UpdatePlan
    memory_bytes: Mapping[str, int]

    def to_json_dict(self) -> dict[str, Any]:
        """Return the content of ``run.json``."""
        plan = {
            "units": [
                [[[run.sub_group, run.begin, run.numel] for run in unit.ranges], unit.label]
                for unit in self.plan.workload.units
            ],
            "placements": [placement.value for placement in self.plan.placements],
            "num_slots": self.plan.num_slots,
            "order": self.plan.order,
        }
        return {"format": FORMAT, **vars(self), "plan": plan}

    @classmethod
    def from_json_dict(cls, found: Mapping[str, Any]) -> RunInfo:
        """Return the facts from the content of ``run.json``. Raise an error of Python's if it has another shape."""
        plan = found["plan"]
        units = [
            Unit(index, tuple(Range(*map(int, run)) for run in ranges), str(label))
            for index, (ranges, label) in enumerate(plan["units"])
        ]
        return cls(
            began=str(found["began"]),
            world_size=int(found["world_size"]),
            accelerator=str(found["accelerator"]),
            software=dict(found["software"]),
            plan=UpdatePlan(
                workload=Workload(tuple(units)),
                placements=tuple(map(Placement, plan["placements"])),
                num_slots=int(plan["num_slots"]),
                order=None if plan["order"] is None else tuple(map(int, plan["order"])),
            ),
            memory_bytes={str(kind): int(reserved) for kind, reserved in found["memory_bytes"].items()},
        )


class RunWriter(ReportSink):
    """A sink that writes the files of a run; the first update deletes those of an earlier run.

    Each update gives a line. The other files are written when DeepSpeed prints, and at the end.
    """

    name = "deep_optimizer_states.report"
    _open: dict[Path, TextIO] = {}  # noqa: RUF012
    """The lines that engines of this process write, by folder."""

    def __init__(self, folder: Path, every_n_steps: float | None, describe: Callable[[], RunInfo]) -> None:
        self._folder = folder
        self._every_n_steps = every_n_steps
        self._describe = describe
        self._steps: TextIO | None = None
        self._last: UpdateRecord | None = None

    def updated(self, record: UpdateRecord, reporter: UpdateReporter) -> None:
        """Write the line of one update. Raise ``FileExistsError`` if another engine of this process uses the folder."""
        steps = self._steps = self._steps or self._start()
        try:
            steps.write(json.dumps({"step": record.counts.step, **asdict(record.numbers)}) + "\n")
            self._last = record
            if record.is_due(self._every_n_steps):
                self._write(record, reporter)
        except BaseException:
            # The reporter calls this sink no more, so another engine may use the folder.
            steps.close()
            raise

    def close(self, reporter: UpdateReporter) -> None:
        """Write the last update, and release the folder."""
        if self._steps is not None and self._last is not None:
            self._steps.close()
            self._write(self._last, reporter)

    def _start(self) -> TextIO:
        folder = self._folder.resolve()
        if folder in self._open and not self._open[folder].closed:
            raise FileExistsError(
                "must be a folder of its own for each engine, found one that another engine of this process writes to. "
                "Give each engine its own config"
            )
        folder.mkdir(parents=True, exist_ok=True)
        for name in (MEASURED, PREDICTED, PAGE):
            (folder / name).unlink(missing_ok=True)
        self._replace(INFO, self._describe().to_json_dict())
        # Buffer a line at a time, so that the file of a killed process contains all updates that it ran.
        self._open[folder] = (folder / STEPS).open("w", buffering=1)
        return self._open[folder]

    def _write(self, last: UpdateRecord, reporter: UpdateReporter) -> None:
        self._replace(MEASURED, last.timeline.chrome_trace(last.phases))
        if (predicted := reporter.prediction()) is not None:
            self._replace(PREDICTED, predicted.timeline.chrome_trace(predicted.phases))
        rows = [
            {"what": row.name, "predicted_s": row.predicted_s, "measured_s": row.measured_s}
            for row in reporter.comparison()
        ]
        compared = {"compared_updates": reporter.compared_updates, "compared": rows}
        self._replace(INFO, self._describe().to_json_dict() | compared)

    def _replace(self, name: str, content: object) -> None:
        replace_file(self._folder / name, json.dumps(content, indent=2 if name == INFO else None) + "\n")


@dataclass(frozen=True, kw_only=True)
class RecordedRun:
    """A run as its folder describes it.

    ``steps`` are the lines of ``steps.jsonl``. ``compared`` is empty and ``predicted`` is None if nothing was
    predicted; ``measured`` is None until the first update is written.
    """

    info: RunInfo
    steps: Sequence[Mapping[str, float | None]]
    compared_updates: int
    compared: Sequence[ComparisonRow]
    measured: tuple[Timeline, Sequence[PhaseSpan]] | None
    predicted: tuple[Timeline, Sequence[PhaseSpan]] | None

    @classmethod
    def read(cls, folder: Path) -> RecordedRun:
        """Return the run in ``folder``, as far as it is written. Raise ``RunError`` if there is none."""
        try:
            info = parse_json(read_text(folder / INFO, MAX_RUN_BYTES))
            if info["format"] != FORMAT:
                raise ValueError(f"format {shorten(info['format'])}")
            # A process that was killed may have written only a part of the last line.
            lines = [line for line in read_text(folder / STEPS, MAX_RUN_BYTES).splitlines() if line.endswith("}")]
            measured, predicted = (
                Timeline.from_chrome_trace(parse_json(read_text(path, MAX_RUN_BYTES))) if path.exists() else None
                for path in (folder / MEASURED, folder / PREDICTED)
            )
            return cls(
                info=RunInfo.from_json_dict(info),
                steps=[
                    {name: None if value is None else float(value) for name, value in parse_json(line).items()}
                    for line in lines
                ],
                compared_updates=int(info.get("compared_updates", 0)),
                compared=[
                    ComparisonRow(str(row["what"]), float(row["predicted_s"]), float(row["measured_s"]))
                    for row in info.get("compared", [])
                ],
                measured=measured,
                predicted=predicted,
            )
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            found = f"{type(error).__name__}: {error}"
            raise RunError(
                f"A run must be a folder that training has written, of format {FORMAT}; found {folder}: {found}.\n"
                f'Train with "deep_optimizer_states": {{"report": "FOLDER"}}, and name that folder.'
            ) from None
