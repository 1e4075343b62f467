"""Plots show their numbers: heights and places are proportional, and nothing leaves the picture."""

import math

import pytest

from quatrain.web.plots import HEIGHT, LABELS, TOP, Bar, Point, bars, curves, meter


def percent(value: str) -> float:
    assert value.endswith("%")
    return float(value[:-1])


def test_bars_are_proportional_and_stand_on_one_line():
    made = bars([Bar("a", (0.1, 0.4), "told"), Bar("b", (0.2, 0.0), "told")], "title")
    rects = list(made.iter("rect"))
    assert [rect.get("class") for rect in rects] == ["s0", "s1", "s0"]  # what is 0 has no bar
    assert [float(rect.get("height")) for rect in rects] == [HEIGHT / 4, HEIGHT, HEIGHT / 2]
    assert {float(rect.get("y")) + float(rect.get("height")) for rect in rects} == {TOP + HEIGHT}
    edges = [(percent(rect.get("x")), percent(rect.get("x")) + percent(rect.get("width"))) for rect in rects]
    assert all(0 <= left < right <= 100 for left, right in edges)
    assert [title.text for title in made.iter("title")] == ["told", "told"]
    labels = [text.text for text in made.iter("text")]
    assert labels == ["0%", "10%", "20%", "30%", "40%", "a", "b"]


@pytest.mark.parametrize("places", [1, 2, 7, 8, 20, 40])
def test_labels_have_room_on_a_narrow_screen(places):
    made = bars([Bar(str(number), (1.0,), "") for number in range(places)], "title")
    below = [text for text in made.iter("text") if text.get("x") != "0"]
    assert 1 <= len(below) <= LABELS


def test_a_curve_goes_through_its_points():
    points = [Point(64, 0.1), Point(256, 0.2, "two"), Point(1024, 0.4)]
    made = curves([points], "title", [(64, "64"), (1024, "1k"), (4096, "4k")], y_log=False)
    (line,) = made.iter("polyline")
    path = [tuple(map(float, pair.split(","))) for pair in line.get("points").split()]
    assert path == [(0.0, 75.0), (50.0, 50.0), (100.0, 0.0)]
    (dot,) = made.iter("circle")
    assert (percent(dot.get("cx")), float(dot.get("cy"))) == (50.0, TOP + HEIGHT / 2)
    labels = [text.text for text in made.iter("text")]
    assert labels[-2:] == ["64", "1k"]  # 4k lies beyond
    assert "40%" in labels


def test_a_logarithmic_plot():
    made = curves([[Point(1, 1000), Point(10, 100), Point(100, 1)], []], "title", [(10, "10")], y_log=True)
    path = [tuple(map(float, pair.split(","))) for pair in next(made.iter("polyline")).get("points").split()]
    assert [round(x) for x, _ in path] == [0, 50, 100]
    assert [y for _, y in path] == pytest.approx([0, 100 - 100 * 2 / 3, 100], abs=0.01)
    assert [text.text for text in made.iter("text")] == ["1", "10", "100", "1,000", "10"]


@pytest.mark.parametrize(
    ("points", "y_log"),
    [([], True), ([], False), ([Point(1, 1)], True), ([Point(1, 1)], False), ([Point(5, 0)] * 2, False)],
)
def test_degenerate_plots_are_finite(points, y_log):
    made = curves([points], "title", [(1, "1")], y_log)
    numbers = [
        part for line in made.iter("polyline") for pair in line.get("points").split() for part in pair.split(",")
    ]
    assert all(math.isfinite(float(number)) for number in numbers)
    assert bars([], "title").tag == bars([Bar("a", (0.0,), "")], "title").tag == "svg"


@pytest.mark.parametrize("highest", [1e-4, 0.003, 0.07, 0.2421, 0.5, 1.0])
def test_marks_are_round_and_few(highest):
    labels = [text.text for text in bars([Bar("", (highest,), "")], "t").iter("text") if text.get("x") == "0"]
    assert 3 <= len(labels) <= 6
    assert all(float(label[:-1]) <= 100 * highest * 1.0001 for label in labels)


def test_a_meter_is_as_long_as_its_share():
    (bar,) = meter(0.125).iter("rect")
    assert bar.get("width") == "12.500%"
