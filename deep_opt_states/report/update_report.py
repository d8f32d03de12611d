"""A line in the log and a picture of the last update, every n steps; predicted against measured, at the end."""

from __future__ import annotations

import atexit
from collections import deque
from collections.abc import Callable, Sequence
from statistics import median

from deep_opt_states.config import ReportConfig
from deep_opt_states.report.comparison import Compared, Measured, Predicted, compare
from perf_model.action import Lane
from perf_model.draw import draw
from perf_model.plan import UpdatePlan
from perf_model.timeline import Phase, PhaseSpan, Timeline, seconds_of
from perf_model.windows import Windows

WARM_UPDATES = 2
"""The first ones touch memory and wake threads; they are not compared."""

COMPARED_UPDATES = 100
"""The last ones are kept."""


class UpdateReport:
    """``log`` prints a line; pictures are written by the rank that ``writes``. ``predict``: None predicts nothing."""

    def __init__(
        self,
        config: ReportConfig,
        plan: UpdatePlan,
        predict: Callable[[Windows], Predicted] | None,
        writes: bool,
        log: Callable[[str], None],
    ) -> None:
        self._config = config
        self._plan = plan
        self._predict = predict
        self._writes = writes
        self._log = log
        self._exposed_s: deque[float] = deque(maxlen=max(1, config.every_n_steps))
        self._compared: deque[Measured] = deque(maxlen=COMPARED_UPDATES)
        self._steps = 0
        self._broken = False
        # A script that ends without destroying its engine has trained all the same.
        atexit.register(self.close)

    def updated(self, phases: Sequence[PhaseSpan], timeline: Callable[[], Timeline]) -> None:
        """After each update, what the model did around it; ``timeline`` is asked for only when it is used.

        A report that cannot be written is said, once, and ends the reports; it must not end the training.
        """
        self._steps += 1
        self._exposed_s.append(seconds_of(Phase.EXPOSED, phases))
        if self._predict is not None and self._steps > WARM_UPDATES:
            self._compared.append(Measured.of(timeline(), phases))
        if self._config.every_n_steps == 0 or self._broken or self._steps % self._config.every_n_steps:
            return
        try:
            self._write(timeline(), phases)
        except Exception as error:  # noqa: BLE001
            self._broken = True
            self._log(
                f"report.trace: cannot be written to {self._config.trace}: {type(error).__name__}: {error}. "
                f"There will be no more reports; training goes on."
            )

    def compared(self) -> list[Compared]:
        """Predicted against measured, of the updates so far; empty if nothing was predicted or measured."""
        if self._predict is None or not self._compared:
            return []
        return compare(self._predict, self._compared)

    def close(self) -> None:
        """Training is over: say how good the prediction was, once."""
        atexit.unregister(self.close)
        if rows := self.compared():
            self._predict = None
            lines = "\n".join(f"  {row}" for row in rows)
            self._log(f"predicted against measured, median of {len(self._compared)} of {self._steps} updates:\n{lines}")

    def _write(self, last: Timeline, phases: Sequence[PhaseSpan]) -> None:
        busy = ", ".join(f"{lane.value} {last.busy_s(lane) * 1e3:.1f}" for lane in Lane)
        hidden_s = last.hidden_s(self._exposed_s[-1])
        self._log(
            f"update {self._steps}: median {median(self._exposed_s) * 1e3:.1f} ms exposed over the last "
            f"{len(self._exposed_s)}; last one {hidden_s * 1e3:.1f} ms hidden, busy by lane (ms): {busy}"
        )
        path = self._config.trace_path
        if path is not None and self._writes:
            last.write_chrome_trace(path, phases)
            draw(last, path.with_suffix(".png"), str(self._plan), phases)
