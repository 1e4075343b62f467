"""Curves for a terminal: every mark where its point is."""

import pytest

from quatrain.training.curves import MARKS, draw

FALLING = [(0, 4.0), (50, 2.0), (100, 1.0)]


def places(text: str, mark: str, width: int, height: int) -> set[tuple[int, int]]:
    """(column, row) of a mark within the axes, row 0 on top."""
    grid = [line.split("|", 1)[1] for line in text.splitlines()[:height]]
    return {(column, row) for row, line in enumerate(grid) for column, cell in enumerate(line) if cell == mark}


@pytest.mark.parametrize(("width", "height"), [(70, 14), (11, 4)])
def test_the_picture_has_the_lines_and_columns_that_were_asked_for(width: int, height: int) -> None:
    text = draw({"train": FALLING}, width, height)
    lines = text.splitlines()
    assert len(lines) == height + 3
    assert all(len(line) <= width + 9 for line in lines[:-1])
    assert lines[height].endswith("+" + "-" * width)


def test_marks_stand_where_step_and_loss_say() -> None:
    text = draw({"train": FALLING, "val": [(0, 4.0), (100, 4.0)]}, width=11, height=4)
    assert places(text, MARKS[0], 11, 4) == {(5, 2), (10, 3)}  # the first point lies under the second curve's
    assert places(text, MARKS[1], 11, 4) == {(0, 0), (10, 0)}


def test_axes_name_the_highest_and_lowest_loss_and_the_last_step() -> None:
    lines = draw({"train": FALLING}, width=20, height=4).splitlines()
    assert lines[0].split("|")[0].strip() == "4.00"
    assert lines[3].split("|")[0].strip() == "1.00"
    assert lines[5].split() == ["0", "100"]


def test_the_legend_names_every_curve_with_its_mark() -> None:
    legend = draw({"train": FALLING, "sonnet 116": FALLING}).splitlines()[-1]
    assert legend.split("   ")[-2:] == [f"{MARKS[0]} train", f"{MARKS[1]} sonnet 116"]


@pytest.mark.parametrize("points", [[(0, 3.0)], [(7, 3.0)], [(0, 3.0), (10, 3.0)]])
def test_a_single_point_and_a_flat_curve_can_be_drawn(points: list[tuple[int, float]]) -> None:
    text = draw({"train": points}, width=11, height=4)
    assert {row for _, row in places(text, MARKS[0], 11, 4)} == {0}
