"""Train one variant of a case on the real engine, and record every value that must be equal to the bit."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import astuple, dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import deepspeed
import torch
import torch.distributed as dist

from deep_opt_states.device.cpu import HostDevice
from deep_opt_states.runtime.issuer import Issuer
from deep_opt_states.zero.internals.compat import partitions_by_name
from perf_model.schedule.placement import Placement
from tests.zero.parity.case import Case
from tests.zero.parity.parity_model import ParityNet, batch, param_groups

Block = dict[str, Any] | None
"""The plugin's config block; None is stock DeepSpeed."""
Result = dict[str, Any]
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass
class Speculations:
    """The number of speculated steps that were kept and that were void. A valid one that has not started is neither."""

    kept: int = 0
    void: int = 0
    streamed: int = 0
    """The number of kept ones of streamed units."""


@contextmanager
def counted_speculations() -> Iterator[Speculations]:
    """Yield the numbers of all engines' speculated steps inside this context."""
    found = Speculations()
    keep_speculations, forget_speculations = Issuer.keep_speculations, Issuer.forget_speculations

    def keep(self: Issuer, is_valid: Callable[[int], bool]) -> bool | None:
        before, on_stream = len(self.on_cpu), self._early.speculated

        def counted(unit: int) -> bool:
            holds = is_valid(unit)
            found.void += not holds
            return holds

        all_hold = keep_speculations(self, counted)
        found.kept += len(self.on_cpu) - before
        found.streamed += len(on_stream) if all(map(is_valid, on_stream)) else 0
        return all_hold

    def forget(self: Issuer, units: Collection[int] | None = None) -> None:
        futures = [future for action, future in self._speculated.items() if units is None or action.unit in units]
        forget_speculations(self, units)
        found.void += sum(not future.cancelled() for future in futures)

    with (
        mock.patch.object(Issuer, "keep_speculations", keep),
        mock.patch.object(Issuer, "forget_speculations", forget),
    ):
        yield found


def wait_for_speculations(engine: Any) -> list[BaseException | None]:
    """Wait until all speculated steps of ``engine`` have run, and return the exception of each; none with stock."""
    running = getattr(engine.optimizer, "_running", None)
    return [] if running is None else [future.exception() for future in running.executor._issuer._speculated.values()]


@dataclass
class Record:
    """The values of one training run on this rank: tensors without padding, and numbers per step or sub-group."""

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    numbers: dict[str, list[float]] = field(default_factory=dict)
    optimizer_class: str = ""
    deferred: int = 0
    """The number of forwards that began while an update was in flight."""
    placements: set[str] = field(default_factory=set)
    speculations: Speculations = field(default_factory=Speculations)


def make_engine(case: Case, block: Block) -> Any:
    torch.manual_seed(17)
    config = case.ds_config(block)
    if case.zero_init:
        with deepspeed.zero.Init(config_dict_or_path=config):
            model = ParityNet(case)
    else:
        model = ParityNet(case)
    with mock.patch.object(HostDevice, "shares_host_memory", case.shares_host_memory):
        engine, *_ = deepspeed.initialize(model=model, model_parameters=param_groups(model, case), config=config)
    return engine


def run_variant(case: Case, block: Block) -> Record:
    with counted_speculations() as counts, shared_folder() as folder, closing_engine(case, block) as engine:
        return replace(train(engine, case, folder), speculations=counts)


def run_resumed(case: Case, saved_by: Block, resumed_by: Block) -> Record:
    with counted_speculations() as counts, shared_folder() as folder:
        with closing_engine(case, saved_by) as engine:
            train(engine, case, folder)
            engine.save_checkpoint(str(folder))
        with closing_engine(case, resumed_by) as engine:
            engine.load_checkpoint(str(folder))
            return replace(train(engine, case, folder), speculations=counts)


def run(case: Case, saved_by: Block, block: Block) -> Record:
    return run_resumed(case, saved_by, block) if case.resume else run_variant(case, block)


@contextmanager
def closing_engine(case: Case, block: Block) -> Iterator[Any]:
    engine = make_engine(case, block)
    try:
        yield engine
    finally:
        engine.destroy()


@contextmanager
def shared_folder() -> Iterator[Path]:
    """Yield a temporary folder that is the same on every rank, and remove it when all ranks have left the context."""
    paths = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(paths, src=0)
    folder = Path(str(paths[0]))
    try:
        yield folder
    except BaseException:
        # The other ranks may never leave the context.
        if dist.get_rank() == 0:
            shutil.rmtree(folder, ignore_errors=True)
        raise
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder)


def gathered(value: Any) -> list[Any]:
    """Return the values of all ranks. A collective."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def parity_inputs(case: Case, step: int, micro_batch: int) -> tuple[Any, ...]:
    """Return the arguments of a ``ParityNet`` for this rank's micro-batch, which is counted over all steps."""
    x, target = batch(case, dist.get_rank(), micro_batch, DTYPES[case.dtype])
    sometimes: float | None = 1.0
    if micro_batch in case.skips_sometimes:
        sometimes = 0.0 if case.zero_instead_of_skip else None
    return x, target, sometimes, case.poisoned.get(step, 1.0)


def forward(engine: Any, inputs: tuple[Any, ...]) -> torch.Tensor:
    """Return the loss of the inputs. A copy to the device that blocks would prevent the overlap."""
    tensors = (each.to(engine.device, non_blocking=True) if isinstance(each, torch.Tensor) else each for each in inputs)
    loss: torch.Tensor = engine(*tensors)
    return loss


def train_on_batch(engine: Any, case: Case, number: int) -> torch.Tensor:
    loss = forward(engine, parity_inputs(case, -1, number))
    engine.backward(loss)
    engine.step()
    return loss.detach()


