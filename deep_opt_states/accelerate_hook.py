"""Wrap the functions of Accelerate that read a config and replace an optimizer: warn before weights are loaded."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from wrapt import wrap_function_wrapper

from deep_opt_states.activation import json_of, plugin_for
from deep_opt_states.names import REPLACED_OPTIMIZER


def warn_early(module: Any) -> None:
    """Wrap the functions of ``module``, ``accelerate.utils.deepspeed``."""

    def read_config(wrapped: Any, hf_config: Any, args: Any, kwargs: Any) -> None:
        # Accelerate and the Trainer read a config before they load weights, and DeepSpeed does so afterwards.
        wrapped(*args, **kwargs)
        if plugin_for(hf_config):
            from deep_opt_states.config import enabled_config
            from deep_opt_states.zero.start.accelerated import warn_of_config

            if enabled_config(json_of(hf_config)) is not None:
                warn_of_config(json_of(hf_config))

    def replace_optimizer(wrapped: Any, _: Any, args: Any, kwargs: Any) -> Any:
        replacing = wrapped(*args, **kwargs)
        setattr(replacing, REPLACED_OPTIMIZER, type(args[0] if args else kwargs["optimizer"]))
        return replacing

    # Only warnings depend on them, so a release that lacks one works.
    with suppress(AttributeError):
        wrap_function_wrapper(module, "HfDeepSpeedConfig.__init__", read_config)
    with suppress(AttributeError):
        wrap_function_wrapper(module, "map_pytorch_optim_to_deepspeed", replace_optimizer)
