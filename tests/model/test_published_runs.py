"""Test files of measured runs: they are read, or refused with the rule, the value found and the remedy."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perf_model.json_input import printable
from perf_model.published.runs import NAMES, NUMBERS, REQUIRED, RunsError, parse_runs, read_runs
from tests.launch import REPOSITORY

PUBLISHED = REPOSITORY / "benchmarks" / "data" / "published_runs.csv"

ROW = {
    "machine": "4xH100",
    "sweep": "strides",
    "model_name": "13B",
    "real_params": "11250000000",
    "tp": "1",
    "dp": "4",
    "layers": "40",
    "hidden": "5120",
    "heads": "40",
    "cpu_ratio": "0.5",
    "sub_group_size": "100000000",
    "interleaved": "1",
    "async_grad_flush": "1",
    "update_stride": "2",
    "forward_s": "0.21",
    "update_s": "1.25",
}


def text_of(*rows: dict[str, str]) -> str:
    """Return ``rows`` as CSV."""
    file = io.StringIO()
    writer = csv.DictWriter(file, list(rows[0]))
    writer.writeheader()
    writer.writerows(rows)
    return file.getvalue()


def refused(text: str) -> str:
    """Check that ``text`` is refused, and return the message."""
    with pytest.raises(RunsError) as caught:
        parse_runs(text, "runs.csv")
    message = str(caught.value)
    assert "found" in message
    assert len(message.splitlines()) == 2, "rule and value found, then the remedy"
    return message


def test_the_published_runs_are_read() -> None:
    runs = read_runs(PUBLISHED)
    assert len(runs) == len(PUBLISHED.read_text().splitlines()) - 1
    first = runs[0]
    assert (first.machine, first.sweep, first.tp, first.dp) == ("A100-40GB-nodes", "13B-scale-DP", 1, 1)
    assert first.measured_s == 7.91
    assert first.setting.real_params == 11_250_000_000
    # The column has 5, but nothing was interleaved.
    assert first.setting.update_stride is None
    assert runs[2].setting.update_stride == 5


def test_runs_that_differ_only_where_the_update_does_not_have_equal_settings() -> None:
    run, other = parse_runs(text_of(ROW, {**ROW, "async_grad_flush": "0", "update_s": "1.3", "sweep": "again"}), "")
    assert run.setting == other.setting
    assert run.setting.ranks == 4


@pytest.mark.parametrize("name", [name for name in NUMBERS if name not in REQUIRED])
def test_a_column_that_is_not_needed_may_be_blank_missing_or_0(name: str) -> None:
    without = {key: value for key, value in ROW.items() if key != name}
    assert len(parse_runs(text_of({**ROW, name: ""}), "")) == 1
    assert len(parse_runs(text_of({**ROW, name: "0", "interleaved": "0"}), "")) == 1
    assert len(parse_runs(text_of(without), "")) == 1


def test_numbers_in_other_spellings_and_additional_columns_are_read() -> None:
    row = {**ROW, "real_params": "1.125e10", "update_s": " 1.25 ", "more": "whatever"}
    (run,) = parse_runs(text_of(row) + "\r\n", "")
    assert (run.setting.real_params, run.measured_s) == (11_250_000_000, 1.25)
    (stock,) = parse_runs(text_of({**ROW, "interleaved": "0", "update_stride": ""}), "")
    assert stock.setting.update_stride is None


@pytest.mark.parametrize("name", REQUIRED)
def test_a_missing_column_that_is_needed_is_refused(name: str) -> None:
    message = refused(text_of({key: value for key, value in ROW.items() if key != name}))
    assert f"must have one column {name}, found 0 in" in message


@pytest.mark.parametrize(
    ("name", "field", "rule"),
    [
        ("real_params", "0", "must be a whole number from 1 to 1e+13, found '0'"),
        ("real_params", "11.25B", "whole number"),
        ("real_params", "1.5", "whole number"),
        ("real_params", "1e999", "whole number"),
        ("real_params", "", "must be a number, found nothing"),
        ("dp", "-4", "must be a whole number from 1 to 1e+06, found '-4'"),
        ("tp", "1_0", "found '1_0'"),
        ("hidden", "\u0661", "whole number"),
        ("layers", "many", "found 'many'"),
        ("cpu_ratio", "1.01", "must be a number from 0 to 1, found '1.01'"),
        ("interleaved", "yes", "found 'yes'"),
        ("interleaved", "0.5", "must be a whole number from 0 to 1"),
        ("update_stride", "0", "must be at least 1 where interleaved is 1, found 0"),
        ("update_stride", "", "must be at least 1 where interleaved is 1, found nothing"),
        ("update_stride", "-2", "found '-2'"),
        ("update_s", "nan", "must be a number from 1e-06 to 1e+06, found 'nan'"),
        ("update_s", "inf", "found 'inf'"),
        ("update_s", "0", "found '0'"),
        ("update_s", "-1.25", "found '-1.25'"),
        ("forward_s", "nan", "found 'nan'"),
        ("sweep", " ", "must not be blank, found nothing"),
    ],
)
def test_an_implausible_field_is_refused_with_line_and_column(name: str, field: str, rule: str) -> None:
    message = refused(text_of(ROW, {**ROW, name: field}))
    assert message.startswith(f"runs.csv, line 3, {name}: ")
    assert rule in message


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("", "found nothing"),
        ("\n\n", "found nothing"),
        (text_of(ROW).splitlines()[0], "must have at least one run"),
        (text_of(ROW) + "4xH100,strides\n", "line 3: must have a field for each of 16 columns, found 2 fields"),
        (text_of(ROW) + "," * 40 + "\n", "found 41 fields"),
        (text_of(ROW) + '"never closed', "must be a CSV file"),
        (text_of(ROW) + "x" * 200_000, "must be a CSV file"),
        ("update_s," + text_of(ROW), "must have one column update_s, found 2 in"),
    ],
)
def test_a_text_that_is_no_table_of_runs_is_refused(text: str, rule: str) -> None:
    assert rule in refused(text)


def test_an_implausible_number_of_sub_groups_is_refused() -> None:
    plausible = text_of(*[{**ROW, "update_stride": str(stride)} for stride in range(1, 51)])
    assert len(parse_runs(plausible, "")) == 50
    message = refused(text_of(ROW, {**ROW, "real_params": "1e13"}, ROW))
    assert "at most 10,000 sub-groups per rank in all different runs together, found 25,029, most of them in" in message
    assert "in line 3." in message


def test_files_that_cannot_be_read_or_decoded_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RunsError, match=r"must be a readable file, found .*none\.csv"):
        read_runs(tmp_path / "none.csv")
    with pytest.raises(RunsError, match="must be a readable file"):
        read_runs(tmp_path)
    (tmp_path / "utf16.csv").write_bytes(text_of(ROW).encode("utf-16"))
    with pytest.raises(RunsError, match=r"must be text in UTF-8, found .*\nConvert"):
        read_runs(tmp_path / "utf16.csv")
    (tmp_path / "mark.csv").write_bytes(text_of(ROW).encode("utf-8-sig"))
    assert len(read_runs(tmp_path / "mark.csv")) == 1


@given(st.text())
@pytest.mark.promise("P6")
def test_any_text_is_refused_with_rule_value_and_remedy(text: str) -> None:
    refused(text)


@given(inserted=st.binary(), position=st.integers(0, 10**4))
def test_any_bytes_in_a_file_are_read_or_refused_with_the_value_found(
    tmp_path_factory: pytest.TempPathFactory, inserted: bytes, position: int
) -> None:
    path = tmp_path_factory.getbasetemp() / "bytes.csv"
    good = text_of(ROW, ROW).encode()
    path.write_bytes(good[: position % len(good)] + inserted + good[position % len(good) :])
    message = "found"
    try:
        assert read_runs(path)
    except RunsError as error:
        message = str(error)
    assert "found" in message


FIELDS = st.one_of(
    st.text(max_size=8), st.floats().map(str), st.integers().map(str), st.sampled_from(["", "nan", "1e400", "0x10"])
)


@given(st.sampled_from(list(ROW)), FIELDS)
def test_any_field_is_a_number_in_bounds_or_refused_with_its_column(name: str, field: str) -> None:
    text = text_of({**ROW, name: field})
    try:
        (run,) = parse_runs(text, "runs.csv")
    except RunsError:
        assert name in refused(text)
        return
    if name in NAMES:
        assert getattr(run, name) == printable(field.strip())
    elif field.strip():
        assert NUMBERS[name].low <= float(field) <= NUMBERS[name].high
    assert run.measured_s > 0
