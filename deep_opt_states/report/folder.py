"""Write the folder of a run while it trains, and read it. The traces are of a median update, and of its prediction."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, TextIO

from pydantic import TypeAdapter

from deep_opt_states.files import replace_file
from deep_opt_states.report.line import COMPARED_UPDATES, WARM_UPDATES, ReportSink, UpdateReporter
from deep_opt_states.report.record import FORMAT, ComparisonRow, RunInfo, UpdateRecord
from perf_model.json_input import printable, shorten
from perf_model.prediction.overlap_windows import Windows
from perf_model.prediction.timeline import PhaseSpan, Timeline

INFO, STEPS, MEASURED, PREDICTED, PAGE = "run.json", "steps.jsonl", "timeline.json", "predicted.json", "report.html"

RECENT_UPDATES = 25
"""The number of last updates of which the median one is drawn."""

RUN_INFO = TypeAdapter(RunInfo)

TracedUpdate = tuple[Timeline, Sequence[PhaseSpan]]


class RunWriter(ReportSink):
    """A sink that writes the files of a run: a line per update, all else with the line of the log and at the end."""

    name = "deep_optimizer_states.report"
    _open: dict[Path, TextIO] = {}  # noqa: RUF012
    """The open ``steps.jsonl`` of this process, by folder."""

    def __init__(self, folder: Path, describe: Callable[[], RunInfo]) -> None:
        self._folder = folder
        self._describe = describe
        self._steps: TextIO | None = None
        self._recent: deque[UpdateRecord] = deque(maxlen=RECENT_UPDATES)
        """The last updates of the same plan."""

    def updated(self, record: UpdateRecord, reporter: UpdateReporter) -> None:
        """Write the line of one update. Raise ``FileExistsError`` if another engine of this process uses the folder."""
        steps = self._steps = self._steps or self._start()
        try:
            steps.write(json.dumps({"step": record.step, **record.numbers}) + "\n")
            if self._recent and self._recent[-1].plan is not record.plan:
                self._recent.clear()
            self._recent.append(record)
            if record.is_due:
                self._write(reporter)
        except BaseException:
            steps.close()
            raise

    def close(self, reporter: UpdateReporter) -> None:
        if self._steps is not None and self._recent:
            self._steps.close()
            self._write(reporter)

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
        self._write_info({})
        # Line buffering keeps all updates of a process that is killed.
        self._open[folder] = (folder / STEPS).open("w", buffering=1)
        return self._open[folder]

    def _write(self, reporter: UpdateReporter) -> None:
        by_duration = sorted(self._recent, key=lambda record: record.measured.update_s)
        typical = by_duration[len(by_duration) // 2]
        self._replace(MEASURED, typical.timeline.chrome_trace(typical.phases))
        if (predicted := reporter.prediction()) is not None:
            self._replace(PREDICTED, predicted.timeline.chrome_trace(predicted.phases))
        windows = typical.plan.read_windows() or Windows()
        measured = {
            "compared_updates": reporter.compared_updates,
            "compared": list(map(asdict, reporter.comparison())),
            "forward_alone_s": windows.forward_s or None,
            "backward_alone_s": windows.backward_s or None,
            "stock_s": typical.plan.predict_stock(),
            "drawn_step": typical.step,
        }
        self._write_info(measured)

    def _write_info(self, measured: Mapping[str, Any]) -> None:
        self._replace(INFO, {"format": FORMAT, **RUN_INFO.dump_python(self._describe(), mode="json"), **measured})

    def _replace(self, name: str, content: object) -> None:
        replace_file(self._folder / name, json.dumps(content, indent=2 if name == INFO else None) + "\n")


def values_of(quantity: str, steps: Sequence[Mapping[str, float | None]]) -> list[float]:
    return [value for step in steps if (value := step.get(quantity)) is not None]


class RunError(ValueError):
    """An error for a folder that contains no readable run: the rule, the value found, and the remedy."""


@dataclass(frozen=True, kw_only=True)
class RecordedRun:
    """A run as far as its folder describes it: phases without an update are ``alone``, and ``stock_s`` is predicted."""

    info: RunInfo
    steps: Sequence[Mapping[str, float | None]]
    measured: TracedUpdate | None = None
    predicted: TracedUpdate | None = None
    compared: Sequence[ComparisonRow] = ()
    compared_updates: int = 0
    forward_alone_s: float | None = None
    backward_alone_s: float | None = None
    stock_s: float | None = None
    drawn_step: int | None = None
    """The step of ``measured``."""

    @property
    def typical_steps(self) -> Sequence[Mapping[str, float | None]]:
        """Return the steps whose medians are shown: those that are compared, or else the last ones."""
        if self.compared_updates:
            return self.steps[-self.compared_updates :]
        return (self.steps[WARM_UPDATES:] or self.steps)[-COMPARED_UPDATES:]

    def median(self, quantity: str) -> float | None:
        """Return the median of a quantity over ``typical_steps``, None if it was not recorded."""
        values = values_of(quantity, self.typical_steps)
        return median(values) if values else None

    @classmethod
    def read(cls, folder: Path) -> RecordedRun:
        """Return the run in ``folder``, as far as it is written. Raise ``RunError`` if there is none."""
        try:
            info = json.loads((folder / INFO).read_text("utf-8"))
            if info["format"] != FORMAT:
                raise ValueError(f"format {shorten(info['format'])}")
            # A killed process may have written a part of the last line.
            lines = [line for line in (folder / STEPS).read_text("utf-8").splitlines() if line.endswith("}")]
            measured, predicted = (
                Timeline.from_chrome_trace(json.loads(path.read_text("utf-8"))) if path.exists() else None
                for path in (folder / MEASURED, folder / PREDICTED)
            )
            numbers = ("compared_updates", "forward_alone_s", "backward_alone_s", "stock_s", "drawn_step")
            return cls(
                info=RUN_INFO.validate_python(info),
                steps=[_with_cost(_numbers(json.loads(line)), info) for line in lines],
                measured=measured,
                predicted=predicted,
                compared=[ComparisonRow(**row) for row in info.get("compared", [])],
                **{name: info[name] for name in numbers if name in info},
            )
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise RunError(
                f"A run must be a folder that training has written, of format {FORMAT}; found {folder}: "
                f"{printable(f'{type(error).__name__}: {error}', 200)}.\n"
                f'Train with "deep_optimizer_states": {{"report": "FOLDER"}}, and name that folder.'
            ) from None


def _numbers(step: Mapping[str, Any]) -> dict[str, float | None]:
    """Return ``step`` with numbers. Raise ``TypeError`` or ``ValueError`` for a value that is none."""
    return {name: None if value is None else float(value) for name, value in step.items()}


def _with_cost(step: dict[str, float | None], info: Mapping[str, Any]) -> dict[str, float | None]:
    """Return ``step`` with its update's cost: exposed seconds, and those by which forward and backward took longer."""
    exposed_s, forward_s, backward_s = step["exposed_s"], step["forward_s"], step.get("last_backward_s")
    if (forward_alone_s := info.get("forward_alone_s")) is None:
        return {**step, "cost_s": exposed_s}
    if exposed_s is None or forward_s is None:
        return step
    slowed_s = max(0.0, forward_s - forward_alone_s)
    if backward_s is not None and (backward_alone_s := info.get("backward_alone_s")) is not None:
        slowed_s += max(0.0, backward_s - backward_alone_s)
    return {**step, "slowed_s": slowed_s, "cost_s": exposed_s + slowed_s}
