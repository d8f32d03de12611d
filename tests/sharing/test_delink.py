"""Test ``deep-opt-states delink``: names, moments, links, refusals, kills at every moment, and training after it."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.checkpoint import ds_to_universal
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

from deep_opt_states.cli.main import main
from deep_opt_states.sharing.renaming import rename
from tests.forked_child import exit_code_of_child
from tests.ranks import on_ranks, once
from tests.sharing.stack_model import BLOCK, SharingCase, Stack, tokens
from tests.tiers import thorough
from tests.zero.parity.training import Block, Record, collect, differences

NAMES = ("embed.weight", "model.layers.0.mlp.weight", "model.layers.0.norm.weight", "model.layers.1.mlp.weight")
KINDS = ("fp32", "exp_avg", "exp_avg_sq")
LAYERS = ["--share", "model.layers.0", "--into", "model.layers.{2..3}"]


@pytest.fixture
def pseudo(tmp_path: Path) -> Path:
    """Return the folder of a universal checkpoint, with the files of DeepSpeed's converter at stage 3."""
    folder = tmp_path / "pseudo"
    generator = torch.Generator().manual_seed(1)
    for name in NAMES:
        (folder / "zero" / name).mkdir(parents=True)
        for kind in KINDS:
            torch.save(torch.randn(50, generator=generator) ** 2, folder / "zero" / name / f"{kind}.pt")
    torch.save({"step": 7}, folder / "zero" / "optimizer_state.pt")
    torch.save({"module": {}}, folder / "zero_pp_rank_0_mp_rank_00_model_states.pt")
    (tmp_path / "latest_universal").write_text("pseudo")
    return folder


def digests(folder: Path) -> dict[str, str]:
    """Return the hash of each file by its path in ``folder``."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def load(folder: Path, name: str, kind: str) -> torch.Tensor:
    return torch.load(folder / "zero" / name / f"{kind}.pt", weights_only=True)


def delink(pseudo: Path, *options: str, real: str = "real") -> Path:
    """Run the command, check that it succeeds, and return the new folder."""
    folder = pseudo.parent / real
    assert main(["delink", str(pseudo), str(folder), *options]) == 0
    return folder


@pytest.mark.parametrize("moments", ["mean", "copy", "zero"])
def test_weights_are_links_and_moments_follow_the_rule(moments: str, pseudo: Path) -> None:
    before = digests(pseudo)
    real = delink(pseudo, *LAYERS, "--moments", moments)
    assert digests(pseudo) == before
    new = [f"model.layers.{layer}.{rest}" for layer in (0, 2, 3) for rest in ("mlp.weight", "norm.weight")]
    assert {path.name for path in (real / "zero").iterdir()} == {NAMES[0], NAMES[3], *new, "optimizer_state.pt"}
    for name in new:
        old = f"model.layers.0.{name.split('.', 3)[3]}"
        assert (real / "zero" / name / "fp32.pt").samefile(pseudo / "zero" / old / "fp32.pt")
        for power, kind in enumerate(("exp_avg", "exp_avg_sq"), start=1):
            shared = load(pseudo, old, kind)
            expected = {"mean": shared / 3**power, "copy": shared, "zero": torch.zeros(50)}[moments]
            assert torch.equal(load(real, name, kind), expected)
            first = real / "zero" / old / f"{kind}.pt"
            assert first.samefile(real / "zero" / name / f"{kind}.pt"), "equal moments are one file"
    for name in (NAMES[0], NAMES[3], "optimizer_state.pt"):
        assert digests(real / "zero" / name) == digests(pseudo / "zero" / name)
    assert (real / "zero" / "optimizer_state.pt").samefile(pseudo / "zero" / "optimizer_state.pt")
    assert (real.parent / "latest_universal").read_text() == "real"
    assert sorted(path.name for path in real.parent.iterdir()) == ["latest_universal", "pseudo", "real"]


def test_moments_with_a_description_of_their_shards_keep_it(pseudo: Path) -> None:
    path = pseudo / "zero" / NAMES[1] / "exp_avg.pt"
    torch.save({"param": torch.ones(2, 3), "cat_dim": 1}, path)
    real = delink(pseudo, *LAYERS, "--moments", "mean")
    found = torch.load(real / "zero" / NAMES[1] / "exp_avg.pt", weights_only=True)
    assert found["cat_dim"] == 1
    assert torch.equal(found["param"], torch.ones(2, 3) / 3)


def test_copies_on_request_or_without_links_are_independent_of_the_shared_checkpoint(
    pseudo: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    real = delink(pseudo, *LAYERS, "--moments", "mean", "--copy")
    before = digests(real)
    with mock.patch.object(os, "link", side_effect=OSError(errno.EXDEV, "Invalid cross-device link")):
        copied = delink(pseudo, *LAYERS, "--moments", "mean", real="copied")
    assert "Files were copied: no hard link: Invalid cross-device link" in capsys.readouterr().out
    linked = delink(pseudo, *LAYERS, "--moments", "mean", real="linked")
    assert digests(linked) == digests(copied) == before
    for path in pseudo.rglob("*.pt"):
        path.write_bytes(b"overwritten in place")
    assert digests(real) == digests(copied) == before
    assert digests(linked) != before


@pytest.mark.P6
def test_a_dry_run_writes_nothing_and_names_what_is_missing(pseudo: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1, "vocab_size": 32}
    config = {"model_type": "llama", **sizes, "num_attention_heads": 2, "num_key_value_heads": 2}
    (pseudo.parent / "config.json").write_text(json.dumps(config))
    before = digests(pseudo.parent)
    options = ["--dry-run", "--model", str(pseudo.parent / "config.json")]
    real = delink(pseudo, *LAYERS, "--moments", "mean", *options)
    lines = capsys.readouterr().out.splitlines()
    assert f"{NAMES[1]} -> {NAMES[1]} ... model.layers.3.mlp.weight (3)" in lines
    assert "Nothing was written (--dry-run)." in lines
    found = dict(line.split(": ", 1) for line in lines if ": " in line)
    assert not real.exists()
    assert digests(pseudo.parent) == before
    assert "model.layers.0.self_attn.q_proj.weight" in found["Missing in the checkpoint"].split(", ")
    assert "model.layers.3.mlp.weight" in found["Not in the model"].split(", ")


class Untrusted:
    """An object that makes a folder when it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return os.mkdir, (str(self._folder),)


