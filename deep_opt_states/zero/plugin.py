"""Create our optimizer where DeepSpeed would create its own, if the engine's config has our block.

``activation.py`` calls these functions from wrappers of DeepSpeed's methods. It first checks the release of DeepSpeed,
because the imports here need names that another release may lack.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from deepspeed.accelerator import get_accelerator

# SuperOffload's optimizer inherits from stock's class. It must be defined before that name is replaced.
from deepspeed.runtime.superoffload import superoffload_stage3  # noqa: F401
from deepspeed.runtime.utils import DummyOptim
from deepspeed.runtime.zero import stage3

from deep_opt_states.config import Config
from deep_opt_states.names import CHECK_SWITCH, CONFIG_KEY
from deep_opt_states.zero.checkpoint_check import check_before_loading
from deep_opt_states.zero.enabled import enabled_config
from deep_opt_states.zero.internals.agreement import raise_together, same_on_all_ranks
from deep_opt_states.zero.internals.compat import config_of, param_dict
from deep_opt_states.zero.internals.log import log_rank_0
from deep_opt_states.zero.internals.timers import breakdown_forbids_deferring, unsynchronize_throughput_timer
from deep_opt_states.zero.stage3 import DeepOptimizerStates_Stage3
from deep_opt_states.zero.start.devices import AcceleratorChoice, choose_device
from deep_opt_states.zero.start.refusals import (
    refuse_config,
    refuse_later_methods,
    refuse_optimizer,
    refuse_rules_without_effect,
)
from deep_opt_states.zero.start.release import missing_names_are_refused, warn_of_untested_release
from deep_opt_states.zero.start.reporting import EngineProgress
from deep_opt_states.zero.step.direct_writes import checks_direct_writes


def configure_zero_optimizer(wrapped: Callable[..., Any], engine: Any, args: Any, kwargs: Any) -> Any:
    """Replace ``DeepSpeedEngine._configure_zero_optimizer`` for an engine whose config has our block.

    This is a collective over all ranks: if the config of a rank lacks the block, the others wait for it.
    """
    basic_optimizer = args[0] if args else kwargs.get("optimizer")
    if basic_optimizer is None or isinstance(basic_optimizer, DummyOptim):
        return wrapped(*args, **kwargs)
    switches = f"on, with {CHECK_SWITCH}=1" if checks_direct_writes() else "on"
    # Before stock's constructor, whose collectives a rank that refuses would never reach.
    choice = same_on_all_ranks(
        lambda: _choose(engine, basic_optimizer), lambda choice: "off" if choice is None else switches
    )
    if choice is None:
        return wrapped(*args, **kwargs)
    config, accelerator = choice
    refuse_later_methods(engine)
    if checks_direct_writes():
        log_rank_0(f"{CHECK_SWITCH}=1: updates end inside step(), and direct writes to partitions are named")
    if config.overlap_forward and (checks_direct_writes() or breakdown_forbids_deferring(config_of(engine))):
        config = config.model_copy(update={"overlap_forward": False})
    if config.overlap_forward and not accelerator.slots_on_host:
        unsynchronize_throughput_timer(config_of(engine))
    # The engine imports the class by its name when it creates its optimizer.
    stock = stage3.DeepSpeedZeroOptimizer_Stage3
    ours = partial(DeepOptimizerStates_Stage3, config, accelerator, EngineProgress(engine))
    try:
        stage3.DeepSpeedZeroOptimizer_Stage3 = ours
        return wrapped(*args, **kwargs)
    finally:
        stage3.DeepSpeedZeroOptimizer_Stage3 = stock


def _choose(engine: Any, basic_optimizer: Any) -> tuple[Config, AcceleratorChoice] | None:
    """Return our block and the accelerator, or None if the plugin is off. Raise ``ConfigError`` or ``Unsupported``."""
    config = enabled_config(param_dict(config_of(engine)))
    if config is None:
        return None
    refuse_config(config_of(engine))
    refuse_optimizer(basic_optimizer)
    return config, choose_device()


@missing_names_are_refused()
def check_config(ds_config: Any) -> None:
    """Check every ``DeepSpeedConfig`` that has our block. Raise ``ConfigError`` or ``Unsupported``.

    ``deepspeed.zero.Init`` also reads the config, and partitions the model by it: the error should come before that.
    The rules concern engines with an optimizer, which only ``"optimizer"`` in the config shows here; ``check_engine``
    checks all other engines.
    """
    config = enabled_config(param_dict(ds_config))
    if config is not None and ds_config.optimizer_name is not None:
        refuse_config(ds_config)


@missing_names_are_refused()
def check_engine(engine: Any, model: Any) -> None:
    """Check an engine for ``model`` whose config has our block, before it partitions the model.

    An engine without an optimizer, such as TRL's reference model, may have the config of the training. It runs as stock
    DeepSpeed, and nothing is checked. With an optimizer, this is a collective over all ranks: if one rank refuses the
    engine, all ranks raise. Raise ``ConfigError`` or ``Unsupported``.
    """
    if engine.client_optimizer or engine.optimizer_name():
        # DeepSpeed sets the device of this rank only later, and NCCL needs it now.
        get_accelerator().set_device(max(0, engine.local_rank))
        raise_together(lambda: _check_engine(engine, model))
    elif enabled_config(param_dict(config_of(engine))) is not None:
        log_rank_0(
            f'an engine without an optimizer runs as stock DeepSpeed: "{CONFIG_KEY}" has no update to schedule there'
        )


def _check_engine(engine: Any, model: Any) -> None:
    config = enabled_config(param_dict(config_of(engine)))
    if config is None:
        return
    refuse_config(config_of(engine))
    if model is not None:
        # DeepSpeed compiles its kernels later. Then the names are checked again: only a part may be trained.
        trained = [name for name, param in model.named_parameters() if param.requires_grad]
        refuse_rules_without_effect(config, model, trained)
    warn_of_untested_release()


def check_checkpoint(engine: Any, args: Any, kwargs: Any) -> None:
    """Check the files that ``engine.load_checkpoint(*args, **kwargs)`` would read, if the engine has our optimizer.

    This is a collective over all ranks. Raise ``CheckpointError`` on all of them.
    """
    if isinstance(engine.optimizer, DeepOptimizerStates_Stage3):
        check_before_loading(engine, args, kwargs)
