"""Call a signal handler at a chosen moment, as Ctrl-C does."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def alarm_after(seconds: float, handler: Callable[..., object]) -> Iterator[None]:
    """Call ``handler`` once, ``seconds`` after the start of the context, unless it has ended before."""
    previous = signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        try:
            # The alarm may come at this moment.
            signal.setitimer(signal.ITIMER_REAL, 0)
        finally:
            signal.signal(signal.SIGALRM, previous)
