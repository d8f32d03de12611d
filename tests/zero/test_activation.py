"""Check that the JSON block enables the plugin, and that DeepSpeed without it is stock but for eight wrappers.

The tests start fresh interpreters, since pytest has imported the modules that must not be imported yet. This file is
also the user's script that they start, which does not mention any plugin: only its JSON config does.
"""

from __future__ import annotations

import inspect
import json
import multiprocessing
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.launch import Finished, run_ranks

SCRIPT = __file__
NO_AUTOLOAD = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
STOCK = "deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3"
TRAINED = "trained with DeepOptimizerStates_Stage3\n"
ACTIVATION_MODULES = {"deep_opt_states", *(f"deep_opt_states.{name}" for name in ("activation", "log", "names"))}
BLOCK = {"placement": "stride", "update_stride": 2}
ZERO_3 = {"stage": 3, "sub_group_size": 64, "offload_optimizer": {"device": "cpu"}}


def train(config: str) -> None:
    import deepspeed
    import torch

    from tests.zero.process_group import end_process

    model = torch.nn.Linear(8, 32)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    engine.backward(engine(torch.ones(2, 8, device=engine.device, dtype=torch.bfloat16)).float().square().mean())
    engine.step()
    print(f"trained with {type(engine.optimizer).__name__}")
    end_process()


def spawn(*arguments: str) -> None:
    assert "torch" not in sys.modules
    child = multiprocessing.get_context("spawn").Process(target=report, args=arguments)
    child.start()
    child.join()
    sys.exit(abs(child.exitcode or 0))


def optimizer_or_error(config: str) -> dict[str, Any]:
    import deepspeed
    import torch

    model = torch.nn.Linear(8, 8)
    try:
        engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    except ValueError as error:
        return {"optimizer": f"{type(error).__name__}: {error}"}
    optimizer_class = type(engine.optimizer)
    return {"optimizer": f"{optimizer_class.__module__}.{optimizer_class.__qualname__}", "modules": sorted(sys.modules)}


def wrapped_in_deepspeed() -> Iterator[str]:
    """Yield the functions that wrappers replace in the modules of DeepSpeed that are loaded, and in their classes."""
    modules = [module for name, module in sys.modules.items() if name.partition(".")[0] == "deepspeed"]
    classes = [value for module in modules for value in vars(module).values() if inspect.isclass(value)]
    for owner in (*modules, *classes):
        for value in vars(owner).values():
            if type(value).__name__ == "FunctionWrapper":
                yield f"{value.__wrapped__.__module__}.{value.__wrapped__.__qualname__}"


def report(path: str, trained: str, *configs: str) -> None:
    import torch  # noqa: F401

    with_torch = sorted(sys.modules)
    engines = [optimizer_or_error(config) for config in configs]
    found = {"with torch": with_torch, "engines": engines, "wrapped": sorted({*wrapped_in_deepspeed()})}
    Path(path).write_text(json.dumps(found))
    import deep_opt_states  # noqa: F401

    train(trained)


def write_config(path: Path, zero: dict[str, Any], **blocks: Any) -> str:
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": zero,
    }
    path.write_text(json.dumps({**config, **blocks}))
    return str(path)


def run(*arguments: str, **changes: str) -> Finished:
    (finished,) = run_ranks(1, list(arguments), timeout_s=120, **changes)
    assert finished.returncode == 0, finished.output[-5000:]
    return finished


def without_wrapt(modules: list[str]) -> set[str]:
    return {name for name in modules if name.partition(".")[0] != "wrapt"}


