"""Refuse a release of DeepSpeed that is too old or lacks names that the plugin uses; warn of an untested one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache

import deepspeed

from deep_opt_states import log
from deep_opt_states.config import Unsupported
from deep_opt_states.names import CONFIG_KEY, __version__
from deep_opt_states.zero.internals.private_names import missing_names
from deep_opt_states.zero.internals.releases import TESTED_DEEPSPEED, is_tested, is_too_old


def check_release() -> None:
    """Raise ``Unsupported`` if DeepSpeed is too old, or an untested release without a private name. No collective."""
    version = deepspeed.__version__
    if is_too_old(version):
        raise Unsupported(
            f'"{CONFIG_KEY}" is enabled, but DeepSpeed must be version {TESTED_DEEPSPEED[0]} or later, '
            f"found {version}.\n"
            f"Install the newest that was tested with pip install deepspeed=={TESTED_DEEPSPEED[-1]}."
        )
    if not is_tested(version) and (missing := _missing_names(version)):
        raise _refusal(missing)


@cache
def _missing_names(version: str) -> list[str]:
    """Look for the names before an engine exists, because our class then replaces stock's optimizer."""
    return missing_names()


@contextmanager
def missing_names_are_refused() -> Iterator[None]:
    """Raise ``Unsupported`` if a module or attribute is missing inside this context in an untested release."""
    try:
        yield
    except (ImportError, AttributeError) as error:
        if is_tested(deepspeed.__version__):
            raise
        raise _refusal([str(error)]) from error


def warn_of_untested_release() -> None:
    """Log a warning, once per process, if the release of DeepSpeed is untested."""
    if not is_tested(deepspeed.__version__):
        log.warn_once(
            f"DeepSpeed {deepspeed.__version__} was not tested with deep_opt_states {__version__}: results may differ "
            f"from stock's. It has all names that the plugin uses, so training goes on. To avoid the risk: "
            f"pip install deepspeed=={TESTED_DEEPSPEED[-1]}"
        )


def _refusal(missing: Sequence[str]) -> Unsupported:
    lines = "".join(f"  {line}\n" for line in missing)
    return Unsupported(
        f'"{CONFIG_KEY}" is enabled, but DeepSpeed must have all names that the plugin uses, found '
        f"{deepspeed.__version__}, an untested release that lacks\n"
        f"{lines}"
        f"Install one that was tested: pip install deepspeed=={TESTED_DEEPSPEED[-1]}."
    )
