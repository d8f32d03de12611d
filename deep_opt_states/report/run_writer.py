"""Writes a ``Run``, while it is trained: one line at each update, all the rest when DeepSpeed prints and at the end."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import TextIO

from deep_opt_states.report.record import UpdateRecord
from deep_opt_states.report.reporter import UpdateReport
from deep_opt_states.report.run_data import ABOUT, MEASURED, PAGE, PREDICTED, STEPS, About, to_json

_TAKEN: set[Path] = set()
"""By the engines of this process that train."""


class RunFolder:
    """Begins with the first update: what another run has left in the folder is replaced then."""

    name = "deep_optimizer_states.report"

    def __init__(self, folder: Path, every_n_steps: float | None, about: About) -> None:
        self._folder = folder
        self._every_n_steps = every_n_steps
        self._about = about.to_json_dict()
        self._steps: TextIO | None = None
        self._last: UpdateRecord | None = None

    def updated(self, record: UpdateRecord, report: UpdateReport) -> None:
        if self._steps is None:
            self._steps = self._begin()
        self._steps.write(json.dumps({"step": record.progress.step, **asdict(record.numbers)}) + "\n")
        self._last = record
        if record.is_due(self._every_n_steps):
            self._write(record, report)

    def close(self, report: UpdateReport) -> None:
        if self._steps is not None and self._last is not None:
            self._steps.close()
            _TAKEN.discard(self._folder.resolve())
            self._write(self._last, report)

    def _begin(self) -> TextIO:
        folder = self._folder.resolve()
        if folder in _TAKEN:
            raise FileExistsError(
                "must be a folder of its own for each engine, found one that another engine of this process writes to. "
                "Give each its own config"
            )
        _TAKEN.add(folder)
        self._folder.mkdir(parents=True, exist_ok=True)
        for name in (MEASURED, PREDICTED, PAGE):
            (self._folder / name).unlink(missing_ok=True)
        self._replace(ABOUT, to_json(self._about))
        # A line at a time, so that a process that is killed has written what it has trained.
        return (self._folder / STEPS).open("w", buffering=1)

    def _write(self, last: UpdateRecord, report: UpdateReport) -> None:
        self._replace(MEASURED, json.dumps(last.timeline.chrome_trace(last.phases)))
        predicted, compared = report.predicted(), report.compared()
        if predicted is not None:
            self._replace(PREDICTED, json.dumps(predicted.timeline.chrome_trace(predicted.phases)))
        rows = [{"what": row.what, "predicted_s": row.predicted_s, "measured_s": row.measured_s} for row in compared]
        self._replace(ABOUT, to_json({**self._about, "compared_updates": report.compared_updates, "compared": rows}))

    def _replace(self, name: str, text: str) -> None:
        """Whoever reads meanwhile finds all of the old or all of the new text."""
        partial = self._folder / f".{name}.partial"
        partial.write_text(text)
        os.replace(partial, self._folder / name)
