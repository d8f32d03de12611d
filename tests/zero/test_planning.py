"""Check the plans of training: their profile, what a GPU allows, and that they are those that ``plan`` prints.

For models and machines that are too large for a test, the engine's own planning runs, DeepSpeed's code forms the
sub-groups, parameters have no elements, and the measurements of the first steps are given.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout
from dataclasses import replace
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import deepspeed
import pytest
import torch
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

from deep_opt_states.config import Config, Unsupported
from deep_opt_states.device import cuda
from deep_opt_states.device.cpu import HostDevice
from deep_opt_states.host.cores import CoreShare
from deep_opt_states.report.record import PredictedUpdate
from deep_opt_states.zero.internals.compat import partitions_by_name
from deep_opt_states.zero.start import devices, planning
from deep_opt_states.zero.start.devices import AcceleratorChoice
from deep_opt_states.zero.start.planning import make_plan
from deep_opt_states.zero.step import gpu_memory
from deep_opt_states.zero.step.gpu_memory import FIRST_STEPS, GpuBudget, GpuMemory
from perf_model.prediction.hardware import HardwareProfile
from perf_model.prediction.memory import TrainingSetup, memory_of
from perf_model.prediction.overlap_windows import Windows
from perf_model.prediction.slowdown import Slowdown
from perf_model.presets.machines import MACHINES, MachinePreset
from perf_model.presets.models import MODELS
from perf_model.schedule.host_layout import Widths
from perf_model.schedule.placement import Placement
from perf_model.schedule.plan import UpdatePlan
from perf_model.schedule.workload import Partition
from perf_model.training_run.job import DEFAULT_SUB_GROUP_SIZE, Job
from perf_model.training_run.training_memory import TrainingMemory
from tests.cli.planning import job as arguments
from tests.cli.planning import planned as planned_for
from tests.model.costs import plan_of
from tests.model.profiles import RATES, profile
from tests.ranks import on_ranks
from tests.zero.parity.case import Case

GPU = AcceleratorChoice(HostDevice(), slots_on_host=False)
HOST = AcceleratorChoice(HostDevice(), slots_on_host=True)
SHARE = CoreShare(threads=1, reason="a test")

CASE = Case(
    name="planned",
    blocks=(),
    world_size=2,
    schedule=False,
    sub_group_size=8000,
    zero={"stage3_param_persistence_threshold": 0},
)


def train_each(*blocks: dict[str, Any]) -> tuple[list[Any], str]:
    """Train each block for 5 steps. Return the refusal, or the placements and the comparison, of each, and the log."""
    found: list[Any] = []
    with redirect_stdout(StringIO()) as output:
        for block in blocks:
            model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
            config = CASE.ds_config(block)
            try:
                engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
            except Exception as error:  # noqa: BLE001 (the test reads the message)
                found.append(f"{type(error).__name__}: {error}")
                continue
            for _ in range(5):
                engine.backward(engine(torch.ones(1, 64, dtype=torch.bfloat16)).float().square().mean())
                engine.step()
            placements = {placement.value for placement in engine.optimizer.plan.placements}
            compared = engine.optimizer.report.comparison()
            found.append((placements, {row.name: (row.predicted_s, row.measured_s) for row in compared}))
            engine.destroy()
    return found, output.getvalue()


@pytest.mark.P5
def test_without_a_profile_a_quick_one_is_measured_cached_and_shared(tmp_path: Path) -> None:
    blocks = {}, {"report": str(tmp_path / "run"), "placement": "streamed"}
    (found, log), (_, silent) = on_ranks(2, train_each, *blocks, XDG_CACHE_HOME=str(tmp_path))
    (cached,) = (tmp_path / "deep_opt_states").glob("*.json")
    assert HardwareProfile.read(cached).provenance.ranks == 2
    assert log.count("A quick hardware profile was measured.") == 1
    assert log.count(str(cached)) == 1, "the second engine reads the profile of the first"
    # The CPU accelerator has no separate memory through which states could be streamed.
    kinds = {"cpu": {"CPU_STEP"}, "streamed": {"PREFETCH", "GPU_STEP", "FLUSH_STATES"}}
    for (placements, compared), placement in zip(found, kinds, strict=True):
        assert placements == {placement}
        assert compared.keys() == {"update", "exposed", *kinds[placement]}
        assert all(min(seconds) > 0 for seconds in compared.values())
        assert re.search(rf"\n  {placement}: .* {4 * (64 * 64 + 64) // 2:,} parameters, .* of host memory", log)
    assert log.count("5 updates, median of the last 3 against the prediction:\n  update ") == 2
    # At the start and at the end. The config of the second engine decides the placement itself.
    assert (
        log.count("Nothing is streamed: the accelerator is the CPU, which has the states in its memory already.") == 2
    )
    assert "against the prediction" not in silent


def test_a_given_profile_is_used_or_refused_as_rank_0_reads_it(tmp_path: Path) -> None:
    cpu_only = {name: rate for name, rate in RATES.items() if name.startswith(("cpu_adam_params", "stock", "dram"))}
    rates = {**cpu_only, "cpu_adam_params_per_s": 1e9, "dram_copy_bytes_per_s": 4e9}
    texts = {
        "cpu": profile(rates).to_json(),
        "gpu": profile().to_json(),
        "old": json.dumps({**json.loads(profile().to_json()), "version": 0}),
    }
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    blocks = [{"profile": str(tmp_path / name)} for name in (*texts, "missing")]
    first, second = on_ranks(2, train_each, *blocks, {"placement": "cpu"}, XDG_CACHE_HOME=str(tmp_path))
    assert "measured with 1 rank per node at the same time, while 2 train" in first[1]
    assert "while 2 train" not in second[1]
    for (_, compared), *refused, trained in (first[0], second[0]):
        # Adam takes 1 ns per parameter, and nothing is published.
        assert compared["update"][0] == pytest.approx(4 * (64 * 64 + 64) // 2 / 1e9, rel=1e-6)
        assert "deep_optimizer_states.profile: must be of a machine like the one that trains" in refused[0]
        assert "Write one here with: deep-opt-states profile" in refused[0]
        assert trained == ({"cpu"}, {}), "a rule needs no profile if nothing is reported"
    assert "ProfileError: version: must be the integer 2, found 0" in first[0][2]
    assert "deep-opt-states profile --output profile.json" in first[0][3]
    assert all("rank 0" in refusal for refusal in second[0][2:4])
    assert not (tmp_path / "deep_opt_states").exists(), "nothing was measured"


ON_CPU = plan_of(Placement.CPU, Placement.CPU, numel=4_000_000)
MIXED = plan_of(*Placement, numel=4_000_000)


@pytest.fixture
def one_rank_with_a_gpu_of_80_gb(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(planning, "_load_profile", lambda *_: profile())
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (1, 80 * 10**9))
    with machine(num_ranks=1, free_bytes=0):
        yield


@pytest.mark.usefixtures("one_rank_with_a_gpu_of_80_gb")
def test_a_gpu_with_its_kernel_takes_every_placement_in_the_memory_that_is_free() -> None:
    assert GPU.validate(MIXED) is MIXED
    assert GPU.why_only_the_cpu_updates() == ""
    assert HOST.gpu_budget(Config()) is None
    for gpu_memory_gb, start_bytes, grown_bytes in ((None, 0, 58 * 10**9), (2.5, 25 * 10**8, 25 * 10**8), (0, 0, 0)):
        budget = GPU.gpu_budget(Config(gpu_memory_gb=gpu_memory_gb))
        assert budget is not None
        assert budget.bytes == start_bytes
        for _ in range(10):
            budget.observe(60 * 10**9, alloc_retries=0, held_bytes=budget.bytes)
        # Without a limit of the user, the budget grows to what is free, less the margin.
        assert budget.bytes == grown_bytes
    setup = TrainingSetup(widths=Widths(param=2, grad=4), accumulates=True)
    for plan in (ON_CPU, MIXED):
        needed = memory_of(plan, replace(setup, sums_on_accelerator=True)).gpu_bytes
        budgets = (GpuBudget(start_bytes=size, margin_bytes=0, fills=False) for size in (needed, needed - 1))
        assert [GPU.fits_accumulators(plan, setup, budget) for budget in budgets] == [True, False]
        # Where the config gives the placements, a tenth of the GPU may be used.
        assert GPU.fits_accumulators(plan, setup, None)
        assert not GPU.fits_accumulators(plan, replace(setup, widths=Widths(param=2, grad=10**9)), None)
        assert HOST.fits_accumulators(plan, setup, None) == (plan is MIXED)


def test_without_a_kernel_for_the_gpu_only_the_cpu_updates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "_no_gpu_adam", lambda: "No Triton: pip install triton==3.6.0")
    assert GPU.validate(ON_CPU) is ON_CPU
    assert HOST.validate(MIXED) is MIXED
    with pytest.raises(Unsupported, match=r'(?s)need a GPU Adam kernel.*No Triton: pip.*Or use "placement": "cpu"'):
        GPU.validate(MIXED)
    assert GPU.why_only_the_cpu_updates() == "No Triton: pip install triton==3.6.0"
    assert "the accelerator is the CPU" in HOST.why_only_the_cpu_updates()
    budget = GPU.gpu_budget(Config(gpu_memory_gb=2.5))
    assert budget is not None
    budget.observe(10**10, 0, 0)
    assert budget.bytes == 0


@pytest.mark.usefixtures("one_rank_with_a_gpu_of_80_gb")
def test_the_log_gives_the_memory_of_each_placement_or_the_reason_why_nothing_is_streamed() -> None:
    sub_groups = [[Partition("layers.0.weight", 1_000_000_000)], [Partition("layers.1.weight", 500_000_000)]]

    def planned(grad: int = 2, **block: Any) -> tuple[str, list[str]]:
        widths, config = Widths(param=2, grad=grad), Config(**block)
        setup = TrainingSetup(widths=widths, accumulates=True)
        found = make_plan(config, sub_groups, setup, GPU, GPU.gpu_budget(config), SHARE)
        return found.at_start(), found.at_end(found.plan, widths)

    at_start, at_end = planned(gpu_memory_gb=8.0, unit_size=10**9)
    reason = "Nothing is streamed: the budget of 8.0 GB of GPU memory cannot hold a slot and the gradients, 9.0 GB. Set"
    assert reason in at_start
    assert at_end[-1].startswith(reason)
    assert planned()[0].endswith("no GPU memory until the first steps have shown how much is free.")
    assert "Nothing is streamed" not in "".join([*planned(gpu_memory_gb=8.0)[1], *planned(placement="cpu")[1]])
    rules = [{"match": "layers.0.*", "states": "resident"}, {"match": "*", "states": "streamed"}]
    streamed, resident = planned(4, placement=rules, unit_size=10**9)[1]
    assert streamed.endswith("on the accelerator 1 slot of 6.00 GB and 2.00 GB of gradients")
    assert resident.endswith("on the accelerator 12.0 GB of states and 4.00 GB of gradients")


def plan_of_training(
    job: Job, machine_of_preset: MachinePreset, printed: dict[str, Any], folder: Path
) -> tuple[UpdatePlan, PredictedUpdate]:
    """Return the plan after the first steps, with the measurements that ``plan`` assumes, and its prediction."""
    path, ds_config, assumed = folder / "profile.json", printed["deepspeed_config"], dict(printed["windows"])
    path.write_text(machine_of_preset.profile(job.world_size).to_json())
    windows, uses = Windows(slowdown=Slowdown(cpu=assumed.pop("cpu_slowdown")), **assumed), tuple(job.shape.uses())
    config = Config(**ds_config["deep_optimizer_states"], profile=str(path))
    size = ds_config["zero_optimization"].get("sub_group_size", DEFAULT_SUB_GROUP_SIZE)
    sub_groups = sub_groups_of_trainer(list(job.shape.parameters()), job.world_size, size)
    memory, profile = TrainingMemory(job), HardwareProfile.read(path)
    assert profile.gpu_memory_bytes is not None
    with machine(job.world_size, profile.gpu_memory_bytes - memory.gpu_bytes - memory.cache_bytes):
        budget = GPU.gpu_budget(config)
        planned = make_plan(config, sub_groups, TrainingSetup(widths=Widths(param=2, grad=2)), GPU, budget, SHARE)
        # The states do not exist, and all memory that a plan asks for is there.
        running: Any = SimpleNamespace(plan=planned.plan, uses=uses, is_evicted=False, holds_memory=False)
        running.windows = SimpleNamespace(windows=lambda: windows)
        running.gradients = SimpleNamespace(have_device_accumulators=False)
        running.adopt = lambda plan: vars(running).update(plan=plan, is_evicted=True, holds_memory=True)
        running.restore = lambda: vars(running).update(is_evicted=False) is None
        assert planned.request is not None
        assert planned.predict is not None
        assert budget is not None
        of_gpu = GpuMemory(running, planned.request, budget, before_move=lambda: None)
        for _ in range(FIRST_STEPS):
            of_gpu.observe()
            of_gpu.adapt(is_short_anywhere=of_gpu.is_short)
        return running.plan, planned.predict(running.plan, uses, windows)


def sub_groups_of_trainer(parameters: list[tuple[str, int]], num_ranks: int, size: int) -> list[list[Partition]]:
    """Return one rank's sub-groups as DeepSpeed forms them from the parameter groups of Hugging Face's Trainer."""
    optimizer: Any = object.__new__(DeepSpeedZeroOptimizer_Stage3)
    optimizer.sub_group_size = size
    by_name = {}
    for index, (name, numel) in enumerate(parameters):
        length = -(-numel // num_ranks)
        by_name[name] = SimpleNamespace(ds_id=index, numel=length, partition_numel=lambda length=length: length)
    # The Trainer applies weight decay to all parameters but these.
    without_decay = [name for name in by_name if "norm" in name or name.endswith(".bias")]
    with_decay = [name for name in by_name if name not in without_decay]
    fp16_groups = [
        sub_group
        for names in (with_decay, without_decay)
        for sub_group in optimizer._create_fp16_sub_groups([by_name[name] for name in names])
    ]
    module = SimpleNamespace(named_parameters=by_name.items)
    return partitions_by_name(SimpleNamespace(module=module, fp16_groups=fp16_groups, persistent_parameters=[]))


@contextmanager
def machine(num_ranks: int, free_bytes: int) -> Iterator[None]:
    """Replace what asks the other ranks, which all measure the same, and what asks the GPU."""
    ranks = SimpleNamespace(rank=0, size=num_ranks, gather=lambda value: [value] * num_ranks)
    together = {"raise_together": lambda action: action(), "same_on_all_ranks": lambda find, describe: find()}
    replaced: list[tuple[Any, dict[str, Any]]] = [
        (planning, {"Ranks": lambda: ranks, **together}),
        (gpu_memory, {"gather_values": ranks.gather, "dist": SimpleNamespace(get_rank=lambda: 0), **together}),
        (devices, {"_no_gpu_adam": lambda: ""}),
        (cuda, {"free_and_retries": lambda *_: (free_bytes, 0)}),
        (cuda, {"failed_allocations": lambda: 0}),
    ]
    with ExitStack() as patches:
        for module, values in replaced:
            patches.enter_context(mock.patch.multiple(module, **values))
        yield


OPTIONS = {"unit_size": 70_000_000, "gpu_memory_gb": 40.0, "gpu_memory_margin_gb": 6.5}


@pytest.mark.P5
@pytest.mark.parametrize(
    ("preset", "model", "num_ranks", "micro_batch", "options"),
    [
        ("h100-pcie5", "Llama-3-8B", 1, 1, {}),
        ("a100-pcie4", "20B", 4, 2, {}),
        ("h100-pcie5", "Llama-3-8B", 1, 1, OPTIONS),
    ],
)
def test_the_engine_finds_the_printed_plan_with_the_printed_seconds(
    preset: str, model: str, num_ranks: int, micro_batch: int, options: dict[str, float], tmp_path: Path
) -> None:
    sizes = {"world_size": num_ranks, "ranks_per_node": num_ranks, "micro_batch": micro_batch}
    # How much host memory training has for eager units depends on the machine that trains.
    printed = planned_for(arguments(preset, model, **sizes, eager_memory_gb=0, **options))
    block, decisions = printed["deepspeed_config"]["deep_optimizer_states"], printed["plan"]
    assert options.keys() <= block.keys()
    plan, predicted = plan_of_training(
        Job(shape=MODELS[model], sequence=2048, **sizes), MACHINES[preset], printed, tmp_path
    )
    # A start with a limit of the user already has a plan, which stays if another one gains less than ``LITTLE_GAIN``.
    assert plan.fingerprint == decisions["fingerprint"]
    assert [placement.value for placement in plan.placements] == decisions["placements"]
    assert plan.num_slots == decisions["num_slots"]
    assert list(plan.order or ()) == decisions["order"]
    assert predicted.exposed_s == printed["predicted"]["exposed_update_s"], "equal, not only near"
    assert predicted.timeline.active_s == printed["predicted"]["update_s"]
    if not options:
        # With DeepSpeed's default sub-groups of 1e9 parameters, the first versions left nearly everything on the CPU.
        assert plan.numel(Placement.CPU) <= 0.6 * plan.workload.numel
        assert predicted.exposed_s <= 0.5 * printed["baselines"]["all_cpu"]["exposed_update_s"]
