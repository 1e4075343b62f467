"""metrics.jsonl: every row whole, every number as it was, cut back at resume."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quatrain.errors import QuatrainError
from quatrain.training.metrics import JsonLines, data_wait


@pytest.fixture
def lines(tmp_path: Path) -> JsonLines:
    return JsonLines(tmp_path / "metrics.jsonl")


def test_an_absent_file_has_no_rows_and_stays_absent(lines: JsonLines) -> None:
    assert lines.rows() == []
    lines.cut(10)
    assert not lines.path.exists()


@pytest.mark.parametrize(
    "line", ['{"step": 2, "loss": 1e999}', '{"step": 2, "text": "\\ud800"}', "[" * 200_000, "5", "{}"]
)
def test_a_line_that_was_not_written_here_ends_the_rows(lines: JsonLines, line: str) -> None:
    lines.append({"step": 1})
    with lines.path.open("a") as file:
        file.write(line + "\n")
    assert lines.rows() == [{"step": 1}]


def test_rows_come_back_in_order_one_a_line(lines: JsonLines) -> None:
    written = [{"step": step, "text": "a\nb\u2028c\x85 “ü😀"} for step in range(3)]
    for row in written:
        lines.append(row)
    assert lines.rows() == written
    assert [json.loads(line) for line in lines.path.read_bytes().decode().rstrip("\n").split("\n")] == written


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False)))
def test_floats_read_back_as_the_same_number(tmp_path_factory: pytest.TempPathFactory, numbers: list[float]) -> None:
    lines = JsonLines(tmp_path_factory.mktemp("floats") / "metrics.jsonl")
    for number in numbers:
        lines.append({"step": 1, "loss": number})
    assert [row["loss"].hex() for row in lines.rows()] == [number.hex() for number in numbers]


def test_cutting_keeps_whole_rows_up_to_and_including_the_step(lines: JsonLines) -> None:
    for step in (0, 1, 1, 2, 3):
        lines.append({"step": step})
    lines.cut(2)
    assert [row["step"] for row in lines.rows()] == [0, 1, 1, 2]
    lines.cut(0)
    assert [row["step"] for row in lines.rows()] == [0]


@pytest.mark.parametrize("torn", [b'{"step": 1, "lo', b'{"step": 1}', b'{"step": 1, "text": "\xe2\x82', b"\0" * 9])
def test_a_torn_last_line_is_no_row_and_is_cut_off(lines: JsonLines, torn: bytes) -> None:
    lines.append({"step": 0})
    whole = lines.path.read_bytes()
    lines.path.write_bytes(whole + torn)
    assert lines.rows() == [{"step": 0}]
    lines.cut(5)
    assert lines.path.read_bytes() == whole
    lines.append({"step": 1})
    assert lines.rows() == [{"step": 0}, {"step": 1}]


@pytest.mark.parametrize("torn", [b'{"step": 1, "lo\n', b"\0\0\n", b"[1]\n", b'{"loss": 1.0}\n', b"\n"])
def test_nothing_behind_a_line_that_is_not_whole_is_a_row(lines: JsonLines, torn: bytes) -> None:
    lines.append({"step": 0})
    whole = lines.path.read_bytes()
    lines.path.write_bytes(whole + torn + b'{"step": 2}\n')
    assert lines.rows() == [{"step": 0}]
    lines.cut(5)
    assert lines.path.read_bytes() == whole


def test_rows_of_training_and_of_validation_are_told_apart_by_what_they_hold(lines: JsonLines) -> None:
    rows = [{"step": 0, "val_loss": 4.0}, {"step": 1, "loss": 3.0}, {"step": 1, "val_loss": 3.5}]
    for row in rows:
        lines.append(row)
    assert (lines.trained(), lines.validated()) == ([rows[1]], [rows[0], rows[2]])
    assert lines.rows() == rows


def test_a_row_that_cannot_be_written_is_one_message_with_the_path(tmp_path: Path) -> None:
    with pytest.raises(QuatrainError, match=r"absent/metrics\.jsonl: cannot write 12 bytes"):
        JsonLines(tmp_path / "absent" / "metrics.jsonl").append({"step": 0})


def test_the_share_of_waiting_is_that_of_the_time_of_all_steps() -> None:
    quick, long = {"tokens_per_second": 900.0, "data_wait": 0.5}, {"tokens_per_second": 100.0, "data_wait": 0.1}
    assert data_wait([quick]) == 0.5
    assert data_wait([quick, long]) == pytest.approx(0.14)  # the long step took nine tenths of the time
    assert data_wait([quick, {"tokens_per_second": 100.0}]) == pytest.approx(0.05)  # a row from before it was measured
    assert data_wait([]) is None
