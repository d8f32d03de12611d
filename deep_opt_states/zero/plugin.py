"""Create our optimizer where DeepSpeed would create its own, if the engine's config contains our block."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.utils import DummyOptim
from deepspeed.runtime.zero import stage3
from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum

from deep_opt_states import log
from deep_opt_states.config import Config, enabled_config
from deep_opt_states.names import CHECK_SWITCH, CONFIG_KEY
from deep_opt_states.zero.checkpoint_check import check_before_loading
from deep_opt_states.zero.checkpoint_saving import save_16bit_model, save_checkpoint  # noqa: F401 (for the activation)
from deep_opt_states.zero.internals.agreement import raise_together, same_on_all_ranks
from deep_opt_states.zero.internals.compat import (
    breakdown_forbids_deferring,
    config_of,
    param_dict,
    unsynchronize_throughput_timer,
)
from deep_opt_states.zero.stage3 import DeepOptimizerStates_Stage3
from deep_opt_states.zero.start.accelerated import warn_of_optimizer
from deep_opt_states.zero.start.devices import AcceleratorChoice, choose_device
from deep_opt_states.zero.start.disk import check_folders, with_nvme_path
from deep_opt_states.zero.start.refusals import (
    refuse_config,
    refuse_later_methods,
    refuse_optimizer,
    refuse_rules_without_effect,
)
from deep_opt_states.zero.start.release import missing_names_are_refused, warn_of_untested_release
from deep_opt_states.zero.start.reporting import EngineProgress
from deep_opt_states.zero.step.direct_writes import checks_direct_writes

with suppress(ModuleNotFoundError):
    # SuperOffload's optimizer inherits from stock's class: define it before that name is replaced. 0.17.6 has none.
    from deepspeed.runtime.superoffload import superoffload_stage3  # noqa: F401


def configure_zero_optimizer(wrapped: Callable[..., Any], engine: Any, args: Any, kwargs: Any) -> Any:
    """Replace ``DeepSpeedEngine._configure_zero_optimizer``: a collective, also for ranks whose block is disabled."""
    basic_optimizer = args[0] if args else kwargs.get("optimizer")
    if basic_optimizer is None or isinstance(basic_optimizer, DummyOptim):
        return wrapped(*args, **kwargs)
    switches = f"on, with {CHECK_SWITCH}=1" if checks_direct_writes() else "on"
    # Before stock's constructor: a rank that refuses would never reach its collectives.
    choice = same_on_all_ranks(lambda: _choose(engine, basic_optimizer), lambda choice: switches if choice else "off")
    if choice is None:
        return wrapped(*args, **kwargs)
    config, accelerator = choice
    warn_of_optimizer(basic_optimizer)
    refuse_later_methods(engine)
    ds_config = config_of(engine)
    # The schedule reads and writes units on disk. To stock's code, the states are in host memory.
    ds_config.zero_config.offload_optimizer.device = OffloadDeviceEnum.cpu
    if checks_direct_writes():
        log.info(f"{CHECK_SWITCH}=1: updates end inside step(), and direct writes to partitions are named")
    if config.overlap_forward and (checks_direct_writes() or breakdown_forbids_deferring(ds_config)):
        config = config.model_copy(update={"overlap_forward": False})
    if config.overlap_forward and not accelerator.slots_on_host:
        unsynchronize_throughput_timer(ds_config)
    # The engine imports the class by its name just before it creates its optimizer.
    stock = stage3.DeepSpeedZeroOptimizer_Stage3
    ours = partial(DeepOptimizerStates_Stage3, config, accelerator, EngineProgress(engine))
    try:
        stage3.DeepSpeedZeroOptimizer_Stage3 = ours
        return wrapped(*args, **kwargs)
    finally:
        stage3.DeepSpeedZeroOptimizer_Stage3 = stock


def _choose(engine: Any, basic_optimizer: Any) -> tuple[Config, AcceleratorChoice] | None:
    """Return our block and the accelerator, or None if the plugin is off. Raise ``ConfigError`` or ``Unsupported``."""
    if (config := _supported(config_of(engine))) is None:
        return None
    refuse_optimizer(basic_optimizer)
    return config, choose_device()


def _supported(ds_config: Any) -> Config | None:
    """Return our block, or None if the plugin is off. Raise ``ConfigError`` or ``Unsupported``."""
    if (config := enabled_config(param_dict(ds_config))) is None:
        return None
    refuse_config(ds_config)
    return with_nvme_path(config, ds_config.zero_config.offload_optimizer)


@missing_names_are_refused()
def check_config(ds_config: Any) -> None:
    """Check a ``DeepSpeedConfig`` with our block before ``deepspeed.zero.Init`` partitions the model by it."""
    # Without an optimizer in the config, ``check_engine`` checks it later.
    enabled_config(param_dict(ds_config))
    if ds_config.optimizer_name is not None:
        _supported(ds_config)


@missing_names_are_refused()
def check_engine(engine: Any, model: Any) -> None:
    """Check an engine whose config contains our block, before it partitions ``model``."""
    # With an optimizer, this is a collective over all ranks. One without, as TRL's reference model, runs as stock.
    if engine.client_optimizer or engine.optimizer_name():
        # NCCL needs the device of this rank now, and DeepSpeed sets it only later.
        get_accelerator().set_device(max(0, engine.local_rank))
        raise_together(lambda: _check_engine(engine, model))
    elif enabled_config(param_dict(config_of(engine))) is not None:
        log.info(
            f'an engine without an optimizer runs as stock DeepSpeed: "{CONFIG_KEY}" has no update to schedule there'
        )


def _check_engine(engine: Any, model: Any) -> None:
    if (config := _supported(config_of(engine))) is None:
        return
    if model is not None:
        # Early, because DeepSpeed compiles its kernels next. ``assemble`` checks the trained names again.
        trained = [name for name, param in model.named_parameters() if param.requires_grad]
        refuse_rules_without_effect(config, model, trained)
    check_folders(config)
    warn_of_untested_release()


def load_checkpoint(wrapped: Callable[..., Any], engine: Any, args: Any, kwargs: Any) -> Any:
    """Replace ``DeepSpeedEngine.load_checkpoint``. All ranks raise ``CheckpointError`` if one cannot load its files."""
    if isinstance(engine.optimizer, DeepOptimizerStates_Stage3):
        check_before_loading(engine, args, kwargs)
    return wrapped(*args, **kwargs)
