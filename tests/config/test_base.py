"""A recipe over another one: what is laid over, what is replaced, and how overrides join in."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from millrace.config.inputs import DataConfig, ModelConfig, TokenizerConfig
from millrace.config.recipe import (
    ConfigError,
    derivation,
    load_recipe,
    recipe_names,
    recipe_text,
    resolve,
    settings,
)

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
  loss: {clip_low: 0.1, dual_clip: 3.0}
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
        "data: {eval: held.jsonl}\npolicy: {loss: {clip_high: 0.4}}\nadvantage: {lam: 0.7}\n",
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
    assert config.policy.loss.model_dump() == {
        "kind": "ppo_clip",
        "clip_low": 0.1,
        "clip_high": 0.4,
        "dual_clip": 3.0,
    }
    assert config.advantage.model_dump(include={"kind", "gamma", "lam"}) == {
        "kind": "gae",
        "gamma": 0.9,
        "lam": 0.7,
    }


def test_a_section_is_switched_off_by_null_and_set_to_its_defaults_by_an_empty_one(write: Any) -> None:
    off = "base: root.yaml\ncritic: null\nadvantage: {kind: group}\npolicy: {kl: null}\n"
    folder = write(off=off, reset="base: root.yaml\ncritic: {}\nmodel: {path: folder, shape: {}}\n")
    config = load_recipe(folder / "off.yaml")
    assert (config.critic, config.policy.kl, config.policy.loss.clip_low) == (None, None, 0.1)
    config = load_recipe(folder / "reset.yaml")
    assert config.critic is not None and (config.critic.clip, config.critic.warmup_steps) == (0.5, 0)
    assert (config.model.path, config.model.shape) == ("folder", {})


SIX_LINES = """base: grpo
model: {path: folder}
data: {train: chats.jsonl}
rewards:
  - kind: function
    function: "my_rewards:graded"
