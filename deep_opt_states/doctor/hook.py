"""Whether a fresh interpreter has the activation hook after ``import torch`` alone, and what that costs."""

from __future__ import annotations

import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from deep_opt_states.doctor.finding import Finding, Status
from deep_opt_states.names import CONFIG_KEY, SWITCH

AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"
"""PyTorch's switch for all entry points of the group ``torch.backends``: on if unset or 1."""

TIMEOUT_S = 120

_IS_LIVE = """
import sys, torch
activation = sys.modules.get("deep_opt_states.activation")
print("live" if activation is not None and activation.is_active() else "not live")
"""

_COST = """
import time, torch
start = time.perf_counter()
from deep_opt_states.activation import activate
activate()
print(time.perf_counter() - start)
"""


@dataclass(frozen=True)
class AfterImport:
    """``said`` is what the interpreter wrote about us to stderr: the reason, where the hook is not live."""

    live: bool
    said: str = ""


def import_torch(environ: Mapping[str, str]) -> AfterImport:
    command = [sys.executable, "-c", _IS_LIVE]
    child = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, env=environ)
    lines = child.stderr.splitlines()
    said = [line for line in lines if line.startswith("deep_opt_states") or "Error: " in line]
    return AfterImport(child.stdout.splitlines()[-1:] == ["live"], said[-1] if said else "")


def import_costs_s(environ: Mapping[str, str], num_runs: int = 5) -> list[float]:
    """What our entry point adds to ``import torch``, each time in a fresh interpreter.

    Raises ``CalledProcessError`` if one of them fails.
    """
    # With the autoload off, torch leaves our entry point alone and we can time it by itself.
    env = {**environ, AUTOLOAD: "0"}
    command = [sys.executable, "-c", _COST]
    return [
        float(subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, env=env, check=True).stdout)
        for _ in range(num_runs)
    ]


def check_hook(after: AfterImport, autoload: str | None) -> Finding:
    topic = "activation hook"
    if after.live:
        return Finding(topic, Status.OK, "live in a fresh interpreter after import torch: the JSON block is enough")
    if autoload not in (None, "1"):
        found = f'{AUTOLOAD}={autoload}; must be unset or 1, or "{CONFIG_KEY}" in the JSON is ignored'
        return Finding(
            topic, Status.FAIL, found, f"Unset {AUTOLOAD}, or import deep_opt_states in the training script."
        )
    found = "not live after import torch; must be, or the JSON block is ignored"
    if after.said:
        remedy = (
            'See all of it with python -c "import torch", and mend what it names; pip install --force-reinstall helps.'
        )
        return Finding(topic, Status.FAIL, f"{found} ({after.said})", remedy)
    remedy = "Reinstall deep_opt_states with pip, which writes its entry point for PyTorch."
    return Finding(topic, Status.FAIL, found, remedy)


def check_cost(costs_s: Sequence[float]) -> Finding:
    median, least, most = (1e3 * cost_s for cost_s in (statistics.median(costs_s), min(costs_s), max(costs_s)))
    found = f"{median:.1f} ms, median of {len(costs_s)} fresh interpreters ({least:.1f} to {most:.1f} ms)"
    return Finding("cost at import torch", Status.OK, found)


def check_switch(value: str | None) -> Finding:
    if value == "0":
        found = "0: the plugin is switched off, training runs with stock DeepSpeed whatever the JSON says"
        return Finding(SWITCH, Status.WARN, found, f"Unset {SWITCH} to train with the plugin.")
    if value not in (None, "1"):
        found = f"{value!r} has no meaning; must be unset or 1 (on), or 0 (off)"
        return Finding(SWITCH, Status.WARN, found, f"Set {SWITCH}=0 to switch the plugin off, or unset it.")
    return Finding(SWITCH, Status.OK, "unset" if value is None else value)
