"""A line in the log and a picture of the last update, every n steps; predicted against measured, at the end."""

from __future__ import annotations

import atexit
from collections import deque
from collections.abc import Callable, Mapping
from statistics import median

from deep_opt_states.config import ReportConfig
from deep_opt_states.report.comparison import Compared, compare, seconds_by_kind
from perf_model.action import ActionKind, Lane
from perf_model.draw import draw
from perf_model.plan import UpdatePlan
from perf_model.timeline import Timeline

WARM_UPDATES = 2
"""The first ones touch memory and wake threads; they are not compared."""

COMPARED_UPDATES = 100
"""The last ones are kept."""


class UpdateReport:
    """``log`` prints a line; pictures are written by the rank that ``writes``. ``predicted``: None predicts nothing."""

    def __init__(
        self,
        config: ReportConfig,
        plan: UpdatePlan,
        predicted: Timeline | None,
        writes: bool,
        log: Callable[[str], None],
    ) -> None:
        self._config = config
        self._plan = plan
        self._predicted = predicted
        self._writes = writes
        self._log = log
        self._update_s: deque[float] = deque(maxlen=max(1, config.every_n_steps))
        self._compared_update_s: deque[float] = deque(maxlen=COMPARED_UPDATES)
        self._compared: deque[Mapping[ActionKind, float]] = deque(maxlen=COMPARED_UPDATES)
        self._steps = 0
        self._broken = False
        # A script that ends without destroying its engine has trained all the same.
        atexit.register(self.close)

    def updated(self, update_s: float, timeline: Callable[[], Timeline]) -> None:
        """After each update; ``timeline`` is asked for only when it is used.

        A report that cannot be written is said, once, and ends the reports; it must not end the training.
        """
        self._steps += 1
        self._update_s.append(update_s)
        if self._predicted is not None and self._steps > WARM_UPDATES:
            self._compared_update_s.append(update_s)
            self._compared.append(seconds_by_kind(timeline()))
        if self._config.every_n_steps == 0 or self._broken or self._steps % self._config.every_n_steps:
            return
        try:
            self._write(timeline())
        except Exception as error:  # noqa: BLE001
            self._broken = True
            self._log(
                f"report.trace: cannot be written to {self._config.trace}: {type(error).__name__}: {error}. "
                f"There will be no more reports; training goes on."
            )

    def compared(self) -> list[Compared]:
        """Predicted against measured, of the updates so far; empty if nothing was predicted or measured."""
        if self._predicted is None or not self._compared:
            return []
        return compare(self._predicted, self._compared, self._compared_update_s)

    def close(self) -> None:
        """Training is over: say how good the prediction was, once."""
        atexit.unregister(self.close)
        if rows := self.compared():
            self._predicted = None
            lines = "\n".join(f"  {row}" for row in rows)
            self._log(f"predicted against measured, median of {len(self._compared)} of {self._steps} updates:\n{lines}")

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
