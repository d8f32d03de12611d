"""Set how the device behaves: its memory, how long work takes, and the adversaries that expose missing waits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace

from tests.software_gpu.library import RESOURCES, UNLIMITED, Amounts, CSettings, call

GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class MachineRates:
    """The speeds of an emulated machine, or of this one if all rates are unlimited. Work without a limit takes no time.

    Copies and host memory are in bytes per second. ``pageable`` limits copies from and to pageable memory. Kernels take
    ``launch_s`` and then the time of their floating-point operations if they are products of matrices, else of the
    bytes that they read and write. A product stands for ``kernels_per_product`` kernels of the emulated run, or waves
    of their thread blocks, and the GPU executes kernels of other streams between them. Every copy between host and
    device begins with ``copy_latency_s``. The GPU's Adam updates ``adam_params_per_s``. The model's kernels lose the
    shares ``slowed_by_host_work`` and ``slowed_by_copies`` of their speed while the host updates, and while a copy
    between host and device runs.
    """

    h2d: float = UNLIMITED
    d2h: float = UNLIMITED
    both_directions: float = UNLIMITED
    pageable: float = UNLIMITED
    host_memory: float = UNLIMITED
    flops_per_s: float = UNLIMITED
    device_bytes_per_s: float = UNLIMITED
    adam_params_per_s: float = UNLIMITED
    launch_s: float = 0.0
    copy_latency_s: float = 0.0
    kernels_per_product: int = 1
    slowed_by_host_work: float = 0.0
    slowed_by_copies: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of the device. The defaults are a device without delays, on which memory that is free holds NaN.

    ``lazy``: a stream executes nothing before the host or another stream waits for it, or ``lazy_s`` have passed.
    ``jitter_s``: each task starts after a random delay of up to so many seconds. ``execute_first``: a task executes
    before the time that it takes has passed, instead of after it, so that the time of the arithmetic on this machine is
    part of it. ``trace``: keep the spans of all tasks for ``device.take_spans``. ``racecheck``: check that accesses to
    the same memory are ordered (``racecheck.py``).
    """

    rates: MachineRates = field(default_factory=MachineRates)
    lazy: bool = False
    lazy_s: float = 0.3
    jitter_s: float = 0.0
    seed: int = 0
    execute_first: bool = False
    trace: bool = False
    racecheck: bool = False
    memory_bytes: int = 4 * GIB

    def apply(self) -> None:
        limited = {"h2d", "d2h", "both_directions", "pageable", "host_memory"}
        given = {
            **vars(self.rates),
            **vars(self),
            # A GPU and a CPU do one second of work per second. They take no time if the rates of kernels are unlimited.
            "capacities": Amounts(*(getattr(self.rates, name) if name in limited else 1.0 for name in RESOURCES)),
            "emulated": self.rates != MachineRates(),
        }
        call("configure", CSettings(**{name: given[name] for name, *_ in CSettings._fields_}))
        _applied[0] = self


_applied = [Settings()]


def current() -> Settings:
    return _applied[0]


@contextmanager
def applied(settings: Settings) -> Iterator[None]:
    before = current()
    settings.apply()
    try:
        yield
    finally:
        # Tasks that were issued inside are executed with the settings inside, also after an exception.
        call("drain")
        before.apply()


def changed(**changes: object) -> AbstractContextManager[None]:
    return applied(replace(current(), **changes))  # type: ignore[arg-type]


PLAIN = Settings()
LAZY = Settings(lazy=True)
JITTER = Settings(jitter_s=3e-3, seed=1)
ADVERSARIES = {"plain": PLAIN, "lazy": LAZY, "jitter": JITTER}
"""Ways in which the device is allowed to behave, and in which different missing waits show."""
