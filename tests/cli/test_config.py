"""Every setting of a recipe and where it comes from."""

from __future__ import annotations

import json
import re

import pytest

from millrace.cli.config import written
from millrace.config.explain import known_keys
from millrace.config.recipe import from_yaml, load_recipe, resolve, settings
from millrace.config.settings import BASIC

HEAD = re.compile(r"^(?P<key>[\w.]+) +(?P<source>default|recipe|override) +(?P<value>.*)$", re.M)


def test_every_setting_is_shown_with_source_value_and_meaning(lab):
    out = lab("config", "tiny.yaml", "rollout.top_k=5", "--all").out
    shown = {row["key"]: (row["source"], row["value"]) for row in HEAD.finditer(out)}
    config = load_recipe("tiny.yaml", {"rollout.top_k": 5})
    assert list(shown) == [key for key, _, _ in settings(config)]
    assert shown["steps"] == ("recipe", "2")
    assert shown["rollout.top_k"] == ("override", "5")
    assert shown["rollout.temperature"] == ("default", "1.0")
    flat = " ".join(out.split())
    assert [meaning for _, _, meaning in settings(config) if meaning not in flat] == []


def test_without_all_the_basic_settings_and_those_that_differ_are_shown(lab):
    out = lab("config", "tiny.yaml", "rollout.top_k=5").out
    shown = {row["key"]: row["source"] for row in HEAD.finditer(out)}
    every = resolve("tiny.yaml", {"rollout.top_k": 5})[1]
    assert shown == {one.key: one.source for one in every if one.basic or one.source != "default"}
    assert shown["rollout.temperature"] == "default" and "rollout.top_p" not in shown
    assert f"{len(every) - len(shown)} more settings have their defaults; --all shows them" in out


def test_basic_settings_are_few_and_there(lab):
    every = set(known_keys())
    assert set(BASIC) <= every and len(set(BASIC)) == len(BASIC) < 30
    assert len([one for one in resolve("tiny.yaml")[1] if one.basic]) < 45


def test_the_sizes_follow_the_settings(lab):
    out = lab("config", "tiny.yaml").out
    assert "batch: 4 prompts x 2 samples per prompt = 8 sequences" in out.partition("How the sizes follow")[2]


@pytest.mark.parametrize("columns", ["80", "200"])
def test_no_line_is_wider_than_the_terminal(lab, columns):
    lab.patch.setenv("COLUMNS", columns)
    lines = lab("config", "quickstart").out.splitlines()
    assert max(map(len, lines)) <= int(columns)
    assert (max(map(len, lines)) > 80) == (columns == "200")


def test_what_is_piped_has_no_colours(lab):
    assert "\x1b" not in lab("config", "quickstart").out


def test_yaml_is_the_resolved_recipe_alone(lab):
    shown = lab("config", "tiny.yaml", "steps=9", "--yaml").out
    assert from_yaml(shown, "shown") == load_recipe("tiny.yaml", {"steps": 9})


def test_the_schema_needs_no_recipe(lab):
    schema = json.loads(lab("config", "--schema").out)
    assert schema["anyOf"] == [{"required": ["base"]}, {"required": ["data"]}]
    assert schema["additionalProperties"] is False


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ([], "name a recipe (millrace recipes lists them), or ask for --schema"),
        (["tiny.yaml", "--schema"], "--schema goes alone, since the schema is the same for every recipe"),
        (["tiny.yaml", "--yaml", "--all"], "--yaml prints every setting; leave out --all"),
        (["--yaml", "--schema"], "--schema goes alone, since the schema is the same for every recipe"),
        (["tiny.yaml", "steps"], "'steps' is not of the form key=value, such as steps=50"),
    ],
)
def test_a_request_that_makes_no_sense_is_refused(lab, words, sentence):
    result = lab("config", *words)
    assert (result.code, result.err) == (2, f"error: {sentence}\n")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("auto", "auto"),
        (None, "null"),
        (True, "true"),
        ((), "[]"),
        ("", '""'),
        ("a b", '"a b"'),
        (1e-6, "1e-06"),
    ],
)
def test_a_value_is_written_as_an_override_would_spell_it(value, text):
    assert written(value) == text
