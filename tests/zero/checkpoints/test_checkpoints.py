"""Check that stock and the plugin read each other's checkpoints, and that a load keeps every tensor in its place."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from deepspeed.checkpoint import ds_to_universal
from deepspeed.checkpoint.constants import OPTIMIZER_STATE_DICT
from deepspeed.runtime.checkpoint_engine import TorchCheckpointEngine
from deepspeed.utils import safe_set_local_optimizer_state
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from torch.utils._pytree import tree_flatten

from tests.ranks import on_ranks
from tests.zero.parity.case import CPU, STREAMED_ONE_SLOT, STRIDE_2, Case, by_sub_group
from tests.zero.parity.cases import ALL_ON_DISK, ON_DISK, OTHER_RULES, PLANNED_REST, RULES, SOME_ON_DISK
from tests.zero.parity.training import (
    Block,
    Record,
    closing_engine,
    collect,
    differences,
    run_resumed,
    train,
)

CASE = Case(
    name="checkpoints",
    blocks=(),
    steps=3,
    clip=0.5,
    zero={"stage3_gather_16bit_weights_on_model_save": True},
)
UNIVERSAL = {"checkpoint": {"load_universal": True}}
MIXED = by_sub_group("resident", "cpu", "streamed", "cpu", "streamed")
VARIANTS: dict[str, Block] = {"stock": None, "ours": STRIDE_2}
FIRST_TAG = f"global_step{CASE.steps}"


def make_case(**changes: Any) -> Case:
    return replace(CASE, world_size=dist.get_world_size(), **changes)


@dataclass(frozen=True)
class Places:
    """The addresses of the states, the kernels that update them, and the number of memory reservations."""

    addresses: tuple[int, ...]
    kernels: tuple[int, ...]
    reserved: int

    @classmethod
    def from_optimizer(cls, optimizer: Any) -> Places:
        """Return the places of the states, and check that DeepSpeed's attributes show the tensors that are updated."""
        masters = optimizer.fp32_partitioned_groups_flat
        keys = ("exp_avg", "exp_avg_sq")
        shown = [(master, *(optimizer.optimizer.state[master][key] for key in keys)) for master in masters]
        updated = [
            (tensors.master, tensors.exp_avg, tensors.exp_avg_sq) for tensors in optimizer._running.memory.sub_groups
        ]
        addresses, updated_addresses = (
            [tensor.data_ptr() for sub_group in sub_groups for tensor in sub_group] for sub_groups in (shown, updated)
        )
        assert addresses == updated_addresses
        assert len(set(addresses)) == len(addresses) >= 15
        kernels = (optimizer._running.executor, optimizer._running.executor._actions, *optimizer._assembly.kernels)
        return cls(tuple(addresses), tuple(map(id, kernels)), len(optimizer.accounting_device.reserved))


@contextmanager
def states_stay_in_place(optimizer: Any) -> Iterator[None]:
    """Check that the block moves no state and reserves no memory. Stock's optimizer is not checked.

    With bf16 masters, a load puts the moments in another dtype, which needs other slots.
    """
    if not hasattr(optimizer, "plan") or CASE.states == "bf16-masters":
        yield
        return
    before = Places.from_optimizer(optimizer)
    yield
    assert Places.from_optimizer(optimizer) == before


def assert_same(expected: Record, found: Record, label: object = "") -> None:
    assert len(expected.tensors) >= 30
    assert differences(expected, found) == [], label


def resume_in_fresh_engine(block: Block, folder: Path, case: Case | None = None, **load_options: Any) -> Record:
    case = make_case() if case is None else case
    with closing_engine(case, block) as engine, states_stay_in_place(engine.optimizer):
        path, _ = engine.load_checkpoint(str(folder), **load_options)
        assert path is not None
        return train(engine, case, folder)


def state_of(engine: Any) -> Record:
    found = Record()
    collect(engine.optimizer, found)
    return found


