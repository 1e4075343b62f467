import doctest
import importlib
import pkgutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import quatrain

MODULES = sorted(module.name for module in pkgutil.walk_packages(quatrain.__path__, "quatrain.") if not module.ispkg)
WITH_EXAMPLES = [
    name
    for name in MODULES
    if ">>> " in Path(quatrain.__path__[0], *name.split(".")[1:]).with_suffix(".py").read_text()
]


def test_public_names_are_those_of_the_design():
    names = (
        "GPT, ModelConfig, TokenStore, Loader, Trainer, prepare, train, evaluate, generate, build_tokenizer, "
        "sample_batch, sequential_batches, packed_mask, coverage, padding_waste"
    )
    assert sorted(quatrain.__all__) == sorted(names.split(", "))
    assert set(quatrain.__all__) <= set(dir(quatrain))


@pytest.mark.parametrize("name", quatrain.__all__)
def test_every_public_name_resolves_to_a_documented_object_of_that_name(name):
    found = getattr(quatrain, name)
    assert found.__name__ == name
    assert found.__doc__


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="has no attribute 'nope'"):
        _ = quatrain.nope


def test_importing_quatrain_does_not_import_torch():
    script = "import quatrain, sys; quatrain.TokenStore, quatrain.ModelConfig; print('torch' in sys.modules)"
    process = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert process.stdout == "False\n"


def test_version_is_the_one_in_pyproject():
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8"))
    assert quatrain.__version__ == project["project"]["version"]


@pytest.mark.parametrize("name", MODULES)
def test_every_module_opens_with_what_it_does(name):
    assert importlib.import_module(name).__doc__


def test_the_modules_whose_examples_are_run():
    expected = {"tokens.order", "tokens.windows", "tokens.packing", "text.tokenizers", "errors", "mixing", "settings"}
    assert {f"quatrain.{name}" for name in expected} <= set(WITH_EXAMPLES)


@pytest.mark.parametrize("name", WITH_EXAMPLES)
def test_examples_in_docstrings_give_what_they_show(name):
    result = doctest.testmod(importlib.import_module(name))
    assert result.attempted
    assert not result.failed
