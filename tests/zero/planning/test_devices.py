"""Check the placements and the memory that a plan may use on CUDA, on a machine without a GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from deep_opt_states.config import Config
from deep_opt_states.device.cpu import HostDevice
from deep_opt_states.device.kernels.adam import BF16_MASTERS, BF16_STATES, FP32_STATES, AdamKernel, StateDtypes
from deep_opt_states.zero.start import devices
from deep_opt_states.zero.start.devices import AcceleratorChoice
from deep_opt_states.zero.start.unsupported import Unsupported
from deep_opt_states.zero.step.gpu_memory import GpuBudget
from perf_model.prediction.memory import TrainingSetup, memory_of
from perf_model.schedule.host_layout import Widths
from perf_model.schedule.placement import Placement
from perf_model.schedule.plan import UpdatePlan
from perf_model.schedule.workload import Workload
from tests.runtime.plain_adam import PlainAdam

CUDA = AcceleratorChoice(HostDevice(), slots_on_host=False)
HOST = AcceleratorChoice(HostDevice(), slots_on_host=True)


def plan(*placements: Placement) -> UpdatePlan:
    return UpdatePlan(workload=Workload.from_numels([4_000_000] * len(placements)), placements=placements, num_slots=1)


ON_CPU = plan(Placement.CPU, Placement.CPU)
MIXED = plan(Placement.CPU, Placement.STREAMED, Placement.RESIDENT)


@pytest.fixture
def no_gpu_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "_no_gpu_adam", lambda: "No Triton: pip install triton==3.6.0")


@pytest.fixture
def gpu_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "_no_gpu_adam", lambda: "")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (1, 80 * 10**9))


@pytest.mark.usefixtures("gpu_kernel")
def test_with_a_gpu_kernel_every_placement_is_accepted() -> None:
    assert CUDA.validate(MIXED) is MIXED
    assert CUDA.validate(ON_CPU) is ON_CPU


@pytest.mark.usefixtures("no_gpu_kernel")
def test_without_a_gpu_kernel_only_cpu_placement_is_accepted() -> None:
    assert CUDA.validate(ON_CPU) is ON_CPU
    assert HOST.validate(MIXED) is MIXED
    with pytest.raises(Unsupported) as caught:
        CUDA.validate(MIXED)
    rule, *remedies = str(caught.value).splitlines()
    assert "need a GPU Adam kernel" in rule
    assert "found 2 of them" in rule
    assert remedies == ["No Triton: pip install triton==3.6.0", 'Or use "placement": "cpu" on this accelerator.']


@pytest.mark.usefixtures("gpu_kernel")
@pytest.mark.parametrize(("gpu_memory_gb", "start_bytes"), [(None, 0), (2.5, 25 * 10**8), (0, 0)])
def test_the_planner_starts_without_gpu_memory_unless_the_config_gives_a_budget(
    gpu_memory_gb: float | None, start_bytes: int
) -> None:
    config = Config(gpu_memory_gb=gpu_memory_gb)
    budget = CUDA.gpu_budget(config)
    assert budget is not None
    assert budget.bytes == start_bytes
    for _ in range(10):
        budget.observe(60 * 10**9, alloc_retries=0, held_bytes=budget.bytes)
    # Without a limit of the user, the budget grows to what is free, less the margin.
    assert budget.bytes == (58 * 10**9 if gpu_memory_gb is None else start_bytes)
    assert HOST.gpu_budget(config) is None


@pytest.mark.usefixtures("gpu_kernel")
def test_sums_over_micro_batches_stay_on_the_gpu_if_they_fit_next_to_the_states() -> None:
    setup = TrainingSetup(widths=Widths(param=2, grad=4), accumulates=True)
    # With offloaded parameters, updates on the accelerator need a buffer for the rounded parameters, too.
    for placed in (setup, replace(setup, params_on_host=True)):
        all_gradients, with_states = (
            memory_of(plan, replace(placed, sums_on_accelerator=True)).gpu_bytes for plan in (ON_CPU, MIXED)
        )
        assert 0 < all_gradients < with_states
        for plan, needed in ((ON_CPU, all_gradients), (MIXED, with_states)):
            budgets = (GpuBudget(start_bytes=size, margin_bytes=0, fills=False) for size in (needed, needed - 1))
            assert [CUDA.fits_accumulators(plan, placed, budget) for budget in budgets] == [True, False]
    for plan in (ON_CPU, MIXED):
        # Where the config gives the placements, a tenth of the GPU may be used.
        assert CUDA.fits_accumulators(plan, setup, None)
        assert not CUDA.fits_accumulators(plan, replace(setup, widths=Widths(param=2, grad=10**9)), None)
    assert HOST.fits_accumulators(MIXED, setup, None)
    assert not HOST.fits_accumulators(ON_CPU, setup, None)


@pytest.mark.usefixtures("no_gpu_kernel")
def test_the_reason_is_given_if_only_the_cpu_updates(monkeypatch: pytest.MonkeyPatch) -> None:
    assert CUDA.why_only_the_cpu_updates() == "No Triton: pip install triton==3.6.0"
    assert "the accelerator is the CPU" in HOST.why_only_the_cpu_updates()
    monkeypatch.setattr(devices, "_no_gpu_adam", lambda: "")
    assert CUDA.why_only_the_cpu_updates() == ""


@pytest.mark.usefixtures("no_gpu_kernel")
def test_without_a_gpu_kernel_the_planner_never_uses_gpu_memory() -> None:
    for config in (Config(), Config(gpu_memory_gb=2.5)):
        budget = CUDA.gpu_budget(config)
        assert budget is not None
        for _ in range(10):
            assert budget.bytes == 0
            budget.observe(10**10, 0, 0)


class Optimizer:
    """The attributes of DeepSpeed's optimizer that are read."""

    defaults = {"betas": (0.8, 0.9)}  # noqa: RUF012
    adam_w_mode = False


