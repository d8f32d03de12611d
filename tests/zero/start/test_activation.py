"""Check that the JSON block enables the plugin, and that DeepSpeed without it is stock but for four wrappers.

The tests start fresh interpreters, since pytest has imported the modules that must not be imported yet.
"""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.launch import Finished, run_ranks

SCRIPTS = Path(__file__).parent
PLAIN = str(SCRIPTS / "plain_script.py")
NO_AUTOLOAD = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
STOCK = "deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3"
ACTIVATION_MODULES = {"deep_opt_states", *(f"deep_opt_states.{name}" for name in ("activation", "log", "names"))}
BLOCK = {"placement": "stride", "update_stride": 2}
ZERO_3 = {"stage": 3, "sub_group_size": 64, "offload_optimizer": {"device": "cpu"}}

Report = dict[str, Any]


def write_config(path: Path, zero: dict[str, Any] | None, block: dict[str, Any] | None) -> str:
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
    }
    if zero is not None:
        config["zero_optimization"] = zero
    if block is not None:
        config["deep_optimizer_states"] = block
    path.write_text(json.dumps(config))
    return str(path)


def run(*arguments: str, **changes: str) -> Finished:
    (finished,) = run_ranks(1, list(arguments), timeout_s=120, **changes)
    assert finished.returncode == 0, finished.output[-5000:]
    return finished


def make_engines(folder: Path, *configs: str, **changes: str) -> Report:
    run(str(SCRIPTS / "engine_per_config.py"), str(folder / "report"), *configs, **changes)
    return json.loads((folder / "report.0").read_text())


@pytest.fixture(scope="module")
def with_block(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_config(tmp_path_factory.mktemp("block") / "config.json", ZERO_3, BLOCK)


# One worker of pytest-xdist runs these tests, so that the engines are made once.
in_one_worker = pytest.mark.xdist_group("engines with and without the hook")


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory, with_block: str) -> tuple[Report, Report]:
    """Return reports on engines in a process with the hook, and in one without the plugin.

    The first config has no block.
    """
    folder, other = tmp_path_factory.mktemp("with"), tmp_path_factory.mktemp("without")
    no_block = write_config(folder / "no_block.json", ZERO_3, None)
    configs = [
        no_block,
        write_config(folder / "disabled.json", ZERO_3, {**BLOCK, "enabled": False}),
        write_config(folder / "stage_0.json", {"stage": 0}, BLOCK),
        write_config(folder / "no_zero.json", None, BLOCK),
    ]
    with ThreadPoolExecutor() as pool:
        hooked = pool.submit(make_engines, folder, *configs)
        unhooked = pool.submit(make_engines, other, no_block, with_block, **NO_AUTOLOAD)
        return hooked.result(), unhooked.result()


@pytest.mark.promise("P3")
def test_the_block_enables_the_plugin_in_a_plain_script(with_block: str) -> None:
    assert "trained with DeepOptimizerStates_Stage3" in run(PLAIN, with_block).output


@pytest.mark.promise("P3")
def test_the_block_enables_the_plugin_under_torchrun(with_block: str) -> None:
    rendezvous = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"]
    finished = run("-m", "torch.distributed.run", "--nproc-per-node", "2", *rendezvous, PLAIN, with_block)
    assert finished.output.count("trained with DeepOptimizerStates_Stage3\n") == 2


@pytest.mark.promise("P3")
def test_the_block_enables_the_plugin_in_spawned_children(with_block: str) -> None:
    finished = run("-m", "tests.zero.start.spawned_ranks", with_block)
    assert finished.output.count("trained with DeepOptimizerStates_Stage3\n") == 2


@in_one_worker
def test_without_the_block_the_optimizer_is_stock(reports: tuple[Report, Report]) -> None:
    for report in reports:
        assert report["engines"][0]["optimizer"] == STOCK