def save(folder: Path) -> None:
    """Save with every variant, and check that the files have stock's types, order of keys and sizes of storage.

    The job ``resume`` checks the bits: stock's padding holds arbitrary elements of backward's buffers.
    """
    saved = {}
    for name, block in VARIANTS.items():
        with closing_engine(make_case(), block) as engine, states_stay_in_place(engine.optimizer):
            train(engine, make_case(), folder)
            engine.save_checkpoint(str(folder / name))
        (path,) = (folder / name / FIRST_TAG).glob(f"*zero_pp_rank_{dist.get_rank()}_*optim_states.pt")
        saved[name] = tree_flatten(torch.load(path, weights_only=False)[OPTIMIZER_STATE_DICT])
    (stock, tree), (ours, our_tree) = saved.values()
    assert tree == our_tree
    assert sum(isinstance(leaf, torch.Tensor) for leaf in stock) >= 15
    for expected, found in zip(stock, ours, strict=True):
        assert type(expected) is type(found)
        if isinstance(expected, torch.Tensor):
            assert expected.dtype == found.dtype
            assert expected.requires_grad == found.requires_grad
            assert expected.untyped_storage().nbytes() == found.untyped_storage().nbytes()
            assert vars(expected).keys() == vars(found).keys()


def convert_to_universal(root: Path, tag: str) -> None:
    """Convert the checkpoint ``tag`` in ``root`` to a universal checkpoint, which is the next one to be loaded."""
    options = ["--input_folder", str(root / tag), "--output_folder", str(root / "universal")]
    sys.argv[1:] = [*options, "--num_extract_workers", "1", "--num_merge_workers", "1"]
    ds_to_universal.main(ds_to_universal.parse_arguments())


def resume(folder: Path) -> None:
    """Export checkpoints of stock and of the plugin, and resume them with other placements and numbers of slots."""
    stock, ours = (Record(tensors=get_fp32_state_dict_from_zero_checkpoint(str(folder / name))) for name in VARIANTS)
    assert len(stock.tensors) == 8
    assert differences(stock, ours) == [], "zero_to_fp32"
    expected = resume_in_fresh_engine(None, folder / "stock")
    assert_same(expected, resume_in_fresh_engine(None, folder / "ours"), "ours to stock")
    for block in (STREAMED_ONE_SLOT, MIXED):
        with closing_engine(make_case(), block) as engine:
            for saved_by in VARIANTS:
                with states_stay_in_place(engine.optimizer):
                    engine.load_checkpoint(str(folder / saved_by))
                    assert_same(expected, train(engine, make_case(), folder), f"{saved_by} to {block}")


def another_set_of_rules(folder: Path) -> None:
    """Load checkpoints that were saved under rules by name with stock and under other rules, and the other way."""
    expected = run_resumed(make_case(), None, None)
    ways: list[tuple[Block, Block]] = [(RULES, OTHER_RULES), (OTHER_RULES, PLANNED_REST), (PLANNED_REST, None)]
    for saved_by, resumed_by in ways:
        assert_same(expected, run_resumed(make_case(), saved_by, resumed_by), f"{saved_by} to {resumed_by}")


def tags(folder: Path) -> None:
    """Check that tags, ``latest``, partial loads and exports have the results of stock."""
    stock, ours = (save_and_load_by_tag(block, folder / name) for name, block in VARIANTS.items())
    assert len(stock) == 7
    for name, expected in stock.items():
        assert_same(expected, ours[name], name)


def save_and_load_by_tag(block: Block, folder: Path) -> dict[str, Record]:
    """Return one record for each way to save, export and load."""
    found = {}
    with closing_engine(make_case(), block) as engine, states_stay_in_place(engine.optimizer):
        train(engine, make_case(), folder)
        engine.save_checkpoint(str(folder), tag="first")
        first = state_of(engine)
        train(engine, make_case(), folder)
        engine.save_checkpoint(str(folder), tag="second", save_latest=False)
        second = state_of(engine)
        assert (folder / "latest").read_text() == "first"
        engine.save_16bit_model(str(folder / "16bit"))
        weights = torch.load(folder / "16bit" / "pytorch_model.bin") if dist.get_rank() == 0 else {}
        found["16bit"] = replace(second, tensors={**second.tensors, **weights})
        whole = get_fp32_state_dict_from_zero_checkpoint(str(folder), tag="second")
        assert len(whole) == 8
        found["zero_to_fp32"] = replace(second, tensors={**second.tensors, **whole})
        train(engine, make_case(), folder)
        engine.load_checkpoint(str(folder))
        assert_same(first, state_of(engine), "latest")
        engine.load_checkpoint(str(folder), tag="second")
        assert_same(second, state_of(engine), "the second tag")
        found["in process"] = train(engine, make_case(), folder)
        assert engine.load_checkpoint(str(folder / "nowhere")) == (None, None)
        found["nothing to load"] = train(engine, make_case(), folder)
        engine.load_checkpoint(str(folder), load_optimizer_states=False)
        found["without the optimizer, in process"] = train(engine, make_case(), folder)
    found["without the optimizer"] = resume_in_fresh_engine(block, folder, load_optimizer_states=False)
    found["the module only"] = resume_in_fresh_engine(block, folder, load_module_only=True, load_optimizer_states=False)
    return found


