"""State how near predictions were to measurements on a machine, in the words that the screens print."""

from __future__ import annotations

import re

from perf_model.prediction.hardware import HardwareProfile
from perf_model.training_run.job import Job
from perf_model.training_run.micro_batch import TRAINING_SHARE
from perf_model.units import percent

LARGER_MODELS = (45, 0.038, 0.167)
"""The number of published runs of larger models, with the median and 90th percentile of the relative errors of their
iterations. The rates were fitted to smaller models on the same machine (``python -m benchmarks published``)."""

FITTED_PRESETS = ("a100-40gb", "a100-40gb-nodes", "h100-pcie5")
"""The presets of machines with such runs, to which some of their rates are fitted."""

OWN_GPUS = re.compile(r"\bH[12]00\b")
"""The GPUs that this project ran on (``tests/model/test_own_gpus.py`` has the errors)."""

NEVER = "No prediction has been compared with a measurement on such a machine."

SIMULATED_STEP = (
    " Stock's step() is simulated without norm, unscaling and the search for inf: 20 to 45% too short on our GPUs."
)
SHARE_OF_PRODUCTS = f" The model runs at {TRAINING_SHARE} times the rate of a large product, as on our H200."


def comparison(profile: HardwareProfile, job: Job) -> str:
    """Return a few sentences: the comparison that applies to this job on this machine, or that there is none."""
    found = _errors(profile, job)
    if profile.has_accelerator and profile.get("stock_step_params_per_s") is None:
        found += SIMULATED_STEP
    if profile.has_accelerator and profile.get("training_flops_per_s") is None:
        found += SHARE_OF_PRODUCTS
    return found


def _errors(profile: HardwareProfile, job: Job) -> str:
    source, gpu = profile.provenance.source, profile.provenance.gpu
    is_on_one_node = job.world_size == job.ranks_on_node
    is_alike = job.states == "fp32" and job.trainable_share == 1 and not job.offload_param
    is_alike &= job.shape.active_numel == job.shape.numel
    is_fitted = profile.name in FITTED_PRESETS and "given by the user" not in source
    if is_fitted and is_alike and is_on_one_node is not profile.name.endswith("-nodes"):
        runs, median, p90 = LARGER_MODELS
        return (
            f"Iterations of {runs} published runs on A100-40GB and H100-80GB were off by {percent(median)} in the "
            f"median and by at most {percent(p90)} in nine of ten, with Megatron-DeepSpeed's own time per layer and "
            "rates fitted to smaller models."
        )
    if source != "measured" or OWN_GPUS.search(gpu) is None or job.world_size > 1 or not is_alike:
        return NEVER
    if profile.get("module_forward_s") is None or profile.get("stock_step_params_per_s") is None:
        return f"{NEVER[:-1]} without its own seconds per module."
    return (
        "With two models on hosts with one H100 or H200 and 16 cores, iterations were off by 8% in the median and by "
        "at most 20%, speed-ups by 8 and 40%, and stock's update by 10 and 22%. Exposed times of 35 to 390 ms were "
        "predicted below 1 ms, as time in forward. Their times per module are from the same runs."
    )
