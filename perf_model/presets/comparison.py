"""State how near predictions were to measurements on a machine, in the words that the screens print."""

from __future__ import annotations

import re

from perf_model.prediction.hardware import HardwareProfile
from perf_model.units import percent

LARGER_MODELS = (45, 0.038, 0.167)
"""The number of published runs of larger models, with the median and 90th percentile of the relative errors of their
iterations. The rates were fitted to smaller models on the same machine (``python -m benchmarks published``)."""

FITTED_PRESETS = ("a100-40gb", "a100-40gb-nodes", "h100-pcie5")
"""The presets of machines with such runs, to which some of their rates are fitted."""

OWN_GPUS = re.compile(r"\bH[12]00\b")
"""The GPUs that this project ran on (``tests/model/test_own_gpus.py`` has the errors)."""

NEVER = "No prediction has been compared with a measurement on such a machine."


def comparison(profile: HardwareProfile) -> str:
    """Return one or two sentences: the comparison that applies to this machine, or that there is none."""
    source, gpu = profile.provenance.source, profile.provenance.gpu
    if profile.name in FITTED_PRESETS and "given by the user" not in source:
        runs, median, p90 = LARGER_MODELS
        return (
            f"Iterations of {runs} published runs on A100-40GB and H100-80GB were off by {percent(median)} in the "
            f"median and by at most {percent(p90)} in nine of ten, with Megatron-DeepSpeed's own time per layer and "
            "rates fitted to smaller models."
        )
    if source != "measured" or OWN_GPUS.search(gpu) is None or profile.provenance.ranks > 1:
        return NEVER
    if profile.get("module_forward_s") is None or profile.get("stock_step_params_per_s") is None:
        return f"{NEVER[:-1]} without its own seconds per module."
    return (
        "With two models on hosts with one H100 or H200 and 16 cores, iterations were off by 8% in the median and by "
        "at most 20%, and speed-ups by at most 21%. Their times per module are from the same runs."
    )
