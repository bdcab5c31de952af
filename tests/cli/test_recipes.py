"""What comes with millrace."""

from __future__ import annotations

import re
from pathlib import Path

from millrace.cli.recipes import purpose
from millrace.config.recipe import load_recipe, recipe_names, recipe_text, resolve
from millrace.config.settings import BASIC
from tests.config.trees import TASKS


def test_every_recipe_is_listed_with_what_it_does(lab):
    out = lab("recipes").out
    lines = out.splitlines()
    tasks, methods = (re.findall(r"^  (\S+)$", part, re.M) for part in out.split("Methods: "))
    assert sorted(tasks) == sorted(TASKS)
    assert sorted(tasks + methods) == recipe_names()
    assert max(map(len, lines)) <= 80
    for name in recipe_names():
        shown = " ".join(line.strip() for line in lines)
        assert purpose(recipe_text(name)) in shown


def test_a_recipe_is_printed_so_that_it_can_be_kept(lab):
    Path("mine.yaml").write_text(lab("recipes", "quickstart").out)
    assert Path("mine.yaml").read_text() == recipe_text("quickstart")
    assert lab("config", "mine.yaml").code == 0


def test_a_purpose_is_the_first_paragraph_of_the_opening_comment():
    assert purpose("# One\n# two.\nsteps: 1\n# three\n") == "One two."
    assert purpose("# One\n# two.\n#\n# Three.\nsteps: 1\n") == "One two."
    assert purpose("steps: 1\n") == ""


def test_a_wrong_name_names_the_nearest(lab):
    result = lab("recipes", "quickstrat")
    assert (result.code, "did you mean quickstart?" in result.err) == (2, True)


def test_the_template_is_a_recipe_of_the_basic_settings(lab):
    Path("mine.yaml").write_text(lab("recipes", "--template").out)
    config = load_recipe("mine.yaml")
    assert (config.model.path, config.data.train, config.rewards[0].kind) == ("FOLDER", "FILE.jsonl", "exact")
    shown = {one.key for one in resolve("mine.yaml")[1] if one.basic}
    assert all(any(f"{key}.".startswith(f"{basic}.") for key in shown) for basic in BASIC)
    # All else is what `base: grpo` has.
    given = {"model.path": "FOLDER", "data.train": "FILE.jsonl", "rewards": [{"kind": "exact"}]}
    Path("least.yaml").write_text("base: grpo\n")
    assert config == load_recipe("least.yaml", given)
    assert (
        lab("recipes", "grpo", "--template").err
        == "error: --template goes alone, without the name of a recipe\n"
    )