@pytest.mark.P3
def test_the_block_enables_the_plugin_and_without_it_deepspeed_loads_none_of_it(tmp_path: Path) -> None:
    """Check torchrun, a spawned child, and an import of the plugin where PyTorch does not load it."""
    with_block = write_config(tmp_path / "block.json", ZERO_3, deep_optimizer_states=BLOCK)
    no_block = write_config(tmp_path / "no_block.json", ZERO_3)
    misspelled = write_config(tmp_path / "misspelled.json", ZERO_3, deep_opt_states=BLOCK)
    disabled = write_config(tmp_path / "disabled.json", ZERO_3, deep_optimizer_states={**BLOCK, "enabled": False})
    stage_0 = write_config(tmp_path / "stage_0.json", {"stage": 0}, deep_optimizer_states=BLOCK)
    hooked_report, unhooked_report = tmp_path / "hooked", tmp_path / "unhooked"
    torchrun = ("-m", "torch.distributed.run", "--nproc-per-node", "1", "--rdzv-backend", "c10d")
    with ThreadPoolExecutor() as pool:
        hooked_configs = (no_block, misspelled, disabled, stage_0)
        runs = [
            pool.submit(run, SCRIPT, "spawn", str(hooked_report), with_block, *hooked_configs),
            pool.submit(run, SCRIPT, "report", str(unhooked_report), with_block, no_block, with_block, **NO_AUTOLOAD),
            pool.submit(run, *torchrun, "--rdzv-endpoint", "127.0.0.1:0", SCRIPT, "train", with_block),
        ]
    outputs = [one.result().output for one in runs]
    assert [output.count(TRAINED) for output in outputs] == [1, 1, 1]
    assert outputs[0].count('the key "deep_opt_states" in the DeepSpeed config has no effect') == 1
    hooked, unhooked = (json.loads(path.read_text()) for path in (hooked_report, unhooked_report))
    assert without_wrapt(hooked["with torch"]) - set(unhooked["with torch"]) == ACTIVATION_MODULES
    *with_stock, refused = hooked["engines"]
    assert [engine["optimizer"] for engine in (*with_stock, *unhooked["engines"])] == [STOCK] * 5
    assert refused["optimizer"].startswith("Unsupported: ")
    assert "zero_optimization.stage: must be 3, found 0." in refused["optimizer"]

    stocks_modules = set(unhooked["engines"][0]["modules"])
    # A warning of a misspelled key loads no module either. DeepSpeed has loaded an extension, whose lock may have been
    # left by a build that was killed.
    for engine in with_stock[:2]:
        assert without_wrapt(engine["modules"]) - stocks_modules == ACTIVATION_MODULES | {"deep_opt_states.waiting"}
        assert stocks_modules <= set(engine["modules"])
    saving = ("save_16bit_model", "save_checkpoint")
    methods = ("__init__", "_configure_zero_optimizer", "_do_sanity_check", "load_checkpoint", *saving)
    watched, config = "deepspeed.comm.comm.init_distributed", "runtime.config.DeepSpeedConfig._initialize_params"
    engines = [f"deepspeed.runtime.engine.DeepSpeedEngine.{method}" for method in methods]
    assert (hooked["wrapped"], unhooked["wrapped"]) == ([watched, f"deepspeed.{config}", *engines], [])


def test_import_torch_survives_a_broken_wrapt_also_if_warnings_are_errors(tmp_path: Path) -> None:
    (tmp_path / "wrapt.py").write_text("raise RuntimeError('broken')\n")
    output = run("-W", "error", "-c", "import torch; print('imported')", PYTHONPATH=str(tmp_path)).output
    assert "imported\n" in output
    assert "the plugin cannot be activated: RuntimeError: broken" in output


class ChangedConfig:
    def __init__(self, config: dict[str, Any]) -> None:
        self.json = config


@pytest.mark.P6
def test_a_deepspeed_without_the_wrapped_functions_refuses_a_config_with_the_block(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import deepspeed

    from deep_opt_states import activation
    from deep_opt_states.config import Unsupported

    monkeypatch.setattr(deepspeed, "__version__", "0.20.0")
    monkeypatch.setattr(deepspeed.runtime.config, "DeepSpeedConfig", ChangedConfig)
    monkeypatch.setattr(ChangedConfig, "__init__", ChangedConfig.__init__)
    activation._hook_config(deepspeed.runtime.config)
    ChangedConfig({})
    ChangedConfig({"deep_optimizer_states": {"enabled": False}})
    with pytest.raises(Unsupported, match=r"found 0\.20\.0, an untested release that lacks") as refused:
        ChangedConfig({"deep_optimizer_states": {}})
    assert "DeepSpeedConfig._initialize_params is missing" in str(refused.value)
    logged = capsys.readouterr().out
    assert "does not support this version of DeepSpeed: deepspeed.runtime.config has no DeepSpeedConfig" in logged


if __name__ == "__main__":
    {"train": train, "spawn": spawn, "report": report}[sys.argv[1]](*sys.argv[2:])
