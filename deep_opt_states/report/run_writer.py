"""Write a run's folder during training: one line per update, the other files when DeepSpeed prints and at the end."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TextIO

from deep_opt_states.files import replace_file
from deep_opt_states.report.record import UpdateRecord
from deep_opt_states.report.reporter import UpdateReporter
from deep_opt_states.report.run_data import INFO, MEASURED, PAGE, PREDICTED, STEPS, RunInfo, to_json

_TAKEN: set[Path] = set()
"""The folders that engines of this process write to."""


class RunWriter:
    """A sink that writes the files of a ``RecordedRun``; the first update deletes those of an earlier run."""

    name = "deep_optimizer_states.report"

    def __init__(self, folder: Path, every_n_steps: float | None, describe: Callable[[], RunInfo]) -> None:
        self._folder = folder
        self._every_n_steps = every_n_steps
        self._describe = describe
        self._steps: TextIO | None = None
        self._last: UpdateRecord | None = None

    def updated(self, record: UpdateRecord, reporter: UpdateReporter) -> None:
        """Write the line of one update. Raise ``FileExistsError`` if another engine of this process uses the folder.

        After an error the folder is free for another engine, because the reporter calls this sink no more.
        """
        if self._steps is None:
            self._steps = self._begin()
        try:
            self._steps.write(json.dumps({"step": record.counts.step, **asdict(record.numbers)}) + "\n")
            self._last = record
            if record.is_due(self._every_n_steps):
                self._write(record, reporter)
        except BaseException:
            self._release(self._steps)
            raise

    def close(self, reporter: UpdateReporter) -> None:
        """Write the last update, and release the folder."""
        if self._steps is not None and self._last is not None:
            self._release(self._steps)
            self._write(self._last, reporter)

    def _release(self, steps: TextIO) -> None:
        _TAKEN.discard(self._folder.resolve())
        steps.close()

    def _begin(self) -> TextIO:
        folder = self._folder.resolve()
        if folder in _TAKEN:
            raise FileExistsError(
                "must be a folder of its own for each engine, found one that another engine of this process writes to. "
                "Give each engine its own config"
            )
        self._folder.mkdir(parents=True, exist_ok=True)
        for name in (MEASURED, PREDICTED, PAGE):
            (self._folder / name).unlink(missing_ok=True)
        replace_file(self._folder / INFO, to_json(self._describe().to_json_dict()))
        # Buffer a line at a time, so that the file of a killed process has all updates that it ran.
        steps = (self._folder / STEPS).open("w", buffering=1)
        _TAKEN.add(folder)
        return steps

    def _write(self, last: UpdateRecord, reporter: UpdateReporter) -> None:
        replace_file(self._folder / MEASURED, json.dumps(last.timeline.chrome_trace(last.phases)))
        predicted, compared = reporter.prediction(), reporter.comparison()
        if predicted is not None:
            trace = predicted.timeline.chrome_trace(predicted.phases)
            replace_file(self._folder / PREDICTED, json.dumps(trace))
        rows = [{"what": row.name, "predicted_s": row.predicted_s, "measured_s": row.measured_s} for row in compared]
        info = {**self._describe().to_json_dict(), "compared_updates": reporter.compared_updates, "compared": rows}
        replace_file(self._folder / INFO, to_json(info))
