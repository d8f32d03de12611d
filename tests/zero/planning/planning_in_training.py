"""Let the planning of a training run plan for models and machines that are too large for a test.

The code that plans at start and between steps is the engine's own: ``make_plan``, ``GpuBudget``, ``GpuMemory``.
DeepSpeed's code forms the sub-groups. Parameters have names and lengths but no elements, and the
measurements of the first steps are given: the windows, and the memory that is free at the peak.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

from deep_opt_states.config import Config
from deep_opt_states.device import cuda
from deep_opt_states.device.cpu import HostDevice
from deep_opt_states.host.cores import CoreShare
from deep_opt_states.report.record import PredictedUpdate
from deep_opt_states.zero.internals.compat import partitions_by_name
from deep_opt_states.zero.start import devices, planning
from deep_opt_states.zero.start.devices import AcceleratorChoice
from deep_opt_states.zero.start.planning import make_plan
from deep_opt_states.zero.step import gpu_memory
from deep_opt_states.zero.step.gpu_memory import FIRST_STEPS, GpuMemory
from perf_model.prediction.hardware import HardwareProfile
from perf_model.prediction.memory import TrainingSetup
from perf_model.prediction.overlap_windows import Windows
from perf_model.schedule.host_layout import Widths
from perf_model.schedule.plan import UpdatePlan
from perf_model.schedule.workload import Partition
from perf_model.training_run.job import DEFAULT_SUB_GROUP_SIZE

GPU = AcceleratorChoice(HostDevice(), slots_on_host=False)
"""An accelerator with memory of its own. Nothing is executed on it."""


@dataclass(frozen=True)
class ParameterOfDeepSpeed:
    """A parameter as far as sub-groups depend on it."""

    ds_id: int
    numel: int

    def partition_numel(self) -> int:
        """Return the length of one rank's partition, with padding."""
        return self.numel


@dataclass
class RunningWithoutStates:
    """A ``RunningPlan`` whose states do not exist. All memory that a plan asks for is there."""

    plan: UpdatePlan
    uses: tuple[str, ...] | None = None
    measured: Windows | None = None
    is_evicted: bool = False
    adopted: list[UpdatePlan] = field(default_factory=list)

    @property
    def windows(self) -> Any:
        """Return the windows that the first steps have shown."""
        return SimpleNamespace(windows=lambda: self.measured)

    @property
    def gradients(self) -> Any:
        """Return gradients that are not accumulated."""
        return SimpleNamespace(have_device_accumulators=False)

    @property
    def holds_memory(self) -> bool:
        """Return whether a plan has been adopted: the first one has no memory."""
        return bool(self.adopted)

    def adopt(self, plan: UpdatePlan) -> None:
        """Run ``plan`` from the next step on."""
        self.plan, self.is_evicted = plan, True
        self.adopted.append(plan)

    def restore(self) -> bool:
        """Reserve the memory of the plan."""
        self.is_evicted = False
        return True


@dataclass(frozen=True, kw_only=True)
class TrainingRun:
    """A training run of ``ranks`` ranks on a machine with this profile, and what is measured in its first steps.

    ``parameters`` have the names and numbers of elements in the model's order. ``config`` is that of DeepSpeed.
    ``uses`` has the names in the order in which forward uses them. ``free_bytes`` is the GPU memory that is free at
    the peak.
    """

    parameters: Sequence[tuple[str, int]]
    ranks: int
    config: dict[str, Any]
    profile: HardwareProfile
    uses: Sequence[str]
    windows: Windows
    free_bytes: int

    def sub_groups(self) -> list[list[Partition]]:
        """Return one rank's sub-groups as DeepSpeed forms them from the parameter groups of Hugging Face's Trainer."""
        optimizer: Any = object.__new__(DeepSpeedZeroOptimizer_Stage3)
        optimizer.sub_group_size = self.config["zero_optimization"].get("sub_group_size", DEFAULT_SUB_GROUP_SIZE)
        by_name = {
            name: ParameterOfDeepSpeed(ds_id, -(-numel // self.ranks))
            for ds_id, (name, numel) in enumerate(self.parameters)
        }
        # The Trainer applies weight decay to all parameters but these.
        without_decay = [name for name in by_name if "norm" in name or name.endswith(".bias")]
        with_decay = [name for name in by_name if name not in without_decay]
        fp16_groups = [
            sub_group
            for names in (with_decay, without_decay)
            for sub_group in optimizer._create_fp16_sub_groups([by_name[name] for name in names])
        ]
        module = SimpleNamespace(named_parameters=lambda: by_name.items())
        return partitions_by_name(SimpleNamespace(module=module, fp16_groups=fp16_groups, persistent_parameters=[]))

    def plan(self, folder: Path) -> tuple[UpdatePlan, PredictedUpdate]:
        """Return the plan that the ranks run after the first steps, and the prediction that they report for it.

        ``folder`` is for the profile that the config names.
        """
        path = folder / "profile.json"
        path.write_text(self.profile.to_json())
        config = Config(**self.config["deep_optimizer_states"], profile=str(path))
        sub_groups = self.sub_groups()
        with self._machine():
            budget = GPU.gpu_budget(config)
            setup = TrainingSetup(widths=Widths(param=2, grad=2))
            planned = make_plan(config, sub_groups, setup, GPU, budget, CoreShare(threads=1, reason="a test"))
            assert planned.request is not None
            assert planned.predict is not None
            assert budget is not None
            running: Any = RunningWithoutStates(planned.plan, tuple(self.uses), self.windows)
            memory = GpuMemory(running, planned.request, budget, before_move=lambda: None)
            for _ in range(FIRST_STEPS):
                memory.observe()
                memory.adapt(is_short_anywhere=memory.is_short)
            return running.plan, planned.predict(running.plan, running.uses, self.windows)

    @contextmanager
    def _machine(self) -> Iterator[None]:
        """Replace what asks the other ranks, which all measure the same, and what asks the GPU."""
        ranks = SimpleNamespace(rank=0, size=self.ranks, gather=lambda value: [value] * self.ranks)
        replaced: list[tuple[Any, dict[str, Any]]] = [
            (planning, {"Ranks": lambda: ranks}),
            (gpu_memory, {"gather_values": ranks.gather, "dist": SimpleNamespace(get_rank=lambda: 0)}),
            (devices, {"_no_gpu_adam": lambda: ""}),
            (
                cuda,
                {
                    "free_and_retries": lambda *_: (self.free_bytes, 0),
                    "allocated_bytes": lambda: 0,
                    "failed_allocations": lambda: 0,
                },
            ),
        ]
        with ExitStack() as patches:
            for module in (planning, gpu_memory):
                patches.enter_context(mock.patch.object(module, "raise_together", lambda action: action()))
                patches.enter_context(mock.patch.object(module, "same_on_all_ranks", lambda find, describe: find()))
            for module, values in replaced:
                patches.enter_context(mock.patch.multiple(module, **values))
            yield
