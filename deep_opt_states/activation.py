"""Enable the plugin by the JSON config alone, at almost no cost in programs that do not use DeepSpeed.

PyTorch calls ``activate`` at ``import torch`` (entry point group ``torch.backends``). Modules that need torch are
imported once an engine's config contains our block.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from functools import cache, partial
from typing import Any

from deep_opt_states import log
from deep_opt_states.names import ACCELERATE_FIELDS, CONFIG_KEY, REPLACED_OPTIMIZER, ignored_blocks, is_our_block

_models: list[Any] = []
"""The models of the engines that are being constructed, the last one innermost."""


@cache
def activate() -> bool:
    """Register the hooks, and return whether that succeeded. An error would break ``import torch`` everywhere."""
    try:
        from wrapt import register_post_import_hook

        register_post_import_hook(_hook_engine, "deepspeed.runtime.engine")
        register_post_import_hook(_hook_config, "deepspeed.runtime.config")
        register_post_import_hook("deep_opt_states.waiting:watch_loader", "torch.utils.cpp_extension")
        register_post_import_hook("deep_opt_states.waiting:watch_rendezvous", "deepspeed.comm.comm")
        register_post_import_hook(_hook_accelerate, "accelerate.utils.deepspeed")
    except Exception as error:  # noqa: BLE001 (no error here may break torch)
        # No warnings.warn: where warnings are errors, it would break `import torch`.
        log.warn(f"the plugin cannot be activated: {type(error).__name__}: {error}")
        return False
    return True


def _hook_engine(module: Any) -> None:
    """Wrap the methods that create our optimizer and that load checkpoints, if the config contains our block."""

    def do_sanity_check(wrapped: Any, engine: Any, args: Any, kwargs: Any) -> Any:
        wrapped(*args, **kwargs)
        if plugin := plugin_for(getattr(engine, "_config", None)):
            # The engine has no model yet.
            plugin.check_engine(engine, _models[-1] if _models else None)

    def call_plugin(name: str, wrapped: Any, engine: Any, args: Any, kwargs: Any) -> Any:
        if plugin := plugin_for(getattr(engine, "_config", None)):
            return getattr(plugin, name)(wrapped, engine, args, kwargs)
        return wrapped(*args, **kwargs)

    def init_engine(wrapped: Any, engine: Any, args: Any, kwargs: Any) -> None:
        # No update exists if this module was never imported.
        hooks = sys.modules.get("deep_opt_states.zero.internals.partition_hooks")
        model = kwargs.get("model", args[1] if len(args) > 1 else None)
        if hooks is not None and model is not None:
            hooks.before_new_engine(model)
        _models.append(model)
        try:
            wrapped(*args, **kwargs)
        finally:
            _models.pop()

    # An engine, also of stock, copies partitions that an update of another engine may still write to.
    _wrap(module, "DeepSpeedEngine", "__init__", init_engine)
    # In _do_sanity_check an engine first knows its optimizer, before it partitions the model. ZeRO stage 0 creates no
    # ZeRO optimizer, so the second wrapper alone would silently ignore our block.
    _wrap(module, "DeepSpeedEngine", "_do_sanity_check", do_sanity_check)
    # The functions of ``plugin`` have the names of the methods.
    for method in ("_configure_zero_optimizer", "load_checkpoint", "save_checkpoint", "save_16bit_model"):
        _wrap(module, "DeepSpeedEngine", method, partial(call_plugin, method.removeprefix("_")))


def _hook_config(module: Any) -> None:
    def initialize_params(wrapped: Any, ds_config: Any, args: Any, kwargs: Any) -> None:
        # DeepSpeed's own error for our block inside one of its blocks does not name the place.
        _report_ignored_blocks(ds_config)
        wrapped(*args, **kwargs)
        if plugin := plugin_for(ds_config):
            plugin.check_config(ds_config)

    def initialize(wrapped: Any, ds_config: Any, args: Any, kwargs: Any) -> None:
        wrapped(*args, **kwargs)
        _report_ignored_blocks(ds_config)
        plugin_for(ds_config)

    if not _wrap(module, "DeepSpeedConfig", "_initialize_params", initialize_params):
        # A release without the method must not train with stock unnoticed.
        _wrap(module, "DeepSpeedConfig", "__init__", initialize)


def _hook_accelerate(module: Any) -> None:
    """Wrap the functions that read a config and replace an optimizer: warn before weights are loaded."""
    from wrapt import wrap_function_wrapper

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


def plugin_for(ds_config: Any) -> Any:
    """Return the module ``plugin`` if the JSON contains our block. Raise ``ConfigError`` or ``Unsupported``."""
    param_dict = json_of(ds_config)
    if CONFIG_KEY not in param_dict:
        return None
    from deep_opt_states.config import enabled_config
    from deep_opt_states.zero.start.release import check_release, missing_names_are_refused

    is_enabled = enabled_config(param_dict) is not None
    if is_enabled:
        check_release()
    # The ranks agree whether the plugin is on, so a rank with a disabled block takes part where it can.
    with missing_names_are_refused() if is_enabled else suppress(ImportError, AttributeError):
        from deep_opt_states.zero import plugin

        return plugin
    return None


def json_of(ds_config: Any) -> dict[str, Any]:
    """Return the user's JSON. Importing its name from ``zero/internals`` would load the plugin in every process."""
    attributes: dict[str, Any] = getattr(ds_config, "__dict__", {})
    ours = (value for value in attributes.values() if isinstance(value, dict) and CONFIG_KEY in value)
    param_dict: dict[str, Any] = attributes.get("_param_dict", next(ours, {}))
    return param_dict


def _report_ignored_blocks(ds_config: Any) -> None:
    """Raise ``ConfigError`` for our block in a wrong place, and warn of misspelled names, which stock ignores."""
    param_dict = json_of(ds_config)
    blocks = [block for block in ignored_blocks(param_dict) if not block.is_switched_off]
    # Accelerate's launcher passes on these keys without their values.
    in_yaml = [key for key in os.environ.get(ACCELERATE_FIELDS, "").split(",") if is_our_block(key)]
    if CONFIG_KEY in in_yaml or not all(block.is_misspelled for block in blocks):
        from deep_opt_states.config import misplaced_error

        raise misplaced_error(next((block for block in blocks if not block.is_misspelled), None))
    if CONFIG_KEY not in param_dict:
        # No error: a misspelled name may be the user's own.
        for block in blocks:
            _warn_of_misspelled(block.path)
        for key in in_yaml:
            _warn_of_misspelled(("deepspeed_config", key))


def _warn_of_misspelled(path: tuple[object, ...]) -> None:
    place = " at the top level" if len(path) > 1 else ""
    # DeepSpeed may read a config several times.
    log.warn_once(
        f'the key "{".".join(map(str, path))}" in the DeepSpeed config has no effect: did you mean '
        f'"{CONFIG_KEY}"{place}? Until that is changed, stock DeepSpeed trains.'
    )


def _wrap(module: Any, owner: str, method: str, wrapper: Any) -> bool:
    """Wrap ``owner.method``, or log a warning and return False: DeepSpeed must still be importable."""
    from wrapt import wrap_function_wrapper

    if not (hasattr(module, owner) and hasattr(getattr(module, owner), method)):
        log.warn(
            f"the plugin does not support this version of DeepSpeed: {module.__name__} has no {owner}.{method}. Do not "
            f"use the block {CONFIG_KEY!r}; `deep-opt-states doctor` shows which versions are supported."
        )
        return False
    wrap_function_wrapper(module, f"{owner}.{method}", wrapper)
    return True
