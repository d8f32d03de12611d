"""Test the plugin's logger: who logs, the prefix, and that the user's configuration is obeyed."""

from __future__ import annotations

import io
import logging
import sys
from collections.abc import Iterator

import pytest
import torch.distributed as dist

from deep_opt_states import log


@pytest.fixture(autouse=True)
def logger(monkeypatch: pytest.MonkeyPatch) -> Iterator[logging.Logger]:
    """Yield the logger as it is before the first line, in a process that no launcher has started."""
    logger = logging.getLogger("deep_opt_states")
    before = logger.handlers[:], logger.level, logger.propagate
    logger.handlers[:], logger.level, logger.propagate = [], logging.NOTSET, True
    monkeypatch.setattr(log, "_rank", None)
    monkeypatch.delenv("RANK", raising=False)
    log._logger.cache_clear()
    yield logger
    logger.handlers[:], level, logger.propagate = before
    logger.setLevel(level)
    log._logger.cache_clear()


def log_one_of_each() -> None:
    log.info("for all")
    log.warn("a warning for all")
    log.info_this_rank("of this rank")
    log.warn_this_rank("a warning of this rank")
    log.error(ValueError("broken"))


def test_rank_0_logs_everything_and_only_levels_above_info_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    log_one_of_each()
    assert capsys.readouterr().out.splitlines() == [
        "[deep_opt_states] for all",
        "[deep_opt_states] WARNING: a warning for all",
        "[deep_opt_states] of this rank",
        "[deep_opt_states] WARNING: a warning of this rank",
        "[deep_opt_states] ERROR: broken",
        "ValueError: broken",
    ]


def test_a_framework_whose_loggers_drop_the_information_of_others_keeps_our_lines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class DropsInfo(logging.Logger):
        """A class of loggers such as axolotl's."""

        def __init__(self, name: str) -> None:
            super().__init__(name)
            self.addFilter(lambda record: record.levelno > logging.INFO)

    monkeypatch.delitem(logging.Logger.manager.loggerDict, "deep_opt_states")
    frameworks_class = logging.getLoggerClass()
    logging.setLoggerClass(DropsInfo)
    try:
        log.info("for all")
        assert logging.getLoggerClass() is DropsInfo
    finally:
        logging.setLoggerClass(frameworks_class)
    assert capsys.readouterr().out == "[deep_opt_states] for all\n"


def test_another_rank_logs_only_what_concerns_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "3")
    log_one_of_each()
    assert capsys.readouterr().out.splitlines() == [
        "[deep_opt_states] rank 3: of this rank",
        "[deep_opt_states] WARNING: rank 3: a warning of this rank",
        "[deep_opt_states] ERROR: rank 3: broken",
        "ValueError: broken",
    ]


def test_the_rank_is_still_known_at_exit_when_there_is_no_group_any_more(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda: 2)
    log.info("in training")
    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    log.info("the summary")
    log.warn_this_rank("late")
    assert capsys.readouterr().out == "[deep_opt_states] WARNING: rank 2: late\n"


def test_handlers_of_the_root_logger_do_not_show_lines_twice(capsys: pytest.CaptureFixture[str]) -> None:
    handler = logging.StreamHandler(sys.stdout)
    logging.getLogger().addHandler(handler)
    try:
        log.warn("once")
    finally:
        logging.getLogger().removeHandler(handler)
    assert capsys.readouterr().out.count("once") == 1


def test_a_handler_of_the_user_takes_the_place_of_ours(
    logger: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    to_file = logging.StreamHandler(written := io.StringIO())
    to_file.setFormatter(logging.Formatter("%(name)s %(levelname)s %(message)s"))
    logger.addHandler(to_file)
    logger.setLevel(logging.INFO)
    log.info("a line with 100 %d")
    assert written.getvalue() == "deep_opt_states INFO a line with 100 %d\n"
    assert capsys.readouterr().out == ""
    assert logger.handlers == [to_file]
    assert logger.propagate


def test_a_level_of_the_user_is_kept(logger: logging.Logger, capsys: pytest.CaptureFixture[str]) -> None:
    logger.setLevel(logging.ERROR)
    log_one_of_each()
    assert capsys.readouterr().out == "[deep_opt_states] ERROR: broken\nValueError: broken\n"