class RecordingAdam(PlainAdam):
    """An Adam kernel that records its options and the dtypes for which it was compiled."""

    def __init__(self, betas: tuple[float, float], *, adamw: bool, dtypes: StateDtypes) -> None:
        super().__init__()
        self.made_with = (betas, adamw, dtypes)
        self.compiled_for: list[Any] = []

    def compile(self, *dtypes: Any) -> None:
        self.compiled_for.append(dtypes)


def test_a_gpu_kernel_is_made_only_if_the_gpu_may_update_a_unit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(devices, "gpu_adam", RecordingAdam)
    monkeypatch.setattr(devices, "_no_gpu_adam", lambda: "")
    host_adam: AdamKernel = PlainAdam()

    def kernel(
        choice: AcceleratorChoice,
        update_plan: UpdatePlan,
        budget: GpuBudget | None = None,
        dtypes: StateDtypes = FP32_STATES,
    ) -> AdamKernel | None:
        optimizer: Any = Optimizer()
        return choice.device_adam(update_plan, budget, host_adam, optimizer, torch.bfloat16, torch.bfloat16, dtypes)

    assert kernel(HOST, MIXED) is host_adam
    assert kernel(CUDA, ON_CPU) is None
    assert kernel(CUDA, ON_CPU, GpuBudget(start_bytes=0, margin_bytes=0, fills=True)) is not None
    made = kernel(CUDA, MIXED)
    assert isinstance(made, RecordingAdam)
    assert made.made_with == ((0.8, 0.9), False, FP32_STATES)
    params, grads = [torch.bfloat16], {torch.bfloat16, torch.float32}
    assert made.compiled_for == [(grads, params, FP32_STATES)], "gradients read by users are fp32"
    made = kernel(CUDA, MIXED, dtypes=BF16_MASTERS)
    assert isinstance(made, RecordingAdam)
    of_both = [({torch.bfloat16}, params, dtypes) for dtypes in (BF16_MASTERS, BF16_STATES)]
    assert made.compiled_for == of_both, "a load puts moments in the dtype of the masters"
