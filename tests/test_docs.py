"""README and docs say what is true: their commands parse, their tables are the code's, their links lead somewhere."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from quatrain.cli import parse
from quatrain.errors import UsageError
from quatrain.recipes.named import RECIPES
from quatrain.recipes.resolve import resolve, settings_page

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def commands() -> list[tuple[str, str]]:
    found = []
    for page in PAGES:
        for block in re.findall(r"```sh\n(.*?)```", page.read_text(), re.DOTALL):
            for line in block.replace("\\\n", " ").splitlines():
                if line.startswith("quatrain "):
                    found.append((page.name, line))
    return found


@pytest.mark.parametrize(("page", "line"), commands())
def test_every_command_in_the_docs_parses(page: str, line: str) -> None:
    command, bound = parse(shlex.split(line, comments=True)[1:])
    if command.__name__ == "train" and bound.arguments["recipe"] in RECIPES:
        resolve(bound.arguments["recipe"], bound.arguments.get("settings", ()))


def test_a_command_with_a_wrong_option_would_be_found() -> None:
    with pytest.raises(UsageError, match="did you mean '--out'"):
        parse(shlex.split("prepare books.txt --outt x"))


def test_there_is_a_page_for_every_command() -> None:
    names = {path.stem.rstrip("_") for path in (ROOT / "src/quatrain/commands").glob("[a-z]*.py")}
    assert names <= {page.stem for page in PAGES}


def test_the_table_of_settings_is_the_code_s() -> None:
    assert (ROOT / "docs/settings.md").read_text() == settings_page(), "run: make fix"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_named_modules_exist(page: Path) -> None:
    text = page.read_text()
    for target in re.findall(r"\]\(([^)#]+)", text):
        assert "://" in target or (page.parent / target).exists(), target
    for module in re.findall(r"`((?:text|tokens|model|inference|training|recipes|commands)/\w+\.py)`", text):
        assert (ROOT / "src/quatrain" / module).is_file(), module


def test_the_changelog_has_the_package_s_version() -> None:
    import quatrain

    assert re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)[1] == quatrain.__version__
    assert f'version = "{quatrain.__version__}"' in (ROOT / "pyproject.toml").read_text()


@pytest.mark.parametrize("example", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.name)
def test_examples_run(example: Path) -> None:
    done = subprocess.run([sys.executable, str(example)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout
