"""Warn of what Accelerate, and so the Trainer, makes of a config and of the optimizer of a script."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from deep_opt_states import log
from deep_opt_states.config import Unsupported
from deep_opt_states.names import CONFIG_KEY, PARAGRAPH, REPLACED_OPTIMIZER
from deep_opt_states.zero.start.older_stages import refuse_older_stage

CONVERSION = (
    'Use "adamw_torch": without the key, Accelerate and the Trainer replace every optimizer but Adagrad by '
    "DeepSpeedCPUAdam, also adamw_bnb_8bit and SGD, which then have L2 decay instead of AdamW's."
)
REMOVE_KEY = f'Remove "zero_force_ds_cpu_optimizer": false, unless the script passes a DeepSpeedCPUAdam. {CONVERSION}'
KEPT = f'Accelerate and the Trainer keep the optimizer, and deepspeed.initialize refuses it with "{CONFIG_KEY}"'

DECOUPLED_DECAY = {"Adam": False, "AdamW": True, "AdamW32bit": True}
"""Whether weight decay is decoupled, by the classes of PyTorch and bitsandbytes that DeepSpeedCPUAdam can replace."""


def keeps_optimizer(param_dict: Mapping[str, Any]) -> bool:
    """Return whether Accelerate keeps the optimizer of the script."""
    # No error: a DeepSpeedCPUAdam that the script passes has the weight decay of AdamW only if it is kept.
    return not param_dict.get("zero_force_ds_cpu_optimizer", True) and "optimizer" not in param_dict


def warn_of_config(param_dict: Mapping[str, Any]) -> None:
    """Warn if this config will be refused, unless the engine has no optimizer."""
    try:
        refuse_older_stage(param_dict)
    except Unsupported as error:
        # Accelerate reads the config several times, with ever more values filled in.
        log.warn_once(
            f"deepspeed.initialize will fail, and `deep-opt-states doctor --config` prints the config for ZeRO-3.\n"
            f"{str(error).partition(PARAGRAPH)[0]}"
        )
    if keeps_optimizer(param_dict):
        log.warn_once(f"{REMOVE_KEY} With the key, {KEPT}.")


def warn_of_optimizer(optimizer: Any) -> None:
    """Warn if Accelerate made this DeepSpeedCPUAdam of one that computes other updates."""
    replaced = getattr(optimizer, REPLACED_OPTIMIZER, None)
    if replaced is not None and DECOUPLED_DECAY.get(replaced.__name__) is not optimizer.adam_w_mode:
        decay = "AdamW's" if optimizer.adam_w_mode else "L2"
        log.warn(
            f"{replaced.__module__}.{replaced.__qualname__} does not train: Accelerate has replaced it by "
            f"DeepSpeedCPUAdam, which is Adam in fp32 with {decay} weight decay, with stock as well. For AdamW, use "
            '"adamw_torch".'
        )
