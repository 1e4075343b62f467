"""The mean validation curves of an ablation with bands of one standard deviation, as an SVG file of its own."""

import itertools
import math
from collections.abc import Iterator, Sequence
from xml.etree.ElementTree import Element, tostring

from quatrain.training.comparison import Comparison, Point, Row
from quatrain.web.markup import element

LEFT, TOP, WIDTH, HEIGHT = 56, 30, 640, 340  # pixels of the plot itself
LEGEND = 250  # pixels to its right
BOTTOM = 46
BEGINNING = 0.1  # of the tokens: the steep fall there may leave the plot at the top
HUES = 137.5  # degrees from one variant to the next: neighbours never look alike

STYLE = """
text { font: 12px system-ui, sans-serif; fill: #3d4650; }
.ground { fill: #fff; } .grid { stroke: #e3e0d8; } .goal { stroke: #8a8f98; stroke-dasharray: 2 4; }
.line { fill: none; stroke-width: 1.8; } .base { stroke-dasharray: 6 3; } .band { opacity: .16; }
@media (prefers-color-scheme: dark) {
  text { fill: #c9ced4; } .ground { fill: #1c2024; } .grid { stroke: #353b42; }
}
"""


class Axes:
    """Tokens to the right and loss upwards, as pixels."""

    def __init__(self, curves: Sequence[Sequence[Point]], to_loss: float) -> None:
        self.tokens = max((point.tokens for curve in curves for point in curve), default=1) or 1
        late = [point for curve in curves for point in curve if point.tokens >= BEGINNING * self.tokens]
        self.low = min([to_loss, *(point.loss - (point.deviation or 0.0) for point in late)])
        self.high = max([to_loss, *(point.loss + (point.deviation or 0.0) for point in late)])
        if self.high == self.low:
            self.high += 1.0

    def x(self, tokens: float) -> float:
        return LEFT + WIDTH * tokens / self.tokens

    def y(self, loss: float) -> float:
        return TOP + HEIGHT * (self.high - loss) / (self.high - self.low)


def plot(comparison: Comparison) -> str:
    """The picture as a whole file; it loads nothing, and follows the reader's light or dark setting."""
    drawn = [row for row in comparison.rows if row.curve]
    axes = Axes([row.curve for row in drawn], comparison.to_loss)
    style = Element("style")
    style.text = STYLE
    box = {"x": LEFT, "y": TOP, "width": WIDTH, "height": HEIGHT}
    parts = [
        style,
        element("title", "Validation loss by tokens: mean over the seeds, bands of one standard deviation"),
        element("defs", element("clipPath", element("rect", **box), id="inside")),
        element("rect", width="100%", height="100%", class_="ground"),
        *_frame(axes, comparison.to_loss),
        element(
            "g", *itertools.chain(*(_curve(row, n, axes) for n, row in enumerate(drawn))), clip_path="url(#inside)"
        ),
        *itertools.chain(*(_legend(row, number) for number, row in enumerate(drawn))),
    ]
    width, height = LEFT + WIDTH + LEGEND, TOP + max(HEIGHT, 20 * len(drawn)) + BOTTOM
    size = {"viewBox": f"0 0 {width} {height}", "width": width, "height": height}
    svg = element("svg", *parts, xmlns="http://www.w3.org/2000/svg", role="img", **size)
    return tostring(svg, encoding="unicode") + "\n"


def _frame(axes: Axes, to_loss: float) -> Iterator[Element]:
    for loss in round_marks(axes.low, axes.high):
        y = _px(axes.y(loss))
        yield element("line", x1=LEFT, x2=LEFT + WIDTH, y1=y, y2=y, class_="grid")
        yield element("text", f"{loss:.4g}", x=LEFT - 6, y=_px(axes.y(loss) + 4), text_anchor="end")
    for tokens in round_marks(0, axes.tokens):
        yield element("text", _short(tokens), x=_px(axes.x(tokens)), y=TOP + HEIGHT + 18, text_anchor="middle")
    yield element("text", "tokens", x=LEFT + WIDTH / 2, y=TOP + HEIGHT + 38, text_anchor="middle")
    yield element("text", "validation loss, nats per token", x=LEFT, y=TOP - 12)
    goal = _px(axes.y(to_loss))
    yield element("line", x1=LEFT, x2=LEFT + WIDTH, y1=goal, y2=goal, class_="goal")


def _curve(row: Row, number: int, axes: Axes) -> Iterator[Element]:
    colour = _colour(number)
    upper = [(axes.x(p.tokens), axes.y(p.loss + (p.deviation or 0.0))) for p in row.curve]
    lower = [(axes.x(p.tokens), axes.y(p.loss - (p.deviation or 0.0))) for p in row.curve]
    yield element("polygon", points=_path([*upper, *reversed(lower)]), fill=colour, class_="band")
    middle = _path([(axes.x(p.tokens), axes.y(p.loss)) for p in row.curve])
    kind = "line base" if number == 0 else "line"
    yield element("polyline", element("title", row.variant), points=middle, stroke=colour, class_=kind)


def _legend(row: Row, number: int) -> Iterator[Element]:
    y = TOP + 10 + 20 * number
    left = LEFT + WIDTH + 14
    kind = "line base" if number == 0 else "line"
    yield element("line", x1=left, x2=left + 22, y1=y, y2=y, stroke=_colour(number), class_=kind)
    name = row.variant if len(row.variant) <= 30 else row.variant[:29] + "…"
    yield element("text", name, x=left + 28, y=y + 4)


def _colour(number: int) -> str:
    return "#7c8590" if number == 0 else f"hsl({(200 + HUES * (number - 1)) % 360:.0f} 62% 48%)"


def _path(points: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{_px(x)},{_px(y)}" for x, y in points)


def _px(value: float) -> str:
    return f"{value:.1f}"


def _short(tokens: float) -> str:
    for unit, name in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if tokens >= unit:
            return f"{tokens / unit:.4g}{name}"
    return f"{tokens:.4g}"


def round_marks(low: float, high: float) -> list[float]:
    """Two to five round numbers from low to high."""
    rough = (high - low) / 4
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= rough * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [step * number for number in range(first, last + 1)]
