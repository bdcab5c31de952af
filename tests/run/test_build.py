"""From settings to parts."""

from __future__ import annotations

import json
import shutil
from contextlib import closing
from copy import deepcopy
from pathlib import Path

import pytest
import torch

from millrace.config.recipe import ConfigError
from millrace.config.reward_sections import ChatRewardConfig, FunctionRewardConfig
from millrace.data.chat import chat_text
from millrace.data.rows import DataError
from millrace.data.tokenizers import load_tokenizer, train_tokenizer
from millrace.errors import SetupError
from millrace.models.heads import scalar_model
from millrace.models.load import ModelError, load_model, save_model
from millrace.rewards.reward_errors import RewardError
from millrace.rewards.sandbox import Permissions
from millrace.run.build import build, build_reward, choose_device, function_permissions
from millrace.run.build_models import CRITIC
from millrace.run.build_rewards import check_groups
from millrace.training.optimizer import start_optimizer
from millrace.training.scorer import ModelScorer
from millrace.transport.weight_update import WeightSyncError
from millrace.types import Prompt
from tests.close import close_fp64
from tests.end_to_end.tiny import tiny_recipe
from tests.training.pieces import random_batch

SFT_OPTIMIZER = {"schedule": "cosine", "min_lr_ratio": 0.1, "warmup_steps": 2, "weight_decay": 0.25}


def test_the_sampler_starts_with_weights_of_its_own_equal_to_the_policys(tmp_path):
    parts = build(tiny_recipe(tmp_path), None)
    trainer = parts.reinforcer(5, None, None)
    parts.policy_weights.activate(trainer)
    sent = dict(trainer.named_tensors())
    assert trainer.version == 5
    before = parts.engine.fingerprint()
    next(iter(sent.values())).add_(1)
    assert parts.engine.fingerprint() == before
    parts.transport.update_weights(trainer.named_tensors(), 6)
    assert parts.engine.version == 6
    assert parts.engine.fingerprint() != before


def test_a_sampler_that_computes_something_else_than_it_holds_gets_no_version(tmp_path):
    parts = build(tiny_recipe(tmp_path), None)
    trainer = parts.reinforcer(0, None, None)
    parts.policy_weights.activate(trainer)
    parts.transport.update_weights(trainer.named_tensors(), 1)
    first = parts.engine._model.get_submodule("model.embed_tokens")
    first.register_forward_hook(lambda module, given, output: 0.5 * output)
    with pytest.raises(WeightSyncError, match="^the sampler holds version 2 and computes something else"):
        parts.transport.update_weights(trainer.named_tensors(), 2)


@pytest.mark.slow
def test_one_seed_gives_one_start_and_another_seed_another(tmp_path):
    def start(seed: int) -> tuple[dict[str, str], list[str]]:
        parts = build(tiny_recipe(tmp_path, {"seed": seed}), None)
        return parts.engine.fingerprint(), [prompt.text for prompt in parts.eval_prompts]

    (weights_0, held_0), (again, held_again), (weights_1, held_1) = start(0), start(0), start(1)
    assert (weights_0, held_0) == (again, held_again)
    assert weights_0 != weights_1
    assert held_0 != held_1


def test_a_deterministic_run_has_one_arithmetic_on_both_sides(tmp_path):
    parts = build(tiny_recipe(tmp_path, {"deterministic": True}), None)
    heads = [parts.engine._model.lm_head, parts.reinforcer(0, None, None).model.lm_head]
    assert [head.tile for head in heads] == [32, 32]
    plain = build(tiny_recipe(tmp_path), None)
    assert plain.reinforcer(0, None, None).model.lm_head.tile is None


def test_the_recipes_chat_template_is_that_of_the_tokenizer(tmp_path):
    (tmp_path / "my.jinja").write_text("{{ note }}{{ messages[0].content }}")
    options = {"file": str(tmp_path / "my.jinja"), "note": "n"}
    made = build(tiny_recipe(tmp_path, {"tokenizer.chat_template": options}), None)
    made.save_model(tmp_path / "model")
    tokenizer = load_tokenizer(tmp_path / "model")
    assert chat_text(tokenizer, [{"role": "user", "content": "x"}], "here") == "nx"
    with pytest.raises(ConfigError, match="file is 1, not the name of a file"):
        tiny_recipe(tmp_path, {"tokenizer.chat_template": {"file": 1}})
    with pytest.raises(ConfigError, match="'a b' is no name of a variable"):
        tiny_recipe(tmp_path, {"tokenizer.chat_template": {"a b": 1}})


