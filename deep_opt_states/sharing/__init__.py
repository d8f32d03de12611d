"""How do layers share their parameters, and how do they get their own? For Pseudo-to-Real training."""

from deep_opt_states.sharing.layers import SharingError, share_layers

__all__ = ["SharingError", "share_layers"]
