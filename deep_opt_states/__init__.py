"""How is interleaved optimizer offloading enabled in DeepSpeed ZeRO-3? By one block of the JSON config.

Importing this package is the same as its entry point at ``import torch``, and loads neither torch nor DeepSpeed.
"""

from deep_opt_states.activation import activate
from deep_opt_states.names import __version__

__all__ = ["__version__", "activate"]

activate()
