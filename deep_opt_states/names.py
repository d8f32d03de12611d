"""Define the version and the names that users write, in a module whose import costs almost nothing."""

import difflib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

__version__ = "0.3.0"

CONFIG_KEY = "deep_optimizer_states"
"""The block in the DeepSpeed JSON config."""

SWITCH = "DEEP_OPT_STATES"
"""The environment variable that, set to 0, switches the plugin off."""

CHECK_SWITCH = "DEEP_OPT_STATES_CHECK"
"""The environment variable that, set to 1, names parameters that a script writes to without a call that waits."""

ACCELERATE_FIELDS = "ACCELERATE_CONFIG_DS_FIELDS"
"""The environment variable in which Accelerate's launcher lists the keys of ``deepspeed_config`` in its YAML file."""

PARAGRAPH = "\n\n"
"""The end of the rule and the remedy in an error, which further paragraphs may follow."""

REPLACED_OPTIMIZER = "deep_opt_states_replaced"
"""The attribute of an optimizer with the class of the one that Accelerate has replaced by it."""


def is_our_block(key: object) -> bool:
    """Return whether ``key`` is the name of our block, or another spelling of it, such as ``deep_opt_states``."""
    if not isinstance(key, str) or _is_disabled(key):
        return False
    # Some scripts write a path with dots as one key.
    letters, expected = _letters(key.rpartition(".")[2]), _letters(CONFIG_KEY)
    # DeepSpeed's most similar key is ``fp32_optimizer_states``, with a similarity of 0.89.
    return letters.startswith(("deepopt", "deepspeedopt")) or bool(
        difflib.get_close_matches(letters, [expected], cutoff=0.92)
    )


class IgnoredBlock(NamedTuple):
    """A block that DeepSpeed would ignore, because it is below the top level of the config or misspelled."""

    path: tuple[object, ...]
    """The keys, and positions in lists, that lead to the block and end with its name."""
    block: object
    neighbours: Mapping[object, object]
    """The dictionary that contains the block."""

    @property
    def is_misspelled(self) -> bool:
        """Return whether the name is not ours."""
        return self.path[-1] != CONFIG_KEY

    @property
    def is_switched_off(self) -> bool:
        """Return whether stock DeepSpeed shall train, as it does."""
        return self.block is False or (isinstance(self.block, Mapping) and self.block.get("enabled") is False)


def ignored_blocks(config: Mapping[str, object]) -> Iterator[IgnoredBlock]:
    """Yield each block of a config with our name below the top level, or with another spelling anywhere."""
    seen = {id(config)}
    containers: list[tuple[tuple[object, ...], Any]] = [((), config)]
    for path, container in containers:
        for key, value in container.items() if isinstance(container, Mapping) else enumerate(container):
            if is_our_block(key):
                if path or key != CONFIG_KEY:
                    yield IgnoredBlock((*path, key), value, container)
            elif isinstance(value, Mapping | list | tuple) and not _is_disabled(key) and id(value) not in seen:
                # A config in Python may contain itself.
                seen.add(id(value))
                containers.append(((*path, key), value))


def _is_disabled(key: object) -> bool:
    """Return whether a key starts with a character that is not a letter, by which users disable keys."""
    return isinstance(key, str) and not key.lstrip()[:1].isalpha()


def _letters(key: str) -> str:
    return "".join(filter(str.isalpha, key.lower()))
