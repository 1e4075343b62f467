"""An ablation to look at: its table as Markdown, CSV and JSON, and its curves as a picture."""

import csv
import io
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from quatrain.files import replace_file
from quatrain.training.comparison import NOISE_DEVIATIONS, SAME_SIZE, TESTED, Comparison, Row
from quatrain.web.ladder_plot import plot

SIGNS = 4  # digits after the point of a loss

TEXTS = (0, 6)  # columns of the Markdown that stand to the left

# Columns of the CSV, and keys of a variant in the JSON.
COLUMNS = (
    "variant",
    "parameters",
    "parameters_share",
    "mean",
    "deviation",
    "difference",
    "p_paired",
    "p_welch",
    "verdict",
    "train_loss",
    "tokens_to_loss",
    "seconds_to_loss",
    "tokens_per_second",
)


def write(folder: Path, comparison: Comparison, told: dict[str, Any]) -> list[Path]:
    """Write ablation.json, .md, .csv and .svg into the folder; `told` is what the numbers depend on."""
    curves = {row.variant: [point._asdict() for point in row.curve] for row in comparison.rows}
    contents = {
        "json": json.dumps(facts(comparison, told) | {"curves": curves}, indent=1, ensure_ascii=False) + "\n",
        "md": markdown(comparison),
        "csv": table(comparison),
        "svg": plot(comparison),
    }
    files = [folder / f"ablation.{kind}" for kind in contents]
    for path, content in zip(files, contents.values(), strict=True):
        replace_file(path, content.encode())
    return files


def facts(comparison: Comparison, told: dict[str, Any]) -> dict[str, Any]:
    """All but the curves, as `--json` gives it."""
    noise = asdict(comparison.noise) | {"threshold": comparison.noise.threshold}
    variants = [
        {key: value for key, value in asdict(row).items() if key != "curve"} | {"another_size": row.another_size}
        for row in comparison.rows
    ]
    return told | {"noise": noise, "to_loss": comparison.to_loss, "test": TESTED, "variants": variants}


def table(comparison: Comparison) -> str:
    """The rows as CSV with every digit; what is not known is empty."""
    seeds = len(comparison.rows[0].losses)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*COLUMNS, *(f"loss_{number}" for number in range(seeds))])
    for row in comparison.rows:
        writer.writerow([*(getattr(row, name) for name in COLUMNS), *row.losses])
    return text.getvalue()


def markdown(comparison: Comparison) -> str:
    """The table for people, in columns of one width, and under it the sentences that it needs."""
    loss = f"{comparison.to_loss:.{SIGNS}f}"
    head = ["variant", "parameters", "val loss", "±", "difference", "p", "verdict"]
    head += [f"tokens to {loss}", f"seconds to {loss}", "tokens/s"]
    rows = [_cells(row) for row in comparison.rows]
    widths = [max(3, *(len(cells[column]) for cells in (head, *rows))) for column in range(len(head))]
    rule = [("-" * width if column in TEXTS else "-" * (width - 1) + ":") for column, width in enumerate(widths)]
    lines = [_line(head, widths), f"|{'|'.join(f' {mark} ' for mark in rule)}|", *(_line(row, widths) for row in rows)]
    return "\n".join([*lines, "", *_notes(comparison)]) + "\n"


def _cells(row: Row) -> list[str]:
    return [
        row.variant,
        f"{row.parameters:,}{' (!)' if row.another_size else ''}",
        _number(row.mean, f".{SIGNS}f"),
        _number(row.deviation, f".{SIGNS}f"),
        _number(row.difference, f"+.{SIGNS}f"),
        _number(row.p_paired, ".3g"),
        f"diverged ({len(row.diverged)} of {len(row.losses)})" if row.diverged else row.verdict,
        _number(row.tokens_to_loss, ",.0f"),
        _number(row.seconds_to_loss, ",.1f"),
        _number(row.tokens_per_second, ",.0f"),
    ]


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    padded = (
        f"{cell:<{width}}" if column in TEXTS else f"{cell:>{width}}"
        for column, (cell, width) in enumerate(zip(cells, widths, strict=True))
    )
    return f"| {' | '.join(padded)} |"


def _notes(comparison: Comparison) -> Iterator[str]:
    noise = comparison.noise
    if noise.threshold is None:
        yield "One seed: neither a spread nor a p-value, and no difference can be told from the noise."
    else:
        yield (
            f"±: standard deviation over {noise.seeds} seeds. p: {TESTED}, each variant against the base, two-sided, "
            f"not corrected for several variants. noise: the difference is below {NOISE_DEVIATIONS:g} standard "
            f"deviations of the base ({noise.threshold:.{SIGNS}f})."
        )
    yield "Tokens and seconds (of training) to a loss: where the mean validation curve first is down at it; –: never."
    for row in comparison.rows:
        if row.another_size:
            yield (
                f"(!) {row.variant} has {row.parameters_share:+.1%} parameters; above {SAME_SIZE:.0%} a difference may "
                f"be that of size."
            )
        for message in dict.fromkeys(row.diverged):
            yield f"{row.variant} diverged: {message}"