def test_activation_offload_without_a_gpu_is_refused(tmp_path):
    with pytest.raises(SetupError, match="mesh.activation_offload has no effect on cpu, whose memory is the"):
        build(tiny_recipe(tmp_path, {"mesh": {"activation_offload": True}, "device": "cpu"}), None)


def test_cuda_graphs_without_a_gpu_are_refused(tmp_path):
    with pytest.raises(SetupError, match="engine.cuda_graphs needs a CUDA device, and the model is on cpu"):
        build(tiny_recipe(tmp_path, {"engine": {"cuda_graphs": True}, "device": "cpu"}), None)


def test_full_marks_are_the_sum_of_what_can_be_earned(tmp_path):
    rewards = [
        {"kind": "exact", "weight": 2.0},
        {"kind": "gsm8k", "weight": 0.5},
        {"kind": "exact", "weight": -1.0},
    ]
    assert build(tiny_recipe(tmp_path, {"rewards": rewards}), None).full_marks == 2.5


def test_a_demonstration_ends_with_the_end_of_text(tmp_path):
    parts = build(tiny_recipe(tmp_path), None)
    prompt = parts.train_prompts[0]
    (token_ids,) = parts.demonstrations.tokens(prompt)
    assert len(token_ids) == 2
    assert token_ids[-1] == parts.stop_token_ids[0]


