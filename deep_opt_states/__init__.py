"""Interleaved optimizer offloading for DeepSpeed ZeRO-3, enabled by its JSON config.

Importing this package does by hand what the entry point does at ``import torch``: it lets the JSON block
``deep_optimizer_states`` switch the plugin on. It imports neither torch nor DeepSpeed.
"""

from deep_opt_states.activation import activate

__version__ = "0.1.0"
__all__ = ["activate"]

activate()
