"""Check that stock and the plugin read each other's checkpoints, and that a load keeps every tensor in its place."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
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
from tests.zero.parity.cases import ALL_ON_DISK, ON_DISK, SOME_ON_DISK
from tests.zero.parity.training import Block, Record, assert_same_bits, closing_engine, differences, recorded, train

CASE = Case(name="checkpoints", blocks=(), steps=3, clip=0.5, zero={"stage3_gather_16bit_weights_on_model_save": True})
UNIVERSAL = {"checkpoint": {"load_universal": True}}
MIXED = by_sub_group("resident", "cpu", "streamed", "cpu", "streamed")
VARIANTS: dict[str, Block] = {"stock": None, "ours": STRIDE_2}
FIRST_TAG = f"global_step{CASE.steps}"


def make_case(**changes: Any) -> Case:
    return replace(CASE, world_size=dist.get_world_size(), **changes)


def places_of(optimizer: Any) -> list[int]:
    """Return the addresses of the states, which DeepSpeed's attributes show, and the number of memory reservations."""
    state, masters = optimizer.optimizer.state, optimizer.fp32_partitioned_groups_flat
    tensors = [
        tensor for master in masters for tensor in (master, state[master]["exp_avg"], state[master]["exp_avg_sq"])
    ]
    addresses = [tensor.data_ptr() for tensor in tensors]
    assert len(set(addresses)) == len(addresses) >= 15
    return [*addresses, len(optimizer.accounting_device.reserved)]


@contextmanager
def states_stay_in_place(optimizer: Any) -> Iterator[None]:
    """Check that the block moves no state and reserves no memory. Stock's optimizer is not checked.

    With bf16 masters, a load puts the moments in another dtype, which needs other slots.
    """
    is_checked = hasattr(optimizer, "plan") and CASE.states != "bf16-masters"
    before = places_of(optimizer) if is_checked else None
    yield
    assert not is_checked or places_of(optimizer) == before


def resume_in_fresh_engine(block: Block, folder: Path, case: Case | None = None, **load_options: Any) -> Record:
    case = make_case() if case is None else case
    with closing_engine(case, block) as engine, states_stay_in_place(engine.optimizer):
        path, _ = engine.load_checkpoint(str(folder), **load_options)
        assert path is not None
        return train(engine, case, folder)


def save(folder: Path) -> None:
    """Save with every variant, and compare types, keys and sizes with stock's. Stock's padding is arbitrary."""
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
    stock, ours = (Record(tensors=get_fp32_state_dict_from_zero_checkpoint(str(folder / name))) for name in VARIANTS)
    assert len(stock.tensors) == 8
    assert_same_bits(stock, ours)
    expected = resume_in_fresh_engine(None, folder / "stock")
    assert_same_bits(expected, resume_in_fresh_engine(None, folder / "ours"))
    for block in (STREAMED_ONE_SLOT, MIXED):
        with closing_engine(make_case(), block) as engine:
            for saved_by in VARIANTS:
                with states_stay_in_place(engine.optimizer):
                    engine.load_checkpoint(str(folder / saved_by))
                    assert_same_bits(expected, train(engine, make_case(), folder))


def tags(folder: Path) -> None:
    stock, ours = (save_and_load_by_tag(block, folder / name) for name, block in VARIANTS.items())
    assert len(stock) == 7
    for name, expected in stock.items():
        assert_same_bits(expected, ours[name])


def save_and_load_by_tag(block: Block, folder: Path) -> dict[str, Record]:
    found = {}
    with closing_engine(make_case(), block) as engine, states_stay_in_place(engine.optimizer):
        train(engine, make_case(), folder)
        engine.save_checkpoint(str(folder), tag="first")
        first = recorded(engine)
        train(engine, make_case(), folder)
        engine.save_checkpoint(str(folder), tag="second", save_latest=False)
        second = recorded(engine)
        assert (folder / "latest").read_text() == "first"
        engine.save_16bit_model(str(folder / "16bit"))
        weights = torch.load(folder / "16bit" / "pytorch_model.bin") if dist.get_rank() == 0 else {}
        found["16bit"] = replace(second, tensors={**second.tensors, **weights})
        whole = get_fp32_state_dict_from_zero_checkpoint(str(folder), tag="second")
        assert len(whole) == 8
        found["zero_to_fp32"] = replace(second, tensors={**second.tensors, **whole})
        train(engine, make_case(), folder)
        engine.load_checkpoint(str(folder))
        assert_same_bits(first, recorded(engine))
        engine.load_checkpoint(str(folder), tag="second")
        assert_same_bits(second, recorded(engine))
        found["in process"] = train(engine, make_case(), folder)
        assert engine.load_checkpoint(str(folder / "nowhere")) == (None, None)
        found["nothing to load"] = train(engine, make_case(), folder)
        engine.load_checkpoint(str(folder), load_optimizer_states=False)
        found["without the optimizer, in process"] = train(engine, make_case(), folder)
    found["without the optimizer"] = resume_in_fresh_engine(block, folder, load_optimizer_states=False)
    found["the module only"] = resume_in_fresh_engine(block, folder, load_module_only=True, load_optimizer_states=False)
    return found