def test_a_demonstration_that_does_not_fit_is_left_out_with_a_count_or_refused(tmp_path):
    rows = [{"question": "1", "answer": "2"}] * 3 + [{"question": "1", "answer": "3" * 80}]
    rows = [{**row, "question": str(number)} for number, row in enumerate(rows)]
    (tmp_path / "long.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    changes = {"data.train": str(tmp_path / "long.jsonl"), "data.eval": str(tmp_path / "long.jsonl")}
    (tmp_path / "other.jsonl").write_text('{"question": "9", "answer": "9"}\n')
    changes["data.eval"] = str(tmp_path / "other.jsonl")
    parts = build(tiny_recipe(tmp_path, changes), None)
    assert [prompt.id for prompt in parts.demonstrations.prompts] == ["train:0", "train:1", "train:2"]
    assert (len(parts.train_prompts), parts.num_long_demonstrations) == (4, 1)
    with pytest.raises(DataError) as caught:
        build(tiny_recipe(tmp_path, {**changes, "data.too_long": "refuse"}), None)
    assert str(caught.value) == (
        "prompt train:3 and its demonstration have 82 tokens and at most 48 are allowed; "
        "shorten it, or set data.too_long to filter"
    )


def test_a_completion_longer_than_a_micro_batch_is_refused(tmp_path):
    with pytest.raises(SetupError) as caught:
        build(tiny_recipe(tmp_path, {"policy.tokens_per_micro_batch": 3}), None)
    assert str(caught.value) == (
        "rollout.max_tokens is 3 but a micro-batch holds 3 tokens, prompt included; "
        "raise policy.tokens_per_micro_batch"
    )


def test_a_prompt_without_a_demonstration_is_named(tmp_path):
    (tmp_path / "empty.jsonl").write_text(
        '{"question": "a", "answer": ""}\n{"question": "b", "answer": ""}\n'
    )
    config = tiny_recipe(tmp_path, {"data.train": str(tmp_path / "empty.jsonl"), "data.eval_size": 1})
    with pytest.raises(DataError) as caught:
        build(config, None)
    assert str(caught.value) == (
        "prompt train:0 has no demonstration to imitate in SFT; set data.demonstration_column"
    )


def test_a_batch_holds_no_prompt_twice(tmp_path):
    assert len(build(tiny_recipe(tmp_path, {"rollout.prompts_per_step": 32}), None).train_prompts) == 32
    with pytest.raises(SetupError, match="prompts_per_step is 33, but there are 32 prompts to train on"):
        build(tiny_recipe(tmp_path, {"rollout.prompts_per_step": 33}), None)
    # Where nothing is sampled, nothing is asked of it.
    build(tiny_recipe(tmp_path, {"rollout.prompts_per_step": 33, "steps": 0}), None)


def test_prompts_that_leave_no_room_for_an_answer_are_left_out_and_counted(tmp_path):
    lines = "".join(f'{{"question": "{"x " * n}{n}", "answer": "1"}}\n' for n in range(1, 41))
    (tmp_path / "long.jsonl").write_text(lines)
    config = tiny_recipe(tmp_path, {"data.train": str(tmp_path / "long.jsonl"), "rollout.max_tokens": 20})
    parts = build(config, None)
    longest = max(len(prompt.token_ids) for prompt in parts.train_prompts + parts.eval_prompts)
    assert longest <= 48 - 20
    assert parts.num_filtered > 0
    assert len(parts.train_prompts) + len(parts.eval_prompts) + parts.num_filtered == 40


def test_without_a_kl_penalty_there_is_no_reference_and_nothing_to_control(tmp_path):
    parts = build(tiny_recipe(tmp_path), None)
    assert (parts.reference, parts.control) == (None, None)
    held = build(tiny_recipe(tmp_path, {"policy.kl.coefficient": 0.1}), None)
    assert held.control.coefficient == 0.1


def test_the_reference_is_what_a_folder_holds_frozen_and_asked_at_the_samplers_temperature(tmp_path):
    changes = {"policy.kl.coefficient": 0.1, "rollout.temperature": 0.7}
    parts = build(tiny_recipe(tmp_path, changes), None)
    parts.save_model(tmp_path / "start")
    reference = parts.reference(tmp_path / "start")
    trainer = parts.reinforcer(0, parts.control, reference)
    batch = random_batch(0)
    assert torch.equal(reference.logprobs(batch), trainer.scorer.logprobs(batch))
    with torch.no_grad():
        for _, tensor in trainer.named_tensors():
            tensor.add_(0.1)
    assert not torch.equal(reference.logprobs(batch), trainer.scorer.logprobs(batch))


CRITIC_RECIPE = {
    "advantage.kind": "gae",
    "critic": {"learning_rate": 0.25},
    "steps": 6,
    "policy.optimizer_steps_per_batch": 2,
}


def test_without_a_use_for_it_there_is_no_critic(tmp_path):
    assert build(tiny_recipe(tmp_path), None).critic is None


def test_a_critic_begins_at_the_present_weights_with_a_head_of_zeros_and_its_own_rate(tmp_path):
    changes = CRITIC_RECIPE | {"policy.optimizer.schedule": "linear"}
    parts = build(tiny_recipe(tmp_path, changes), None)
    policy = parts.reinforcer(0, None, None)
    with torch.no_grad():
        for _, tensor in policy.named_tensors():
            tensor.add_(0.01)  # as SFT would
    critic = parts.critic()
    for ours, theirs in zip(
        critic.model.base_model.parameters(), policy.model.base_model.parameters(), strict=True
    ):
        assert torch.equal(ours, theirs)
        assert ours.data_ptr() != theirs.data_ptr()
    batch = random_batch(0)
    assert float(critic.values(batch)[0].abs().sum()) == 0.0
    # Twelve optimizer steps of six batches, down to a tenth of the peak.
    rates = [critic.optim_step().learning_rate for _ in range(12)]
    close_fp64([rates[0], rates[-1]], [0.25, 0.25 * (0.1 + 0.9 / 12)])


@pytest.mark.slow
def test_sft_has_the_schedule_and_the_decay_of_the_policys_optimizer(tmp_path):
    changes = {f"policy.optimizer.{name}": value for name, value in SFT_OPTIMIZER.items()}
    changes |= {"sft.steps": 10, "sft.learning_rate": 0.5}
    trainer = build(tiny_recipe(tmp_path, changes), None).imitator(0)
    assert [group["weight_decay"] for group in trainer.optimizer.param_groups] == [0.25, 0.0]
    rates = [trainer.optim_step().learning_rate for _ in range(11)]
    # Up in two steps, then half of a cosine over eight, down to a tenth.
    close_fp64([rates[0], rates[1], rates[6], rates[10]], [0.25, 0.5, 0.5 * 0.55, 0.05])
    ending = build(tiny_recipe(tmp_path, changes | {"sft.stop_accuracy": [0.4, 0.6]}), None).imitator(0)
    assert [ending.optim_step().learning_rate for _ in range(11)][2:] == [0.5] * 9


@pytest.mark.slow
def test_eight_bit_moments_are_of_policy_and_critic_and_refused_without_effect(tmp_path):
    changes = CRITIC_RECIPE | {"policy.optimizer.kind": "adamw_8bit"}
    with pytest.raises(ModelError) as error:
        build(tiny_recipe(tmp_path, changes | {"model.shape.hidden_size": 8}), None)
    assert "policy.optimizer.kind adamw_8bit has no effect" in str(error.value)
    parts = build(tiny_recipe(tmp_path, changes), None)
    for trainer in (parts.imitator(0), parts.reinforcer(0, None, None), parts.critic()):
        kinds = {name.partition("/")[0] for name in start_optimizer(trainer.optimizer, trainer.model)}
        assert kinds == {"step", "state1", "state2", "absmax1", "absmax2"}


@pytest.mark.slow
def test_a_critic_of_a_checkpoint_is_taken_up_as_it_was(tmp_path):
    config = tiny_recipe(tmp_path, CRITIC_RECIPE)
    parts = build(config, None)
    critic = parts.critic()
    with torch.no_grad():
        critic.model.score.weight.fill_(0.5)
    checkpoint = tmp_path / "checkpoint"
    parts.save_model(checkpoint / "model")
    save_model(critic.model, checkpoint / CRITIC)
    assert (checkpoint / CRITIC / "model.safetensors").is_file()
    again = build(config, checkpoint).critic()
    batch = random_batch(0)
    assert float(critic.values(batch)[0].abs().sum()) > 0.1
    assert torch.equal(again.values(batch)[0], critic.values(batch)[0])
    # Products of unaligned memory are rounded differently, and a resumed run must repeat every bit.
    models = (again.model, build(config, checkpoint).reinforcer(0, None, None).model)
    assert {p.data_ptr() % 64 for model in models for p in model.parameters()} == {0}
    # One saved before there was a critic gives a fresh one.
    shutil.rmtree(checkpoint / CRITIC)
    assert float(build(config, checkpoint).critic().values(batch)[0].abs().sum()) == 0.0


def saved(folder: Path, seed: int, *, scores: bool = False) -> Path:
    """A model of another seed with its tokenizer; with `scores` a reward model."""
    parts = build(tiny_recipe(folder.parent, {"seed": seed}), None)
    parts.save_model(folder)
    if scores:
        judge = scalar_model(load_model(folder, dtype=torch.float32))
        torch.nn.init.normal_(judge.score.weight, generator=torch.Generator().manual_seed(seed))
        save_model(judge, folder)
    return folder


@pytest.mark.slow
def test_a_critic_starts_from_what_the_recipe_names(tmp_path):
    language, judge = saved(tmp_path / "language", 1), saved(tmp_path / "judge", 2, scores=True)
    batch = random_batch(0)

    def made(path: Path):
        return build(tiny_recipe(tmp_path, CRITIC_RECIPE | {"critic": {"path": str(path)}}), None).critic()

    backbone = load_model(language, dtype=torch.float32).base_model
    critic = made(language)
    assert float(critic.values(batch)[0].abs().sum()) == 0.0
    for ours, theirs in zip(critic.model.base_model.parameters(), backbone.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    values_T = made(judge).values(batch)[0]
    assert float(values_T.abs().sum()) > 0.1
    # A checkpoint gives its critic, and the folder of its policy that policy.
    checkpoint = tmp_path / "checkpoint"
    shutil.copytree(language, checkpoint / "model")
    shutil.copytree(judge, checkpoint / CRITIC)
    assert torch.equal(made(checkpoint).values(batch)[0], values_T)
    assert float(made(checkpoint / "model").values(batch)[0].abs().sum()) == 0.0


@pytest.mark.slow
def test_the_reference_is_what_the_recipe_names(tmp_path):
    other = saved(tmp_path / "other", 1)
    kl = {"policy.kl": {"coefficient": 0.1, "path": str(other)}}
    parts = build(tiny_recipe(tmp_path, kl), None)
    parts.save_model(tmp_path / "start")
    batch = random_batch(0)
    says_T = parts.reference(tmp_path / "start").logprobs(batch)
    scorers = [
        ModelScorer(load_model(folder, dtype=torch.float32), temperature=1.0, max_tokens=1000)
        for folder in (other, tmp_path / "start")
    ]
    assert torch.equal(says_T, scorers[0].logprobs(batch))
    assert not torch.equal(says_T, scorers[1].logprobs(batch))


@pytest.mark.slow_beyond(1)
@pytest.mark.parametrize("key", ["critic.path", "policy.kl.path"])
def test_a_model_that_cannot_stand_beside_the_policy_is_refused_before_anything_runs(tmp_path, key):
    given = CRITIC_RECIPE | {"critic": {}, "policy.kl": {"coefficient": 0.1, "estimator": "full"}}

    def message(folder: Path) -> str:
        with pytest.raises((SetupError, DataError)) as caught:
            build(tiny_recipe(tmp_path, deepcopy(given) | {key: str(folder)}), None)
        return str(caught.value)

    assert message(tmp_path / "gone") == (
        f"{key} {tmp_path / 'gone'} does not exist; give a model folder, a checkpoint or a run (millrace "
        "train quickstart makes runs/quickstart-1)"
    )
    other = saved(tmp_path / "other", 1)
    train_tokenizer(["sums of words"] * 9, vocab_size=260, across_words=False).save_pretrained(other)
    assert message(other) == (
        f"{key} {other} reads other tokens than the policy; give a model with the policy's tokenizer, or set "
        "tokenizer.path to that of the other model"
    )


def test_a_penalty_over_the_vocabulary_needs_as_many_logits(tmp_path):
    other = tmp_path / "other"
    parts = build(tiny_recipe(tmp_path), None)
    parts.save_model(other)
    wider = load_model(other, dtype=torch.float32)
    wider.resize_token_embeddings(300)
    save_model(wider, other)
    kl = {"coefficient": 0.1, "estimator": "full", "path": str(other)}
    with pytest.raises(SetupError) as caught:
        build(tiny_recipe(tmp_path, {"policy.kl": kl}), None)
    assert str(caught.value) == (
        f"policy.kl.estimator full sums over the 257 logits of the policy, and policy.kl.path {other} has "
        "300; choose another estimator"
    )


@pytest.mark.world
def test_a_reward_that_cannot_start_stops_the_build_with_its_reason(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rewards = [{"kind": "format", "pattern": "x"}, {"kind": "function", "function": "nowhere:grade"}]
    with pytest.raises(RewardError, match="nowhere"):
        build(tiny_recipe(tmp_path, {"rewards": rewards}), None)


@pytest.mark.world
def test_reward_functions_judge_side_by_side(tmp_path, monkeypatch):
    """Each of the two waits until the other has begun."""
    (tmp_path / "meeting.py").write_text(
        "import pathlib, time\n"
        "def meet(me, other):\n"
        "    pathlib.Path(me).touch()\n"
        "    while not pathlib.Path(other).exists():\n"
        "        time.sleep(0.01)\n"
        "    return 1.0\n"
        "def one(prompt, completion, answer, row): return meet('one', 'two')\n"
        "def two(prompt, completion, answer, row): return meet('two', 'one')\n"
    )
    monkeypatch.chdir(tmp_path)
    entries = [
        {"kind": "function", "function": f"meeting:{name}", "timeout_s": 60, "writable": ["."]}
        for name in ("one", "two")
    ]
    config = tiny_recipe(tmp_path, {"rewards": [*entries, {"kind": "exact", "weight": 4}]})
    with closing(build_reward(config, torch.device("cpu"))) as reward:
        (outcome,) = reward.score([Prompt("train:0", (1,), "1+1=", "2")], ["2"])
    assert (outcome.kind, outcome.value) == ("score", 6.0)


def test_what_a_reward_function_may_do_is_what_the_recipe_says(tmp_path, monkeypatch):
    monkeypatch.setenv("MY_KEY", "x")
    monkeypatch.chdir(tmp_path)
    given = {"env_vars": ["MY_KEY"], "writable": ["."], "network": True, "memory_gb": 0.5}
    found = function_permissions(FunctionRewardConfig(kind="function", function="a:b", **given))
    assert found == Permissions(True, ("MY_KEY",), (str(tmp_path),), 2**29, 2**30)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"env_vars": ["NOT_SET"]},
            "a:b is to see the variable NOT_SET, which is not set; set it or take it out",
        ),
        ({"writable": ["nowhere"]}, "/nowhere, which is not a folder; make it first"),
    ],
)
def test_a_permission_that_cannot_be_given_is_refused(given, message):
    with pytest.raises(RewardError, match=message):
        function_permissions(FunctionRewardConfig(kind="function", function="a:b", **given))


def test_cuda_where_there_is_none_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SetupError) as caught:
        choose_device("cuda")
    assert str(caught.value) == "device is cuda but torch sees no CUDA device; set device: auto or cpu"
    assert choose_device("auto").type == choose_device("cpu").type == "cpu"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert [choose_device(wanted).type for wanted in ("auto", "cuda", "cpu")] == ["cuda", "cuda", "cpu"]


def test_a_saved_policy_is_an_ordinary_model_folder(tmp_path):
    parts = build(tiny_recipe(tmp_path), None)
    folder = Path(tmp_path / "model")
    parts.save_model(folder)
    names = {path.name for path in folder.iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"} <= names


def test_a_comparison_of_a_group_needs_the_whole_group_in_one_process():
    given = {"base_url": "http://h/v1", "model": "m", "rubric": "r"}
    check_groups([ChatRewardConfig(kind="judge", **given)])
    with pytest.raises(SetupError, match="set engine.num_engines to 1 or more, or remove relative"):
        check_groups([ChatRewardConfig(kind="judge", relative=True, **given)])
