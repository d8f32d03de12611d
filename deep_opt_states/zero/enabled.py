"""Decide whether a config enables the plugin.

Nothing is imported here that another release of DeepSpeed may lack: a disabled block must never prevent training.
"""

from __future__ import annotations

import os
from typing import Any

from deep_opt_states.config import Config, parse_config
from deep_opt_states.names import SWITCH
from deep_opt_states.zero.internals.log import log_rank_0

_logged_switched_off = False


def enabled_config(param_dict: dict[str, Any]) -> Config | None:
    """Return our block of the user's JSON if the plugin is on.

    Raise ``ConfigError`` for an invalid block, even if it is not enabled.
    """
    global _logged_switched_off
    config = parse_config(param_dict)
    if config is None or not config.enabled:
        return None
    if os.environ.get(SWITCH) == "0":
        if not _logged_switched_off:
            log_rank_0(f"switched off by {SWITCH}=0: training with stock DeepSpeed")
            _logged_switched_off = True
        return None
    return config
