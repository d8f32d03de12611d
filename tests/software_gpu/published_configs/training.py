"""Train the small Llama with Hugging Face's Trainer on the emulated machine, and measure its iterations."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache, wraps
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from deepspeed import DeepSpeedEngine
from torch.utils.data import Dataset
from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments

from benchmarks.emulated.host_passes import HostPasses
from deep_opt_states.report.line import UpdateReporter
from deep_opt_states.zero.stage3 import DeepOptimizerStates_Stage3
from deep_opt_states.zero.step.running_plan import RunningPlan
from examples.common.byte_gpt import StdlibText
from perf_model.plan_request import PlanRequest, SizedPlan
from perf_model.prediction.timeline import Timeline
from perf_model.schedule.action import ActionKind
from perf_model.schedule.placement import Placement
from perf_model.schedule.plan import UpdatePlan
from tests.software_gpu import device, settings
from tests.software_gpu.published_configs.emulated_h100 import H100Run
from tests.zero.parity.training import Record, collect

SEED = 17
LEARNING_RATE = 1e-3
PHASES = ("forward", "backward", "step")
"""The methods of DeepSpeed's engine that one iteration consists of, and the names of the marks at their ends."""


class TextOfStandardLibrary(Dataset[dict[str, torch.Tensor]]):
    """A dataset of sequences of bytes, from text that every machine has."""

    def __init__(self, context: int, length: int) -> None:
        self._context, self._length = context, length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        inputs, _ = _text().batch(seed=SEED, step=index, rank=0, batch_size=1, context=self._context)
        return {"input_ids": inputs[0], "labels": inputs[0]}


@cache
def _text() -> StdlibText:
    return StdlibText()


@dataclass(frozen=True, kw_only=True)
class Steps:
    """The steps of an arm: ``untimed`` ones take no emulated time, ``warm_up`` ones follow, then ``measured`` ones."""

    untimed: int = 0
    warm_up: int
    measured: int

    @property
    def total(self) -> int:
        """Return the number of all steps."""
        return self.untimed + self.warm_up + self.measured


@dataclass
class TrainedArm:
    """The values that must be equal to the bit, and what was measured, in emulated seconds.

    Stock has no plan. ``planned`` has the fingerprints of all plans that the planner returned, at start and later, and
    ``fingerprint`` is that of the plan that ran last, with ``placements`` of its units. ``updated`` is where each unit
    was updated in the last step, by the actions that ran. ``adopted`` has the log lines of the changes. ``lag_s`` is
    the longest time by which this machine was behind the emulated one.
    """

    record: Record
    phases_s: dict[str, list[float]]
    lag_s: float
    fingerprint: str = ""
    placements: list[str] = field(default_factory=list)
    updated: list[str] = field(default_factory=list)
    planned: list[str] = field(default_factory=list)
    adopted: list[str] = field(default_factory=list)

    @property
    def iteration_s(self) -> list[float]:
        """Return the seconds of each measured iteration."""
        return [sum(phases_s) for phases_s in zip(*self.phases_s.values(), strict=True)]


def train(
    run: H100Run, config: dict[str, Any], folder: Path, steps: Steps, *, optimizer: type[torch.optim.Optimizer] | None
) -> TrainedArm:
    """Train with ``config``, which is complete except for what the Trainer fills in.

    ``optimizer`` None lets the Trainer create its own.
    """
    with run.trained_by_trainer() as passes, _marked(), _observed() as observed:
        trainer = _trainer(run, config, folder, steps, optimizer)
        trainer.add_callback(_TimeAfterFirstSteps(passes, steps.untimed))
        device.take_spans()
        trainer.train()
        device.synchronize()
        passes.take_time = False
        lag_s = device.take_lag_s()
        marks = [(span.name, span.end_s) for span in device.take_spans() if span.name in PHASES]
        engine = trainer.model_wrapped
        arm = TrainedArm(
            record=Record(optimizer_class=type(engine.optimizer).__name__),
            phases_s=_phases_s(marks[-len(PHASES) * steps.measured - 1 :]),
            lag_s=lag_s,
        )
        arm.record.numbers["loss"] = [logged["loss"] for logged in trainer.state.log_history if "loss" in logged]
        with settings.changed(rates=settings.MachineRates()):
            collect(engine.optimizer, arm.record)
            if isinstance(engine.optimizer, DeepOptimizerStates_Stage3):
                _describe_updates(engine.optimizer, observed, arm)
            engine.destroy()
    return arm


