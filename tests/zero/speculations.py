"""Count the speculated steps that updates keep, and those that were in vain: a test without either proves little."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

from deep_opt_states.runtime.issuer import Issuer


@dataclass
class Speculations:
    """The number of speculated steps that were kept and that were void. A valid one that has not started is neither."""

    kept: int = 0
    void: int = 0


@contextmanager
def counted_speculations() -> Iterator[Speculations]:
    """Yield the numbers of all engines' speculated steps inside this context."""
    found = Speculations()
    keep_speculations, forget_speculations = Issuer.keep_speculations, Issuer.forget_speculations

    def keep(self: Issuer, is_valid: Callable[[int], bool]) -> bool | None:
        before = len(self.on_cpu)

        def counted(unit: int) -> bool:
            holds = is_valid(unit)
            found.void += not holds
            return holds

        all_hold = keep_speculations(self, counted)
        found.kept += len(self.on_cpu) - before
        return all_hold

    def forget(self: Issuer, units: Collection[int] | None = None) -> None:
        futures = [future for action, future in self._speculated.items() if units is None or action.unit in units]
        forget_speculations(self, units)
        found.void += sum(not future.cancelled() for future in futures)

    with (
        mock.patch.object(Issuer, "keep_speculations", keep),
        mock.patch.object(Issuer, "forget_speculations", forget),
    ):
        yield found


def wait_for_speculations(engine: Any) -> list[BaseException | None]:
    """Wait until all speculated steps of ``engine`` have run, and return the exception of each; none with stock."""
    running = getattr(engine.optimizer, "_running", None)
    return [] if running is None else [future.exception() for future in running.executor._issuer._speculated.values()]
