"""A recipe over another one: what is laid over, what is replaced, and how overrides join in."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from millrace.config.recipe import ConfigError, load_recipe, recipe_names, recipe_text, resolve, settings

ROOT_RECIPE = """
steps: 9
data: {train: sums.jsonl, eval_size: 5}
rewards:
  - {kind: exact, weight: 0.5}
  - {kind: gsm8k}
critic: {clip: 0.3, warmup_steps: 4}
advantage: {kind: gae, gamma: 0.9, lam: 0.8}
policy:
  optimizer_steps_per_batch: 2
  loss: {low: 0.1, dual: 3.0}
  kl: {coefficient: 0.25, target: 0.5}
model: {shape: {hidden_size: 8, num_hidden_layers: 3}}
"""


@pytest.fixture
def write(tmp_path: Path) -> Any:
    """Writes recipe files; gives back the folder."""

    def files(**texts: str) -> Path:
        for name, text in {"root": ROOT_RECIPE, **texts}.items():
            (tmp_path / f"{name}.yaml").write_text(text, encoding="utf-8")
        return tmp_path

    return files


def changes(name: str | Path, base: str | Path) -> dict[str, tuple[Any, Any]]:
    """Settings that one recipe has and another has not, or has otherwise: the values of both."""
    mine, other = ({key: value for key, value, _ in settings(load_recipe(recipe))} for recipe in (name, base))
    return {
        key: (mine.get(key), other.get(key))
        for key in mine | other
        if (key in mine, mine.get(key)) != (key in other, other.get(key))
    }


def test_a_file_over_a_shipped_recipe_changes_what_it_names_and_nothing_else(write: Any) -> None:
    folder = write(mine="base: quickstart\nsteps: 7\npolicy: {optimizer: {betas: [0.5, 0.6]}}\n")
    assert changes(folder / "mine.yaml", "quickstart") == {
        "steps": (7, 400),
        "policy.optimizer.betas": ((0.5, 0.6), (0.9, 0.99)),
    }


def test_a_file_over_a_file_is_looked_for_beside_it(write: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write()
    (folder / "inner").mkdir()
    (folder / "inner" / "mine.yaml").write_text("base: ../root.yaml\nsteps: 2\n", encoding="utf-8")
    expected = {"steps": (2, 9)}
    assert changes(folder / "inner" / "mine.yaml", folder / "root.yaml") == expected
    monkeypatch.chdir(folder)
    assert changes("inner/mine.yaml", "root.yaml") == expected


def test_sections_are_laid_over_key_by_key_and_lists_are_replaced(write: Any) -> None:
    folder = write(
        middle="base: root.yaml\nsteps: 5\ncritic: {clip: 0.7}\npolicy: {kl: {target: null}}\n",
        mine="base: middle.yaml\nrewards: [{kind: number}]\nmodel: {shape: {hidden_size: 16}}\n"
        "data: {eval: held.jsonl}\npolicy: {loss: {high: 0.4}}\nadvantage: {lam: 0.7}\n",
    )
    config = load_recipe(folder / "mine.yaml")
    assert (config.steps, [reward.kind for reward in config.rewards]) == (5, ["number"])
    assert config.data.model_dump(include={"train", "eval", "eval_size"}) == {
        "train": "sums.jsonl",
        "eval": "held.jsonl",
        "eval_size": 5,
    }
    assert config.model.shape == {"hidden_size": 16, "num_hidden_layers": 3}
    assert config.critic is not None and (config.critic.clip, config.critic.warmup_steps) == (0.7, 4)
    assert config.policy.kl is not None
    assert (config.policy.kl.coefficient, config.policy.kl.target) == (0.25, None)
    assert config.policy.loss.model_dump() == {"kind": "ppo_clip", "low": 0.1, "high": 0.4, "dual": 3.0}
    assert config.advantage.model_dump(include={"kind", "gamma", "lam"}) == {
        "kind": "gae",
        "gamma": 0.9,
        "lam": 0.7,
    }


def test_a_section_is_switched_off_by_null_and_set_to_its_defaults_by_an_empty_one(write: Any) -> None:
    off = "base: root.yaml\ncritic: null\nadvantage: {kind: group}\npolicy: {kl: null}\n"
    folder = write(off=off, reset="base: root.yaml\ncritic: {}\nmodel: {path: folder, shape: {}}\n")
    config = load_recipe(folder / "off.yaml")
    assert (config.critic, config.policy.kl, config.policy.loss.low) == (None, None, 0.1)
    config = load_recipe(folder / "reset.yaml")
    assert config.critic is not None and (config.critic.clip, config.critic.warmup_steps) == (0.5, 0)
    assert (config.model.path, config.model.shape) == ("folder", {})


def test_own_data_and_an_own_model_go_over_the_quickstart(write: Any) -> None:
    text = "base: quickstart\ndata: {train: mine.jsonl, task: {}, task_size: 10000, identity_column: null}\n"
    folder = write(mine=text + "model: {path: folder, shape: {}}\ntokenizer: {}\nrewards: [{kind: exact}]\n")
    config = load_recipe(folder / "mine.yaml")
    assert (config.data.train, config.data.task, config.model.path) == ("mine.jsonl", {}, "folder")
    assert (config.tokenizer.alphabet, config.data.max_prompt_tokens) == ("bytes", 32)


@pytest.mark.parametrize(
    ("above", "advantage", "loss"),
    [
        (
            "advantage: {kind: group, epsilon: 0.5}\ncritic: null",
            {"kind": "group", "baseline": "mean", "divide_by_std": True, "epsilon": 0.5},
            {"kind": "ppo_clip", "low": 0.1, "high": 0.2, "dual": 3.0},
        ),
        (
            "advantage: {kind: gae, lam: 0.7}\npolicy: {loss: {kind: gspo, high: 0.3}}",
            {"kind": "gae", "gamma": 0.9, "lam": 0.7, "whiten": True},
            {"kind": "gspo", "low": 3e-4, "high": 0.3, "gradient": "sequence"},
        ),
        (
            "policy: {loss: {kind: ppo_clip, low: 0.3}}",
            {"kind": "gae", "gamma": 0.9, "lam": 0.8, "whiten": True},
            {"kind": "ppo_clip", "low": 0.3, "high": 0.2, "dual": 3.0},
        ),
    ],
    ids=["another advantage", "another loss", "the default kind, named"],
)
def test_another_kind_replaces_a_section_and_the_same_kind_does_not(
    write: Any, above: str, advantage: dict[str, Any], loss: dict[str, Any]
) -> None:
    config = load_recipe(write(mine=f"base: root.yaml\n{above}\n") / "mine.yaml")
    assert advantage.items() <= config.advantage.model_dump().items()
    assert config.policy.loss.model_dump() == loss
    assert config.policy.optimizer_steps_per_batch == 2


def test_a_setting_of_the_kind_before_is_refused_after_a_change_of_kind(write: Any) -> None:
    folder = write(mine="base: root.yaml\npolicy: {loss: {kind: cispo, dual: 2.0}}\n")
    with pytest.raises(ConfigError) as error:
        load_recipe(folder / "mine.yaml")
    assert str(error.value).endswith("unknown key policy.loss.dual; kind cispo has: low, high")


OVERRIDES = {
    "policy.loss.kind": "gspo",
    "policy.loss.high": 0.3,
    "advantage.lam": 0.6,
    "advantage": {"kind": "gae", "whiten": False},
    "rewards.0.kind": "format",
    "rewards.0.pattern": "x",
}


@pytest.mark.parametrize("seed", range(6))
def test_overrides_change_kinds_whatever_their_order(write: Any, seed: int) -> None:
    orders = list(itertools.permutations(OVERRIDES.items()))
    overrides = dict(orders[seed * 127 % len(orders)])
    config = load_recipe(write() / "root.yaml", overrides)
    assert config.policy.loss.model_dump() == {
        "kind": "gspo",
        "low": 3e-4,
        "high": 0.3,
        "gradient": "sequence",
    }
    assert {"kind": "gae", "lam": 0.6, "gamma": 1.0, "whiten": False}.items() <= (
        config.advantage.model_dump().items()
    )
    assert config.rewards[0].model_dump(include={"kind", "weight", "pattern"}) == {
        "kind": "format",
        "weight": 1.0,
        "pattern": "x",
    }


def test_an_override_that_names_the_kind_there_is_keeps_its_settings(write: Any) -> None:
    folder = write()
    config = load_recipe(folder / "root.yaml", {"policy.loss.kind": "ppo_clip", "advantage.kind": "gae"})
    assert config == load_recipe(folder / "root.yaml")


def test_every_setting_knows_whether_the_recipes_or_an_override_set_it(write: Any) -> None:
    folder = write(mine="base: root.yaml\npolicy: {loss: {high: 0.3}}\n")
    source = {s.key: s.source for s in resolve(folder / "mine.yaml")[1]}
    assert source["policy.loss.low"] == source["policy.loss.high"] == source["critic.clip"] == "recipe"
    assert source["critic.coefficient"] == source["policy.loss.kind"] == "default"
    found = resolve(folder / "mine.yaml", {"policy.loss.kind": "gspo", "policy.loss.gradient": "token"})[1]
    source = {s.key: s.source for s in found if s.key.startswith("policy.loss")}
    # What the recipes said of another kind is gone.
    assert source == {
        "policy.loss.kind": "override",
        "policy.loss.low": "default",
        "policy.loss.high": "default",
        "policy.loss.gradient": "override",
    }


def test_a_recipe_that_is_its_own_base_is_refused_with_the_way_around(
    write: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(write(a="base: b.yaml\n", b="base: a.yaml\n", self="base: ./self.yaml\n"))
    with pytest.raises(ConfigError) as error:
        load_recipe("a.yaml")
    assert str(error.value) == "recipe a.yaml is its own base: a.yaml -> b.yaml -> a.yaml"
    with pytest.raises(ConfigError) as error:
        load_recipe(Path("self.yaml"))
    assert str(error.value) == "recipe self.yaml is its own base: self.yaml -> self.yaml"


def test_a_circle_through_other_folders_is_found(tmp_path: Path) -> None:
    for name, base in {"a": "../b/mine.yaml", "b": "../a/mine.yaml"}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "mine.yaml").write_text(f"base: {base}\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="is its own base: "):
        load_recipe(tmp_path / "a" / "mine.yaml")


@pytest.mark.parametrize(
    ("base", "sentence"),
    [
        (
            "quickstrat",
            "there is no recipe quickstrat; did you mean quickstart? (a file of your own ends in .yaml)",
        ),
        ("none.yaml", "recipe file none.yaml does not exist"),
        ("none.yml", "recipe file none.yml does not exist"),
        ("3", "recipe mine.yaml: base is 3; it names a recipe, such as quickstart"),
        ("[ppo]", "recipe mine.yaml: base is ['ppo']; it names a recipe, such as quickstart"),
    ],
)
def test_a_base_that_is_not_there_says_so(
    write: Any, monkeypatch: pytest.MonkeyPatch, base: str, sentence: str
) -> None:
    monkeypatch.chdir(write(mine=f"base: {base}\n"))
    with pytest.raises(ConfigError) as error:
        load_recipe("mine.yaml")
    assert str(error.value) == sentence


def test_no_base_is_no_base(write: Any) -> None:
    folder = write(mine=f"base: null\n{ROOT_RECIPE}")
    assert changes(folder / "mine.yaml", folder / "root.yaml") == {}


def test_a_base_is_a_matter_of_recipe_files(write: Any) -> None:
    with pytest.raises(ConfigError, match="unknown key base"):
        load_recipe(write() / "root.yaml", {"base": "quickstart"})


def test_shipped_recipes_build_on_shipped_recipes_alone() -> None:
    bases = {
        line.removeprefix("base: ")
        for name in recipe_names()
        for line in recipe_text(name).splitlines()
        if line.startswith("base:")
    }
    assert bases == {"quickstart", "ppo"}