def _phases_s(marks: Sequence[tuple[str, float]]) -> dict[str, list[float]]:
    """Return the seconds of the computing stream in each phase of each iteration, from the mark before it to its mark.

    Waits of the computing stream for the update are part of the phase in which it waits.
    """
    phases_s: dict[str, list[float]] = {name: [] for name in PHASES}
    for (_, begin_s), (name, end_s) in pairwise(marks):
        phases_s[name].append(end_s - begin_s)
    return phases_s


def _describe_updates(optimizer: DeepOptimizerStates_Stage3, observed: _ObservedEngine, arm: TrainedArm) -> None:
    """Add the plans and the last update to ``arm``. No update is in flight, and all have been reported."""
    arm.fingerprint = optimizer.plan.fingerprint
    arm.placements = [placement.value for placement in optimizer.plan.placements]
    arm.planned, arm.adopted = observed.planned, observed.adopted
    assert observed.timeline is not None
    arm.updated = [placement.value for placement in placements_of(observed.timeline)]


def _trainer(
    run: H100Run, config: dict[str, Any], folder: Path, steps: Steps, optimizer: type[torch.optim.Optimizer] | None
) -> Trainer:
    # Create the arguments before the model: with them, the model is partitioned while it is created.
    arguments = TrainingArguments(
        output_dir=str(folder),
        deepspeed=config,
        bf16=True,
        per_device_train_batch_size=1,
        gradient_checkpointing=True,
        learning_rate=LEARNING_RATE,
        max_steps=steps.total,
        logging_steps=steps.total,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    torch.manual_seed(SEED)
    # The CPU's fused attention has other bits than the device's.
    model = AutoModelForCausalLM.from_config(run.small.llama, attn_implementation="eager")
    return Trainer(
        model=model,
        args=arguments,
        train_dataset=TextOfStandardLibrary(run.small.context, steps.total),
        optimizer_cls_and_kwargs=(optimizer, {"lr": LEARNING_RATE}) if optimizer else None,
    )


class _TimeAfterFirstSteps(TrainerCallback):
    """Begin emulated time after the first steps."""

    def __init__(self, passes: HostPasses, untimed: int) -> None:
        self._passes, self._untimed = passes, untimed
        self._without_time = ExitStack()

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._without_time.enter_context(settings.changed(rates=settings.MachineRates()))

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self._untimed:
            self._without_time.close()
            self._passes.take_time = True
            device.take_lag_s()


@contextmanager
def _marked() -> Iterator[None]:
    """Put a mark on the computing stream at the end of each phase inside this context."""

    def marked(name: str) -> Callable[..., Any]:
        method = getattr(DeepSpeedEngine, name)

        @wraps(method)
        def wrapped(*args: Any, **others: Any) -> Any:
            result = method(*args, **others)
            device.launch(lambda: None, name)
            return result

        return wrapped

    with ExitStack() as patches:
        for name in PHASES:
            patches.enter_context(mock.patch.object(DeepSpeedEngine, name, marked(name)))
        yield


@dataclass
class _ObservedEngine:
    """The fingerprints of all plans of the planner, the changes of the plan, and the last measured update."""

    planned: list[str] = field(default_factory=list)
    adopted: list[str] = field(default_factory=list)
    timeline: Timeline | None = None


@contextmanager
def _observed() -> Iterator[_ObservedEngine]:
    """Observe the engine that is created and trained inside this context."""
    observed = _ObservedEngine()
    plan, adopt, updated = PlanRequest.plan, RunningPlan.adopt, UpdateReporter.updated

    def observed_plan(request: PlanRequest) -> SizedPlan:
        found = plan(request)
        observed.planned.append(found.plan.fingerprint)
        return found

    def observed_adoption(running: RunningPlan, adopted: UpdatePlan) -> None:
        adopt(running, adopted)
        observed.adopted.append(adopted.fingerprint)

    def observed_update(reporter: UpdateReporter, phases: Any, timeline: Any) -> None:
        observed.timeline = timeline()
        updated(reporter, phases, timeline)

    with (
        mock.patch.object(PlanRequest, "plan", observed_plan),
        mock.patch.object(RunningPlan, "adopt", observed_adoption),
        mock.patch.object(UpdateReporter, "updated", observed_update),
    ):
        yield observed


def placements_of(timeline: Timeline) -> list[Placement]:
    """Return where each unit was updated, from the actions that ran."""
    kinds: dict[int, set[ActionKind]] = {}
    for span in timeline.spans:
        kinds.setdefault(span.action.unit, set()).add(span.action.kind)
    return [_placement(kinds[unit]) for unit in sorted(kinds)]


def _placement(kinds: set[ActionKind]) -> Placement:
    if ActionKind.CPU_STEP in kinds:
        return Placement.CPU
    return Placement.STREAMED if ActionKind.PREFETCH in kinds else Placement.RESIDENT
