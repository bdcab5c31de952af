"""docs/presets.md says of every preset what it sets, and shows every setting that tells them apart."""

from __future__ import annotations

import re

import pytest

from millrace.cli.config import written
from millrace.config.recipe import recipe_names, settings
from tests.config.trees import on_quickstart
from tests.house.source import ROOT

TABLE = re.compile(r"^\| \| Setting \|.*\n\|[-|]+\n(?:\|.*\n)+", re.M)
# What a section that is off cannot be compared by.
NOT_SHOWN = {"policy.kl", "policy.correction", "policy.correction.reject"}


def cells(line: str) -> list[str]:
    return [cell.strip("` ") for cell in line.strip("|").split("|")]


def tables() -> list[dict[str, dict[str, str]]]:
    """Of each table: what it says of each recipe, setting by setting."""
    found = []
    for match in TABLE.finditer((ROOT / "docs" / "presets.md").read_text(encoding="utf-8")):
        head, _, *lines = [cells(line) for line in match[0].splitlines()]
        found.append({name: {line[1]: line[i] for line in lines} for i, name in enumerate(head) if i > 1})
    return found


def set_by(name: str) -> dict[str, str]:
    """Every setting of a recipe as the page writes it."""
    return {key: written(value) for key, value, _ in settings(on_quickstart(name))}


def test_the_page_compares_every_preset_with_our_own_recipe() -> None:
    grpo, ppo = tables()
    assert (next(iter(grpo)), next(iter(ppo))) == ("grpo", "ppo")
    assert sorted({*grpo, *ppo} - {"grpo", "ppo"}) == [name for name in recipe_names() if "@" in name]


@pytest.mark.parametrize("table", tables(), ids=["grpo", "ppo"])
def test_the_page_says_what_every_preset_sets(table: dict[str, dict[str, str]]) -> None:
    for name, told in table.items():
        found = set_by(name)
        assert told == {key: found.get(key, "none") for key in told}, name


@pytest.mark.parametrize("table", tables(), ids=["grpo", "ppo"])
def test_the_page_shows_every_setting_that_tells_presets_apart(table: dict[str, dict[str, str]]) -> None:
    every = [set_by(name) for name in table]
    keys = {key for one in every for key in one}
    differing = {key for key in keys if len({one.get(key) for one in every}) > 1}
    assert differing - NOT_SHOWN <= set(next(iter(table.values())))
