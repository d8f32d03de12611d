"""Names that users write. Here and not where they are used, since ``activation`` must cost next to nothing."""

import difflib

CONFIG_KEY = "deep_optimizer_states"
"""The block in the DeepSpeed JSON config."""

SWITCH = "DEEP_OPT_STATES"
"""The environment variable that, set to 0, switches the plugin off."""


def resembles_config_key(key: object) -> bool:
    """Return whether ``key`` is another spelling of ``CONFIG_KEY``, such as ``deep_opt_states``.

    DeepSpeed ignores unknown top-level keys, so a misspelled block would train with stock DeepSpeed unnoticed. No key
    of DeepSpeed's own comes this close: the nearest, ``fp32_optimizer_states``, has a similarity of 0.89.
    """
    # A key that begins with another sign is commented out.
    if not isinstance(key, str) or key == CONFIG_KEY or not key[:1].isalpha():
        return False
    letters, ours = _letters(key), _letters(CONFIG_KEY)
    return letters.startswith("deepopt") or bool(difflib.get_close_matches(letters, [ours], cutoff=0.92))


def _letters(key: str) -> str:
    return "".join(filter(str.isalpha, key.lower()))
