"""Training a reward model: the Bradley-Terry loss, whatever the split, and a rule that it learns."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from millrace.config.recipe import ConfigError
from millrace.data.rows import DataError
from millrace.data.tokenizers import train_tokenizer
from millrace.errors import CheckpointError
from millrace.models.heads import load_scalar_model, scalar_model
from millrace.models.load import Model, fresh_config, fresh_model, save_model
from millrace.training.optimizer import adamw
from millrace.training.preferences import (
    PreferenceReport,
    Rows,
    bradley_terry,
    pair_accuracy,
    preference_step,
    train_reward_model,
)
from tests.close import close_fp32, close_fp64
from tests.training.pieces import SHAPE, VOCAB_SIZE, tiny_model

LETTERS = "abcdefgh"


def judge(seed: int = 0, dtype: torch.dtype = torch.float32) -> Model:
    model = scalar_model(tiny_model(seed, dtype))
    torch.nn.init.normal_(model.score.weight, generator=torch.Generator().manual_seed(seed))
    return model


def random_pairs(seed: int, num: int = 7) -> list[Rows]:
    rng = np.random.default_rng(seed)
    rows = [rng.integers(0, VOCAB_SIZE, rng.integers(1, 12)).tolist() for _ in range(2 * num)]
    return list(zip(rows[::2], rows[1::2], strict=True))


def own_scores(model: Model, pairs: list[Rows]) -> torch.Tensor:
    """[2, N], by the module's own forward of each text."""
    model.set_attn_implementation("eager")
    scores = [
        [model(torch.tensor(row)[None], use_cache=False).logits[0, 0] for row in side]
        for side in zip(*pairs, strict=True)
    ]
    model.set_attn_implementation("millrace")
    return torch.stack([torch.stack(side) for side in scores])


def stepped(pairs: list[Rows], max_tokens: int) -> tuple[list[torch.Tensor], dict[str, float]]:
    """The gradient that a first step took, and its metrics."""
    model = judge(dtype=torch.float64)
    optimizer = adamw(model, betas=(0.9, 0.999), weight_decay=0.0)
    report = preference_step(model, optimizer, pairs, learning_rate=0.5, max_tokens=max_tokens)
    assert (report.skipped, report.learning_rate) == (False, 0.5)
    return [optimizer.state[p]["exp_avg"] / (1 - 0.9) for p in model.parameters()], report.metrics


def test_the_loss_is_minus_the_log_probability_of_the_winner():
    chosen_N, rejected_N = (
        torch.tensor([0.5, -2.0, 90.0, -90.0]).double(),
        torch.tensor([0.5, 1.0, -30.0, 30.0]),
    )
    expected = [math.log(2), math.log(1 + math.exp(3)), math.exp(-120), 120]
    close_fp64(bradley_terry(chosen_N, rejected_N.double()), expected, atol=1e-60)


def test_accuracy_counts_a_tie_as_half():
    model, pairs = judge(), random_pairs(0)
    with torch.no_grad():
        chosen_N, rejected_N = own_scores(model, pairs)
    won = int((chosen_N > rejected_N).sum())
    assert 0 < won < 7
    tied = [*pairs, (pairs[0][0], pairs[0][0])]
    for max_tokens in (1, 30, 1000):
        close_fp64(pair_accuracy(model, pairs, max_tokens=max_tokens), won / 7)
        close_fp64(pair_accuracy(model, tied, max_tokens=max_tokens), (won + 0.5) / 8)
    close_fp64(pair_accuracy(scalar_model(tiny_model()), pairs, max_tokens=99), 0.5)


@pytest.mark.slow_beyond(1)
@pytest.mark.parametrize("seed", range(3))
def test_a_step_follows_the_gradient_of_the_mean_loss(seed):
    pairs = random_pairs(seed)
    reference = judge(dtype=torch.float64)
    score_2N = own_scores(reference, pairs)
    loss = -torch.log(torch.sigmoid(score_2N[0] - score_2N[1])).mean()
    loss.backward()
    norm = torch.cat([p.grad.flatten() for p in reference.parameters()]).norm()
    taken, metrics = stepped(pairs, 1000)
    assert norm > 1  # the gradient is scaled down to 1
    for gradient, parameter in zip(taken, reference.parameters(), strict=True):
        close_fp32(gradient, parameter.grad / norm, rtol=1e-4, atol=1e-5)
    close_fp32(metrics["loss"], loss)
    close_fp64(metrics["accuracy"], float((score_2N[0] > score_2N[1]).double().mean()))


