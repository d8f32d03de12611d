"""Define the version and the names that users write, and recognise misspellings of these names.

They are here and not in the modules that use them, because importing ``activation`` must cost almost nothing.
"""

import difflib
from collections.abc import Iterable, Iterator, Sequence

__version__ = "0.2.0"

CONFIG_KEY = "deep_optimizer_states"
"""The block in the DeepSpeed JSON config."""

SWITCH = "DEEP_OPT_STATES"
"""The environment variable that, set to 0, switches the plugin off."""

CHECK_SWITCH = "DEEP_OPT_STATES_CHECK"
"""The environment variable that, set to 1, names parameters that a script writes to without a call that waits."""


def resembles_config_key(key: object) -> bool:
    """Return whether ``key`` is another spelling of ``CONFIG_KEY``, such as ``deep_opt_states``.

    DeepSpeed ignores unknown top-level keys, so with a misspelled block, stock DeepSpeed would train unnoticed. No key
    of DeepSpeed itself is as similar: the nearest, ``fp32_optimizer_states``, has a similarity of 0.89.
    """
    # Users disable a key by a leading character that is not a letter.
    if not isinstance(key, str) or key == CONFIG_KEY or not key[:1].isalpha():
        return False
    letters, expected = _letters(key), _letters(CONFIG_KEY)
    return letters.startswith("deepopt") or bool(difflib.get_close_matches(letters, [expected], cutoff=0.92))


def blocks_below(config: object, path: str = "") -> Iterator[tuple[str, str, object]]:
    """Yield each key below the top level of ``config`` that is ours or resembles it: its path, the key, and its value.

    DeepSpeed passes on several of its blocks unread, such as ``"optimizer"``: our block would be ignored there.
    """
    entries: Iterable[tuple[object, object]] = ()
    if isinstance(config, dict):
        # Users disable a key by a leading character that is not a letter.
        entries = [(key, value) for key, value in config.items() if str(key)[:1].isalpha()]
    elif isinstance(config, (list, tuple)):
        entries = enumerate(config)
    for key, value in entries:
        if key == CONFIG_KEY or resembles_config_key(key):
            if path:
                yield path, str(key), value
        else:
            yield from blocks_below(value, f"{path}.{key}" if path else str(key))


def is_about_our_block(location: Sequence[object]) -> bool:
    """Return whether a validation error at ``location``, a path of keys, is about our block, however it is spelled.

    ``location`` is empty if the error is about several keys.
    """
    return any(key == CONFIG_KEY or resembles_config_key(key) for key in location[-1:])


def _letters(key: str) -> str:
    return "".join(filter(str.isalpha, key.lower()))
