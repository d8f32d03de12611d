"""Decide whether a config enables the plugin. Import nothing here that another release of DeepSpeed may lack."""

from __future__ import annotations

import os
from typing import Any

from deep_opt_states import log
from deep_opt_states.config import Config, parse_config
from deep_opt_states.names import SWITCH


def enabled_config(param_dict: dict[str, Any]) -> Config | None:
    """Return our block of the user's JSON if the plugin is on. Raise ``ConfigError`` for any invalid block."""
    config = parse_config(param_dict)
    if config is None or not config.enabled:
        return None
    if os.environ.get(SWITCH) == "0":
        log.info_once(f"switched off by {SWITCH}=0: training with stock DeepSpeed")
        return None
    return config
