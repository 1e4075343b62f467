import tomllib
from pathlib import Path

import pytest

from quatrain.recipes.named import RECIPES
from quatrain.recipes.resolve import flatten, resolve
from test_cli import done, refused


@pytest.fixture(autouse=True)
def _empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_the_list_has_a_line_for_every_recipe():
    lines = done("recipes").out.splitlines()
    assert [line.split()[0] for line in lines] == list(RECIPES)
    assert all(len(line.split()) > 3 for line in lines)


def test_json_lists_the_names_and_people_read_stderr():
    answer = done("recipes", "--json")
    assert answer.json == {"recipes": list(RECIPES)}
    assert answer.out.count("\n") == 1
    assert "gpt2-xl" in answer.err


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_is_printed_as_toml_that_reads_back_equal(name):
    text = done("recipes", name).out
    tomllib.loads(text)
    Path("mine.toml").write_text(text, encoding="utf-8")
    recipe = RECIPES[name]()
    assert resolve("mine.toml")[0] == recipe.config
    comments = [line.removeprefix("# ") for line in text.splitlines() if line.startswith("# ")]
    assert comments == [*recipe.head.splitlines(), f"prepare its data with: {recipe.prepare}"]


def test_json_of_a_recipe_has_its_settings_and_its_prepare_command():
    recipe = RECIPES["shakespeare"]()
    answer = done("recipes", "shakespeare", "--json")
    settings = flatten(recipe.config) | {"optim.betas": list(recipe.config.optim.betas)}
    assert answer.json == {"name": "shakespeare", "settings": settings, "prepare": recipe.prepare}


@pytest.mark.parametrize(("name", "nearest"), [("gpt3", "gpt2"), ("sonets", "sonnets"), ("gpt2-medum", "gpt2-medium")])
def test_an_unknown_name_is_told_with_the_nearest_and_all(name, nearest):
    told = refused("recipes", name)
    assert f"no recipe '{name}' (did you mean '{nearest}'?)" in told
    assert ", ".join(RECIPES) in told
