"""What a wrong recipe is told: one sentence for each mistake, with the setting's name and the way out."""

from __future__ import annotations

from typing import Any

import pytest

from millrace.config.explain import known_keys
from millrace.config.recipe import ConfigError, validate
from tests.config.trees import BASE

KINDS = "exact, gsm8k, number, task, format, function, code, judge, model"
LOSSES = "ppo_clip, reinforce, gspo, gmpo, cispo, sapo, dppo, dro, topr, clip_cov, kl_cov, function"
ADVANTAGES = (
    "group, leave_one_out, reinforce_plus_plus, reinforce_plus_plus_baseline, greedy_baseline, "
    "length_weighted, gpg, pass_at_k, group_decoupled, token_baseline, returns, gae, n_step, v_trace, "
    "teacher, function"
)


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
        "unknown key policy.kl.kind; did you mean policy.optimizer.kind?",
    ),
    ({"temperature": 1}, "unknown key temperature; did you mean rollout.temperature?"),
    ({"qqqq": 1}, "unknown key qqqq"),
    (
        {"rewards": [{"kind": "exact", "wieght": 2}]},
        "unknown key rewards.0.wieght; did you mean rewards.0.weight?",
    ),
    (
        {"rewards": [{"kind": "exact"}, {"kind": "exact", "pattern": "x"}]},
        "unknown key rewards.1.pattern; kind exact has: weight",
    ),
    (
        {"environment": {"kind": "guess", "readable": ["a"]}},
        "unknown key environment.readable; kind guess has: max_turns, max_tokens, on_length, attempts, "
        "invalid_score, full_marks, workers, begin_s, step_s, episode_s, fault, env_vars, options",
    ),
    (
        {"rewards": [{"kind": "format", "pattern": "x", "timeout": 2}]},
        "unknown key rewards.0.timeout; did you mean rewards.0.timeout_s?",
    ),
    (
        {"rewards": [{"kind": "exakt"}]},
        f"rewards.0.kind is 'exakt'; there are: {KINDS}",
    ),
    (
        {"rewards": [{"weight": 2}]},
        f"rewards.0.kind is missing; there are: {KINDS}",
    ),
    (
        {"rewards": [{"kind": "format"}]},
        "rewards.0.pattern is missing; its meaning: regular expression for the whole completion",
    ),
    (
        {"rewards": []},
        "the recipe has no rewards and no environment; add one of them",
    ),
    ({"sft": {}}, "sft.steps is missing; its meaning: most optimizer steps"),
    (
        {"policy": {"optimizer": {"betas": [0.9]}}},
        "policy.optimizer.betas.1 is missing; its meaning: decay of the first and second moments",
    ),
    (
        {"advantage": {"kind": "gae", "lamb": 0.9}, "critic": {}},
        "unknown key advantage.lamb; did you mean advantage.lam?",
    ),
    (
        {"advantage": {"length_adaptive": 0.05}},
        "unknown key advantage.length_adaptive; kind group has: baseline, divide_by_std, epsilon, "
        "lone_reward, whiten, credit, turn_discount, state_weight",
    ),
    ({"advantage": {"kind": "opo"}}, f"advantage.kind is 'opo'; there are: {ADVANTAGES}"),
    (
        {"advantage": {"kind": "n_step"}, "critic": {}},
        "advantage.num_steps is missing; its meaning: n, the rewards summed before the critic's value",
    ),
    (
        {"advantage": None},
        "advantage is None: input should be a valid dictionary or object to extract fields from",
    ),
    (
        {"policy": {"loss": {"kind": "gspo", "dual_clip": 3.0}}},
        "unknown key policy.loss.dual_clip; kind gspo has: clip_low, clip_high, gradient",
    ),
    (
        {"policy": {"loss": {"kind": "reinforce", "clip": 0.2}}},
        "unknown key policy.loss.clip; kind reinforce has no settings",
    ),
    ({"policy": {"loss": {"kind": "ppo"}}}, f"policy.loss.kind is 'ppo'; there are: {LOSSES}"),
    (
        {"policy": {"loss": {"kind": "dppo", "clip_low": 1.0}}},
        "policy.loss.clip_low is 1.0: input should be less than 1",
    ),
    ({"critic": {"cilp": 0.2}}, "unknown key critic.cilp; did you mean critic.clip?"),
    (
        {"policy": {"correction": {"reject": {"hihg": 2.0, "high": 2.0}}}},
        "unknown key policy.correction.reject.hihg; did you mean policy.correction.reject.high?",
    ),
    (
        {"policy": {"correction": {"reject": {}}}},
        "policy.correction.reject.high is missing; its meaning: upper bound: of the ratio for k1, of the "
        "estimate for k2 and k3",
    ),
    ({3: 1}, "3 is 3: keys should be strings"),
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
        "recipe mine: data.train is missing; its meaning: JSONL, JSON, CSV (these also as .gz or "
        ".zst) or Parquet file, a pattern of several, a folder of them or of the datasets "
        "package, reasoning-gym:NAME, your own module:function that returns rows, or environment "
        "for the problems of the environment; `sources` stands for data.sources",
        "recipe mine: unknown key rewards.0.wieght; did you mean rewards.0.weight?",
        "recipe mine: rewards.1.timeout_s is 0: input should be greater than 0",
    ]


def test_an_error_inside_a_list_is_one_sentence() -> None:
    with pytest.raises(ConfigError) as error:
        validate({**BASE, "rewards": [{"kind": "format"}]}, "mine")
    assert str(error.value) == (
        "recipe mine: rewards.0.pattern is missing; its meaning: regular expression for the whole completion"
    )


def test_known_keys_are_those_of_every_kind_once() -> None:
    keys = known_keys()
    assert len(keys) == len(set(keys))
    expected = {
        *(
            "steps",
            "critic",
            "critic.clip",
            "policy.kl.place",
            "policy.correction.reject.low",
        ),
        *("advantage.kind", "advantage.epsilon", "advantage.lam", "advantage.num_steps", "advantage.path"),
        *("policy.loss.dual_clip", "policy.loss.gradient", "policy.loss.covariance_high", "policy.loss.beta"),
    }
    assert expected <= set(keys)
    # Entries of a list are counted, not named.
    assert [key for key in keys if key.startswith("rewards")] == ["rewards"]
    assert keys.index("policy.loss") + 1 == keys.index("policy.loss.kind")
