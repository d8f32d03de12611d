"""Check a DeepSpeed config as the start of training does, without training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from deep_opt_states.config import ConfigError, Unsupported, misplaced_error, parse_config
from deep_opt_states.doctor import FAIL, OK, WARN, Finding
from deep_opt_states.names import CONFIG_KEY, PARAGRAPH, ignored_blocks
from deep_opt_states.zero.start.older_stages import refuse_older_stage
from perf_model.json_input import reason
from perf_model.prediction.hardware import HardwareProfile, ProfileError


def examine_config(path: Path) -> dict[str, Finding]:
    """Return the findings about the DeepSpeed config in ``path``, by the checks at start that need no engine."""
    try:
        return {path.name: _check(_read(path))}
    except (ValueError, AssertionError) as error:
        # Our errors are pairs of lines, rule and remedy, below a title if there are many. Paragraphs are of the first.
        message, *more = str(error).split(PARAGRAPH)
        lines = [line for line in message.splitlines() if not line.endswith(":")]
        if type(error) in (ConfigError, ProfileError, Unsupported) and len(lines) % 2 == 0:
            pairs = list(zip(lines[::2], lines[1::2], strict=True))
            pairs[0] = (pairs[0][0], PARAGRAPH.join((pairs[0][1], *more)))
        else:
            pairs = [(f"DeepSpeed must accept the config, found that it raises {error}", "Correct this key.")]
        return {f"{path.name} ({number})": FAIL(*pair) for number, pair in enumerate(pairs, start=1)}


def _read(path: Path) -> dict[str, Any]:
    """Return the config as DeepSpeed reads it. Raise ``ConfigError`` if that fails."""
    import hjson
    from deepspeed.runtime.config_utils import dict_raise_error_on_duplicate_keys

    rule = "A DeepSpeed config must be a file with a JSON object"
    try:
        found = hjson.loads(path.read_text(), object_pairs_hook=dict_raise_error_on_duplicate_keys)
    except (OSError, ValueError) as error:
        why = " ".join(reason(error).splitlines())
        raise ConfigError(f"{rule}, found {path}: {why}\nCorrect the file, or give the path of another one.") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{rule}, found {path} with another value.\nCorrect the file.")
    return found


def _check(raw: dict[str, Any]) -> Finding:
    from deepspeed.runtime.config import DeepSpeedConfig

    from deep_opt_states.zero.start.accelerated import KEPT, REMOVE_KEY, keeps_optimizer
    from deep_opt_states.zero.start.disk import check_folders, with_nvme_path
    from deep_opt_states.zero.start.refusals import refuse_config
    from deep_opt_states.zero.start.release import check_release

    for block in ignored_blocks(raw):
        if block.is_misspelled and CONFIG_KEY not in raw:
            found = f"{'.'.join(map(str, block.path))}: has no effect, and stock DeepSpeed trains"
            return FAIL(found, f'Is it "{CONFIG_KEY}" at the top level? Correct the name.')
        if not block.is_misspelled and not block.is_switched_off:
            raise misplaced_error(block)
    config = parse_config(raw)
    if config is None:
        found = f"{CONFIG_KEY}: must be at the top level, found no such block: stock DeepSpeed trains"
        return FAIL(found, f'Add "{CONFIG_KEY}": {{}}.')
    if not config.enabled:
        return WARN(f"{CONFIG_KEY}.enabled: false, stock DeepSpeed trains", "Remove the key.")
    if config.profile is not None:
        HardwareProfile.read(Path(config.profile))
    check_release()
    refuse_older_stage(raw)
    # Trainer fills in the values that are "auto", and the batch depends on the number of ranks.
    known = _without_auto({key: value for key, value in raw.items() if key != "train_batch_size"})
    parsed = DeepSpeedConfig({**known, "train_micro_batch_size_per_gpu": 1})
    refuse_config(parsed)
    for doubt in check_folders(with_nvme_path(config, parsed.zero_config.offload_optimizer)):
        return WARN(doubt, "Name a folder on a local disk.")
    if keeps_optimizer(raw):
        return WARN(f'"zero_force_ds_cpu_optimizer": false: {KEPT}', REMOVE_KEY)
    return OK(f"accepted, with placement {config.placement!r}")


def _without_auto(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    return {key: _without_auto(each) for key, each in value.items() if each != "auto"}