@in_one_worker
def test_without_the_block_only_the_activation_is_loaded(reports: tuple[Report, Report]) -> None:
    """Check that the hook loads neither ``deep_opt_states.zero``, ``perf_model``, nor any other package but wrapt."""
    hooked, unhooked = (set(report["engines"][0]["modules"]) for report in reports)
    # DeepSpeed has loaded an extension, whose lock may have been left by a build that was killed.
    assert without_wrapt(hooked) - unhooked == ACTIVATION_MODULES | {"deep_opt_states.waiting"}
    assert unhooked <= hooked


@in_one_worker
def test_deepspeed_is_stock_except_for_six_wrappers(reports: tuple[Report, Report]) -> None:
    """Check the wrappers. ``__init__`` ends updates of other engines, and the next one makes the optimizer.

    The others only check: the first each config, the fourth each engine that has its optimizer, since stage 0 never
    configures a ZeRO optimizer, and the last two each checkpoint: before it is loaded, and whether all of it was saved.
    """
    hooked, unhooked = reports
    assert hooked["wrapped"] == [
        "deepspeed.runtime.config.DeepSpeedConfig._initialize_params",
        "deepspeed.runtime.engine.DeepSpeedEngine.__init__",
        "deepspeed.runtime.engine.DeepSpeedEngine._configure_zero_optimizer",
        "deepspeed.runtime.engine.DeepSpeedEngine._do_sanity_check",
        "deepspeed.runtime.engine.DeepSpeedEngine.load_checkpoint",
        "deepspeed.runtime.engine.DeepSpeedEngine.save_checkpoint",
    ]
    assert unhooked["wrapped"] == []
    ours, stock = hooked["engine attributes"], unhooked["engine attributes"]
    assert list(ours) == list(stock)
    assert {name for name in ours if ours[name] != stock[name]} == {
        "__init__",
        "_configure_zero_optimizer",
        "_do_sanity_check",
        "load_checkpoint",
        "save_checkpoint",
    }


@in_one_worker
def test_with_a_disabled_block_the_optimizer_is_stock(reports: tuple[Report, Report]) -> None:
    assert reports[0]["engines"][1]["optimizer"] == STOCK


@in_one_worker
@pytest.mark.parametrize("index", [2, 3], ids=["stage 0", "no zero_optimization"])
def test_stage_0_is_refused(index: int, reports: tuple[Report, Report]) -> None:
    refused = reports[0]["engines"][index]
    assert refused["error"] == "Unsupported"
    assert "zero_optimization.stage: must be 3, found 0." in refused["message"]
    assert 'set "stage": 3' in refused["message"]


@in_one_worker
def test_without_autoload_the_block_alone_has_no_effect(reports: tuple[Report, Report]) -> None:
    assert reports[1]["engines"][1]["optimizer"] == STOCK


@pytest.mark.parametrize("imports", ["deep_opt_states, deepspeed", "deepspeed, deep_opt_states"])
def test_without_autoload_an_import_enables_the_plugin(imports: str, with_block: str) -> None:
    script = f"import {imports}, runpy; runpy.run_path({PLAIN!r}, run_name='__main__')"
    assert "trained with DeepOptimizerStates_Stage3" in run("-c", script, with_block, **NO_AUTOLOAD).output


def test_the_environment_can_disable_the_plugin(tmp_path: Path, with_block: str) -> None:
    """Check that two engines on each of two ranks are all stock, and that one line in the log gives the reason."""
    script = [str(SCRIPTS / "engine_per_config.py"), str(tmp_path / "report"), with_block, with_block]
    ranks = run_ranks(2, script, timeout_s=120, DEEP_OPT_STATES="0")
    for rank, finished in enumerate(ranks):
        assert finished.returncode == 0, finished.output[-5000:]
        report = json.loads((tmp_path / f"report.{rank}").read_text())
        assert [engine["optimizer"] for engine in report["engines"]] == [STOCK, STOCK]
    log = "".join(finished.output for finished in ranks)
    assert log.count("switched off by DEEP_OPT_STATES=0") == 1, log