@pytest.mark.slow
def test_a_step_is_the_same_however_the_pairs_are_split():
    pairs = random_pairs(4)
    whole, metrics = stepped(pairs, 1000)
    for max_tokens in (1, 25, 60):
        split, again = stepped(pairs, max_tokens)
        for ours, theirs in zip(split, whole, strict=True):
            close_fp32(ours, theirs, rtol=1e-4, atol=1e-5)
        close_fp32([again["loss"], again["accuracy"]], [metrics["loss"], metrics["accuracy"]])


def test_a_step_without_a_finite_gradient_moves_nothing():
    model = judge()
    with torch.no_grad():
        model.score.weight[0, 3] = math.nan
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = adamw(model, betas=(0.9, 0.999), weight_decay=0.0)
    report = preference_step(model, optimizer, random_pairs(1), learning_rate=0.1, max_tokens=100)
    assert report.skipped
    after = model.parameters()
    assert all(
        torch.equal(
            a,
            b,
        )
        or bool(b.isnan().any())
        for a, b in zip(before, after, strict=True)
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A causal language model with its tokenizer."""
    place = tmp_path_factory.mktemp("language") / "model"
    tokens = train_tokenizer([LETTERS + "?", "a?"], vocab_size=40, across_words=False, alphabet="seen")
    config = fresh_config(
        "qwen3", SHAPE | {"max_position_embeddings": 24}, vocab_size=len(tokens), eos_token_id=0
    )
    save_model(fresh_model(config, seed=0, dtype=torch.float32), place)
    tokens.save_pretrained(place)
    return place


def rule(seed: int, num: int) -> list[dict[str, str]]:
    """Of two answers, the one with more of the letter asked for is preferred."""
    rng = np.random.default_rng(seed)
    made = []
    while len(made) < num:
        prompt = "".join(rng.choice(list(LETTERS), 3))
        words = ["".join(rng.choice(list(LETTERS), rng.integers(2, 6))) for _ in range(2)]
        counts = [word.count("a") for word in words]
        if counts[0] != counts[1]:
            chosen, rejected = words if counts[0] > counts[1] else words[::-1]
            made.append({"prompt": f"{prompt}?", "chosen": chosen, "rejected": rejected})
    return made


def write(place: Path, rows: list[dict[str, str]]) -> str:
    path = place / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def trained(pairs: str, folder: Path, output: Path, **more) -> tuple[PreferenceReport, list[str]]:
    said: list[str] = []
    options = {"steps": 30, "learning_rate": 1e-2, "pairs_per_step": 32, "seed": 0, "device": "cpu"} | more
    return train_reward_model(pairs, folder, output, say=said.append, **options), said


@pytest.mark.slow
def test_it_learns_a_rule_and_writes_a_folder_that_plain_transformers_loads(tmp_path, folder):
    rows = rule(0, 600)
    report, said = trained(write(tmp_path, rows), folder, tmp_path / "made" / "judge")
    assert (report.num_train + report.num_held_out, report.steps) == (600, 30)
    assert report.num_held_out > 40
    assert report.accuracy_before == 0.5
    assert report.accuracy_after > 0.9
    assert said[0] == f"{report.num_train} pairs to train on, {report.num_held_out} held out; 30 steps"
    assert [line.split("  ")[0] for line in said[1:]] == [f"step {n}/30" for n in range(3, 31, 3)]
    assert said[1].startswith("step 3/30  loss 0.")
    plain = AutoModelForSequenceClassification.from_pretrained(tmp_path / "made" / "judge").eval()
    reads = AutoTokenizer.from_pretrained(tmp_path / "made" / "judge")
    wins = 0
    for row in rule(9, 50):
        with torch.no_grad():
            texts = [row["prompt"] + row[side] + reads.eos_token for side in ("chosen", "rejected")]
            scores = [float(plain(**reads(text, return_tensors="pt")).logits) for text in texts]
        wins += scores[0] > scores[1]
    assert wins > 45


@pytest.mark.slow
def test_the_same_arguments_give_the_same_weights_and_another_seed_others(tmp_path, folder):
    path = write(tmp_path, rule(0, 60))
    weights = []
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        report, _ = trained(path, folder, tmp_path / name, steps=2, seed=seed)
        model = load_scalar_model(tmp_path / name, dtype=torch.float32)
        weights.append(torch.cat([p.flatten() for p in model.parameters()]))
        assert report.steps == 2
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


@pytest.mark.slow
def test_a_reward_model_goes_on_where_it_was(tmp_path, folder):
    path = write(tmp_path, rule(0, 300))
    first, _ = trained(path, folder, tmp_path / "first")
    again, _ = trained(path, tmp_path / "first", tmp_path / "again", steps=1)
    assert again.accuracy_before == first.accuracy_after > 0.8


def test_without_steps_it_goes_through_the_pairs_once(tmp_path, folder):
    report, said = trained(
        write(tmp_path, rule(0, 60)), folder, tmp_path / "made", steps=None, pairs_per_step=25
    )
    assert (report.num_train, report.steps, len(said)) == (55, 3, 4)


def test_every_pair_is_dealt_once_before_any_is_dealt_again(tmp_path, folder, monkeypatch):
    dealt = []

    def seen(model, optimizer, pairs, **options):
        dealt.extend(pairs)
        return preference_step(model, optimizer, pairs, **options)

    monkeypatch.setattr("millrace.training.preferences.preference_step", seen)
    rows = [
        {"prompt": f"{LETTERS[i // 8]}{LETTERS[i % 8]}?", "chosen": "a", "rejected": "b"} for i in range(11)
    ]
    trained(write(tmp_path, rows), folder, tmp_path / "made", steps=5, pairs_per_step=6)
    assert len(dealt) == 30
    epochs = [[tuple(chosen) for chosen, _ in dealt[first : first + 10]] for first in (0, 10, 20)]
    assert all(len(set(epoch)) == 10 for epoch in epochs)
    assert epochs[0] != epochs[1]


def test_the_learning_rate_falls_to_a_tenth_and_no_weight_decays(tmp_path, folder, monkeypatch):
    rates = []

    def seen(model, optimizer, pairs, *, learning_rate, **options):
        rates.append(learning_rate)
        assert {group["weight_decay"] for group in optimizer.param_groups} == {0.0}
        return preference_step(model, optimizer, pairs, learning_rate=learning_rate, **options)

    monkeypatch.setattr("millrace.training.preferences.preference_step", seen)
    trained(write(tmp_path, rule(0, 20)), folder, tmp_path / "made", steps=3, pairs_per_step=2)
    close_fp64(rates, [0.01, 0.007, 0.004])


def refusal(*words, **more) -> str:
    with pytest.raises((ConfigError, DataError, CheckpointError)) as error:
        trained(*words, **more)
    return str(error.value)


def test_what_cannot_be_trained_on_says_why(tmp_path, folder):
    rows = rule(0, 20)
    path, output = write(tmp_path, rows), tmp_path / "made"
    assert refusal(path, folder, folder) == f"{folder} exists; choose another name"
    assert refusal(path, folder, output, steps=0) == "steps is 0; it must be a number above 0"
    for rate in (0.0, -1.0, math.nan, math.inf):
        expected = f"learning_rate is {rate}; it must be a number above 0"
        assert refusal(path, folder, output, learning_rate=rate) == expected
    assert (
        refusal(path, folder, output, pairs_per_step=-2)
        == "pairs_per_step is -2; it must be a number above 0"
    )
    rows[4]["rejected"] = "b" * 20
    assert refusal(write(tmp_path, rows), folder, output) == (
        f"{path} line 5: prompt and answer have 25 tokens and the model reads at most 24; shorten the pair "
        "or remove it"
    )
    rows[4]["rejected"] = "xyz"
    assert refusal(write(tmp_path, rows), folder, output) == (
        f"{path} line 5: the model's tokenizer has no token for some character of the pair; keep to the "
        "characters it was trained on"
    )
    assert not output.exists()


def test_a_step_that_leaves_no_finite_number_ends_the_training(tmp_path, folder):
    path = write(tmp_path, rule(0, 60))
    message = refusal(path, folder, tmp_path / "made", learning_rate=1e30)
    assert message == "step 2 has no finite gradient; lower the learning rate"
    assert not (tmp_path / "made").exists()
