"""Saves, converts and loads checkpoints by stock DeepSpeed and with the plugin; answers which job found what.

The argument is a folder. The jobs are functions of this file, each done by forked ranks of its own.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from deepspeed.checkpoint import ds_to_universal
from deepspeed.checkpoint.constants import OPTIMIZER_STATE_DICT
from deepspeed.runtime.checkpoint_engine import TorchCheckpointEngine
from deepspeed.utils import safe_set_local_optimizer_state
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from torch.utils._pytree import tree_flatten

from deep_opt_states.zero.start import planning
from deep_opt_states.zero.start.devices import AcceleratorChoice
from tests.launch import answer
from tests.model.profiles import RATES, profile
from tests.zero.forked import Group, import_late
from tests.zero.parity.arm import Block, Record, closing_engine, collect, differences, train
from tests.zero.parity.case import CPU, STREAMED_ONE_SLOT, STRIDE_2, Case

CASE = Case(
    name="checkpoints",
    blocks=(),
    steps=3,
    clip=0.5,
    zero={"stage3_gather_16bit_weights_on_model_save": True},
)
UNIVERSAL = {"checkpoint": {"load_universal": True}}
MIXED = {"placement": ["resident", "cpu", "streamed", "cpu", "streamed"]}
ARMS: dict[str, Block] = {"stock": None, "ours": STRIDE_2}

SLOW_CPU = dict.fromkeys((name for name in RATES if name.startswith("cpu_adam")), 1e7)
SLOW_LINK = dict.fromkeys((name for name in RATES if "h2d" in name or "d2h" in name or "both" in name), 3e8)
PROFILES = {"slow CPU": (SLOW_CPU, 0.003), "slow link": (SLOW_LINK, 0.001)}
"""Rates, and gigabytes of the GPU, for which another plan is the best."""

FIRST = f"global_step{CASE.steps}"


def case(**changes: Any) -> Case:
    return replace(CASE, world_size=dist.get_world_size(), **changes)


@dataclass(frozen=True)
class Places:
    """Where states are, and what updates them, and in how much memory."""

    addresses: tuple[int, ...]
    kernels: tuple[int, ...]
    reserved: int

    @classmethod
    def of(cls, optimizer: Any) -> Places:
        """The same for whoever asks DeepSpeed and for what updates."""
        masters = optimizer.fp32_partitioned_groups_flat
        keys = ("exp_avg", "exp_avg_sq")
        asked = [(master, *(optimizer.optimizer.state[master][key] for key in keys)) for master in masters]
        updated = [(state.master, state.exp_avg, state.exp_avg_sq) for state in optimizer._states]
        addresses, ours = ([tensor.data_ptr() for its in each for tensor in its] for each in (asked, updated))
        assert addresses == ours
        assert len(set(addresses)) == len(addresses) >= 15
        kernels = (optimizer._executor, optimizer._executor._actions, *optimizer._kernels)
        return cls(tuple(addresses), tuple(map(id, kernels)), len(optimizer.ledger.reserved))


@contextmanager
def stays(optimizer: Any) -> Iterator[None]:
    """Nothing moves, and nothing more is reserved."""
    if not hasattr(optimizer, "plan"):
        yield
        return
    before = Places.of(optimizer)
    yield
    assert Places.of(optimizer) == before


def same(expected: Record, found: Record, what: object = "") -> None:
    assert len(expected.tensors) >= 30
    assert differences(expected, found) == [], what


def continued(block: Block, folder: Path, its: Case | None = None, **how: Any) -> Record:
    """Trained from a checkpoint by a fresh engine."""
    its = case() if its is None else its
    with closing_engine(its, block) as engine, stays(engine.optimizer):
        path, _ = engine.load_checkpoint(str(folder), **how)
        assert path is not None
        return train(engine, its, folder)


def state_of(engine: Any) -> Record:
    found = Record()
    collect(engine.optimizer, found)
    return found


# The jobs that others start from


def save(folder: Path) -> None:
    """What is saved is equal, to the bit, the type and the order of keys."""
    saved = {}
    for name, block in ARMS.items():
        with closing_engine(case(), block) as engine, stays(engine.optimizer):
            train(engine, case(), folder)
            engine.save_checkpoint(str(folder / name))
        (path,) = (folder / name / FIRST).glob(f"*zero_pp_rank_{dist.get_rank()}_*optim_states.pt")
        saved[name] = tree_flatten(torch.load(path, weights_only=False)[OPTIMIZER_STATE_DICT])
    (stock, tree), (ours, our_tree) = saved.values()
    assert tree == our_tree
    assert sum(isinstance(leaf, torch.Tensor) for leaf in stock) >= 15
    for expected, found in zip(stock, ours, strict=True):
        assert type(expected) is type(found)
        if isinstance(expected, torch.Tensor):
            assert expected.dtype == found.dtype
            # Padding is not zero with stock: what is beside it in backward's buffers.
            assert expected.requires_grad == found.requires_grad
            assert expected.untyped_storage().nbytes() == found.untyped_storage().nbytes()
            assert vars(expected).keys() == vars(found).keys()


def convert(folder: Path) -> None:
    for name in ARMS:
        for world_size in (1, 2):
            root = folder / f"{world_size}" / name
            options = ["--input_folder", str(root / FIRST), "--output_folder", str(root / "universal")]
            sys.argv[1:] = [*options, "--num_extract_workers", "1", "--num_merge_workers", "1"]
            ds_to_universal.main(ds_to_universal.parse_arguments())


# Jobs


def resume(folder: Path) -> None:
    """Both ways, and another placement, other slots, another profile."""
    planned = []
    for name, (rates, gpu_memory_gb) in PROFILES.items():
        path = folder / f"{name} {dist.get_rank()}.json"
        path.write_text(profile({**RATES, **rates}).to_json())
        planned.append({"placement": "planned", "profile": str(path), "gpu_memory_gb": gpu_memory_gb})
    expected = continued(None, folder / "stock")
    same(expected, continued(None, folder / "ours"), "ours to stock")
    plans = []
    for block in (STREAMED_ONE_SLOT, MIXED, *planned):
        with planned_as_for_a_gpu(), closing_engine(case(), block) as engine:
            for saved_by in ARMS:
                with stays(engine.optimizer):
                    engine.load_checkpoint(str(folder / saved_by))
                    same(expected, train(engine, case(), folder), f"{saved_by} to {block}")
            plans.append(str(engine.optimizer.plan))
    assert plans[-1] != plans[-2], "the profiles are to change the plan"


@contextmanager
def planned_as_for_a_gpu() -> Iterator[None]:
    """On the CPU accelerator a plan has everything on the CPU, and takes profiles of such machines only."""
    with (
        mock.patch.object(planning, "_refuse_other_machine"),
        mock.patch.object(AcceleratorChoice, "memory_for_states_bytes", lambda _, gb: int((gb or 0) * 1e9)),
    ):
        yield


def tags(folder: Path) -> None:
    """Tags, ``latest``, what is left out, and exports, each as with stock."""
    found = {name: part_by_part(block, folder / name) for name, block in ARMS.items()}
    assert len(found["stock"]) == 7
    for name, expected in found["stock"].items():
        same(expected, found["ours"][name], name)


def part_by_part(block: Block, folder: Path) -> dict[str, Record]:
    found = {}
    with closing_engine(case(), block) as engine, stays(engine.optimizer):
        train(engine, case(), folder)
        engine.save_checkpoint(str(folder), tag="first")
        first = state_of(engine)
        train(engine, case(), folder)
        engine.save_checkpoint(str(folder), tag="second", save_latest=False)
        second = state_of(engine)
        assert (folder / "latest").read_text() == "first"
        engine.save_16bit_model(str(folder / "16bit"))
        weights = torch.load(folder / "16bit" / "pytorch_model.bin") if dist.get_rank() == 0 else {}
        found["16bit"] = replace(second, tensors={**second.tensors, **weights})
        whole = get_fp32_state_dict_from_zero_checkpoint(str(folder), tag="second")
        assert len(whole) == 8
        found["zero_to_fp32"] = replace(second, tensors={**second.tensors, **whole})
        train(engine, case(), folder)
        engine.load_checkpoint(str(folder))
        same(first, state_of(engine), "latest")
        engine.load_checkpoint(str(folder), tag="second")
        same(second, state_of(engine), "a tag")
        found["in process"] = train(engine, case(), folder)
        assert engine.load_checkpoint(str(folder / "nowhere")) == (None, None)
        found["nothing to load"] = train(engine, case(), folder)
        engine.load_checkpoint(str(folder), load_optimizer_states=False)
        found["without the optimizer, in process"] = train(engine, case(), folder)
    found["without the optimizer"] = continued(block, folder, load_optimizer_states=False)
    found["of the module only"] = continued(block, folder, load_module_only=True, load_optimizer_states=False)
    return found


def latest_is_last(folder: Path) -> None:
    """Also where no parameter is kept gathered, for which ranks would wait for each other after they have written."""
    its = case(zero={"stage3_param_persistence_threshold": 0})
    write = TorchCheckpointEngine.save

    def late(self: Any, state_dict: Any, path: str) -> None:
        if dist.get_rank() == 1:
            time.sleep(0.5)
        write(self, state_dict, path)
        assert not (folder / "latest").exists(), "it names a checkpoint of which something is missing"

    with closing_engine(its, MIXED) as engine, mock.patch.object(TorchCheckpointEngine, "save", late):
        train(engine, its, folder)
        engine.save_checkpoint(str(folder))
    assert (folder / "latest").read_text() == FIRST


def without_moments(folder: Path) -> None:
    """Twin-Flow saves no moments of what it updates on the GPU, SuperOffload none at all."""
    expected = continued(None, folder / "stock")
    for missing in ((0, 1), range(5)):
        lacking = folder / f"lacking {len(missing)}"
        shutil.copytree(folder / "stock", lacking, ignore=shutil.ignore_patterns("universal"))
        (path,) = lacking.glob("*/*optim_states.pt")
        saved = torch.load(path, weights_only=False)
        moments = saved[OPTIMIZER_STATE_DICT]["optimizer_state_dict"]["state"]
        for sub_group in missing:
            del moments[sub_group]
        torch.save(saved, path)
        stock = continued(None, lacking)
        assert differences(expected, stock) != [], missing
        with closing_engine(case(), MIXED) as engine, stays(engine.optimizer):
            for when in ("fresh", "in process"):
                engine.load_checkpoint(str(lacking))
                same(stock, train(engine, case(), folder), (missing, when))


def read_late(folder: Path) -> None:
    """What a checkpoint engine reads after ``save_checkpoint`` has returned is the step that was saved."""
    # As DeepSpeed's launcher does.
    os.environ.update(CROSS_RANK="0", CROSS_SIZE="1")
    for decoupled in (False, True):
        root = folder / str(decoupled)
        its = case(extra={"checkpoint": {"writer": {"type": "python", "decoupled": decoupled}}})
        with closing_engine(its, MIXED) as engine, stays(engine.optimizer):
            assert engine.checkpoint_engine.is_decoupled() == decoupled
            train(engine, its, root)
            saved = state_of(engine)
            with asleep(engine.checkpoint_engine):
                engine.save_checkpoint(str(root))
                # Before the next step DeepSpeed waits until what is saved is written; setters do not.
                for param in engine.module.parameters():
                    safe_set_local_optimizer_state(param, torch.full_like(param.ds_tensor, 0.5), "exp_avg")
            went_on = train(engine, its, root)
            later = state_of(engine)
            engine.save_checkpoint(str(root), tag="at the end")
        assert differences(saved, later) != []
        with closing_engine(case(), None) as engine:
            engine.load_checkpoint(str(root), tag=FIRST)
            same(saved, state_of(engine), its)
            assert differences(went_on, train(engine, case(), folder)) != [], "the setter has set nothing"
            engine.load_checkpoint(str(root), tag="at the end")
            same(later, state_of(engine), "what was written when the engine was destroyed")


@contextmanager
def asleep(checkpoint_engine: Any) -> Iterator[None]:
    """Its process, if it has one, reads nothing inside."""
    process = getattr(checkpoint_engine, "ckpt_process", None)
    if process is not None:
        os.kill(process.pid, signal.SIGSTOP)
    yield
    if process is not None:
        os.kill(process.pid, signal.SIGCONT)


def universal(folder: Path) -> None:
    """Loaded by another number of ranks."""
    its = case(extra=UNIVERSAL)
    expected = continued(None, folder / "stock", its)
    same(expected, continued(None, folder / "ours", its), "ours to stock")
    same(expected, continued(MIXED, folder / "stock", its), "stock to ours")


def universal_in_part(folder: Path) -> None:
    its = case(extra=UNIVERSAL)
    whole = continued(CPU, folder / "ours", its)
    for how in ({"load_optimizer_states": False}, {"load_module_only": True}):
        stock = continued(None, folder / "stock", its, **how)
        assert differences(whole, stock) != []
        same(stock, continued(MIXED, folder / "ours", its, **how), how)


def main(folder: Path) -> None:
    import_late()
    one, two = folder / "1", folder / "2"
    for path in (one, two):
        path.mkdir()
    stages: list[dict[str, tuple[Callable[[Path], None], Path, int]]] = [
        {
            "save, 1 rank": (save, one, 1),
            "save, 2 ranks": (save, two, 2),
            "tags": (tags, folder / "tags", 2),
            "latest is last": (latest_is_last, folder / "last", 2),
            "read late": (read_late, folder / "late", 1),
        },
        {
            "convert": (convert, folder, 1),
            "resume": (resume, two, 2),
            "without moments": (without_moments, one, 1),
        },
        {
            "universal, 1 to 2 ranks": (universal, one, 2),
            "universal, 2 to 1 ranks": (universal, two, 1),
            "universal, in part": (universal_in_part, two, 1),
            "universal, 2 to 4 ranks": (universal, two, 4),
        },
    ]
    for stage in stages:
        groups = {
            name: Group(partial(work, path), world_size, folder / "outputs" / name)
            for name, (work, path, world_size) in stage.items()
        }
        for name, group in groups.items():
            answer({"job": name, "found": group.problem(timeout_s=200)})


if __name__ == "__main__":
    main(Path(sys.argv[1]))
