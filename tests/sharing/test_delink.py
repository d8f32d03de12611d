"""Test ``deep-opt-states delink``: names, moments, links, refusals, kills at every moment, and training after it."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import shutil
import signal
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

from deep_opt_states.cli.main import main
from deep_opt_states.sharing.delink import rename
from tests.forked_child import exit_code_of_child
from tests.ranks import on_ranks
from tests.sharing.stack_model import BLOCK, SharingCase, Stack, make_engine, tokens, train
from tests.zero.checkpoints.test_checkpoints import convert_to_universal
from tests.zero.parity.training import assert_same_bits

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
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def load(folder: Path, name: str, kind: str) -> Any:
    return torch.load(folder / "zero" / name / f"{kind}.pt", weights_only=True)


def delink(pseudo: Path, *options: str, real: str = "real") -> Path:
    folder = pseudo.parent / real
    assert main(["delink", str(pseudo), str(folder), *options]) == 0
    return folder


@pytest.mark.parametrize("moments", ["mean", "copy", "zero"])
def test_weights_are_links_and_moments_follow_the_rule(moments: str, pseudo: Path) -> None:
    sharded = {"param": torch.ones(2, 3), "cat_dim": 1}
    torch.save(sharded, pseudo / "zero" / NAMES[2] / "exp_avg.pt")
    before = digests(pseudo)
    real = delink(pseudo, *LAYERS, "--moments", moments)
    assert digests(pseudo) == before
    new = [f"model.layers.{layer}.{rest}" for layer in (0, 2, 3) for rest in ("mlp.weight", "norm.weight")]
    assert {path.name for path in (real / "zero").iterdir()} == {NAMES[0], NAMES[3], *new, "optimizer_state.pt"}
    for name in new:
        old = f"model.layers.0.{name.split('.', 3)[3]}"
        assert (real / "zero" / name / "fp32.pt").samefile(pseudo / "zero" / old / "fp32.pt")
        for power, kind in enumerate(("exp_avg", "exp_avg_sq"), start=1):
            shared, found = load(pseudo, old, kind), load(real, name, kind)
            if isinstance(shared, dict):
                assert found["cat_dim"] == sharded["cat_dim"], "the description of shards stays"
                shared, found = shared["param"], found["param"]
            expected = {"mean": shared / 3**power, "copy": shared, "zero": torch.zeros_like(shared)}[moments]
            assert torch.equal(found, expected)
            first = real / "zero" / old / f"{kind}.pt"
            assert first.samefile(real / "zero" / name / f"{kind}.pt"), "equal moments are one file"
    for name in (NAMES[0], NAMES[3], "optimizer_state.pt"):
        assert digests(real / "zero" / name) == digests(pseudo / "zero" / name)
    assert (real / "zero" / "optimizer_state.pt").samefile(pseudo / "zero" / "optimizer_state.pt")
    assert (real.parent / "latest_universal").read_text() == "real"
    assert sorted(path.name for path in real.parent.iterdir()) == ["latest_universal", "pseudo", "real"]


def test_copies_on_request_or_without_links_are_independent_of_the_shared_checkpoint(pseudo: Path) -> None:
    real = delink(pseudo, *LAYERS, "--moments", "mean", "--copy")
    before = digests(real)
    with mock.patch.object(os, "link", side_effect=OSError(errno.EXDEV, "Invalid cross-device link")):
        copied = delink(pseudo, *LAYERS, "--moments", "mean", real="copied")
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
    ("arguments", "message"),
    [
        ("pseudo real --share model.layers.5 --into a", "found 'model.layers.5'. Similar names"),
        ("pseudo real --share model.layers.0 --into model.layers.1", "found model.layers.1.mlp.weight"),
        ("pseudo real --share model.layers.0 --into ../{1..2}", "without slashes"),
        ("pseudo real --share model.layers.0 --into a{1..}", "with one range at most"),
        ("pseudo real --share model.layers.0 --into {1..999}{1..999}", "with one range at most"),
        ("pseudo real --share model.layers.0 --into a --every 0", "--every: must be at least 1"),
        ("pseudo real --share embed --into a --every 2", "must have a number"),
        ("pseudo/zero real --share model.layers.0 --into a", "ds_to_universal"),
        ("pseudo pseudo --share model.layers.0 --into a", "REAL: must be a new folder"),
        ("pseudo nowhere/real --share model.layers.0 --into a", "No such file"),
    ],
)
def test_bad_names_and_folders_are_refused_and_nothing_is_written(
    arguments: str, message: str, pseudo: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(pseudo.parent)
    before = digests(pseudo.parent)
    assert main(["delink", *arguments.split(), "--moments", "mean"]) == 1
    assert message in " ".join(capsys.readouterr().err.split())
    assert digests(pseudo.parent) == before


def killed_before_call(number: int, run: Callable[[], int]) -> int:
    numbers = count(1)

    def counted(call: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        if next(numbers) == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return call(*arguments, **options)

    for name in ("mkdir", "link", "fsync", "rename", "replace"):
        setattr(os, name, partial(counted, getattr(os, name)))
    return run()


def test_a_killed_delink_leaves_the_old_checkpoint_and_no_half_of_a_new_one(pseudo: Path) -> None:
    # Each file is a few moments: only one parameter that is shared, and one that is not.
    for name in NAMES[2:]:
        shutil.rmtree(pseudo / "zero" / name)
    before = digests(pseudo)
    options = ["--share", "model.layers.0", "--into", "model.layers.2", "--moments", "mean"]
    expected = digests(delink(pseudo, *options, real="expected"))
    (pseudo.parent / "latest_universal").write_text("pseudo")
    complete = 0
    for number in count(1):
        real = pseudo.parent / f"real {number}"
        run = partial(main, ["delink", str(pseudo), str(real), *options])
        code = exit_code_of_child(partial(killed_before_call, number, run))
        assert digests(pseudo) == before
        if code == 0:
            break
        assert code == -signal.SIGKILL
        if real.exists():
            complete += 1
            assert digests(real) == expected
        else:
            assert (pseudo.parent / "latest_universal").read_text() == "pseudo"
            assert digests(delink(pseudo, *options, real=real.name)) == expected
            assert not real.with_name(f".{real.name}.partial").exists()
            (pseudo.parent / "latest_universal").write_text("pseudo")
    assert number > 20, "the calls are counted"
    assert complete >= 1, "killed after the rename, before latest_universal"


def test_another_process_that_writes_the_same_folder_is_noticed(
    pseudo: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    partial_folder = pseudo.parent / ".real.partial"
    partial_folder.mkdir()
    descriptor = os.open(partial_folder, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    assert main(["delink", str(pseudo), str(pseudo.parent / "real"), *LAYERS, "--moments", "copy"]) == 1
    assert "must be written by one process at a time" in capsys.readouterr().err
    os.close(descriptor)


def test_a_layer_ends_at_a_dot() -> None:
    names = ["m.1.w", "m.10.w", "m.1.x.w"]
    assert rename(names, {"m.1": ["n"]}) == {"m.1.w": ["n.w"], "m.10.w": ["m.10.w"], "m.1.x.w": ["n.x.w"]}


CASE, STEPS = SharingCase(layers=5, every=2, scale="sum", dtype="bf16"), 3


def evaluate(engine: Any) -> float:
    engine.eval()
    with torch.no_grad():
        loss = float(engine(tokens(0, 10**6)))
    engine.train()
    return loss


def save(folder: Path) -> float:
    engine = make_engine(CASE, CASE.make_model(), BLOCK)
    train(engine, STEPS)
    engine.save_checkpoint(str(folder))
    loss = evaluate(engine)
    engine.destroy()
    return loss


def load_delinked(folder: Path, loss: float) -> None:
    """Convert and delink the checkpoint, which is then the next one to be loaded, load it with both, and train."""
    convert_to_universal(folder, f"global_step{STEPS}")
    layers = ["--share", "model.layers.0", "--into", f"model.layers.{{1..{CASE.layers - 1}}}"]
    delink(folder / "universal", *layers, "--every", str(CASE.every), "--moments", "mean")
    records = []
    for block in (None, BLOCK):
        torch.manual_seed(99)
        model = Stack(CASE.layers)
        engine = make_engine(CASE, model, block, checkpoint={"load_universal": True})
        path, _ = engine.load_checkpoint(str(folder))
        assert path is not None
        assert engine.global_steps == STEPS
        assert evaluate(engine) == loss
        for name, param in model.named_parameters():
            found = {kind: safe_get_full_optimizer_state(param, kind) for kind in KINDS[1:]}
            for kind, tensor in {"fp32": safe_get_full_fp32_param(param), **found}.items():
                assert torch.equal(tensor.flatten(), load(folder / "real", name, kind).flatten()), (kind, name)
        records.append(train(engine, STEPS))
        engine.destroy()
    assert_same_bits(*records)
    classes = [record.optimizer_class for record in records]
    assert classes == ["DeepSpeedZeroOptimizer_Stage3", "DeepOptimizerStates_Stage3"]
    # The training after the load goes on with the step count of the checkpoint.
    assert set(records[0].numbers["step"]) == {2 * STEPS}


@pytest.mark.P1
@pytest.mark.P4
def test_a_delinked_model_has_the_loss_and_the_states_of_the_shared_one_and_trains_as_with_stock(
    tmp_path: Path,
) -> None:
    loss, _ = on_ranks(2, save, tmp_path)
    on_ranks(1, load_delinked, tmp_path, loss)
