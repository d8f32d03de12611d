"""How do layers share their parameters, and how do they get their own? For Pseudo-to-Real training.

``share_layers`` prepares the model of the first stage. ``delink`` makes the checkpoint of the second stage.
"""

from deep_opt_states.sharing.layers import SharingError, share_layers

__all__ = ["SharingError", "share_layers"]