def latest_is_written_last(folder: Path) -> None:
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
            for _ in ("a fresh engine", "a trained one"):
                engine.load_checkpoint(str(incomplete))
                assert_same_bits(stock, train(engine, make_case(), folder))


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
            saved = recorded(engine)
            with suspended(engine.checkpoint_engine):
                engine.save_checkpoint(str(root))
                # DeepSpeed waits for the writer before the next step, but not before a setter.
                for param in engine.module.parameters():
                    safe_set_local_optimizer_state(param, torch.full_like(param.ds_tensor, 0.5), "exp_avg")
            continued = train(engine, case, root)
            later = recorded(engine)
            engine.save_checkpoint(str(root), tag="at the end")
        assert differences(saved, later) != []
        with closing_engine(make_case(), None) as engine:
            engine.load_checkpoint(str(root), tag=FIRST_TAG)
            assert_same_bits(saved, recorded(engine))
            assert differences(continued, train(engine, make_case(), folder)) != [], "the setter has had no effect"
            engine.load_checkpoint(str(root), tag="at the end")
            assert_same_bits(later, recorded(engine))


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
    case = make_case(extra=UNIVERSAL)
    expected = resume_in_fresh_engine(None, folder / "stock", case)
    assert_same_bits(expected, resume_in_fresh_engine(None, folder / "ours", case))
    assert_same_bits(expected, resume_in_fresh_engine(MIXED, folder / "stock", case))


def universal_without_optimizer_states(folder: Path) -> None:
    case = make_case(extra=UNIVERSAL)
    whole = resume_in_fresh_engine(CPU, folder / "ours", case)
    for load_options in ({"load_optimizer_states": False}, {"load_module_only": True}):
        stock = resume_in_fresh_engine(None, folder / "stock", case, **load_options)
        assert differences(whole, stock) != []
        assert_same_bits(stock, resume_in_fresh_engine(MIXED, folder / "ours", case, **load_options))


JOBS: list[tuple[str, Callable[[Path], None], int, int]] = [
    # Parity resumes with states on disk.
    *((states, resume, 2, 2) for states in ("fp32", "bf16-masters", "bf16")),
    ("fp32", missing_moments, 1, 1),
    ("fp32", tags, 2, 0),
    ("fp32", latest_is_written_last, 2, 0),
    ("fp32", asynchronous_writer, 1, 0),
    *((states, universal, 2, 1) for states in ("fp32", "disk")),
    *((states, universal, 1, 2) for states in ("bf16-masters", "bf16")),
    ("fp32", universal_without_optimizer_states, 1, 1),
]
"""The states, "disk" or of ``plan --states``; a function that asserts its result; its ranks, and those that saved."""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


def prepared(root: Path, states: str, world_size: int, *, converted: bool) -> Path:
    folder = root / states / str(world_size)
    if not folder.exists():
        folder.mkdir(parents=True)
        on_ranks(world_size, run_on_this_rank, states, save, folder)
    if converted and not (folder / "ours" / "universal").exists():
        for name in VARIANTS:
            on_ranks(1, convert_to_universal, folder / name, FIRST_TAG, group=nullcontext)
    return folder


def run_on_this_rank(states: str, job: Callable[[Path], None], folder: Path) -> None:
    global CASE, MIXED
    if states == "disk":
        CASE = replace(ON_DISK, widths=(40, 150, 130, 90, 90, 60, 30), steps=3, clip=0.5, zero=CASE.zero)
        VARIANTS["ours"], MIXED = ALL_ON_DISK, SOME_ON_DISK
    else:
        CASE = replace(CASE, states=states)
    job(folder)


@pytest.mark.P4
@pytest.mark.parametrize(
    ("states", "job", "world_size", "saved_on"),
    [pytest.param(*job, marks=pytest.mark.xdist_group(f"checkpoints {job[0]}")) for job in JOBS],
)
def test_checkpoints_are_saved_and_loaded_as_with_stock(
    states: str, job: Callable[[Path], None], world_size: int, saved_on: int, root: Path, tmp_path: Path
) -> None:
    is_universal = job in (universal, universal_without_optimizer_states)
    folder = prepared(root, states, saved_on, converted=is_universal) if saved_on else tmp_path
    on_ranks(world_size, run_on_this_rank, states, job, folder)
