"""From settings to parts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from millrace.algorithms import weights
from millrace.data.rows import DataError
from millrace.orchestration.build import SetupError, build, build_token_weights, choose_device
from millrace.rewards.errors import RewardError
from tests.close import close_fp32
from tests.end_to_end.tiny import tiny_recipe
from tests.training.pieces import random_batch


def test_the_sampler_starts_with_weights_of_its_own_equal_to_the_policys(tmp_path):
    parts = build(tiny_recipe(tmp_path), None)
    trainer = parts.reinforcer(5)
    sent = dict(trainer.named_tensors())
    assert trainer.version == 5
    before = parts.engine.fingerprint()
    next(iter(sent.values())).add_(1)
    assert parts.engine.fingerprint() == before
    parts.transport.send(trainer.named_tensors(), 6)
    assert parts.engine.version == 6
    assert parts.engine.fingerprint() != before


def test_one_seed_gives_one_start_and_another_seed_another(tmp_path):
    def start(seed: int) -> tuple[dict[str, str], list[str]]:
        parts = build(tiny_recipe(tmp_path, {"seed": seed}), None)
        return parts.engine.fingerprint(), [prompt.text for prompt in parts.eval_prompts]

    (weights_0, held_0), (again, held_again), (weights_1, held_1) = start(0), start(0), start(1)
    assert (weights_0, held_0) == (again, held_again)
    assert weights_0 != weights_1
    assert held_0 != held_1


def test_full_marks_are_the_sum_of_what_can_be_earned(tmp_path):
    rewards = [
        {"kind": "exact", "weight": 2.0},
        {"kind": "gsm8k", "weight": 0.5},
        {"kind": "exact", "weight": -1.0},
    ]
    assert build(tiny_recipe(tmp_path, {"rewards": rewards}), None).full_marks == 2.5


@pytest.mark.parametrize("kind", ["token_mean", "sequence_mean", "sequence_sum", "fixed_length"])
def test_token_weights_are_those_of_the_recipe(kind, tmp_path):
    found = build_token_weights(tiny_recipe(tmp_path, {"policy.token_weights": kind}))
    batch = random_batch(0)
    expected = {
        "token_mean": weights.token_mean,
        "sequence_mean": weights.sequence_mean,
        "sequence_sum": weights.sequence_sum,
        # The tiny recipe's longest answer has three tokens.
        "fixed_length": lambda mask, segment: weights.sequence_sum(mask, segment) / 3,
    }[kind]
    close_fp32(found(batch.action_mask_T, batch.segment_T), expected(batch.action_mask_T, batch.segment_T))


def test_a_demonstration_ends_with_the_end_of_text(tmp_path):
    parts = build(tiny_recipe(tmp_path), None)
    prompt = parts.train_prompts[0]
    token_ids = parts.demonstrations[prompt.id]
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
    assert sorted(parts.demonstrations) == ["train:0", "train:1", "train:2"]
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
        "prompt train:0 has no demonstration to imitate in the warm-up; set data.demonstration_column"
    )


def test_prompts_that_leave_no_room_for_an_answer_are_left_out_and_counted(tmp_path):
    lines = "".join(f'{{"question": "{"x " * n}{n}", "answer": "1"}}\n' for n in range(1, 41))
    (tmp_path / "long.jsonl").write_text(lines)
    config = tiny_recipe(tmp_path, {"data.train": str(tmp_path / "long.jsonl"), "rollout.max_tokens": 20})
    parts = build(config, None)
    longest = max(len(prompt.token_ids) for prompt in parts.train_prompts + parts.eval_prompts)
    assert longest <= 48 - 20
    assert parts.num_filtered > 0
    assert len(parts.train_prompts) + len(parts.eval_prompts) + parts.num_filtered == 40


def test_without_a_kl_penalty_there_is_no_reference(tmp_path):
    assert build(tiny_recipe(tmp_path), None).reference is None
    assert build(tiny_recipe(tmp_path, {"policy.kl.coefficient": 0.1}), None).reference is not None


def test_a_reward_that_cannot_start_stops_the_build_with_its_reason(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rewards = [{"kind": "format", "pattern": "x"}, {"kind": "function", "function": "nowhere:grade"}]
    with pytest.raises(RewardError, match="nowhere"):
        build(tiny_recipe(tmp_path, {"rewards": rewards}), None)


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
