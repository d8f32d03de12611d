"""How large the benchmarks are and how long they take, by what trains."""

from __future__ import annotations

from dataclasses import dataclass, replace

from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

from benchmarks.harness.setting import Setting
from deep_opt_states.host import machine

HOST_BYTES = 26
"""Of a parameter, that must be there: stock's 18, and where the CPU trains the model and what it works with."""

QUICK = Setting(layers=2, width=128, context=64, micro_batch=2, sub_group_size=100_000)
"""Shows that a benchmark runs, and nothing else."""

ON_CPU = Setting(layers=4, width=1024, context=64, micro_batch=1, sub_group_size=10_000_000)
"""51.0 M parameters."""

ON_GPU = Setting(layers=20, width=2048, context=2048, micro_batch=1, sub_group_size=100_000_000)
"""1.0 B parameters."""


LARGER_ON_CPU = [replace(ON_CPU, layers=layers, width=width) for layers, width in ((18, 1024), (12, 2048), (24, 2048))]
"""227 and 605 M parameters, and 1.2 B."""

LARGER_ON_GPU = [replace(ON_GPU, layers=layers, width=width) for layers, width in ((28, 2560), (32, 3200), (32, 4608))]
"""2.2, 3.9 and 8.2 B parameters."""

EXACT = Setting(layers=6, width=256, context=128, micro_batch=4, sub_group_size=1_000_000)
"""4.9 M parameters, for hundreds of steps."""


OVERLAPPING_ON_GPU = Setting(layers=16, width=1024, context=1024, micro_batch=8, sub_group_size=25_000_000)
"""203 M parameters: five arms within two minutes."""


@dataclass(frozen=True, kw_only=True)
class Effort:
    """Of each arm so many ``rounds``, each a turn of so many ``iterations`` that count."""

    iterations: int
    rounds: int


def effort(*, quick: bool) -> Effort:
    if quick:
        return Effort(iterations=2, rounds=1)
    # Where the CPU trains, turns differ more than iterations do: memory is faster in some of them, whoever's they are.
    # On a GPU an engine of a billion parameters takes most of its turn to be made; ZenFlow updates all of them every
    # fourth iteration.
    on_gpu = get_accelerator().device_name() == "cuda"
    return Effort(iterations=8, rounds=2) if on_gpu else Effort(iterations=3, rounds=8)


def least_effort(*, quick: bool) -> Effort:
    """For what takes long."""
    return effort(quick=quick) if quick else Effort(iterations=3, rounds=2)


def usual(*, quick: bool) -> Setting:
    if quick:
        return QUICK
    return ON_GPU if get_accelerator().device_name() == "cuda" else ON_CPU


def with_default_sub_groups(setting: Setting) -> Setting:
    """Those that stock has where the config says nothing: a billion parameters each."""
    return replace(setting, sub_group_size=DeepSpeedZeroConfig().sub_group_size)


def larger() -> list[Setting]:
    """Up to one that stock offload does not fit this machine's memory with."""
    return LARGER_ON_GPU if get_accelerator().device_name() == "cuda" else LARGER_ON_CPU


def fits(setting: Setting) -> bool:
    return HOST_BYTES * setting.parameters < machine.memory().usable_bytes


def overlapping(*, quick: bool) -> Setting:
    if not quick and get_accelerator().device_name() == "cuda":
        return OVERLAPPING_ON_GPU
    return usual(quick=quick)


def exact(*, quick: bool) -> Setting:
    return QUICK if quick else EXACT
