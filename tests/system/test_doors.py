"""docs/contributing.md: every recipe works as written, and touches no more files than its heading says."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.doors import Edit, Recipe, carry_out, recipes

RECIPES = {recipe.name: recipe for recipe in recipes()}


def test_there_are_the_recipes() -> None:
    assert len(RECIPES) >= 6
    assert all(recipe.edits and recipe.commands for recipe in RECIPES.values())


SLOW = ("A config key", "A layer", "A model family")  # they train, or run many tests, in separate checkouts


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.prove] if name in SLOW else []) for name in RECIPES]
)
def test_a_recipe_works_within_its_bound(name: str, tmp_path: Path) -> None:
    recipe = RECIPES[name]
    files = carry_out(recipe, tmp_path)
    assert 0 < len(files) <= recipe.bound, files


def test_a_recipe_that_does_not_work_is_seen(tmp_path: Path) -> None:
    wrong = Recipe("wrong", "", 1, (Edit("new.py", "", "", "x = 1\n"),), (("python new.py", ("2",)),))
    with pytest.raises(AssertionError, match="no line '2'"):
        carry_out(wrong, tmp_path)


def test_an_anchor_that_is_gone_is_seen(tmp_path: Path) -> None:
    gone = Recipe("gone", "", 1, (Edit("setup.cfg", "after", "no such line", "x\n"),), ())
    with pytest.raises(AssertionError, match="'no such line' stands in 0 lines"):
        carry_out(gone, tmp_path)


def test_a_program_that_fails_is_seen(tmp_path: Path) -> None:
    fails = Recipe(
        "fails", "", 1, (Edit("new.py", "", "", "print(2)\nraise SystemExit(3)\n"),), (("python new.py", ("2",)),)
    )
    with pytest.raises(AssertionError, match="status 3"):
        carry_out(fails, tmp_path)