"""


def test_a_method_a_model_data_and_a_reward_are_a_recipe_that_trains_nothing_else(write: Any) -> None:
    config = load_recipe(write(mine=SIX_LINES) / "mine.yaml")
    assert config.sft is None and config.steps == 200
    optimizer, rollout = config.policy.optimizer, config.rollout
    assert (optimizer.learning_rate, optimizer.schedule, optimizer.warmup_steps) == (1e-6, "constant", 0)
    assert (rollout.prompts_per_step, rollout.samples_per_prompt, rollout.max_tokens) == (32, 8, 1024)
    assert (rollout.temperature, config.policy.loss_aggregation) == (1.0, "sequence_mean")
    told = {
        setting.key
        for setting in resolve(write(mine=SIX_LINES) / "mine.yaml")[1]
        if setting.source != "default"
    }
    assert told == {
        *("model.path", "data.train", "rewards.0.kind", "rewards.0.function", "advantage.kind"),
        *(
            "advantage.divide_by_std",
            "policy.loss_aggregation",
            "policy.kl.coefficient",
            "policy.kl.estimator",
        ),
    }


def test_supervised_training_takes_a_model_folder(write: Any) -> None:
    folder = write(mine="base: supervised\nmodel: {path: folder}\ndata: {train: mine.jsonl}\n")
    config = load_recipe(folder / "mine.yaml")
    assert config == load_recipe("supervised", {"model.path": "folder", "data.train": "mine.jsonl"})
    assert (config.steps, config.model.path, config.data.answer_column) == (0, "folder", "completion")
    assert config.sft is not None and config.sft.learning_rate == 1e-5


def test_a_method_without_a_task_says_how_to_give_it_one() -> None:
    for name in ("ppo", "grpo@trl"):
        with pytest.raises(ConfigError) as error:
            load_recipe(name, {"steps": 3})
        assert str(error.value) == (
            f"recipe {name} is a method without a task: data and rewards are missing. Write a recipe of your "
            f"own over it (base: {name}, and model.path, data.train, rewards), or try it on the quickstart's "
            f"task: millrace train quickstart base={name}"
        )
    words = {"data.train": "mine.jsonl", "rewards": [{"kind": "exact"}], "model.path": "folder"}
    assert load_recipe("ppo", words).advantage.kind == "gae"


def test_another_base_takes_the_place_of_the_recipes_own(write: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert changes("quickstart", "quickstart") == {}
    found = load_recipe("quickstart", {"base": "remax"})
    assert (found.advantage.kind, found.policy.loss_aggregation) == ("greedy_baseline", "sequence_sum")
    assert (found.rollout.max_tokens, found.policy.optimizer.learning_rate) == (6, 2e-3)
    assert load_recipe("quickstart", {"base": None}) == load_recipe("quickstart")  # its base is the defaults
    # On the command line a file is looked for where the command runs, in a recipe beside the recipe.
    folder = write(mine="base: root.yaml\nsteps: 2\n", other="advantage: {kind: gpg}\n")
    monkeypatch.chdir(folder.parent)
    words = {"data": {"train": "x.jsonl"}, "rewards": [{"kind": "exact"}]}
    found = load_recipe(folder / "mine.yaml", {"base": f"{folder.name}/other.yaml", **words})
    assert (found.steps, found.advantage.kind) == (2, "gpg")


@pytest.mark.parametrize(
    ("above", "data"),
    [
        ("{train: mine.jsonl}", {"train": "mine.jsonl"}),
        ("{train: 'reasoning-gym:chain_sum'}", {"train": "reasoning-gym:chain_sum"}),
        (
            "{train: 'reasoning-gym:chain_sum', task: {min_terms: 3}}",
            {"train": "reasoning-gym:chain_sum", "task": {"min_terms": 3}},
        ),
    ],
    ids=["a file", "a task", "a task with options"],
)
def test_other_data_replaces_a_task_with_all_that_describes_it(write: Any, above: str, data: Any) -> None:
    rewards = "rewards: [{kind: exact}]\n"
    config = load_recipe(write(mine=f"base: quickstart\ndata: {above}\n{rewards}") / "mine.yaml")
    assert config.data == DataConfig(**data)
    words = {f"data.{key}": value for key, value in data.items()} | {"rewards": [{"kind": "exact"}]}
    for given in (words, dict(reversed(words.items())), {"data": data, "rewards": [{"kind": "exact"}]}):
        assert load_recipe("quickstart", given).data == config.data
    # The same task keeps its options, and so do columns of a file that another one replaces.
    same = {"data.train": "reasoning-gym:basic_arithmetic", "data.task.min_terms": 3}
    assert load_recipe("quickstart", same).data.task["max_terms"] == 2
    assert load_recipe("gsm8k_smoke", {"data.train": "mine.jsonl"}).data.demonstration_column == "answer"


def test_a_model_folder_brings_sizes_and_tokenizer_along(write: Any) -> None:
    config = load_recipe(write(mine="base: quickstart\nmodel: {path: folder}\n") / "mine.yaml")
    assert (config.model, config.tokenizer) == (ModelConfig(path="folder"), TokenizerConfig())
    for words in ({"model.path": "folder"}, {"model": {"path": "folder"}}):
        assert load_recipe("quickstart", words) == config
    config = load_recipe("quickstart", {"tokenizer.path": "folder"})
    assert config.tokenizer == TokenizerConfig(path="folder") and config.model.shape["head_dim"] == 32
    with pytest.raises(ConfigError, match="model.shape has no effect because model.path names a folder"):
        load_recipe("quickstart", {"model.path": "folder", "model.shape.hidden_size": 8})


def test_sft_of_any_recipe_can_be_trained_alone() -> None:
    for method in ("ppo", "dapo", "decoupled_ppo", "distillation"):
        words = {"base": method, "steps": 0, "advantage.path": "teacher"}
        if method != "distillation":
            del words["advantage.path"]
        config = load_recipe("quickstart", words)
        assert config.sft is not None and config.sft.loss_aggregation == "token_mean"
        assert [line.split(":")[0] for line in derivation(config)] == ["SFT"]


@pytest.mark.parametrize(
    ("above", "advantage", "loss"),
    [
        (
            "advantage: {kind: group, epsilon: 0.5}\ncritic: null",
            {"kind": "group", "baseline": "mean", "divide_by_std": True, "epsilon": 0.5},
            {"kind": "ppo_clip", "clip_low": 0.1, "clip_high": 0.2, "dual_clip": 3.0},
        ),
        (
            "advantage: {kind: gae, lam: 0.7}\npolicy: {loss: {kind: gspo, clip_high: 0.3}}",
            {"kind": "gae", "gamma": 0.9, "lam": 0.7, "whiten": True},
            {"kind": "gspo", "clip_low": 3e-4, "clip_high": 0.3, "gradient": "sequence"},
        ),
        (
            "policy: {loss: {kind: ppo_clip, clip_low: 0.3}}",
            {"kind": "gae", "gamma": 0.9, "lam": 0.8, "whiten": True},
            {"kind": "ppo_clip", "clip_low": 0.3, "clip_high": 0.2, "dual_clip": 3.0},
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
    folder = write(mine="base: root.yaml\npolicy: {loss: {kind: cispo, dual_clip: 2.0}}\n")
    with pytest.raises(ConfigError) as error:
        load_recipe(folder / "mine.yaml")
    assert str(error.value).endswith("unknown key policy.loss.dual_clip; kind cispo has: clip_low, clip_high")


OVERRIDES = {
    "policy.loss.kind": "gspo",
    "policy.loss.clip_high": 0.3,
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
        "clip_low": 3e-4,
        "clip_high": 0.3,
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
    folder = write(mine="base: root.yaml\npolicy: {loss: {clip_high: 0.3}}\n")
    source = {s.key: s.source for s in resolve(folder / "mine.yaml")[1]}
    assert (
        source["policy.loss.clip_low"] == source["policy.loss.clip_high"] == source["critic.clip"] == "recipe"
    )
    assert source["critic.coefficient"] == source["policy.loss.kind"] == "default"
    found = resolve(folder / "mine.yaml", {"policy.loss.kind": "gspo", "policy.loss.gradient": "token"})[1]
    source = {s.key: s.source for s in found if s.key.startswith("policy.loss.")}
    # What the recipes said of another kind is gone.
    assert source == {
        "policy.loss.kind": "override",
        "policy.loss.clip_low": "default",
        "policy.loss.clip_high": "default",
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
        ("3", "recipe mine.yaml: base is 3; it names a recipe, such as grpo"),
        ("[ppo]", "recipe mine.yaml: base is ['ppo']; it names a recipe, such as grpo"),
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


def test_shipped_recipes_build_on_shipped_methods_alone() -> None:
    bases = {
        line.removeprefix("base: ")
        for name in recipe_names()
        for line in recipe_text(name).splitlines()
        if line.startswith("base:")
    }
    assert bases == {"grpo_token_mean", "ppo", "gigpo"}
