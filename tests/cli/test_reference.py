"""docs/reference.md has the settings of the code, and docs/glossary.md the names of other systems."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Literal

import pytest
from pydantic import PositiveFloat

from millrace.config.explain import known_keys
from millrace.config.method_sections import Share
from millrace.config.other_names import NAMES, SETTLED
from millrace.config.recipe import load_recipe
from tests.house.scripts import load_script

reference = load_script("reference")
TEXT = reference.PAGE.read_text(encoding="utf-8")


def test_the_tables_are_those_of_the_code() -> None:
    assert reference.page(TEXT) == TEXT, "run python scripts/reference.py"


def test_the_glossary_has_every_name_of_another_system() -> None:
    text = reference.GLOSSARY.read_text(encoding="utf-8")
    assert reference.glossary(text) == text, "run python scripts/reference.py"
    assert "| `num_generations`, `n_samples_per_prompt`, `rollout.n`" in text
    missing = [
        name
        for names in (*NAMES.values(), *SETTLED.values())
        for name in names.split()
        if f"`{name}`" not in text
    ]
    assert missing == []


def test_a_glossary_without_the_table_is_refused() -> None:
    with pytest.raises(SystemExit, match=r"glossary\.md needs one table of names and has 0"):
        reference.glossary("# Glossary\n")


def test_every_setting_has_a_row() -> None:
    rows = {key.replace(".N", "") for key in re.findall(r"^\| `([^`]+)` \| .* \| .* \|", TEXT, re.M)}
    sections = {key.rstrip(".").replace(".N", "") for key in reference.TABLES}
    assert set(known_keys()) - sections <= rows


def test_a_section_without_a_table_is_refused() -> None:
    with pytest.raises(SystemExit, match=r"lacks or has too many of the tables \[\('settings', 'engine'\)\]"):
        reference.page(TEXT.replace("<!-- settings engine -->", ""))


def test_the_recipe_on_the_page_loads_and_does_what_the_page_says(tmp_path: Path) -> None:
    (block,) = re.findall(r"^```yaml\n(.*?)^```", TEXT, re.M | re.S)
    (tmp_path / "mine.yaml").write_text(block, encoding="utf-8")
    config = load_recipe(tmp_path / "mine.yaml")
    assert (config.data.train, config.sft, config.policy.optimizer.learning_rate) == (
        "sums.jsonl",
        None,
        1e-6,
    )
    assert config.critic is not None and (config.critic.clip, config.critic.warmup_steps) == (None, 5)
    assert config.advantage.model_dump(include={"kind", "lam"}) == {"kind": "gae", "lam": 0.9}


@pytest.mark.parametrize(
    ("annotation", "expected"),
    [
        (Literal["a", "b", "c"], "`a`, `b` or `c`"),
        (tuple[Literal["a", "b"], ...], "list of `a`, `b`"),
        (tuple[str, ...], "list of texts"),
        (tuple[float, float] | None, "two numbers or null"),
        (Share, "number from 0, to 1"),
        (PositiveFloat | None, "number above 0 or null"),
        (dict[str, Any], "mapping"),
        (bool, "true or false"),
    ],
    ids=str,
)
def test_the_values_of_a_setting_in_words(annotation: Any, expected: str) -> None:
    assert reference.values(annotation) == expected
