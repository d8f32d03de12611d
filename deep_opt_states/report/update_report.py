"""A line in the log and a picture of the last update, every n steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from statistics import median

from deep_opt_states.config import ReportConfig
from perf_model.action import Lane
from perf_model.draw import draw
from perf_model.plan import UpdatePlan
from perf_model.timeline import Timeline


class UpdateReport:
    """``log`` prints a line; pictures are written by the rank that ``writes``."""

    def __init__(self, config: ReportConfig, plan: UpdatePlan, writes: bool, log: Callable[[str], None]) -> None:
        self._config = config
        self._plan = plan
        self._writes = writes
        self._log = log
        self._update_s: deque[float] = deque(maxlen=max(1, config.every_n_steps))
        self._steps = 0
        self._broken = False

    def stepped(self, update_s: float, timeline: Callable[[], Timeline]) -> None:
        """After each update; ``timeline`` is asked for only when it is reported.

        A report that cannot be written is said, once, and ends the reports; it must not end the training.
        """
        if self._config.every_n_steps == 0 or self._broken:
            return
        self._steps += 1
        self._update_s.append(update_s)
        if self._steps % self._config.every_n_steps:
            return
        try:
            self._write(timeline())
        except Exception as error:  # noqa: BLE001
            self._broken = True
            self._log(
                f"report.trace: cannot be written to {self._config.trace}: {type(error).__name__}: {error}. "
                f"There will be no more reports; training goes on."
            )

    def _write(self, last: Timeline) -> None:
        busy = ", ".join(f"{lane.value} {last.busy_s(lane) * 1e3:.1f}" for lane in Lane)
        self._log(
            f"update {self._steps}: median {median(self._update_s) * 1e3:.1f} ms over the last "
            f"{len(self._update_s)}; last one busy by lane (ms): {busy}"
        )
        path = self._config.trace_path
        if path is not None and self._writes:
            last.write_chrome_trace(path)
            draw(last, path.with_suffix(".png"), str(self._plan))