@pytest.mark.P6
def test_nothing_untrusted_is_unpickled(pseudo: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = pseudo.parent / "made"
    torch.save(Untrusted(made), pseudo / "zero" / NAMES[1] / "exp_avg.pt")
    assert main(["delink", str(pseudo), str(pseudo.parent / "real"), *LAYERS, "--moments", "mean"]) == 1
    assert "weights_only=True" in capsys.readouterr().err
    assert not made.exists()
    assert sorted(path.name for path in pseudo.parent.iterdir()) == ["latest_universal", "pseudo"]
    torch.load(pseudo / "zero" / NAMES[1] / "exp_avg.pt", weights_only=False)
    assert made.exists(), "the object does what the test is afraid of"


@pytest.mark.P6
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--share", "model.layers.5", "--into", "a"], "found 'model.layers.5'. Similar names"),
        (["--share", "model.layers.0", "--into", "model.layers.1"], "found model.layers.1.mlp.weight"),
        (["--share", "model.layers.0", "--into", "../{1..2}"], "without slashes"),
        (["--share", "model.layers.0", "--into", "a{1..}"], "with one range at most"),
        (["--share", "model.layers.0", "--into", "{1..999}{1..999}"], "with one range at most"),
        ([*LAYERS, "--every", "0"], "--every: must be at least 1"),
        (["--share", "embed", "--into", "a", "--every", "2"], "must have a number"),
    ],
)
def test_bad_names_are_refused_and_nothing_is_written(
    options: list[str],
    message: str,
    pseudo: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(pseudo.parent)
    before = digests(pseudo.parent)
    assert main(["delink", "pseudo", "real", *options, "--moments", "mean"]) == 1
    assert message in " ".join(capsys.readouterr().err.split())
    assert digests(pseudo.parent) == before


@pytest.mark.P6
def test_folders_that_cannot_be_used_are_refused(pseudo: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = [*LAYERS, "--moments", "copy"]
    assert main(["delink", str(pseudo / "zero"), str(pseudo.parent / "real"), *options]) == 1
    assert "ds_to_universal" in capsys.readouterr().err
    before = digests(pseudo)
    assert main(["delink", str(pseudo), str(pseudo), *options]) == 1
    assert "REAL: must be a new folder" in capsys.readouterr().err
    assert main(["delink", str(pseudo), str(pseudo.parent / "nowhere" / "real"), *options]) == 1
    assert "No such file" in capsys.readouterr().err
    assert digests(pseudo) == before


CALLS = ("mkdir", "link", "fsync", "rename", "replace")


def killed_before_call(number: int, run: Callable[[], int]) -> int:
    """Run ``run``, and kill this process before the call with this ``number`` to a function that changes files."""
    done = 0

    def counted(call: Callable[..., Any]) -> Callable[..., Any]:
        def count(*arguments: Any, **options: Any) -> Any:
            nonlocal done
            done += 1
            if done == number:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*arguments, **options)

        return count

    for name in CALLS:
        setattr(os, name, counted(getattr(os, name)))
    return run()


def test_a_killed_delink_leaves_the_old_checkpoint_and_no_half_of_a_new_one(pseudo: Path) -> None:
    before = digests(pseudo)
    options = [*LAYERS, "--moments", "mean"]
    expected = digests(delink(pseudo, *options, real="expected"))
    (pseudo.parent / "latest_universal").write_text("pseudo")
    complete = number = 0
    while True:
        number += 1
        real = pseudo.parent / f"real {number}"
        arguments = ["delink", str(pseudo), str(real), *options]
        code = exit_code_of_child(lambda: killed_before_call(number, lambda: main(arguments)))  # noqa: B023
        assert digests(pseudo) == before
        if code == 0:
            break
        assert code == -signal.SIGKILL
        latest = (pseudo.parent / "latest_universal").read_text()
        if real.exists():
            complete += 1
            assert digests(real) == expected
        else:
            assert latest == "pseudo"
            assert digests(delink(pseudo, *options, real=real.name)) == expected
            assert not real.with_name(f".{real.name}.partial").exists()
            (pseudo.parent / "latest_universal").write_text("pseudo")
    assert number > 40, "the calls are counted"
    assert complete >= 1, "killed after the rename, before latest_universal"


def test_another_process_that_writes_the_same_folder_is_noticed(pseudo: Path) -> None:
    arguments = ["delink", str(pseudo), str(pseudo.parent / "real"), *LAYERS, "--moments", "copy"]
    link, codes = os.link, []

    def link_and_start_another(*of_link: Any) -> None:
        if not codes:
            codes.append(exit_code_of_child(lambda: main(arguments)))
        link(*of_link)

    with mock.patch.object(os, "link", link_and_start_another):
        assert main(arguments) == 0
    assert codes == [1]


def test_a_layer_ends_at_a_dot() -> None:
    names = ["m.1.w", "m.10.w", "m.1.x.w"]
    assert rename(names, {"m.1": ["n"]}) == {"m.1.w": ["n.w"], "m.10.w": ["m.10.w"], "m.1.x.w": ["n.x.w"]}


# Training

CASE, STEPS = SharingCase(layers=5, every=2, scale="sum", dtype="bf16"), 3


def train(engine: Any) -> Record:
    record = Record(optimizer_class=type(engine.optimizer).__name__)
    losses = record.numbers["loss"] = []
    for step in range(STEPS):
        loss = engine(tokens(dist.get_rank(), step))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    collect(engine.optimizer, record)
    return record


def evaluate(engine: Any) -> float:
    """Return the loss of a batch that is the same on every rank."""
    engine.eval()
    with torch.no_grad():
        loss = float(engine(tokens(0, 10**6)))
    engine.train()
    return loss


def make_engine(model: torch.nn.Module, block: Block, **changes: Any) -> Any:
    config = {**CASE.ds_config(block), **changes}
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    return engine


def save(folder: Path) -> float:
    """Train with shared layers and the plugin, save a checkpoint, and return the loss of the evaluation."""
    engine = make_engine(CASE.make_model(), BLOCK)
    train(engine)
    engine.save_checkpoint(str(folder))
    loss = evaluate(engine)
    engine.destroy()
    return loss


def delink_saved(folder: Path) -> None:
    """Convert the checkpoint to a universal one, and delink it. It is then the next one to be loaded."""
    options = ["--input_folder", str(folder / f"global_step{STEPS}"), "--output_folder", str(folder / "pseudo")]
    sys.argv[1:] = [*options, "--num_extract_workers", "1", "--num_merge_workers", "1"]
    ds_to_universal.main(ds_to_universal.parse_arguments())
    layers = ["--share", "model.layers.0", "--into", f"model.layers.{{1..{CASE.layers - 1}}}"]
    delink(folder / "pseudo", *layers, "--every", str(CASE.every), "--moments", "mean")


@once
def delinked(folder: Path) -> tuple[Path, float]:
    """Return the folder of a delinked checkpoint, which two ranks have saved, and the loss before."""
    loss, _ = on_ranks(2, save, folder)
    on_ranks(1, delink_saved, folder)
    return folder, loss


def load_delinked(folder: Path, loss: float) -> None:
    """Load the delinked checkpoint with stock and with the plugin, and train."""
    records = []
    for block in (None, BLOCK):
        torch.manual_seed(99)
        model = Stack(CASE.layers)
        engine = make_engine(model, block, checkpoint={"load_universal": True})
        path, _ = engine.load_checkpoint(str(folder))
        assert path is not None
        assert engine.global_steps == STEPS
        assert evaluate(engine) == loss
        for name, param in model.named_parameters():
            found = {kind: safe_get_full_optimizer_state(param, kind) for kind in KINDS[1:]}
            for kind, tensor in {"fp32": safe_get_full_fp32_param(param), **found}.items():
                assert torch.equal(tensor.flatten(), load(folder / "real", name, kind).flatten()), (kind, name)
        records.append(train(engine))
        engine.destroy()
    assert differences(*records) == []
    classes = [record.optimizer_class for record in records]
    assert classes == ["DeepSpeedZeroOptimizer_Stage3", "DeepOptimizerStates_Stage3"]
    # The training after the load goes on with the step count of the checkpoint.
    assert set(records[0].numbers["step"]) == {2 * STEPS}


@pytest.mark.parametrize("world_size", [1, thorough(2), thorough(3)])
@pytest.mark.P1
@pytest.mark.P4
@pytest.mark.xdist_group("delink")
def test_a_delinked_model_has_the_loss_and_the_states_of_the_shared_one_and_trains_as_with_stock(
    world_size: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    on_ranks(world_size, load_delinked, *delinked(tmp_path_factory.getbasetemp() / "delink"))
