"""List the ways in which the device and the worker may behave, and in which different missing waits show.

With the lazy ones, the order of events does not depend on the speed of this machine: a task for which nothing waits
is later than everything else.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from tests.software_gpu import settings
from tests.software_gpu.faults.lazy_worker import lazy_worker
from tests.software_gpu.settings import Settings

LAZY_S = 20.0
"""Longer than any of these runs takes, also on a busy machine. Ranks that run the same program do not need progress."""

LAZY, LAZY_WORKER = "lazy", "lazy worker"
LAZY_SIDE_STREAMS = "lazy side streams"
LAZY_COPIES_TO_THE_HOST = "lazy kernels and copies to the host"


@dataclass(frozen=True)
class Adversary:
    """The behaviour of the device, and a context in which the host behaves in a certain way, too."""

    settings: Settings
    host: Callable[[], AbstractContextManager[object]] = nullcontext


ADVERSARIES = {
    **{name: Adversary(found) for name, found in settings.ADVERSARIES.items()},
    LAZY: Adversary(Settings(lazy=True, lazy_s=LAZY_S)),
    LAZY_WORKER: Adversary(Settings(), lazy_worker),
    "lazy, lazy worker": Adversary(Settings(lazy=True, lazy_s=LAZY_S), lazy_worker),
    # Tasks of the default stream are not late, so that they overtake those of the other streams.
    LAZY_SIDE_STREAMS: Adversary(Settings(lazy=True, lazy_s=LAZY_S, eager="on default stream")),
    "lazy default stream": Adversary(Settings(lazy=True, lazy_s=LAZY_S, eager="on other streams")),
    # Prefetches overtake flushes.
    LAZY_COPIES_TO_THE_HOST: Adversary(Settings(lazy=True, lazy_s=LAZY_S, eager="copies to the device")),
}
