"""The pictures and the table of docs/foundations.md are what the code computes."""

from __future__ import annotations

import re
from types import ModuleType

import pytest

from millrace.cli.foundations import build_mdp, method_lines
from millrace.cli.foundations_credit import credit_lines
from millrace.foundations.agreement import exact_methods, sampled_methods
from millrace.foundations.mdp import uniform
from millrace.foundations.walks import sample_episodes
from tests.house.scripts import load_script
from tests.house.source import ROOT

PAGE = (ROOT / "docs" / "foundations.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_script("foundations_pictures")


@pytest.mark.slow
def test_the_pictures_are_what_the_code_computes(script: ModuleType) -> None:
    for name, picture in script.PICTURES.items():
        drawn = script.path_of(name).read_text(encoding="utf-8")
        assert drawn == picture(), f"{name}: run python scripts/foundations_pictures.py"


def test_the_page_shows_every_picture(script: ModuleType) -> None:
    shown = re.findall(r"\]\(pictures/foundations_(\w+)\.svg\)", PAGE)
    assert shown == list(script.PICTURES)
    assert {path.name for path in script.FOLDER.glob("foundations_*.svg")} == {
        script.path_of(name).name for name in shown
    }


@pytest.mark.slow
def test_the_table_of_the_page_is_what_the_command_prints() -> None:
    mdp = build_mdp("chain", 5, 1.0, 0)
    episodes = sample_episodes(mdp, uniform(mdp), 2000, seed=0)
    found = [
        *exact_methods(mdp, uniform(mdp), optimal=False),
        *sampled_methods(mdp, uniform(mdp), episodes, lam=0.8),
    ]
    for line in method_lines(found):
        # What is rounding differs between machines.
        assert re.sub(r" +\d+e-\d\d", "", line) in re.sub(r" +\d+e-\d\d", "", PAGE)


def test_the_table_of_credit_is_what_the_command_prints() -> None:
    assert "\n".join(credit_lines()) in PAGE