def latest_is_written_last(folder: Path) -> None:
    """Check that ``latest`` is written after the files of all ranks, also if no parameter stays gathered.

    Where a parameter stays gathered, its gather makes the ranks wait for each other after they have written.
    """
    case = make_case(zero={"stage3_param_persistence_threshold": 0})
    write = TorchCheckpointEngine.save

    def delayed_save(self: Any, state_dict: Any, path: str) -> None:
        if dist.get_rank() == 1:
            time.sleep(0.5)
        write(self, state_dict, path)
        assert not (folder / "latest").exists(), "latest names a checkpoint that misses a file"

    with closing_engine(case, MIXED) as engine, mock.patch.object(TorchCheckpointEngine, "save", delayed_save):
        train(engine, case, folder)
        engine.save_checkpoint(str(folder))
    assert (folder / "latest").read_text() == FIRST_TAG


def missing_moments(folder: Path) -> None:
    """Load checkpoints without the moments of some or all sub-groups, as stock loads them.

    Twin-Flow saves no moments of the sub-groups that it updates on the GPU. SuperOffload saves no moments at all.
    """
    expected = resume_in_fresh_engine(None, folder / "stock")
    for missing in ((0, 1), range(5)):
        incomplete = folder / f"incomplete {len(missing)}"
        shutil.copytree(folder / "stock", incomplete, ignore=shutil.ignore_patterns("universal"))
        (path,) = incomplete.glob("*/*optim_states.pt")
        saved = torch.load(path, weights_only=False)
        moments = saved[OPTIMIZER_STATE_DICT]["optimizer_state_dict"]["state"]
        for sub_group in missing:
            del moments[sub_group]
        torch.save(saved, path)
        stock = resume_in_fresh_engine(None, incomplete)
        assert differences(expected, stock) != [], missing
        with closing_engine(make_case(), MIXED) as engine, states_stay_in_place(engine.optimizer):
            for engine_state in ("fresh", "in process"):
                engine.load_checkpoint(str(incomplete))
                assert_same(stock, train(engine, make_case(), folder), (missing, engine_state))


def asynchronous_writer(folder: Path) -> None:
    """Check that a checkpoint engine that reads after ``save_checkpoint`` has returned reads the step of the save."""
    # DeepSpeed's launcher sets these.
    os.environ.update(CROSS_RANK="0", CROSS_SIZE="1")
    for decoupled in (False, True):
        root = folder / str(decoupled)
        case = make_case(extra={"checkpoint": {"writer": {"type": "python", "decoupled": decoupled}}})
        with closing_engine(case, MIXED) as engine, states_stay_in_place(engine.optimizer):
            assert engine.checkpoint_engine.is_decoupled() == decoupled
            train(engine, case, root)
            saved = state_of(engine)
            with suspended(engine.checkpoint_engine):
                engine.save_checkpoint(str(root))
                # DeepSpeed waits for the writer before the next step, but not before a setter.
                for param in engine.module.parameters():
                    safe_set_local_optimizer_state(param, torch.full_like(param.ds_tensor, 0.5), "exp_avg")
            continued = train(engine, case, root)
            later = state_of(engine)
            engine.save_checkpoint(str(root), tag="at the end")
        assert differences(saved, later) != []
        with closing_engine(make_case(), None) as engine:
            engine.load_checkpoint(str(root), tag=FIRST_TAG)
            assert_same(saved, state_of(engine), case)
            assert differences(continued, train(engine, make_case(), folder)) != [], "the setter has had no effect"
            engine.load_checkpoint(str(root), tag="at the end")
            assert_same(later, state_of(engine), "the checkpoint that was written when the engine was destroyed")


@contextmanager
def suspended(checkpoint_engine: Any) -> Iterator[None]:
    """Stop the writer process of the checkpoint engine inside the block, if there is one, so that it reads nothing."""
    process = getattr(checkpoint_engine, "ckpt_process", None)
    for number in (signal.SIGSTOP, signal.SIGCONT):
        if process is not None:
            os.kill(process.pid, number)
        if number == signal.SIGSTOP:
            yield


def universal(folder: Path) -> None:
    """Load universal checkpoints on another number of ranks than saved them, and compare with stock."""
    case = make_case(extra=UNIVERSAL)
    expected = resume_in_fresh_engine(None, folder / "stock", case)
    assert_same(expected, resume_in_fresh_engine(None, folder / "ours", case), "ours to stock")
    assert_same(expected, resume_in_fresh_engine(MIXED, folder / "stock", case), "stock to ours")


