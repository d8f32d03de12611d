"""State how near predictions were to measurements on a machine, in the words that the screens print."""

from __future__ import annotations

from perf_model.prediction.hardware import HardwareProfile
from perf_model.units import percent

LARGER_MODELS = (45, 0.038, 0.167)
"""The number of published runs of larger models, with the median and 90th percentile of the relative errors of their
iterations. The rates were fitted to smaller models on the same machine (``python -m benchmarks published``)."""

FITTED_PRESETS = ("a100-pcie4", "a100-40gb", "a100-40gb-nodes", "h100-pcie5")
"""The presets whose rates are fitted to published runs."""

OWN_GPUS = ("H100", "H200")
"""The GPUs that this project ran on (``tests/model/test_own_gpus.py`` has the errors)."""


def comparison(profile: HardwareProfile) -> str:
    """Return one or two sentences: the comparison that applies to this machine, or that there is none."""
    if profile.name in FITTED_PRESETS:
        runs, median, p90 = LARGER_MODELS
        return (
            f"Iterations of {runs} published runs on the GPUs of this preset were off by {percent(median)} in the "
            f"median and by at most {percent(p90)} in nine of ten, with Megatron-DeepSpeed's own time per layer and "
            "rates fitted to smaller models."
        )
    if profile.provenance.source == "measured" and any(gpu in profile.provenance.gpu for gpu in OWN_GPUS):
        return (
            "With two models on hosts with one H100 or H200 and 16 cores, iterations were off by 8% in the "
            "median and by at most 20%, and speed-ups by at most 21%. Their times per module are from the same runs."
        )
    return "No prediction has been compared with a measurement on such a machine."
