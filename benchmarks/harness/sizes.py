"""Choose how large the models are and how often they run, by the kind of accelerator that trains."""

from __future__ import annotations

from dataclasses import dataclass, replace

from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

from benchmarks.harness.device import trains_on_gpu
from benchmarks.harness.setting import TrainingSetting
from deep_opt_states.host import machine

HOST_BYTES_PER_PARAM = 26
"""Bytes per parameter that host memory must have: stock's 18, plus the model and its temporaries if the CPU trains."""

QUICK = TrainingSetting(layers=2, width=128, context=64, micro_batch=2, sub_group_size=100_000)
"""A model that only shows that a benchmark runs."""

ON_CPU = TrainingSetting(layers=4, width=1024, context=64, micro_batch=1, sub_group_size=10_000_000)
"""51.0 M parameters."""

ON_GPU = TrainingSetting(layers=20, width=2048, context=2048, micro_batch=1, sub_group_size=100_000_000)
"""1.0 B parameters."""


LARGER_ON_CPU = [replace(ON_CPU, layers=layers, width=width) for layers, width in ((18, 1024), (12, 2048), (24, 2048))]
"""227 and 605 M parameters, and 1.2 B."""

LARGER_ON_GPU = [replace(ON_GPU, layers=layers, width=width) for layers, width in ((28, 2560), (32, 3200), (32, 4608))]
"""2.2, 3.9 and 8.2 B parameters."""

EXACTNESS = TrainingSetting(layers=6, width=256, context=128, micro_batch=4, sub_group_size=1_000_000)
"""4.9 M parameters, for hundreds of steps."""


OVERLAP_ON_GPU = TrainingSetting(layers=16, width=1024, context=1024, micro_batch=8, sub_group_size=25_000_000)
"""203 M parameters: five variants run within two minutes."""


@dataclass(frozen=True, kw_only=True)
class Repetitions:
    """How often each variant runs: once per round, with ``iterations`` counted iterations per run."""

    iterations: int
    rounds: int


def repetitions(*, quick: bool) -> Repetitions:
    """Return the usual number of rounds and iterations for this accelerator."""
    if quick:
        return Repetitions(iterations=2, rounds=1)
    # If the CPU trains, runs differ more than iterations do: other processes use the memory bandwidth, too.
    # On a GPU, creating an engine of a billion parameters takes most of a run: a run took 28 s on an H100. ZenFlow
    # updates all parameters in every fourth iteration only.
    on_gpu = trains_on_gpu()
    return Repetitions(iterations=6, rounds=2) if on_gpu else Repetitions(iterations=3, rounds=8)


def fewest_repetitions(*, quick: bool) -> Repetitions:
    """Return the number of rounds and iterations for settings that take long."""
    return repetitions(quick=quick) if quick else Repetitions(iterations=3, rounds=2)


def default_setting(*, quick: bool) -> TrainingSetting:
    """Return the setting that most benchmarks use on this accelerator."""
    if quick:
        return QUICK
    return ON_GPU if trains_on_gpu() else ON_CPU


def with_default_sub_groups(setting: TrainingSetting) -> TrainingSetting:
    """Return ``setting`` with DeepSpeed's default sub-group size: a billion parameters."""
    return replace(setting, sub_group_size=DeepSpeedZeroConfig().sub_group_size)


def larger_settings() -> list[TrainingSetting]:
    """Return larger models, up to one whose stock offloading does not fit into this machine's memory."""
    return LARGER_ON_GPU if trains_on_gpu() else LARGER_ON_CPU


def fits_host_memory(setting: TrainingSetting) -> bool:
    """Return whether stock offloading of this model fits into the host memory of this machine."""
    return HOST_BYTES_PER_PARAM * setting.parameters < machine.memory().usable_bytes


def overlap_setting(*, quick: bool) -> TrainingSetting:
    """Return the setting of the ``overlap`` benchmark, which is smaller than the usual one on a GPU."""
    if not quick and trains_on_gpu():
        return OVERLAP_ON_GPU
    return default_setting(quick=quick)


def exactness_setting(*, quick: bool) -> TrainingSetting:
    """Return the setting of the ``exactness`` benchmark."""
    return QUICK if quick else EXACTNESS
