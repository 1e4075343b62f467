"""Loss curves drawn with characters, for a terminal."""

Points = list[tuple[int, float]]  # (step, loss), steps ascending

MARKS = "·o+x"


def draw(curves: dict[str, Points], width: int = 70, height: int = 14) -> str:
    """The curves over one pair of axes, a mark for each, with a legend; as many lines as height + 3."""
    points = [point for curve in curves.values() for point in curve]
    last_step = max(step for step, _ in points)
    low, high = min(loss for _, loss in points), max(loss for _, loss in points)
    grid = [[" "] * width for _ in range(height)]
    for mark, curve in zip(MARKS, curves.values(), strict=False):
        for step, loss in curve:
            column = round(step / max(last_step, 1) * (width - 1))
            row = round((high - loss) / ((high - low) or 1.0) * (height - 1))
            grid[row][column] = mark
    axis = [f"{high - (high - low) * row / (height - 1):7.2f} " for row in range(height)]
    lines = [label + "|" + "".join(cells).rstrip() for label, cells in zip(axis, grid, strict=True)]
    legend = "   ".join(f"{mark} {name}" for mark, name in zip(MARKS, curves, strict=False))
    return "\n".join([*lines, " " * 8 + "+" + "-" * width, f"{'0':>9}{last_step:>{width}}", " " * 9 + legend])
