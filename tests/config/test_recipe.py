from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from millrace.config.recipe import (
    ConfigError,
    derivation,
    from_yaml,
    json_schema,
    known_keys,
    load_recipe,
    parse_overrides,
    recipe_names,
    recipe_text,
    resolve,
    settings,
    to_yaml,
    validate,
)

BASE: dict[str, Any] = {"steps": 3, "data": {"train": "sums.jsonl"}, "rewards": [{"kind": "exact"}]}
TEXT = """
steps: 3
data: {train: sums.jsonl}
rewards:
  - kind: exact
  - {kind: format, pattern: '\\d+', weight: 0.5}
policy:
  optimizer: {learning_rate: 3e-4}
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "mine.yaml"
    path.write_text(TEXT, encoding="utf-8")
    return path


UNKNOWN: list[tuple[dict[str, Any], str]] = [
    ({"stpes": 3}, "unknown key stpes; did you mean steps?"),
    ({"rolout": {}}, "unknown key rolout; did you mean rollout?"),
    (
        {"policy": {"optimizer": {"learning_rat": 1}}},
        "unknown key policy.optimizer.learning_rat; did you mean policy.optimizer.learning_rate?",
    ),
    (
        {"policy": {"learning_rate": 1}},
        "unknown key policy.learning_rate; did you mean policy.optimizer.learning_rate?",
    ),
    (
        {"policy": {"kl": {"coefficient": 1, "kind": "k3"}}},
        "unknown key policy.kl.kind; did you mean policy.loss.kind?",
    ),
    ({"temperature": 1}, "unknown key temperature; did you mean rollout.temperature?"),
    ({"qqqq": 1}, "unknown key qqqq"),
    (
        {"rewards": [{"kind": "exact", "wieght": 2}]},
        "unknown key rewards.0.wieght; did you mean rewards.0.weight?",
    ),
    (
        {"rewards": [{"kind": "exact"}, {"kind": "exact", "pattern": "x"}]},
        "unknown key rewards.1.pattern; beside it are known: kind, weight",
    ),
    (
        {"rewards": [{"kind": "format", "pattern": "x", "timeout": 2}]},
        "unknown key rewards.0.timeout; did you mean rewards.0.timeout_s?",
    ),
    (
        {"rewards": [{"kind": "exakt"}]},
        "rewards.0.kind is 'exakt'; there are: exact, gsm8k, number, task, format, function",
    ),
    (
        {"rewards": [{"weight": 2}]},
        "rewards.0.kind is missing; there are: exact, gsm8k, number, task, format, function",
    ),
    (
        {"rewards": [{"kind": "format"}]},
        "rewards.0.pattern is missing; it says: regular expression for the whole completion",
    ),
    (
        {"rewards": []},
        "rewards is []: tuple should have at least 1 item after validation, not 0",
    ),
    ({"warmup": {}}, "warmup.steps is missing; it says: most optimizer steps"),
    (
        {"policy": {"optimizer": {"betas": [0.9]}}},
        "policy.optimizer.betas.1 is missing; it says: decay of the first and second moments",
    ),
]


@pytest.mark.parametrize(("tree", "sentence"), UNKNOWN, ids=[sentence[:60] for _, sentence in UNKNOWN])
def test_a_wrong_key_is_one_sentence_that_names_the_nearest(tree: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError) as error:
        validate({**BASE, **tree}, "mine")
    assert str(error.value) == f"recipe mine: {sentence}"


def test_several_errors_are_several_lines() -> None:
    tree = {"rewards": [{"kind": "exact", "wieght": 2}, {"kind": "number", "timeout_s": 0}], "data": {}}
    with pytest.raises(ConfigError) as error:
        validate(tree, "mine")
    assert str(error.value).splitlines() == [
        "recipe mine: steps is missing; it says: batches of reinforcement; 0 is supervised training alone",
        "recipe mine: data.train is missing; it says: JSONL or Parquet file, Hugging Face dataset folder, or "
        "reasoning-gym:NAME",
        "recipe mine: unknown key rewards.0.wieght; did you mean rewards.0.weight?",
        "recipe mine: rewards.1.timeout_s is 0: input should be greater than 0",
    ]


def test_an_empty_list_is_told_beside_errors_elsewhere() -> None:
    with pytest.raises(ConfigError) as error:
        validate({**BASE, "rewards": [], "stpes": 1}, "mine")
    assert len(str(error.value).splitlines()) == 2


def test_every_setting_knows_where_it_came_from(recipe: Path) -> None:
    overrides = {"policy.optimizer.betas": [0.9, 0.95], "model.shape.hidden_size": 8, "rewards.0.weight": 2.0}
    config, found = resolve(recipe, overrides)
    by_key = {setting.key: setting for setting in found}
    sources = {key: by_key[key].source for key in by_key if by_key[key].source != "default"}
    assert sources == {
        "steps": "recipe",
        "data.train": "recipe",
        "rewards.0.kind": "recipe",
        "rewards.0.weight": "override",
        "rewards.1.kind": "recipe",
        "rewards.1.pattern": "recipe",
        "rewards.1.weight": "recipe",
        "policy.optimizer.learning_rate": "recipe",
        "policy.optimizer.betas": "override",
        "model.shape": "override",
    }
    assert by_key["rewards.1.timeout_s"].source == by_key["rollout.max_tokens"].source == "default"
    assert by_key["policy.optimizer.betas"].value == (0.9, 0.95)
    assert by_key["rewards.0.kind"].meaning == "which of its kinds"
    assert by_key["steps"].meaning == "batches of reinforcement; 0 is supervised training alone"
    assert [(key, value) for key, value, _ in settings(config)] == [(s.key, s.value) for s in found]


def test_a_free_dictionary_of_the_recipe_is_its_own(tmp_path: Path) -> None:
    path = tmp_path / "shaped.yaml"
    path.write_text(TEXT + "model:\n  shape: {hidden_size: 8}\n", encoding="utf-8")
    assert {s.key: s.source for s in resolve(path)[1]}["model.shape"] == "recipe"


def test_a_section_given_as_override_covers_its_settings(recipe: Path) -> None:
    found = {s.key: s.source for s in resolve(recipe, {"warmup": {"steps": 4}})[1]}
    assert found["warmup.steps"] == "override"


def test_numbers_in_scientific_notation_are_numbers(recipe: Path) -> None:
    assert load_recipe(recipe).policy.optimizer.learning_rate == 3e-4
    assert parse_overrides(["a=3e-4", "b=1E+3", "c=.5e1", "d=-2e3", "e='3e-4'", "f=3e", "g=12"]) == {
        "a": 3e-4,
        "b": 1000.0,
        "c": 5.0,
        "d": -2000.0,
        "e": "3e-4",
        "f": "3e",
        "g": 12,
    }


def test_overrides_are_yaml_values() -> None:
    words = ["steps=50", "data.eval=null", "rollout.stop=['a', '1']", "name=", "policy.kl={coefficient: 1}"]
    assert parse_overrides(words) == {
        "steps": 50,
        "data.eval": None,
        "rollout.stop": ["a", "1"],
        "name": None,
        "policy.kl": {"coefficient": 1},
    }
    assert parse_overrides(["data.template=a=b"]) == {"data.template": "a=b"}


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("steps", "'steps' is not of the form key=value, such as steps=50"),
        ("=5", "'=5' is not of the form key=value, such as steps=50"),
        ("steps=[", "the value of 'steps=[' is not YAML; quote it"),
    ],
)
def test_an_override_that_cannot_be_read_says_how_to_write_it(word: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_overrides([word])
    assert str(error.value) == message


def test_overrides_reach_into_sections_and_lists(recipe: Path) -> None:
    config = load_recipe(
        recipe,
        {"rewards.1.weight": 2.0, "rewards.0": {"kind": "gsm8k"}, "policy.kl.coefficient": 0.1, "steps": 7},
    )
    assert [(reward.kind, reward.weight) for reward in config.rewards] == [("gsm8k", 1.0), ("format", 2.0)]
    assert config.policy.kl is not None and config.policy.kl.coefficient == 0.1
    assert config.policy.optimizer.learning_rate == 3e-4 and config.steps == 7


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ({"rewards.2.weight": 1}, "rewards.2.weight: 2 is not one of the 2 entries, counted from 0"),
        ({"rewards.2": {}}, "rewards.2: 2 is not one of the 2 entries, counted from 0"),
        ({"rewards.x.weight": 1}, "rewards.x.weight: x is not one of the 2 entries, counted from 0"),
        (
            {"rollout.stop": ["a"], "rollout.stop.0.x": 1},
            "rollout.stop.0.x: entry 0 is 'a' and has no settings of its own",
        ),
        ({"rollout.temprature": 1}, "unknown key rollout.temprature; did you mean rollout.temperature?"),
    ],
)
def test_an_override_that_leads_nowhere_says_so(recipe: Path, override: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_recipe(recipe, override)
    assert str(error.value).removeprefix(f"recipe {recipe}: ") == message


REWARDS = [
    {"kind": "exact"},
    {"kind": "gsm8k", "weight": 0.5},
    {"kind": "number", "timeout_s": 2.0},
    {"kind": "task"},
    {"kind": "format", "pattern": "\\d+ # not a comment"},
    {"kind": "function", "function": "my.module:score"},
]
RUNS: list[dict[str, Any]] = [
    BASE,
    {**BASE, "steps": 0, "warmup": {"steps": 5}},
    {**BASE, "warmup": {"steps": 5, "gate": [0.4, 0.6]}, "policy": {"kl": {"coefficient": 3e-4}}},
    {**BASE, "data": {"train": "reasoning-gym:chain_sum", "task": {"min": 2}}, "rewards": REWARDS},
    {**BASE, "model": {"path": "folder"}, "name": "2024", "rollout": {"stop": ["1", "1e5", "null", "é\n"]}},
    {
        **BASE,
        "policy": {
            "loss": {"dual": 3.0},
            "optimizer_steps_per_batch": 2,
            "optimizer": {"learning_rate": 1e-30},
        },
        "trackers": [],
    },
]


@pytest.mark.parametrize("tree", RUNS, ids=str)
def test_a_run_can_be_written_and_read_back(tree: dict[str, Any]) -> None:
    config = validate(tree, "mine")
    again = from_yaml(to_yaml(config), "copy")
    assert again == config
    assert to_yaml(again) == to_yaml(config)


def test_shipped_recipes_can_be_written_and_read_back() -> None:
    names = recipe_names()
    assert "quickstart" in names
    for name in names:
        config = load_recipe(name)
        assert from_yaml(to_yaml(config), name) == config


def test_a_written_run_names_every_setting() -> None:
    text = to_yaml(validate(BASE, "mine"))
    missing = [key for key in known_keys() if f"{key.rpartition('.')[2]}:" not in text]
    # Sections that are switched off have no settings to write.
    assert {key.partition(".")[0] for key in missing} <= {"warmup", "policy"}


def test_the_sizes_of_a_run_are_derived_in_words() -> None:
    tree = {
        **BASE,
        "warmup": {"steps": 600, "sequences_per_step": 64, "gate": [0.45, 0.6]},
        "rollout": {"prompts_per_step": 32, "samples_per_prompt": 8},
        "policy": {"optimizer_steps_per_batch": 4, "tokens_per_micro_batch": 100},
    }
    assert derivation(validate(tree, "mine")) == [
        "warm-up: 64 sequences per optimizer step, until 600 steps or held-out accuracy in [0.45, 0.6]",
        "batch: 32 prompts x 8 samples per prompt = 256 sequences",
        "optimizer: 256 sequences / 4 optimizer steps per batch = 64 sequences per optimizer step",
        "run: 3 batches x 4 = 12 optimizer steps, 768 sequences in all",
        "memory: at most 100 tokens per micro-batch; gradients add up over micro-batches and do not depend "
        "on how many there are",
    ]
    supervised = validate({**BASE, "steps": 0, "warmup": {"steps": 5}}, "mine")
    assert derivation(supervised) == ["warm-up: 128 sequences per optimizer step, until 5 steps"]


def test_the_schema_is_json_that_knows_every_key() -> None:
    schema = json.loads(json_schema())
    assert set(schema["properties"]) == {key for key in known_keys() if "." not in key}
    assert schema["additionalProperties"] is False
    assert {"steps", "data", "rewards"} == set(schema["required"])


def test_a_recipe_that_is_not_there_names_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        recipe_text("quickstrat")
    assert str(error.value) == (
        "there is no recipe quickstrat; did you mean quickstart? (a file of your own ends in .yaml)"
    )
    with pytest.raises(ConfigError) as error:
        recipe_text("zzzz")
    assert str(error.value) == (
        f"there is no recipe zzzz; there are: {', '.join(recipe_names())} (a file of your own ends in .yaml)"
    )
    with pytest.raises(ConfigError, match="none.yaml does not exist$"):
        recipe_text(tmp_path / "none.yaml")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("steps: [1", " line 1, column 10: expected ',' or ']', but got '<stream end>'"),
        ("steps: 3\n  data: 4", " line 2, column 7: mapping values are not allowed here"),
        ("- steps", " is not a mapping of settings"),
        ("", " is not a mapping of settings"),
        (
            "steps: !!python/name:os.system ''",
            " line 1, column 8: could not determine a constructor for the tag",
        ),
    ],
)
def test_a_file_that_is_not_a_recipe_says_where(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as error:
        load_recipe(path)
    assert str(error.value).startswith(f"recipe {path}{message}")