def test_import_torch_alone_loads_only_the_activation() -> None:
    script = "import sys, torch; print(*sorted(sys.modules), sep='\\n')"
    hooked, unhooked = (set(run("-c", script, **changes).output.splitlines()) for changes in ({}, NO_AUTOLOAD))
    ours = {name for name in hooked if name.startswith(("deep_opt_states", "perf_model", "deepspeed"))}
    assert ours == ACTIVATION_MODULES
    assert without_wrapt(hooked) - unhooked == ACTIVATION_MODULES


@pytest.mark.parametrize("error", ["ImportError('gone')", "RuntimeError('broken')"])
def test_import_torch_survives_a_broken_wrapt(error: str, tmp_path: Path) -> None:
    (tmp_path / "wrapt.py").write_text(f"raise {error}\n")
    script = "import torch; print('torch', torch.ones(2).sum().item())"
    # This also holds if warnings are errors.
    output = run("-W", "error", "-c", script, PYTHONPATH=str(tmp_path)).output
    assert "torch 2.0" in output
    name, _, argument = error.partition("(")
    assert f"the plugin cannot be activated: {name}: {argument[1:-2]}" in output


def without_wrapt(modules: set[str]) -> set[str]:
    return {name for name in modules if name.partition(".")[0] != "wrapt"}


@pytest.mark.parametrize("module", ["deepspeed.runtime.engine", "deepspeed.runtime.config"])
def test_a_deepspeed_without_the_wrapped_functions_still_imports(module: str, tmp_path: Path) -> None:
    """Check that a block without effect is reported instead of ignored."""
    for name in ("deepspeed", "deepspeed/runtime"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").touch()
    (tmp_path / f"{module.replace('.', '/')}.py").write_text(
        "class DeepSpeedEngine: pass\nclass DeepSpeedConfig: pass\n"
    )
    output = run("-c", f"import torch, {module}; print('imported')", PYTHONPATH=str(tmp_path)).output
    assert "imported" in output
    assert f"does not support this version of DeepSpeed: {module} has no DeepSpeed" in output


CHANGED_RELEASE = {
    "__init__": "__version__ = '0.20.0'",
    "runtime/__init__": "",
    "runtime/config": """
class DeepSpeedConfig:
    def __init__(self, config):
        self.json = config
""",
    "utils/__init__": """
import logging
logger = logging.getLogger("DeepSpeed")
def log_dist(message, ranks, level):
    logger.log(level, message)
""",
}
"""The source of a DeepSpeed that has none of the private names that the plugin uses, by file."""

READS_CONFIGS = """
import torch, json, sys
from deepspeed.runtime.config import DeepSpeedConfig
for config in map(json.loads, sys.argv[1:]):
    try:
        DeepSpeedConfig(config)
        print("accepted")
    except ValueError as error:
        print("refused:", *str(error).splitlines())
"""


@pytest.mark.promise("P6")
def test_a_deepspeed_without_the_wrapped_functions_refuses_a_config_with_the_block(tmp_path: Path) -> None:
    """Check that stock still reads a config without the block, and one whose block is not enabled."""
    for name, source in CHANGED_RELEASE.items():
        path = tmp_path / "deepspeed" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
    blocks: list[Any] = [None, {"enabled": False}, {}]
    configs = [json.dumps({} if block is None else {"deep_optimizer_states": block}) for block in blocks]
    output = run("-c", READS_CONFIGS, *configs, PYTHONPATH=str(tmp_path)).output
    verdicts = [line for line in output.splitlines() if line.startswith(("accepted", "refused: "))]
    assert verdicts[:2] == ["accepted", "accepted"]
    assert "found 0.20.0, an untested release that lacks" in verdicts[2]
    assert "DeepSpeedConfig._initialize_params is missing" in verdicts[2]
    assert len(verdicts) == 3