def universal_without_optimizer_states(folder: Path) -> None:
    """Load universal checkpoints without the optimizer's states, and compare with stock."""
    case = make_case(extra=UNIVERSAL)
    whole = resume_in_fresh_engine(CPU, folder / "ours", case)
    for load_options in ({"load_optimizer_states": False}, {"load_module_only": True}):
        stock = resume_in_fresh_engine(None, folder / "stock", case, **load_options)
        assert differences(whole, stock) != []
        assert_same(stock, resume_in_fresh_engine(MIXED, folder / "ours", case, **load_options), load_options)


@dataclass(frozen=True)
class CheckpointJob:
    """A function that asserts its result, called on each of ``ranks`` with a folder.

    If ``saved_on`` is given, the folder contains checkpoints that this number of ranks has saved. ``converted`` ones
    are universal, too. The job runs with these ``states``: "disk", or values of ``plan --states``.
    """

    run: Callable[[Path], None]
    ranks: int
    saved_on: int = 0
    converted: bool = False
    states: tuple[str, ...] = ("fp32",)


JOBS = {
    # Parity resumes with states on disk.
    "resume": CheckpointJob(resume, 2, saved_on=2, states=("fp32", "bf16-masters", "bf16")),
    "missing moments": CheckpointJob(missing_moments, 1, saved_on=1),
    "another set of rules": CheckpointJob(another_set_of_rules, 2),
    # A load with bf16 masters puts the moments in another dtype, with stock, too: the job would find other states.
    "tags": CheckpointJob(tags, 2, states=("fp32", "bf16")),
    "latest is written last": CheckpointJob(latest_is_written_last, 2),
    "asynchronous writer": CheckpointJob(asynchronous_writer, 1),
    "universal, 1 to 2 ranks": CheckpointJob(universal, 2, saved_on=1, converted=True, states=("fp32", "disk")),
    "universal, 2 to 1 ranks": CheckpointJob(universal, 1, saved_on=2, converted=True, states=("bf16-masters", "bf16")),
    "universal, 2 to 4 ranks": CheckpointJob(universal, 4, saved_on=2, converted=True),
    "universal, without optimizer states": CheckpointJob(
        universal_without_optimizer_states, 1, saved_on=1, converted=True
    ),
}


@dataclass(frozen=True)
class Checkpoints:
    """Folders with the checkpoints of ``VARIANTS``, saved and converted when a test first needs them."""

    root: Path

    def saved(self, states: str, world_size: int) -> Path:
        folder = self.root / states / str(world_size)
        if not folder.exists():
            folder.mkdir(parents=True)
            run_with(states, save, world_size, folder)
        return folder

    def converted(self, states: str, world_size: int) -> Path:
        folder = self.saved(states, world_size)
        if not (folder / "ours" / "universal").exists():
            run_with(states, convert, 1, folder, group=nullcontext)
        return folder


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    return Checkpoints(tmp_path_factory.mktemp("checkpoints"))


def run_with(states: str, job: Callable[[Path], None], world_size: int, folder: Path, **options: Any) -> None:
    on_ranks(world_size, run_on_this_rank, states, job, folder, **options)


def run_on_this_rank(states: str, job: Callable[[Path], None], folder: Path) -> None:
    global CASE, MIXED
    if states == "disk":
        CASE = replace(ON_DISK, widths=(40, 150, 130, 90, 90, 60, 30), steps=3, clip=0.5, zero=CASE.zero)
        VARIANTS["ours"], MIXED = ALL_ON_DISK, SOME_ON_DISK
    else:
        CASE = replace(CASE, states=states)
    job(folder)


def convert(folder: Path) -> None:
    for name in VARIANTS:
        convert_to_universal(folder / name, FIRST_TAG)


@pytest.mark.P4
@pytest.mark.parametrize(
    ("states", "name"),
    [
        pytest.param(states, name, marks=pytest.mark.xdist_group(f"checkpoints {states}"))
        for name, job in JOBS.items()
        for states in job.states
    ],
)
def test_checkpoints_are_saved_and_loaded_as_with_stock(
    states: str, name: str, checkpoints: Checkpoints, tmp_path: Path
) -> None:
    job = JOBS[name]
    prepared = checkpoints.converted if job.converted else checkpoints.saved
    run_with(states, job.run, job.ranks, prepared(states, job.saved_on) if job.saved_on else tmp_path)
