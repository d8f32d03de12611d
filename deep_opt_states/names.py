"""Names that users write. Here and not where they are used, since ``activation`` must cost next to nothing."""

CONFIG_KEY = "deep_optimizer_states"
"""The block in the DeepSpeed JSON config."""

SWITCH = "DEEP_OPT_STATES"
"""The environment variable that, set to 0, switches the plugin off."""
