"""The seam: swaps the stage-3 class while DeepSpeed configures an engine whose config has our block."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from deepspeed.runtime.superoffload import superoffload_stage3  # noqa: F401 (a subclass of stock's, also later)
from deepspeed.runtime.utils import DummyOptim
from deepspeed.runtime.zero import stage3

from deep_opt_states.config import Config, parse_config
from deep_opt_states.names import CONFIG_KEY, SWITCH
from deep_opt_states.zero.internals.agreement import agree
from deep_opt_states.zero.internals.compat import param_dict
from deep_opt_states.zero.internals.log import say
from deep_opt_states.zero.internals.timers import end_with_the_step, let_updates_go_on
from deep_opt_states.zero.stage3 import DeepOptimizerStates_Stage3
from deep_opt_states.zero.start.devices import AcceleratorChoice, choose_device
from deep_opt_states.zero.start.refusals import refuse_config, refuse_engine
from deep_opt_states.zero.start.reporting import Training

_said_off = False


def configure_zero_optimizer(wrapped: Callable[..., Any], engine: Any, args: Any, kwargs: Any) -> Any:
    """Stands for ``DeepSpeedEngine._configure_zero_optimizer`` of an engine whose config has our block.

    A rank whose config lacks the block does not come here; it cannot be told from one that is late.
    """
    basic_optimizer = args[0] if args else kwargs.get("optimizer")
    if basic_optimizer is None or isinstance(basic_optimizer, DummyOptim):
        return wrapped(*args, **kwargs)
    # Before stock's constructor, which has collectives of its own that a refused rank would never reach.
    choice = agree(lambda: _choose(engine, basic_optimizer), lambda choice: "off" if choice is None else "on")
    if choice is None:
        return wrapped(*args, **kwargs)
    config, accelerator = choice
    if config.overlap_forward and end_with_the_step(engine._config):
        config = config.model_copy(update={"overlap_forward": False})
    if config.overlap_forward and not accelerator.steps_on_host:
        let_updates_go_on(engine._config)
    with _stage3_class(partial(DeepOptimizerStates_Stage3, config, accelerator, Training(engine))):
        return wrapped(*args, **kwargs)


def _choose(engine: Any, basic_optimizer: Any) -> tuple[Config, AcceleratorChoice] | None:
    """None where the plugin is off. Raises ``ConfigError`` or ``Unsupported``."""
    config = _enabled_config(engine._config)
    if config is None:
        return None
    refuse_config(engine._config)
    refuse_engine(engine, basic_optimizer)
    return config, choose_device()


def check_config(ds_config: Any) -> None:
    """Check every ``DeepSpeedConfig`` with our block. Raises ``ConfigError`` or ``Unsupported``.

    ``deepspeed.zero.Init`` reads the config, too, and partitions the model by it: an error before that beats one after.
    What the plugin needs is needed only by an engine that has an optimizer, which nothing but ``"optimizer"`` in the
    config tells here; ``check_engine`` decides about all others.
    """
    if _enabled_config(ds_config) is not None and ds_config.optimizer_name is not None:
        refuse_config(ds_config)


def check_engine(engine: Any) -> None:
    """Check an engine whose config has our block, before it partitions the model. Raises what ``check_config`` does.

    An engine without an optimizer inherits the block where its config is made from that of the training: TRL's
    reference model, a teacher, an evaluation. It is stock DeepSpeed's, whatever else its config says.
    """
    if _enabled_config(engine._config) is None:
        return
    if engine.client_optimizer or engine.optimizer_name():
        refuse_config(engine._config)
    else:
        say(f'an engine without an optimizer is stock DeepSpeed\'s: "{CONFIG_KEY}" has no update to schedule there')


def switched_off() -> bool:
    return os.environ.get(SWITCH) == "0"


def _enabled_config(ds_config: Any) -> Config | None:
    """Raises ``ConfigError`` for an invalid block, also one that is not enabled."""
    global _said_off
    config = parse_config(param_dict(ds_config))
    if config is None or not config.enabled:
        return None
    if switched_off():
        if not _said_off:
            say(f"switched off by {SWITCH}=0: training with stock DeepSpeed")
            _said_off = True
        return None
    return config


@contextmanager
def _stage3_class(replacement: Callable[..., Any]) -> Iterator[None]:
    """The engine imports the class late, by name: what the module holds during the call is what it builds."""
    stock = stage3.DeepSpeedZeroOptimizer_Stage3
    stage3.DeepSpeedZeroOptimizer_Stage3 = replacement
    try:
        yield
    finally:
        stage3.DeepSpeedZeroOptimizer_Stage3 = stock
