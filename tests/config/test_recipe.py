from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from millrace.config.explain import known_keys
from millrace.config.recipe import (
    ConfigError,
    derivation,
    from_yaml,
    json_schema,
    load_recipe,
    parse_overrides,
    recipe_names,
    recipe_text,
    resolve,
    settings,
    to_yaml,
    validate,
)
from tests.config.trees import BASE, TASKS, on_quickstart

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
    kinds = "one of exact, gsm8k, number, task, format, function, code, judge, model"
    assert by_key["rewards.0.kind"].meaning == kinds
    assert by_key["steps"].meaning == (
        "batches of reinforcement learning; 0 is supervised fine-tuning alone. Some hundreds show whether "
        "a method works"
    )
    assert [(key, value) for key, value, _ in settings(config)] == [(s.key, s.value) for s in found]


def test_a_free_dictionary_of_the_recipe_is_its_own(tmp_path: Path) -> None:
    path = tmp_path / "shaped.yaml"
    path.write_text(TEXT + "model:\n  shape: {hidden_size: 8}\n", encoding="utf-8")
    assert {s.key: s.source for s in resolve(path)[1]}["model.shape"] == "recipe"


def test_overrides_are_not_written_to(recipe: Path) -> None:
    given = {"policy.loss": {"kind": "ppo_clip"}, "rewards": [{"kind": "exact"}]}
    before = copy.deepcopy(given)
    config = load_recipe(recipe, given | {"policy.loss.kind": "gspo", "rewards.0.weight": 2.0})
    assert given == before
    assert config.policy.loss.kind == "gspo"
    assert config.rewards[0].weight == 2.0


def test_a_section_given_as_override_covers_its_settings(recipe: Path) -> None:
    found = {s.key: s.source for s in resolve(recipe, {"sft": {"steps": 4}})[1]}
    assert found["sft.steps"] == "override"


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
        ("steps=[", "the value of 'steps=[' is not YAML; quote it: 'steps=\"[\"'"),
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
    {"kind": "model", "path": "judge", "weight": -0.25},
]
REJECT = {"estimator": "k3", "level": "max", "high": 0.02}
RUNS: list[dict[str, Any]] = [
    BASE,
    {**BASE, "steps": 0, "sft": {"steps": 5}},
    {**BASE, "sft": {"steps": 5, "stop_accuracy": [0.4, 0.6]}, "policy": {"kl": {"coefficient": 3e-4}}},
    {**BASE, "data": {"train": "reasoning-gym:chain_sum", "task": {"min": 2}}, "rewards": REWARDS},
    {**BASE, "model": {"path": "folder"}, "name": "2024", "rollout": {"stop": ["1", "1e5", "null", "é\n"]}},
    {
        **BASE,
        "advantage": {"kind": "n_step", "num_steps": 3},
        "critic": {"coefficient": 1.0},
    },
    {**BASE, "advantage": {"kind": "gae", "length_adaptive": 0.05, "critic_lam": 1.0}, "critic": {}},
    {**BASE, "policy": {"proximal": "recompute", "correction": {"level": "geometric", "reject": REJECT}}},
    {**BASE, "policy": {"loss": {"kind": "clip_cov", "fraction": 0.5}, "entropy_coefficient": -0.01}},
    {**BASE, "policy": {"kl": {"coefficient": 0.1, "estimator": "k3+", "target": 0.3, "horizon": 3000}}},
    {
        **BASE,
        "policy": {
            "loss": {"dual_clip": 3.0},
            "optimizer_steps_per_batch": 2,
            "optimizer": {"learning_rate": 1e-30},
        },
        "loggers": [],
    },
]


@pytest.mark.slow_beyond(2)
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
        config = load_recipe(name) if name in TASKS else on_quickstart(name)
        assert from_yaml(to_yaml(config), name) == config


@pytest.mark.slow_beyond(3)
@pytest.mark.parametrize("tree", RUNS, ids=str)
def test_a_written_run_names_every_setting(tree: dict[str, Any]) -> None:
    config = validate(tree, "mine")
    written = yaml.safe_load(to_yaml(config))
    for key, _, _ in settings(config):
        node = written
        for part in key.split("."):
            assert int(part) < len(node) if isinstance(node, list) else part in node, key
            node = node[int(part)] if isinstance(node, list) else node[part]


def test_the_sizes_of_a_run_are_derived_in_words() -> None:
    tree = {
        **BASE,
        "sft": {"steps": 600, "sequences_per_step": 64, "stop_accuracy": [0.45, 0.6]},
        "rollout": {"prompts_per_step": 32, "samples_per_prompt": 8},
        "policy": {"optimizer_steps_per_batch": 4, "tokens_per_micro_batch": 100},
    }
    assert derivation(validate(tree, "mine")) == [
        "SFT: 64 sequences per optimizer step, until 600 steps or held-out accuracy in [0.45, 0.6]",
        "batch: 32 prompts x 8 samples per prompt = 256 sequences",
        "optimizer: 256 sequences / 4 optimizer steps per batch = 64 sequences per optimizer step",
        "run: 3 batches x 4 = 12 optimizer steps, 768 sequences in all",
        "memory: at most 100 tokens per micro-batch; gradients add up over micro-batches and do not depend "
        "on how many there are",
    ]
    supervised = validate({**BASE, "steps": 0, "sft": {"steps": 5}}, "mine")
    assert derivation(supervised) == ["SFT: 128 sequences per optimizer step, until 5 steps"]


def test_the_schema_is_json_that_knows_every_key() -> None:
    schema = json.loads(json_schema())
    assert set(schema["properties"]) == {"base", *(key for key in known_keys() if "." not in key)}
    assert schema["additionalProperties"] is False
    # A recipe over another one need not repeat what that one says.
    assert schema["anyOf"] == [{"required": ["base"]}, {"required": ["data"]}]
    assert "required" not in schema
    below = {name for section in schema["$defs"].values() for name in section["properties"]}
    assert {key.rpartition(".")[2] for key in known_keys() if "." in key} <= below
    assert schema["$defs"]["GspoLoss"]["properties"]["clip_high"]["default"] == 4e-4


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
