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

    def stepped(self, update_s: float, timeline: Callable[[], Timeline]) -> None:
        """After each update; ``timeline`` is asked for only when it is reported."""
        if self._config.every_n_steps == 0:
            return
        self._steps += 1
        self._update_s.append(update_s)
        if self._steps % self._config.every_n_steps:
            return
        last = timeline()
        busy = ", ".join(f"{lane.value} {last.busy_s(lane) * 1e3:.1f}" for lane in Lane)
        self._log(
            f"update {self._steps}: median {median(self._update_s) * 1e3:.1f} ms over the last "
            f"{len(self._update_s)}; last one busy by lane (ms): {busy}"
        )
        path = self._config.trace_path
        if path is not None and self._writes:
            last.write_chrome_trace(path)
            draw(last, path.with_suffix(".png"), str(self._plan))
