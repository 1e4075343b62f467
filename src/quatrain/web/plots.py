"""Plots as inline SVG that fits any width: across in percent, down in pixels, so text keeps its size."""

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple
from xml.etree.ElementTree import Element

from quatrain.web.markup import element

TOP, HEIGHT, BOTTOM = 18, 180, 26  # pixels: room for the highest label, the plot, the labels below
LABELS = 7  # below a plot, at most: as many as a narrow screen has room for


class Bar(NamedTuple):
    """One place of a bar plot: its label, a height (a share) for each series, and what a pointer is told."""

    label: str
    heights: Sequence[float]
    told: str


class Point(NamedTuple):
    """One point of a curve, and what a pointer is told."""

    x: float
    y: float
    told: str = ""


def bars(places: Sequence[Bar], title: str) -> Element:
    """A group of bars at each place, one bar a series; heights are shares, and the lines say percent."""
    highest = max((height for bar in places for height in bar.heights), default=0) or 1
    parts = list(_lines([(mark / highest, f"{100 * mark:.4g}%") for mark in _round_marks(highest)]))
    slot = 100 / max(1, len(places))
    every = math.ceil(len(places) / LABELS)
    for number, bar in enumerate(places):
        width = slot * 0.8 / max(1, len(bar.heights))
        rects = [
            _rect(number * slot + slot * 0.1 + series * width, width, height / highest, series)
            for series, height in enumerate(bar.heights)
            if height
        ]
        parts.append(element("g", element("title", bar.told), *rects))
        if number % every == 0:
            parts.append(_below(number * slot + slot / 2, bar.label))
    return _figure(parts, title)


def curves(series: Sequence[Sequence[Point]], title: str, x_marks: Iterable[tuple[float, str]], y_log: bool) -> Element:
    """Lines with a logarithmic x axis; y is logarithmic too, or a share of which the lines say percent."""
    points = [point for line in series for point in line]
    left, right = (f((math.log(point.x) for point in points), default=0.0) for f in (min, max))
    top = max((point.y for point in points), default=1.0) or 1.0
    high = math.log10(top) or 1.0

    def across(x: float) -> float:
        return 100 * (math.log(x) - left) / ((right - left) or 1.0)

    def up(y: float) -> float:
        return math.log10(y) / high if y_log else y / top

    if y_log:
        marks = [(power / high, f"{10**power:,}") for power in range(math.floor(high) + 1)]
    else:
        marks = [(mark / top, f"{100 * mark:.4g}%") for mark in _round_marks(top)]
    parts = list(_lines(marks))
    for number, line in enumerate(series):
        if line:
            parts.append(_polyline([(across(point.x), up(point.y)) for point in line], number))
        parts += [_dot(across(point.x), up(point.y), point.told, number) for point in line if point.told]
    parts += [_below(across(x), label) for x, label in x_marks if -0.01 < across(x) < 100.01]
    return _figure(parts, title)


def meter(share: float) -> Element:
    """A small horizontal bar inside a table; the cell beside it says the number."""
    bar = element("rect", x="0", y="0", width=_percent(100 * share), height="100%", class_="s0")
    return element("svg", bar, class_="meter", aria_hidden="true")


def _figure(parts: Iterable[Element], title: str) -> Element:
    height = TOP + HEIGHT + BOTTOM
    return element("svg", *parts, class_="plot", role="img", aria_label=title, width="100%", height=height)


def _rect(x: float, width: float, share: float, series: int) -> Element:
    height = max(HEIGHT * share, 1.5)  # what is there is seen
    return element(
        "rect",
        x=_percent(x),
        y=f"{TOP + HEIGHT - height:.1f}",
        width=_percent(width),
        height=f"{height:.1f}",
        class_=f"s{series}",
    )


def _polyline(points: Sequence[tuple[float, float]], series: int) -> Element:
    """In its own coordinates, stretched over the plot; the width of its line is not stretched with it."""
    path = " ".join(f"{x:.2f},{100 - 100 * y:.2f}" for x, y in points)
    line = element("polyline", points=path, class_=f"line l{series}", vector_effect="non-scaling-stroke")
    place = {"x": 0, "y": TOP, "width": "100%", "height": HEIGHT, "viewBox": "0 0 100 100"}
    return element("svg", line, preserveAspectRatio="none", class_="over", **place)


def _dot(x: float, y: float, told: str, series: int) -> Element:
    place = {"cx": _percent(x), "cy": f"{TOP + HEIGHT * (1 - y):.1f}"}
    return element("circle", element("title", told), r="4", class_=f"s{series}", **place)


def _lines(marks: Iterable[tuple[float, str]]) -> Iterable[Element]:
    for share, label in marks:
        y = f"{TOP + HEIGHT * (1 - share):.1f}"
        yield element("line", x1="0", x2="100%", y1=y, y2=y, class_="grid")
        yield element("text", label, x="0", y=f"{float(y) - 4:.1f}")


def _below(x: float, label: str) -> Element:
    anchor = "start" if x < 4 else "end" if x > 96 else "middle"
    return element("text", label, x=_percent(x), y=TOP + HEIGHT + 18, text_anchor=anchor)


def _round_marks(highest: float) -> list[float]:
    """0 and two to five round numbers up to the highest."""
    rough = highest / 4
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= rough)
    return [step * number for number in range(math.floor(highest / step + 1e-9) + 1)]


def _percent(value: float) -> str:
    return f"{value:.3f}%"