def train(engine: Any, case: Case, folder: Path, inputs: Callable[..., tuple[Any, ...]] = parity_inputs) -> Record:
    record = Record(optimizer_class=type(engine.optimizer).__name__)
    # These are read at the end, because reading one waits for the accelerator, which would prevent the overlap.
    losses: list[torch.Tensor] = []
    norms: list[Any] = []
    scales = record.numbers["loss_scale"] = []
    skipped = record.numbers["skipped"] = []
    lrs = record.numbers["lr"] = []
    micro_batch = 0
    for step in range(case.steps):
        for position in range(case.accumulation):
            update = getattr(engine.optimizer, "_update", None)
            record.deferred += update is not None and update._executor.pending
            loss = forward(engine, inputs(case, step, micro_batch))
            engine.backward(loss)
            if not case.caller_accumulates or position == case.accumulation - 1:
                engine.step()
            losses.append(loss.detach())
            micro_batch += 1
        norms.append(engine.get_global_grad_norm())
        scales.append(float(engine.optimizer.loss_scale))
        skipped.append(engine.skipped_steps)
        lrs.extend(group["lr"] for group in engine.optimizer.param_groups)
        if case.reload is not None and step + 1 == case.reload[0]:
            engine.save_checkpoint(str(folder))
        if case.reload is not None and step + 1 == case.reload[1]:
            engine.load_checkpoint(str(folder), load_optimizer_states=case.load_optimizer_states)
    record.numbers["loss"] = [loss.item() for loss in losses]
    record.numbers["norm"] = [float(norm) for norm in norms]
    collect(engine.optimizer, record)
    return record


def collect(optimizer: Any, record: Record) -> None:
    steps = record.numbers["step"] = []
    # DeepSpeed counts parameters over all engines, and variants are compared by position.
    first = min(param.ds_id for group in optimizer.fp16_groups for param in group)
    for sub_group_id, group in enumerate(optimizer.fp16_groups):
        master = optimizer.fp32_partitioned_groups_flat[sub_group_id]
        state = optimizer.state[master]
        steps.append(state["step"])
        flat = {
            "master": master.data,
            "exp_avg": state["exp_avg"],
            "exp_avg_sq": state["exp_avg_sq"],
            "param": optimizer.fp16_partitioned_groups_flat[sub_group_id],
        }
        offset = 0
        for param in group:
            real = real_numel(param)
            for kind, tensor in flat.items():
                # The 16-bit parameters are on the accelerator.
                record.tensors[f"{kind} of {param.ds_id - first}"] = tensor[offset : offset + real].cpu().clone()
            record.tensors[f"ds_tensor of {param.ds_id - first}"] = param.ds_tensor.data[:real].cpu().clone()
            offset += param.partition_numel()


def real_numel(param: Any) -> int:
    """Return the number of elements of this rank's partition, without the padding, which stock does not initialize."""
    numel: int = param.partition_numel()
    return max(0, min(numel, param.ds_numel - dist.get_rank(param.ds_process_group) * numel))


def assert_same_bits(stock: Any, ours: Any) -> None:
    expected = recorded(stock)
    assert expected.tensors, "nothing would be compared"
    assert not differences(expected, recorded(ours))


def recorded(trained: Any) -> Record:
    if isinstance(trained, Record):
        return trained
    record = Record()
    collect(trained.optimizer, record)
    return record


def differences(expected: Record, found: Record) -> list[str]:
    values = [(name, numbers, found.numbers[name]) for name, numbers in expected.numbers.items()]
    names = sorted(expected.tensors.keys() | found.tensors.keys())
    values += [(name, expected.tensors.get(name), found.tensors.get(name)) for name in names]
    return [f"{name}: stock {one}, found {other}" for name, one, other in values if not same(one, other)]


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        if (one.dtype, one.shape, one.device) != (other.dtype, other.shape, other.device):
            return False
        return torch.equal(one.flatten().view(torch.uint8), other.flatten().view(torch.uint8))
    return type(one) is type(other) and repr(one) == repr(other)


def placements_by_name(optimizer: Any) -> dict[str, Placement]:
    """Return the placement of each parameter by its name: of the unit with its middle, as its ends may be in others."""
    plan = optimizer._running.plan
    found = {}
    for sub_group, partitions in enumerate(partitions_by_name(optimizer)):
        runs = [(run, unit.index) for unit in plan.workload.units for run in unit.ranges if run.sub_group == sub_group]
        begin = 0
        for partition in partitions:
            middle = begin + partition.numel // 2
            (index,) = (index for run, index in runs if run.begin <= middle < run.end)
            found[partition.name] = plan.placements[index]
            begin += partition.numel
    return found


def same_as_stock(case: Case) -> Result:
    if case.resume:
        stock = run_resumed(case, None, None)
        variants = {f"stock to {block}": run_resumed(case, None, block) for block in case.blocks}
        variants |= {f"{block} to stock": run_resumed(case, block, None) for block in case.blocks}
    else:
        stock = run_variant(case, None)
        variants = {str(block): run_variant(case, block) for block in case.blocks}
    return result(stock, variants)


def result(stock: Record, variants: dict[str, Record]) -> Result:
    return {
        "numbers": stock.numbers,
        "stock class": stock.optimizer_class,
        "classes": {name: variant.optimizer_class for name, variant in variants.items()},
        "deferred": {name: variant.deferred for name, variant in variants.items()},
        "speculations": {name: astuple(variant.speculations) for name, variant in variants.items()},
        "differences": {name: differences(stock, variant) for name, variant in variants.items()},
    }
