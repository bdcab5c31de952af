"""Names that users of TRL, verl, OpenRLHF and vLLM type get the setting they mean as a hint."""

from __future__ import annotations

from typing import Any

import pytest

from millrace.config.explain import known_keys
from millrace.config.other_names import NAMES, NOTES, SETTLED, hint, key_of
from millrace.config.recipe import ConfigError, load_recipe, parse_overrides
from tests.config.trees import message_of


def test_every_hint_names_a_setting_there_is() -> None:
    assert set(NAMES) <= set(known_keys())
    assert set(NOTES) <= set(NAMES)


def test_every_name_has_one_meaning_and_is_no_setting_itself() -> None:
    names = [name for many in (*NAMES.values(), *SETTLED.values()) for name in many.split()]
    assert sorted(names) == sorted(set(names))
    assert not set(names) & set(known_keys())


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("num_generations", "rollout.samples_per_prompt"),
        ("max_completion_length", "rollout.max_tokens"),
        ("beta", "policy.kl.coefficient"),
        ("lr", "policy.optimizer.learning_rate"),
        ("per_device_train_batch_size", "rollout.prompts_per_step"),
        ("actor_rollout_ref.rollout.n", "rollout.samples_per_prompt"),
        ("actor_rollout_ref.actor.optim.lr", "policy.optimizer.learning_rate"),
        ("critic.optim.lr", "critic.learning_rate"),
        ("algorithm.kl_ctrl.kl_coef", "policy.kl.coefficient"),
        ("data.train_batch_size", "rollout.prompts_per_step"),
        ("custom_reward_function.path", "rewards"),
        ("gpu_memory_utilization", "engine.cache_tokens"),
        ("tensor_parallel_size", "engine.tensor_parallel_size"),
        ("vllm_tensor_parallel_size", "engine.tensor_parallel_size"),
        ("actor_rollout_ref.rollout.tensor_model_parallel_size", "engine.tensor_parallel_size"),
        ("actor.megatron.tensor_model_parallel_size", "mesh.tp"),
        ("max_new_tokens", "rollout.max_tokens"),
        ("n_samples_per_prompt", "rollout.samples_per_prompt"),
        ("temprature", None),
    ],
)
def test_a_name_is_matched_by_its_last_parts(name: str, key: str | None) -> None:
    assert key_of(name) == key
    assert (key or "") in hint(name) and bool(hint(name)) == (key is not None)


@pytest.mark.parametrize(
    ("tree", "lines"),
    [
        ({"beta": 0.1}, ["unknown key beta; in millrace it is policy.kl.coefficient"]),
        ({"learning_rate": 1}, ["unknown key learning_rate; did you mean policy.optimizer.learning_rate?"]),
        (
            {"rollout": {"max_completion_length": 5}},
            ["unknown key rollout.max_completion_length; in millrace it is rollout.max_tokens"],
        ),
        (
            {"engine": {"gpu_memory_utilization": 0.9}},
            ["unknown key engine.gpu_memory_utilization; in millrace it is engine.cache_tokens (in tokens)"],
        ),
        (
            {"actor_rollout_ref": {"rollout": {"n": 8}, "model": {"use_remove_padding": True, "what": 1}}},
            [
                "unknown key actor_rollout_ref.rollout.n; in millrace it is rollout.samples_per_prompt",
                "unknown key actor_rollout_ref.model.use_remove_padding; leave it out: batches are always "
                "packed",
            ],
        ),
        # A kind's own settings are nearer than another system's.
        (
            {"policy": {"loss": {"beta": 1}}},
            ["unknown key policy.loss.beta; kind ppo_clip has: clip_low, clip_high, dual_clip"],
        ),
    ],
    ids=str,
)
def test_an_unknown_key_of_another_system_says_what_it_is_here(
    tree: dict[str, Any], lines: list[str]
) -> None:
    assert message_of(tree).splitlines() == [f"recipe mine: {line}" for line in lines]


def test_names_on_the_command_line_are_told_likewise() -> None:
    with pytest.raises(ConfigError) as error:
        load_recipe("quickstart", parse_overrides(["actor_rollout_ref.rollout.n=8", "critic.optim.lr=1e-5"]))
    assert str(error.value).splitlines() == [
        "recipe quickstart: unknown key critic.optim.lr; in millrace it is critic.learning_rate",
        "recipe quickstart: unknown key actor_rollout_ref.rollout.n; in millrace it is "
        "rollout.samples_per_prompt",
    ]


@pytest.mark.parametrize(
    ("word", "read", "quoted"),
    [
        ("data.template={prompt}", "{'prompt': None}: YAML made a mapping", "{prompt}"),
        ("data.template=Q: {prompt}", "{'Q': {'prompt': None}}: YAML made a mapping", "Q: {prompt}"),
        ("data.prompt_column=17", "17: YAML made a number", "17"),
        ("data.template=true", "True: YAML made true or false", "true"),
        ("data.template=[a]", "['a']: YAML made a list", "['a']"),
    ],
)
def test_text_that_yaml_reads_otherwise_says_how_to_quote_it(word: str, read: str, quoted: str) -> None:
    key = word.partition("=")[0]
    with pytest.raises(ConfigError) as error:
        load_recipe("quickstart", parse_overrides([word]))
    assert str(error.value) == (
        f'recipe quickstart: {key} is {read} of what should be text; put it in quotes: "{quoted}", in a '
        f"shell '{key}=\"{quoted}\"'"
    )
    if quoted.endswith("{prompt}"):
        assert load_recipe("quickstart", parse_overrides([f'{key}="{quoted}"'])).data.template == quoted
