"""quatrain recipes: the list, or one as TOML."""

from typing import Annotated, Any

from cyclopts import Parameter

from quatrain.console import say
from quatrain.errors import UsageError, did_you_mean
from quatrain.recipes.named import RECIPES
from quatrain.recipes.resolve import flatten, to_toml


def recipes(name: str | None = None, *, json: Annotated[bool, Parameter(negative=())] = False) -> dict[str, Any]:
    """List the built-in recipes, or print one as TOML, ready to edit and to give to `train`.

    Parameters
    ----------
    name
        A built-in recipe.
    json
        Print one JSON object as the last line of stdout; words for people go to stderr.

    """
    if name is None:
        for known, function in RECIPES.items():
            say(f"{known:<18}{(function.__doc__ or '').splitlines()[0]}")
        return {"recipes": list(RECIPES)}
    if name not in RECIPES:
        raise UsageError(f"no recipe '{name}'{did_you_mean(name, RECIPES)}; there is {', '.join(RECIPES)}")
    recipe = RECIPES[name]()
    say(to_toml(recipe.config, f"{recipe.head}\nprepare its data with: {recipe.prepare}"), end="")
    return {"name": name, "settings": flatten(recipe.config), "prepare": recipe.prepare}
