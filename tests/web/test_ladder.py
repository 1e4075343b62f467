"""Table, CSV, JSON and picture of an ablation say the same numbers."""

import csv
import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outcomes import group, outcome
from quatrain.training.comparison import Comparison, compare
from quatrain.web.ladder import COLUMNS, facts, markdown, table, write
from quatrain.web.ladder_plot import LEFT, TOP, WIDTH, Axes, plot, round_marks

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def comparison() -> Comparison:
    broken = [outcome("optim.lr=9", seed, diverged="step 3: loss is nan") for seed in range(3)]
    runs = [
        *group("base", 2.0, 2.2, 2.1),
        *group("model.mlp=<swiglu>", 1.0, 1.1, 1.2, parameters=106),
        *group("model.bias=false", 2.11, 2.13, 2.12, parameters=95),
        *broken,
    ]
    return compare(runs)


def test_the_table_for_people(comparison):
    lines = markdown(comparison).splitlines()
    assert len({len(line) for line in lines[:6]}) == 1
    assert [cell.strip() for cell in lines[0].split("|")[1:-1]] == [
        *("variant", "parameters", "val loss", "±", "difference", "p", "verdict"),
        *("tokens to 2.1000", "seconds to 2.1000", "tokens/s"),
    ]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines[2:6]]
    assert rows[0] == ["base", "100", "2.1000", "0.1000", "–", "–", "base", "160", "20.0", "8"]
    assert rows[1][:5] == ["model.mlp=<swiglu>", "106 (!)", "1.1000", "0.1000", "-1.0000"]
    assert rows[1][6] == "better"
    assert rows[2][1:3] + rows[2][4:5] + rows[2][6:8] == ["95", "2.1200", "+0.0200", "noise", "–"]
    assert rows[3] == ["optim.lr=9", "100", *"––––", "diverged (3 of 3)", *"–––"]


def test_the_notes_say_test_threshold_size_and_divergence(comparison):
    notes = markdown(comparison).split("\n\n")[1]
    assert "paired t-test" in notes
    assert "below 2 standard deviations of the base (0.2000)" in notes
    assert "(!) model.mlp=<swiglu> has +6.0% parameters" in notes
    assert "model.bias=false has" not in notes
    assert notes.count("optim.lr=9 diverged: step 3: loss is nan") == 1


def test_one_seed_says_that_it_says_nothing_of_noise():
    text = markdown(compare([*group("base", 2.0), *group("x", 1.0)]))
    assert "One seed: neither a spread nor a p-value" in text


def test_csv_and_json_have_every_digit(comparison, tmp_path: Path):
    rows = list(csv.DictReader(table(comparison).splitlines()))
    for row, one in zip(rows, comparison.rows, strict=True):
        for name in COLUMNS[1:]:
            value = getattr(one, name)
            assert row[name] == ("" if value is None else str(value))
        assert [row[f"loss_{seed}"] for seed in range(3)] == ["" if loss is None else str(loss) for loss in one.losses]
    files = write(tmp_path, comparison, {"recipe": "shakespeare"})
    assert {path.name for path in files} == {path.name for path in tmp_path.iterdir()}
    read = json.loads((tmp_path / "ablation.json").read_text(encoding="utf-8"))
    curves = read.pop("curves")
    assert read == json.loads(json.dumps(facts(comparison, {"recipe": "shakespeare"})))
    assert read["noise"]["threshold"] == comparison.noise.threshold
    assert curves["base"][2] == comparison.rows[0].curve[2]._asdict()
    assert curves["optim.lr=9"] == []


def test_the_picture_has_a_line_and_a_band_for_each_variant_that_has_a_mean(comparison):
    root = ElementTree.fromstring(plot(comparison))
    assert root.tag == f"{SVG}svg"
    lines = list(root.iter(f"{SVG}polyline"))
    assert [line.find(f"{SVG}title").text for line in lines] == ["base", "model.mlp=<swiglu>", "model.bias=false"]
    assert len(list(root.iter(f"{SVG}polygon"))) == 3
    axes = Axes([row.curve for row in comparison.rows], comparison.to_loss)
    x, y = map(float, lines[1].get("points").split()[-1].split(","))
    assert (x, y) == (LEFT + WIDTH, pytest.approx(axes.y(1.1), abs=0.06))
    assert "model.mlp=<swiglu>" in [text.text for text in root.iter(f"{SVG}text")]


def test_the_steep_beginning_does_not_flatten_the_rest():
    finals = outcome("base", 0, 100.0, *([3.0] * 5 + [2.0] * 6))
    axes = Axes([compare([finals]).rows[0].curve], 2.0)
    assert (axes.low, axes.high) == (2.0, 3.0)
    assert axes.y(100.0) < TOP


@given(st.floats(-1e6, 1e6), st.floats(1e-3, 1e6))
def test_marks_are_few_round_and_inside(low, width):
    marks = round_marks(low, low + width)
    assert 2 <= len(marks) <= 6
    assert all(low - 1e-6 * width <= mark <= low + width * (1 + 1e-6) for mark in marks)
